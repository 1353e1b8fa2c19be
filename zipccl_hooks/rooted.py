"""Collectives with a root: broadcast, gather and scatter. Reached as functions of collectives.py."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor

from . import requests
from .arguments import rank_in_group
from .communicator import Work
from .config import Policy
from .dispatch import run
from .eligible import resolve_group

Group = dist.ProcessGroup


def _root_or_first(name: str, rank: int | None, group_rank: int | None, group: Group | None) -> int:
    """Where torch.distributed takes global rank 0 if none is given."""
    return rank_in_group(name, 0 if rank is None and group_rank is None else rank, group_rank, group)


def broadcast(
    tensor: Tensor,
    src: int | None = None,
    group: Group | None = None,
    async_op: bool = False,
    group_src: int | None = None,
    *,
    policy: Policy | None = None,
) -> Work | dist.Work | None:
    """torch.distributed.broadcast, in place; ``src`` is a global rank, ``group_src`` one of the group."""
    return run(
        lambda: requests.broadcast(tensor, rank_in_group("src", src, group_src, resolve_group(group))),
        lambda: dist.broadcast(tensor, src, group, async_op, group_src),
        group, async_op, policy, ("broadcast", tensor),
    )  # fmt: skip


def scatter(
    tensor: Tensor,
    scatter_list: list[Tensor] | None = None,
    src: int | None = None,
    group: Group | None = None,
    async_op: bool = False,
    group_src: int | None = None,
    *,
    policy: Policy | None = None,
) -> Work | dist.Work | None:
    """torch.distributed.scatter: ``scatter_list[i]`` of the root into rank i's ``tensor``."""
    resolved = resolve_group(group)
    root = _root_or_first("src", src, group_src, resolved)
    return run(
        lambda: requests.scatter(tensor, scatter_list, root, resolved),
        lambda: dist.scatter(tensor, scatter_list, src, group, async_op, group_src),
        group, async_op, policy,
    )  # fmt: skip


def gather(
    tensor: Tensor,
    gather_list: list[Tensor] | None = None,
    dst: int | None = None,
    group: Group | None = None,
    async_op: bool = False,
    group_dst: int | None = None,
    *,
    policy: Policy | None = None,
) -> Work | dist.Work | None:
    """torch.distributed.gather: every rank's ``tensor`` into the root's ``gather_list``, by rank."""
    resolved = resolve_group(group)
    root = _root_or_first("dst", dst, group_dst, resolved)
    return run(
        lambda: requests.gather(tensor, gather_list, root, resolved),
        lambda: dist.gather(tensor, gather_list, dst, group, async_op, group_dst),
        group, async_op, policy,
    )  # fmt: skip
