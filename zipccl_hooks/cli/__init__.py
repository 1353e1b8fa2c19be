"""The commands of ``python -m zipccl_hooks``, one module each: ``add_arguments(parser)`` and ``run(args)``.

``run`` returns the exit status and raises Failure for what the user has to mend.
"""

import sys


class Failure(Exception):
    """What keeps a command from being carried out, in one line for the user; exit status 1."""


def progress(text: str) -> None:
    """On a terminal, in place of what was there before; "" clears it. Elsewhere nothing."""
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)
