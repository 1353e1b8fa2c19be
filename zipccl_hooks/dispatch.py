"""Where a collective call goes: to the plain collective, or compressed, on the host or on streams."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
from .cuda_work import enqueue
from .eligible import decline_reason, resolve_group
from .exchange import Call
from .switch import switch


def uses_streams(x: Tensor) -> bool:
    """Whether calls on such tensors are enqueued on streams; else a thread of the host carries them out."""
    return x.is_cuda


def run(
    name: str,
    native: Callable[[], Any],
    body: Callable[[Call, list[Tensor]], None],
    inputs: Sequence[Tensor],
    outputs: Sequence[Tensor],
    num_bytes: int | None,
    group: dist.ProcessGroup | None,
    async_op: bool,
    policy: Policy | None,
    op: Any = None,
) -> Work | dist.Work | None:
    """Sends one call down its path; ``body(call, flat)`` fills ``flat``, the outputs, flat and contiguous."""
    resolved = resolve_group(group)
    if resolved is None:
        return native()
    reference = (*inputs, *outputs)[0]
    policy = policy or default_policy()
    reason = decline_reason(reference, num_bytes, resolved, policy, op)
    if reason is not None:
        recorder(resolved).native(name, reason, sum(t.nbytes for t in inputs))
        return native()
    mode = resolve_mode(policy.mode, reference.dtype)
    found = channel(resolved, reference.device) if uses_streams(reference) else None
    chooser = switch(resolved, found) if found is not None and policy.adaptive else None
    if chooser is not None:
        chosen = chooser.choose(name, num_bytes, reference.dtype, policy.mode)
        if chosen is None:
            recorder(resolved).native(name, "faster so", sum(t.nbytes for t in inputs))
            return native()
        mode = chosen
    call = Call(communicator(resolved), name, reference.dtype, mode)
    in_place = [t.is_contiguous() for t in outputs]
    flat = [(t if whole else torch.empty_like(t, memory_format=torch.contiguous_format)).detach().view(-1)
            for t, whole in zip(outputs, in_place, strict=True)]  # fmt: skip

    def put_back() -> None:
        for target, filled, whole in zip(outputs, flat, in_place, strict=True):
            if not whole:
                target.detach().copy_(filled.view(target.shape))

    if found is not None:
        call.channel = found
        work = enqueue(
            call, lambda: body(call, flat), put_back, [*inputs, *outputs, *flat], outputs, async_op
        )
        if chooser is not None:
            chooser.learn(call, num_bytes, policy.mode)
        return work

    def carry_out() -> None:
        body(call, flat)
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


def exchange_all(
    call: Call, parts: Sequence[Tensor], outs: Sequence[Tensor], longest: int | None = None
) -> None:
    """Flat ``parts[i]`` to rank i, what comes from there into ``outs[i]``.

    ``longest``: elements of the longest part of any rank, if all ranks know that without being told.
    """
    if longest is not None:
        call.kind = (longest,)
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
