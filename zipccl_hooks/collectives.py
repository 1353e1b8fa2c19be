"""torch.distributed's collectives, compressed: the same names, arguments and results, plus ``policy``.

Data movement (all_gather, all_to_all, broadcast, gather, scatter, send) delivers the very bits. Reductions
exchange compressed parts and add them up in rank order in fp32, rounding once to the tensor's dtype: the
result does not depend on message size, piece or arrival, every rank holds the same bits, and for two ranks
they are those of the plain collective. AVG and PREMUL_SUM multiply each term, in the tensor's dtype,
before it is added, as NCCL and DDP do. Where a group spans nodes of several ranks, nodes.py tells the order.
Coalesced calls (coalesced.py) are one call for the tensors of a dtype. Messages (p2p.py: send, recv, isend,
irecv, batch_isend_irecv) concern their two ranks alone and cannot wait for each other.

What is not compressed goes to torch.distributed: dtypes that do not shrink, small tensors, reduce
operations other than those three, CPU tensors of groups without gloo and CUDA tensors of groups without
NCCL; and what switch.py expects to be faster plain. That choice rests only on what all ranks know alike.
``stats()`` counts the reasons.

``min_bytes`` of the policy is compared with the tensor that the call is about: what one rank
contributes to a gather, receives from a scatter, reduces, broadcasts, sends or, without split sizes, puts
into an all_to_all. With splits, of any size on any rank, all_to_all is compressed at every size, since no
rank knows the others' beforehand.

Arguments are checked before anything is sent: TypeError and ValueError name the argument. What ranks
contradict each other in raises errors.PeerMismatch on all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from . import requests
from .coalesced import all_gather_into_tensor_coalesced as all_gather_into_tensor_coalesced
from .coalesced import all_reduce_coalesced as all_reduce_coalesced
from .coalesced import reduce_scatter_tensor_coalesced as reduce_scatter_tensor_coalesced
from .communicator import Work
from .config import Policy, default_policy
from .dispatch import Request, run, torch_collective
from .eligible import decline_reason, resolve_group
from .p2p import batch_isend_irecv as batch_isend_irecv
from .p2p import irecv as irecv
from .p2p import isend as isend
from .p2p import recv as recv
from .p2p import send as send
from .rooted import broadcast as broadcast
from .rooted import gather as gather
from .rooted import scatter as scatter

Group = dist.ProcessGroup


# Gathers


def all_gather_into_tensor(
    output_tensor: Tensor,
    input_tensor: Tensor,
    group: Group | None = None,
    async_op: bool = False,
    *,
    policy: Policy | None = None,
) -> Work | dist.Work | None:
    """torch.distributed.all_gather_into_tensor: every rank's input, in rank order, in everyone's output."""

    def native() -> Any:
        return torch_collective("all_gather_single", "all_gather_into_tensor")(
            output_tensor, input_tensor, group, async_op
        )

    def make() -> Request:
        return requests.all_gather_into_tensor(output_tensor, input_tensor, resolve_group(group))

    return run(make, native, group, async_op, policy, ("all_gather_into_tensor", input_tensor))


def all_gather(
    tensor_list: list[Tensor],
    tensor: Tensor,
    group: Group | None = None,
    async_op: bool = False,
    *,
    policy: Policy | None = None,
) -> Work | dist.Work | None:
    """torch.distributed.all_gather: ``tensor_list[i]`` receives rank i's ``tensor``; sizes may differ."""
    return run(
        lambda: requests.all_gather(tensor_list, tensor, resolve_group(group)),
        lambda: dist.all_gather(list(tensor_list), tensor, group, async_op),
        group, async_op, policy,
    )  # fmt: skip


# Reductions


