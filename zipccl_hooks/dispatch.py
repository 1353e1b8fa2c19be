"""Where a collective call goes: to the plain collective, or compressed, on the host or on streams."""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from . import cuda_exchange, exchange, nodes
from .channel import Channel, channel
from .codec import resolve_mode
from .communicator import Communicator, Work, communicator
from .config import Policy, default_policy
from .counters import Recorder, recorder
from .cuda_work import CudaWork, enqueue
from .eligible import FASTER_SO, PLAIN_TYPES, WATCHED, decline_reason, passing_reason, resolve_group, scale_of
from .exchange import Call
from .format import TILE, Mode, align
from .replay import Recording, likeness
from .switch import Kind, Switch, switch

logger = logging.getLogger(__name__)

VERIFY_EVERY = 64  # calls of a kind: one is repeated uncompressed
MAX_WAYS = 1024  # kept for a group


def torch_collective(newer: str, older: str) -> Callable[..., Any]:
    """A single-tensor collective of torch, which 2.13 renamed, and warns about the older name."""
    return getattr(dist, newer, None) or getattr(dist, older)


def uses_streams(x: Tensor) -> bool:
    """Whether calls on such tensors are enqueued on streams; else a thread of the host carries them out."""
    return x.is_cuda


@dataclass
class Request:
    """One call: what goes in and out, and how it is carried out compressed.

    ``body(call, flat)`` fills ``flat``, the outputs, flat and contiguous. ``num_bytes`` is compared with the
    policy's ``min_bytes``, None where ranks do not know it alike; ``op`` is the operation of a reduction.
    ``detail`` is what else makes a difference to what is enqueued; None where calls will hardly repeat.
    """

    name: str
    body: Callable[[Call, list[Tensor]], None]
    inputs: Sequence[Tensor]
    outputs: Sequence[Tensor]
    num_bytes: int | None
    op: Any = None
    detail: Hashable | None = None

    @property
    def tensor(self) -> Tensor:
        """One of its tensors, which are alike."""
        return (self.inputs or self.outputs)[0]

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


class _Decided(threading.local):
    """What this thread knows of the plain collective that it makes next, or is in."""

    native = False  # ``run`` decided on it: methods.py and c10d.py let it pass
    watching: Switch | None = None  # wants to know when it was issued


decided = _Decided()


def run(
    make: Callable[[], Request],
    native: Callable[[], Any],
    group: dist.ProcessGroup | None,
    async_op: bool,
    policy: Policy | None,
    sized: tuple[str, Tensor] | None = None,
) -> Work | dist.Work | None:
    """Sends one call of a collective down its path: the request that ``make`` makes, or ``native``.

    ``sized``: the request's name, and a tensor as large as its ``num_bytes``.
    """
    resolved, policy = resolve_group(group), policy or default_policy()
    if resolved is None or sized is None or not _known_plain(*sized, resolved, policy):
        request = make()
        start = None if resolved is None else prepare(request, resolved, policy)
        if start is not None:
            return start(async_op)
    before, decided.native = decided.native, True
    try:
        work = native()
    finally:
        decided.native = before
    issued(work)
    return work


def issued(work: Any) -> None:
    """Behind each plain collective that ``prepare`` declined; ``work`` if it is asynchronous, else None."""
    if (watching := decided.watching) is not None:
        decided.watching = None
        watching.issued(work)


def _known_plain(name: str, tensor: Tensor, group: dist.ProcessGroup, policy: Policy) -> bool:
    return type(tensor) in PLAIN_TYPES and stays_plain(name, tensor.nbytes, tensor, group, policy)


def prepare(
    request: Request, group: dist.ProcessGroup, policy: Policy
) -> Callable[[bool], Work | CudaWork | None] | None:
    """What carries a call out compressed, given ``async_op``; None, and counted, if it goes native.

    What is returned must be called: every rank does, and the switch counts on it.
    """
    on_streams = uses_streams(request.tensor)
    if on_streams:
        if stays_plain(request.name, request.num_bytes, request.tensor, group, policy):
            return None
        if (known := _known_way(request, group, policy)) is not None:
            return partial(known.start, request)
    reason = decline_reason(request.tensor, request.num_bytes, group, policy, request.op)
    if reason is not None:
        recorder(group).native(request.name, reason, sum(t.nbytes for t in request.inputs))
        return None
    if on_streams:
        return _prepare_on_streams(request, group, policy)
    comm = communicator(group)

    def start(async_op: bool) -> Work | None:
        work = on_thread(request, comm, policy)
        if async_op:
            return work
        work.wait()
        return None

    return start


def on_thread(request: Request, comm: Communicator, policy: Policy) -> Work:
    """Has the communicator's thread carry out a request."""
    dtype = request.tensor.dtype
    call = Call(comm, request.name, dtype, resolve_mode(policy.mode, dtype), verify=policy.verify)
    flat, put_back = request.flat_outputs()

    def carry_out() -> None:
        if policy.verify:
            turn = comm.calls[call.name]  # in the order of the calls, which is that of all ranks
            comm.calls[call.name] += 1
            call.turn = turn + 1 if turn % VERIFY_EVERY == 0 else 0
        request.body(call, flat)
        call.finish()
        put_back()

    return comm.submit(carry_out, list(request.outputs))


