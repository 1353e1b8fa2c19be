"""Figures into files, with the extra "plot"."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def require() -> None:
    """Raises ImportError, naming the extra, without matplotlib."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise ImportError("plot: needs matplotlib, pip install zipccl_hooks[plot]") from None


def save(draw: Callable[[], Any], path: str, description: str = "") -> None:
    """Writes the matplotlib Figure that ``draw`` makes; the file's name tells the format (.svg, .png, .pdf).

    An .svg is the same each time and has ``description`` in it. Raises ImportError as ``require`` does,
    OSError where the file cannot be written, ValueError for a format that matplotlib does not know.
    """
    require()
    from matplotlib import rc_context

    metadata = {"Description": description, "Date": None} if path.endswith(".svg") else None
    with rc_context({"svg.hashsalt": "zipccl", "svg.fonttype": "none"}):
        draw().savefig(path, dpi=150, metadata=metadata)
