"""Where a collective call goes: to the plain collective, or compressed, on the host or on streams."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from . import cuda_exchange, exchange, nodes
from .channel import channel
from .codec import resolve_mode
from .communicator import Work, communicator
from .config import Policy, default_policy
from .counters import recorder
from .cuda_work import CudaWork, enqueue
from .eligible import decline_reason, resolve_group
from .exchange import Call
from .switch import switch


def uses_streams(x: Tensor) -> bool:
    """Whether calls on such tensors are enqueued on streams; else a thread of the host carries them out."""
    return x.is_cuda


@dataclass
class Request:
    """One collective call: what goes in and out, and how it is carried out compressed.

    ``body(call, flat)`` fills ``flat``, the outputs, flat and contiguous. ``num_bytes`` is compared with the
    policy's ``min_bytes``, None where ranks do not know it alike; ``op`` is the operation of a reduction.
    """

    name: str
    body: Callable[[Call, list[Tensor]], None]
    inputs: Sequence[Tensor]
    outputs: Sequence[Tensor]
    num_bytes: int | None
    op: Any = None


class _Decided(threading.local):
    """Whether this thread is in a plain collective that ``run`` decided on: c10d.py lets it pass."""

    native = False


decided = _Decided()


def run(
    request: Request,
    native: Callable[[], Any],
    group: dist.ProcessGroup | None,
    async_op: bool,
    policy: Policy | None,
) -> Work | dist.Work | None:
    """Sends one call down its path."""
    resolved = resolve_group(group)
    start = None if resolved is None else prepare(request, resolved, policy or default_policy())
    if start is not None:
        return start(async_op)
    before, decided.native = decided.native, True
    try:
        return native()
    finally:
        decided.native = before


def prepare(
    request: Request, group: dist.ProcessGroup, policy: Policy
) -> Callable[[bool], Work | CudaWork | None] | None:
    """What carries a call out compressed, given ``async_op``; None, and counted, if it goes native.

    What is returned must be called: every rank does, and the switch counts on it.
    """
    name, inputs, outputs = request.name, request.inputs, request.outputs
    reference = (*inputs, *outputs)[0]
    reason = decline_reason(reference, request.num_bytes, group, policy, request.op)
    if reason is not None:
        _count_native(request, group, reason)
        return None
    mode = resolve_mode(policy.mode, reference.dtype)
    found = channel(group, reference.device) if uses_streams(reference) else None
    chooser = switch(group, found) if found is not None and policy.adaptive else None
    if chooser is not None:
        chosen = chooser.choose(name, request.num_bytes, reference.dtype, policy.mode)
        if chosen is None:
            _count_native(request, group, "faster so")
            return None
        mode = chosen
    call = Call(communicator(group), name, reference.dtype, mode)
    call.channel = found

    def start(async_op: bool) -> Work | CudaWork | None:
        work = _start(call, request, async_op)
        if chooser is not None:
            chooser.learn(call, request.num_bytes, policy.mode)
        return work

    return start


def _count_native(request: Request, group: dist.ProcessGroup, reason: str) -> None:
    recorder(group).native(request.name, reason, sum(t.nbytes for t in request.inputs))


def _start(call: Call, request: Request, async_op: bool) -> Work | CudaWork | None:
    inputs, outputs = request.inputs, request.outputs
    in_place = [t.is_contiguous() for t in outputs]
    flat = [(t if whole else torch.empty_like(t, memory_format=torch.contiguous_format)).detach().view(-1)
            for t, whole in zip(outputs, in_place, strict=True)]  # fmt: skip

    def put_back() -> None:
        for target, filled, whole in zip(outputs, flat, in_place, strict=True):
            if not whole:
                target.detach().copy_(filled.view(target.shape))

    if call.channel is not None:
        tensors = [*inputs, *outputs, *flat]
        return enqueue(call, lambda: request.body(call, flat), put_back, tensors, outputs, async_op)

    def carry_out() -> None:
        request.body(call, flat)
        call.finish()
        put_back()

    submitted = call.comm.submit(carry_out, list(outputs))
    if async_op:
        return submitted
    submitted.wait()
    return None


def engine(call: Call) -> Any:
    """The exchanges for a call's device: cuda_exchange has the same functions as exchange."""
    return exchange if call.channel is None else cuda_exchange


def flatten(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().view(-1)


def equal_parts(flat: Tensor, size: int) -> list[Tensor]:
    return list(flat.view(size, -1)) if flat.numel() else [flat] * size


def exchange_all(call: Call, parts: Sequence[Tensor], outs: Sequence[Tensor]) -> None:
    """Flat ``parts[i]`` to rank i, what comes from there into ``outs[i]``."""
    engine(call).agree(call, 0.0, [len(p) for p in parts], [len(o) for o in outs])
    engine(call).all_to_all(call, parts, outs)


def exchange_sum(call: Call, parts: Sequence[Tensor], out: Tensor, scale: float) -> None:
    """``out``: the ranks' ``parts[own rank] * scale``, added; by nodes, where the group spans several."""
    one = engine(call)
    found = nodes.tree(call.comm, call.channel) if call.dtype in nodes.DTYPES else None
    if found is None:
        one.reduce_scatter(call, parts, out, scale)
    else:
        found.reduce_scatter(call, parts, out, scale, one.reduce_scatter)
