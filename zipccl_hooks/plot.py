"""Figures into files, with the extra "plot"."""

from __future__ import annotations

import argparse
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


def command(about: str, text: Callable[[], str], draw: Callable[[], Any]) -> None:
    """A module's command line: prints ``text()``; with ``--plot FILE`` draws it, too."""
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("--plot", metavar="FILE", help="draw it, too")
    arguments = parser.parse_args()
    print(text())
    if arguments.plot:
        save(draw, arguments.plot, text())