def _prepare_on_streams(
    request: Request, group: dist.ProcessGroup, policy: Policy
) -> Callable[[bool], CudaWork | None] | None:
    """``prepare`` of a call on CUDA tensors, where a switch may expect plain to be faster."""
    if policy.verify:
        _warn_of_verify()
    dtype = request.tensor.dtype
    found, mode = channel(group, request.tensor.device), resolve_mode(policy.mode, dtype)
    chooser = switch(found) if policy.adaptive else None
    kind = None
    if chooser is not None:
        chosen = chooser.choose(request.name, request.num_bytes, dtype, policy.mode)
        kind = chooser.kind(request.name, request.num_bytes, dtype, policy.mode)
        if chosen is None:
            input_bytes = sum(t.nbytes for t in request.inputs)
            found.comm.recorder.native(request.name, WATCHED if kind.watched else FASTER_SO, input_bytes)
            if kind.watched:
                chooser.issuing(kind)
                decided.watching = chooser
            else:
                settled = _Settled(policy, kind, found.comm.recorder, input_bytes)
                _settled.setdefault(group, {})[request.name, request.num_bytes, dtype] = settled
            return None
        mode = chosen
    way = _Way(policy, found, mode, kind, _likeness(request, group))
    if way.alike is not None:
        ways = _ways.setdefault(group, {})
        if len(ways) >= MAX_WAYS:
            ways.clear()
            found.recordings.clear()
        ways[way.alike] = way
    return partial(way.start, request)


@dataclass
class _Way:
    """How calls that are alike are carried out on streams, found out once."""

    policy: Policy
    channel: Channel
    mode: Mode
    kind: Kind | None  # the switch's, if it is asked
    alike: Hashable | None  # what the calls have in common; None if there is one only

    def is_open(self, policy: Policy) -> bool:
        """Whether a call goes this way as the last one did; then it is counted."""
        if self.policy is not policy:
            return False
        return self.kind is None or self.kind.take(self.mode)

    def start(self, request: Request, async_op: bool) -> CudaWork | None:
        tensors, outputs = [*request.inputs, *request.outputs], list(request.outputs)
        key, recordings = (self.alike, self.mode, self.channel.turn), self.channel.recordings
        recording: Recording | None = recordings.get(key)
        if recording is not None and not torch.autograd._profiler_enabled() and recording.is_good():
            work = enqueue(
                self.channel, partial(recording.play, tensors), _nothing, tensors, outputs, async_op
            )
            recording.call.finish()
            return work
        call = Call(self.channel.comm, request.name, request.tensor.dtype, self.mode, channel=self.channel)
        if self.alike is not None:
            call.recording = Recording(call, tensors)
        flat, put_back = request.flat_outputs()
        call.tensors += (*tensors, *flat)
        work = enqueue(
            self.channel, lambda: request.body(call, flat), put_back, call.tensors, outputs, async_op
        )
        call.finish()
        if self.kind is not None:
            self.kind.learn(call)
        if call.recording is not None and call.recording.complete:
            recordings[key] = call.recording
            call.tensors, call.recording = [], None  # the recording, which has the call, holds no tensors
        return work


def _nothing() -> None:
    pass


_ways: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[Hashable, _Way]] = weakref.WeakKeyDictionary()


def _likeness(request: Request, group: dist.ProcessGroup) -> Hashable | None:
    """What ``request`` has in common with calls that go the same way; None if there will be none."""
    if request.detail is None:
        return None
    scale = None if request.op is None else scale_of(request.op, group.size(), request.tensor.dtype)
    return likeness((request.name, request.detail, scale), request.inputs, request.outputs)


def _known_way(request: Request, group: dist.ProcessGroup, policy: Policy) -> _Way | None:
    """The way of an earlier call that was alike, if it is open."""
    ways = _ways.get(group)
    if not ways or (alike := _likeness(request, group)) is None:
        return None
    way = ways.get(alike)
    if way is None or passing_reason(request.tensor, group) is not None or not way.is_open(policy):
        return None
    return way


@cache
def _warn_of_verify() -> None:
    logger.warning("Policy(verify=True) checks calls on CPU tensors, none on CUDA tensors")


@dataclass(frozen=True)
class _Settled:
    """That calls of a kind go plain until the switch looks at it again."""

    policy: Policy
    kind: Kind
    recorder: Recorder
    input_bytes: int  # of the first of them


_settled: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[Any, _Settled]] = weakref.WeakKeyDictionary()


def stays_plain(
    name: str, num_bytes: int | None, tensor: Tensor, group: dist.ProcessGroup, policy: Policy
) -> bool:
    """Whether a call is of a settled kind; then it is counted, whatever else may speak against it.

    Asked before anything else: a plain collective takes 40 us, which these calls must not add to.
    """
    kinds = _settled.get(group)
    if kinds is None or not uses_streams(tensor):
        return False
    settled = kinds.get((name, num_bytes, tensor.dtype))
    if settled is None or settled.policy is not policy or not settled.kind.take(None):
        return False
    settled.recorder.native(name, FASTER_SO, settled.input_bytes)
    return True


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
        call.recording = None
        found.reduce_scatter(call, parts, out, scale, one.reduce_scatter)


def sum_in_place(call: Call, x: Tensor, scale: float) -> None:
    """Flat ``x``: the ranks' ``x * scale``, added; a reduce-scatter, then an all-gather."""
    comm = call.comm
    shard = align(-(-len(x) // comm.size), TILE)  # whole tiles, so that only the last has a tail
    shards = [x[rank * shard : (rank + 1) * shard] for rank in range(comm.size)]
    exchange_sum(call, shards, shards[comm.rank], scale)
    engine(call).all_gather(call, shards[comm.rank], shards)
