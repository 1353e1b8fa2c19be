"""The commands of ``python -m zipccl_hooks``, one module each: ``add_arguments(parser)`` and ``run(args)``.

``run`` returns the exit status and raises Failure for what the user has to mend.
"""


class Failure(Exception):
    """What keeps a command from being carried out, in one line for the user; exit status 1."""
