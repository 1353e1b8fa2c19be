"""Compression for code that calls torch.distributed, FSDP, DTensor and the like, and stays as it is.

    enable()                              # from here on, for the whole process

    with compressed(Policy(...)):         # in a part of the program
        ...

or the variable ``ZIPCCL_AUTO_ENABLE=1`` for a program that does not know of this package. All ranks must do
so alike; a group's first call finds out whether they do.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from . import c10d, scopes
from .config import Policy
from .scopes import Scope

_enabled: Scope | None = None


def enable(policy: Policy | None = None, *, groups: Iterable[dist.ProcessGroup] | None = None) -> None:
    """Compresses collectives of torch.distributed from now on, whoever calls them.

    Args:
        policy: how; None: ``Policy()``.
        groups: only in these process groups; None: in all, those made later too.

    Raises:
        RuntimeError: it is enabled already.
    """
    global _enabled
    if _enabled is not None:
        raise RuntimeError(
            f"compression is enabled already, with {_enabled.policy}: call disable() first, "
            "or use compressed(...) for a part of the program"
        )
    _enabled = Scope(policy, groups)
    scopes.add(_enabled, outermost=True)
    c10d.install()


def disable() -> None:
    """Undoes ``enable``; without effect where it is not enabled. Scopes and groups of backend zipccl stay."""
    global _enabled
    if _enabled is not None:
        scopes.remove(_enabled)
        c10d.uninstall()
        _enabled = None


@contextmanager
def compressed(
    policy: Policy | None = None, *, groups: Iterable[dist.ProcessGroup] | None = None
) -> Iterator[None]:
    """A part of the program with compressed collectives, or others than around it.

    ``compressed(Policy(enabled=False))`` leaves them plain there. Arguments are those of ``enable``; the
    scope holds for all threads of the process.
    """
    scope = Scope(policy, groups)
    scopes.add(scope)
    c10d.install()
    try:
        yield
    finally:
        c10d.uninstall()
        scopes.remove(scope)


@contextmanager
def compressed_redistribute(
    policy: Policy | None = None, *, mesh: DeviceMesh | None = None
) -> Iterator[None]:
    """``compressed`` for DTensor: redistributions over ``mesh``, of whatever mesh if None.

    Communication of the backward pass is compressed if that runs inside as well.
    """
    with compressed(policy, groups=None if mesh is None else mesh.get_all_groups()):
        yield
