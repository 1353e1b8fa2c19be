"""Coalesced collectives: one call for many tensors. Reached as functions of collectives.py.

Tensors of one dtype are one compressed call, whose size, for ``min_bytes`` and the switch, is theirs
together. Those below ALONE_BYTES are exchanged as one, for which they are copied next to each other, larger
ones by themselves. The bits are those of one call a tensor. What is not compressed goes to torch.distributed,
coalesced. One handle stands for all.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .arguments import check_tensors
from .communicator import Works
from .config import Policy
from .dispatch import Request, engine, exchange_sum, flatten, run, sum_in_place, torch_collective
from .eligible import resolve_group, scale_of
from .exchange import Call

# Of what one rank contributes or receives. An exchange takes the host of a GPU some 0.5 ms, in which a link
# of 25 GB/s moves 12 MiB; copying these there and back takes a hundredth of it.
ALONE_BYTES = 16 * 1024 * 1024

Group = dist.ProcessGroup


@dataclass(frozen=True)
class _Form:
    """A collective on matrices of what a rank puts in and gets: a row for each rank, or one."""

    name: str
    wide_in: bool  # a row for each rank
    wide_out: bool  # where neither has, the call is in place
    exchange: Callable[[Call, Tensor, Tensor, float], None]  # (call, in, out, scale)
    plain: Callable[[Tensor, Tensor, Any, Group | None], Any]  # (in, out, op, group): torch's, of one tensor


_ALL_REDUCE = _Form(
    "all_reduce_coalesced", False, False,
    lambda call, x, out, scale: sum_in_place(call, out[0], scale),
    lambda x, out, op, group: dist.all_reduce(out, op, group),
)  # fmt: skip
_ALL_GATHER = _Form(
    "all_gather_into_tensor_coalesced", False, True,
    lambda call, x, out, scale: engine(call).all_gather(call, x[0], list(out)),
    lambda x, out, op, group: torch_collective("all_gather_single", "all_gather_into_tensor")(out, x, group),
)  # fmt: skip
_REDUCE_SCATTER = _Form(
    "reduce_scatter_tensor_coalesced", True, False,
    lambda call, x, out, scale: exchange_sum(call, list(x), out[0], scale),
    lambda x, out, op, group: torch_collective("reduce_scatter_single", "reduce_scatter_tensor")(
        out, x, op, group
    ),
)  # fmt: skip


def all_reduce_coalesced(
    tensors: Sequence[Tensor],
    op: Any = dist.ReduceOp.SUM,
    group: Group | None = None,
    async_op: bool = False,
    *,
    policy: Policy | None = None,
) -> Works | None:
    """torch.distributed.all_reduce_coalesced: all_reduce of each tensor, in place; dtypes may differ."""
    check_tensors("tensors", tensors)
    return _run(_ALL_REDUCE, tensors, tensors, op, group, async_op, policy)


def all_gather_into_tensor_coalesced(
    output_tensors: Sequence[Tensor],
    input_tensors: Sequence[Tensor],
    group: Group | None = None,
    async_op: bool = False,
    *,
    policy: Policy | None = None,
) -> Works | None:
    """all_gather_into_tensor of each of ``input_tensors`` into its output; dtypes may differ."""
    check_tensors("input_tensors", input_tensors)
    check_tensors("output_tensors", output_tensors, input_tensors, _size(group))
    return _run(_ALL_GATHER, input_tensors, output_tensors, None, group, async_op, policy)


def reduce_scatter_tensor_coalesced(
    output_tensors: Sequence[Tensor],
    input_tensors: Sequence[Tensor],
    op: Any = dist.ReduceOp.SUM,
    group: Group | None = None,
    async_op: bool = False,
    *,
    policy: Policy | None = None,
) -> Works | None:
    """reduce_scatter_tensor of each of ``input_tensors`` into its output; dtypes may differ."""
    check_tensors("output_tensors", output_tensors)
    check_tensors("input_tensors", input_tensors, output_tensors, _size(group))
    return _run(_REDUCE_SCATTER, input_tensors, output_tensors, op, group, async_op, policy)


def _size(group: Group | None) -> int | None:
    """None where this rank is not in the group, which torch.distributed reports."""
    resolved = resolve_group(group)
    return None if resolved is None else resolved.size()


def _run(
    form: _Form,
    inputs: Sequence[Tensor],
    outputs: Sequence[Tensor],
    op: Any,
    group: Group | None,
    async_op: bool,
    policy: Policy | None,
) -> Works | None:
    """Issues a call for each dtype; in place, ``inputs`` are ``outputs``."""
    works = Works(list(outputs))
    for request in _requests(form, inputs, outputs, op):
        plain = partial(_plain, form, request, group)
        works.add(run(partial(_same, request), plain, group, True, policy))
    if not async_op:
        works.wait()
    return works if async_op and _size(group) is not None else None


def _same(request: Request) -> Request:
    return request


def _requests(form: _Form, inputs: Sequence[Tensor], outputs: Sequence[Tensor], op: Any) -> list[Request]:
    """One for each dtype."""
    made = []
    for kind in dict.fromkeys((t.dtype, t.device) for t in inputs):
        pairs = [(x, out) for x, out in zip(inputs, outputs, strict=True) if (x.dtype, x.device) == kind]
        xs, outs = map(list, zip(*pairs, strict=True))
        num_bytes = sum(min(x.nbytes, out.nbytes) for x, out in pairs)
        made.append(Request(form.name, partial(_compressed, form, pairs, op), xs, outs, num_bytes, op))
    return made


def requests_of_all_reduce(tensors: Sequence[Tensor], op: Any) -> list[Request]:
    """As all_reduce_coalesced makes them; of the others likewise."""
    check_tensors("tensors", tensors)
    return _requests(_ALL_REDUCE, tensors, tensors, op)


def requests_of_all_gather(
    output_tensors: Sequence[Tensor], input_tensors: Sequence[Tensor], group: Group
) -> list[Request]:
    check_tensors("input_tensors", input_tensors)
    check_tensors("output_tensors", output_tensors, input_tensors, group.size())
    return _requests(_ALL_GATHER, input_tensors, output_tensors, None)


def requests_of_reduce_scatter(
    output_tensors: Sequence[Tensor], input_tensors: Sequence[Tensor], op: Any, group: Group
) -> list[Request]:
    check_tensors("output_tensors", output_tensors)
    check_tensors("input_tensors", input_tensors, output_tensors, group.size())
    return _requests(_REDUCE_SCATTER, input_tensors, output_tensors, op)


def _plain(form: _Form, request: Request, group: Group | None) -> Works:
    with dist.distributed_c10d._coalescing_manager(group, async_ops=True) as manager:
        for x, out in zip(request.inputs, request.outputs, strict=True):
            form.plain(x, out, request.op, group)
    works = Works(list(request.outputs))
    for work in manager.works:
        works.add(work)
    return works


def _compressed(
    form: _Form, pairs: Sequence[tuple[Tensor, Tensor]], op: Any, call: Call, flat: list[Tensor]
) -> None:
    """The body of a call on tensors of one dtype."""
    size = call.comm.size
    rows_in, rows_out = (size if wide else 1 for wide in (form.wide_in, form.wide_out))
    sources = [flatten(call, x) for x, _ in pairs]
    numels = [len(source) // rows_in for source in sources]
    ins = [source.view(rows_in, n) for source, n in zip(sources, numels, strict=True)]
    outs = [target.view(rows_out, n) for target, n in zip(flat, numels, strict=True)]
    small = [k for k, n in enumerate(numels) if n * call.dtype.itemsize < ALONE_BYTES]
    packs = [[k] for k in range(len(pairs)) if k not in small] + [small] * bool(small)
    joined = []
    for pack in packs:
        x = ins[pack[0]] if len(pack) == 1 else torch.cat([ins[k] for k in pack], dim=1)
        if form.wide_in or form.wide_out:
            out = outs[pack[0]] if len(pack) == 1 else x.new_empty(rows_out, x.shape[1])
        else:
            out = x
        call.tensors += (x, out)
        joined.append((x, out))
    scale = 1.0 if op is None else scale_of(op, size, call.dtype) or 1.0
    call.digest = zlib.crc32(repr(numels).encode())
    engine(call).agree(call, scale, [sum(numels)] * size, [sum(numels)] * size)
    for x, out in joined:
        form.exchange(call, x, out, scale)
    for pack, (_, out) in zip(packs, joined, strict=True):
        for k, part in zip(pack, out.split([numels[k] for k in pack], dim=1), strict=True):
            if part.data_ptr() != outs[k].data_ptr():
                outs[k].copy_(part)
