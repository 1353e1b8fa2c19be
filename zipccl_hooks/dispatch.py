"""Where a collective call goes: to the plain collective, or compressed, on the host or on streams."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from . import cuda_exchange, exchange, nodes
from .channel import Channel, channel
from .codec import resolve_mode
from .communicator import Communicator, Work, communicator
from .config import Policy, default_policy
from .counters import recorder
from .cuda_work import enqueue
from .eligible import decline_reason, resolve_group
from .exchange import Call
from .format import TILE, Mode, align
from .switch import Switch, switch


def torch_collective(newer: str, older: str) -> Callable[..., Any]:
    """A single-tensor collective of torch, which 2.13 renamed, and warns about the older name."""
    return getattr(dist, newer, None) or getattr(dist, older)


def uses_streams(x: Tensor) -> bool:
    """Whether calls on such tensors are enqueued on streams; else a thread of the host carries them out."""
    return x.is_cuda


@dataclass
class Request:
    """A call to be compressed; ``body(call, flat)`` fills ``flat``, the outputs, flat and contiguous."""

    name: str
    body: Callable[[Call, list[Tensor]], None]
    inputs: Sequence[Tensor]
    outputs: Sequence[Tensor]
    num_bytes: int | None
    policy: Policy

    @property
    def tensor(self) -> Tensor:
        """One of its tensors, which are alike."""
        return (*self.inputs, *self.outputs)[0]

    @property
    def mode(self) -> Mode:
        """The policy's, for this dtype."""
        return resolve_mode(self.policy.mode, self.tensor.dtype)

    def flat_outputs(self) -> tuple[list[Tensor], Callable[[], None]]:
        """The outputs for ``body``, and what brings those that are not contiguous back to their place."""
        targets = [t.detach() for t in self.outputs]
        flat = [torch.empty_like(t, memory_format=torch.contiguous_format).view(-1)
                if not t.is_contiguous() else t.view(-1) for t in targets]  # fmt: skip

        def put_back() -> None:
            for target, filled in zip(targets, flat, strict=True):
                if not target.is_contiguous():
                    target.copy_(filled.view(target.shape))

        return flat, put_back


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
    """Sends one call of a collective down its path."""
    resolved = resolve_group(group)
    if resolved is None:
        return native()
    request = Request(name, body, inputs, outputs, num_bytes, policy or default_policy())
    reason = decline_reason(request.tensor, num_bytes, resolved, request.policy, op)
    if reason is not None:
        recorder(resolved).native(name, reason, sum(t.nbytes for t in inputs))
        return native()
    if uses_streams(request.tensor):
        found = channel(resolved, request.tensor.device)
        chooser = switch(found) if request.policy.adaptive else None
        return on_streams(request, found, chooser, native, async_op)
    work = on_thread(request, communicator(resolved))
    if async_op:
        return work
    work.wait()
    return None


def on_thread(request: Request, comm: Communicator) -> Work:
    """Has the communicator's thread carry out a request."""
    call = Call(comm, request.name, request.tensor.dtype, request.mode)
    flat, put_back = request.flat_outputs()

    def carry_out() -> None:
        request.body(call, flat)
        call.finish()
        put_back()

    return comm.submit(carry_out, list(request.outputs))


def on_streams(
    request: Request, channel: Channel, chooser: Switch | None, native: Callable[[], Any], async_op: bool
) -> Any:
    """Enqueues a request, compressed, or plain where ``chooser`` expects that to be faster."""
    dtype, policy, mode = request.tensor.dtype, request.policy, request.mode
    if chooser is not None:
        chosen = chooser.choose(request.name, request.num_bytes, dtype, policy.mode)
        if chosen is None:
            num_bytes = sum(t.nbytes for t in request.inputs)
            channel.comm.recorder.native(request.name, "faster so", num_bytes)
            return native()
        mode = chosen
    call = Call(channel.comm, request.name, dtype, mode, channel=channel)
    flat, put_back = request.flat_outputs()
    call.tensors += (*request.inputs, *request.outputs, *flat)
    outputs = list(request.outputs)
    work = enqueue(channel, lambda: request.body(call, flat), put_back, call.tensors, outputs, async_op)
    call.finish()
    if chooser is not None:
        chooser.learn(call, request.num_bytes, policy.mode)
    return work


def engine(call: Call) -> Any:
    """The exchanges for a call's device: cuda_exchange has the same functions as exchange."""
    return exchange if call.channel is None else cuda_exchange


def flatten(call: Call, tensor: Tensor) -> Tensor:
    """A tensor, flat; a copy where it is not contiguous, which the call keeps."""
    flat = tensor.detach().contiguous().view(-1)
    if not tensor.is_contiguous():
        call.tensors.append(flat)
    return flat


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


def sum_in_place(call: Call, x: Tensor, scale: float) -> None:
    """Flat ``x``: the ranks' ``x * scale``, added; a reduce-scatter, then an all-gather."""
    comm = call.comm
    shard = align(-(-len(x) // comm.size), TILE)  # whole tiles, so that only the last has a tail
    shards = [x[rank * shard : (rank + 1) * shard] for rank in range(comm.size)]
    exchange_sum(call, shards, shards[comm.rank], scale)
    engine(call).all_gather(call, shards[comm.rank], shards)
