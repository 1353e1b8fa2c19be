"""Plots into files, by matplotlib where it is installed: extra ``plot``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def save(figure: Callable[[], Any], path: str, description: str) -> None:
    """Draws ``figure()``, a matplotlib Figure, into a file.

    An .svg holds ``description``, so that a test can tell whether it is of today's numbers, and is the same
    each time. Raises ImportError, naming the extra, without matplotlib.
    """
    try:
        from matplotlib import rc_context
    except ImportError:
        raise ImportError("plot: needs matplotlib, pip install zipccl_hooks[plot]") from None
    metadata = {"Description": description, "Date": None} if path.endswith(".svg") else None
    with rc_context({"svg.hashsalt": "zipccl", "svg.fonttype": "none"}):
        figure().savefig(path, dpi=150, metadata=metadata)
