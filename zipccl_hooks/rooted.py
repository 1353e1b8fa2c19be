"""Collectives with a root: broadcast, gather and scatter. Reached as functions of collectives.py."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor

from .arguments import check_list, check_tensor, rank_in_group
from .communicator import Work
from .config import Policy
from .dispatch import engine, exchange_all, flatten, run
from .eligible import resolve_group
from .exchange import Call

Group = dist.ProcessGroup


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
    check_tensor("tensor", tensor)
    resolved = resolve_group(group)
    root = rank_in_group("src", src, group_src, resolved)

    def body(call: Call, flat: list[Tensor]) -> None:
        comm, x = call.comm, flat[0]
        if not tensor.is_contiguous():
            x.copy_(flatten(call, tensor))
        sends = [len(x)] * comm.size if comm.rank == root else [0] * comm.size
        expects = [len(x) if rank == root else 0 for rank in range(comm.size)]
        engine(call).agree(call, float(root), sends, expects)
        engine(call).broadcast(call, x, root)

    return run(
        "broadcast",
        lambda: dist.broadcast(tensor, src, group, async_op, group_src),
        body, [tensor], [tensor], tensor.nbytes, group, async_op, policy,
    )  # fmt: skip


def _root_of_list(
    rank_name: str,
    rank: int | None,
    group_rank: int | None,
    list_name: str,
    tensors: list[Tensor] | None,
    tensor: Tensor,
    group: Group | None,
) -> int:
    """The root, rank 0 if none is given, once it alone is found to have a tensor per rank like ``tensor``."""
    check_tensor("tensor", tensor)
    root = rank_in_group(rank_name, 0 if rank is None and group_rank is None else rank, group_rank, group)
    if group is None or group.rank() != root:
        if tensors:
            raise ValueError(f"{list_name}: expected none but at the root, got {len(tensors)} tensors")
        return root
    check_list(list_name, tensors or [], tensor, group)
    for k, one in enumerate(tensors or []):
        if one.numel() != tensor.numel():
            raise ValueError(f"{list_name}[{k}]: expected {tensor.numel()} elements, got {one.numel()}")
    return root


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
    root = _root_of_list("src", src, group_src, "scatter_list", scatter_list, tensor, resolve_group(group))

    def body(call: Call, flat: list[Tensor]) -> None:
        nothing = flat[0][:0]
        parts = [flatten(call, t) for t in scatter_list or []] or [nothing] * call.comm.size
        outs = [flat[0] if rank == root else nothing for rank in range(call.comm.size)]
        exchange_all(call, parts, outs, tensor.numel())

    return run(
        "scatter",
        lambda: dist.scatter(tensor, scatter_list, src, group, async_op, group_src),
        body, scatter_list or [], [tensor], tensor.nbytes, group, async_op, policy,
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
    root = _root_of_list("dst", dst, group_dst, "gather_list", gather_list, tensor, resolve_group(group))

    def body(call: Call, flat: list[Tensor]) -> None:
        x = flatten(call, tensor)
        parts = [x if rank == root else x[:0] for rank in range(call.comm.size)]
        exchange_all(call, parts, flat or [x[:0]] * call.comm.size, tensor.numel())

    return run(
        "gather",
        lambda: dist.gather(tensor, gather_list, dst, group, async_op, group_dst),
        body, [tensor], gather_list or [], tensor.nbytes, group, async_op, policy,
    )  # fmt: skip