def reduce_scatter_tensor(
    output: Tensor,
    input: Tensor,
    op: Any = dist.ReduceOp.SUM,
    group: Group | None = None,
    async_op: bool = False,
    *,
    policy: Policy | None = None,
) -> Work | dist.Work | None:
    """torch.distributed.reduce_scatter_tensor: ``output`` is the sum of everyone's part of this rank."""

    def native() -> Any:
        return torch_collective("reduce_scatter_single", "reduce_scatter_tensor")(
            output, input, op, group, async_op
        )

    def make() -> Request:
        return requests.reduce_scatter_tensor(output, input, op, resolve_group(group))

    return run(make, native, group, async_op, policy, ("reduce_scatter_tensor", output))


def reduce_scatter(
    output: Tensor,
    input_list: list[Tensor],
    op: Any = dist.ReduceOp.SUM,
    group: Group | None = None,
    async_op: bool = False,
    *,
    policy: Policy | None = None,
) -> Work | dist.Work | None:
    """torch.distributed.reduce_scatter: ``output`` is the sum of everyone's ``input_list[own rank]``."""
    return run(
        lambda: requests.reduce_scatter(output, input_list, op, resolve_group(group)),
        lambda: dist.reduce_scatter(output, list(input_list), op, group, async_op),
        group, async_op, policy,
    )  # fmt: skip


def all_reduce(
    tensor: Tensor,
    op: Any = dist.ReduceOp.SUM,
    group: Group | None = None,
    async_op: bool = False,
    *,
    policy: Policy | None = None,
) -> Work | dist.Work | None:
    """torch.distributed.all_reduce, in place: a compressed reduce-scatter, then a compressed all-gather."""
    return run(
        lambda: requests.all_reduce(tensor, op),
        lambda: dist.all_reduce(tensor, op, group, async_op),
        group, async_op, policy, ("all_reduce", tensor),
    )  # fmt: skip


def average_(
    tensor: Tensor, group: Group | None = None, policy: Policy | None = None
) -> torch.futures.Future[Tensor]:
    """A future of ``tensor``, averaged in place as DDP does: each term times 1 / size, then the sum.

    Not ``all_reduce`` with AVG where the call goes native: gloo divides the sum.
    """
    resolved = resolve_group(group)
    if resolved is None:
        raise ValueError("group: expected a group that this rank is in")
    policy, average = policy or default_policy(), dist.ReduceOp.AVG
    work: Any
    if decline_reason(tensor, tensor.nbytes, resolved, policy, average) is None:
        work = all_reduce(tensor, average, resolved, True, policy=policy)
    else:
        tensor.mul_(1.0 / resolved.size())
        work = all_reduce(tensor, dist.ReduceOp.SUM, resolved, True, policy=policy)
    return work.get_future().then(lambda future: future.value()[0])


# Exchanges


def all_to_all_single(
    output: Tensor,
    input: Tensor,
    output_split_sizes: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None,
    group: Group | None = None,
    async_op: bool = False,
    *,
    policy: Policy | None = None,
) -> Work | dist.Work | None:
    """torch.distributed.all_to_all_single; split sizes count rows (elements of dimension 0), per rank."""

    def native() -> Any:
        return dist.all_to_all_single(
            output,
            input,
            list(output_split_sizes) if output_split_sizes is not None else None,
            list(input_split_sizes) if input_split_sizes is not None else None,
            group,
            async_op,
        )

    def make() -> Request:
        return requests.all_to_all_single(
            output, input, output_split_sizes, input_split_sizes, resolve_group(group)
        )

    even = output_split_sizes is None and input_split_sizes is None
    return run(make, native, group, async_op, policy, ("all_to_all_single", input) if even else None)


def all_to_all(
    output_tensor_list: list[Tensor],
    input_tensor_list: list[Tensor],
    group: Group | None = None,
    async_op: bool = False,
    *,
    policy: Policy | None = None,
) -> Work | dist.Work | None:
    """torch.distributed.all_to_all: ``input_tensor_list[i]`` goes to rank i, and so on back."""
    return run(
        lambda: requests.all_to_all(output_tensor_list, input_tensor_list, resolve_group(group)),
        lambda: dist.all_to_all(list(output_tensor_list), list(input_tensor_list), group, async_op),
        group, async_op, policy,
    )  # fmt: skip
