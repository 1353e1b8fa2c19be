"""The compressed exchanges under the collectives, for CUDA tensors: enqueued on streams, as channel.py shows.

The same functions as exchange.py has for CPU tensors. What ranks say of a call is compared, over gloo,
when a kind of call is new; later calls of the kind do not wait for anyone. Tensors go in pieces, so
that one piece is encoded and another decoded while a third is under way, and buffers stay small.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import record_function

from . import exchange as host
from .channel import Channel, Entry, Flow
from .cuda import launch
from .exchange import Call
from .format import GROUP, TILE, Layout, align, cached_layout
from .ops import format_dtype

# Bytes of all ranks' tensors in one piece, and of one rank's.
PIECES_BYTES, MIN_PIECE_BYTES = 64 * 1024 * 1024, 1024 * 1024

MAX_PLANS = 256  # kept for a kind of call: an all_to_all may have other splits each time
_NO_RANGE = nullcontext()

Parts = list[Tensor | None]  # by peer; None: nothing goes to it
Consume = Callable[[int, Parts, list[int]], None]  # start, payloads by peer, their spill areas


def agree(call: Call, detail: float, sends: Sequence[int], expects: Sequence[int]) -> None:
    """Notes what this rank says of the call, for when its kind is new."""
    call.description = (detail, sends, expects)


def _layout(call: Call, numel: int) -> Layout:
    return cached_layout(numel, format_dtype(call.dtype), call.mode)


def piece(call: Call) -> int:
    """Elements of one rank's piece: whole groups of tiles, so that only the last has a tail."""
    size = max(PIECES_BYTES // call.comm.size, MIN_PIECE_BYTES)
    return size // call.dtype.itemsize // (GROUP * TILE) * GROUP * TILE


def _calibrate(call: Call, flow: Flow, plan: Plan) -> None:
    """The first call of a kind: compares what all ranks say of it, and asks them how much room they need."""
    rate = 0
    for payload, lay in zip(plan.payloads, plan.out_layouts, strict=True):
        if payload is not None and lay is not None and lay.num_tiles:
            dynamic = int(payload[16:24].view(torch.int64).item())  # waits for the encoder
            rate = max(rate, -(-16 * dynamic // lay.num_tiles))

    def ask() -> None:
        host.agree(call, *call.description)
        rates.extend(call.comm.gather_row([rate]))

    rates: list[list[int]] = []
    call.comm.submit(ask, []).wait()
    flow.set_rate(max(row[0] for row in rates))


def _record(name: str) -> AbstractContextManager[object]:
    """A range of the profiler; it costs ten microseconds, so only where one runs."""
    return record_function(name) if torch.autograd._profiler_enabled() else _NO_RANGE


@dataclass
class Plan:
    """How payloads of certain sizes are exchanged, with a turn's buffers: the same for call after call."""

    rate: int
    out_layouts: list[Layout | None]  # by peer
    in_layouts: list[Layout | None]
    out_bytes: list[int]
    in_bytes: list[int]
    gather: bool
    payloads: Parts
    received: list[Tensor]
    came: Parts  # those of ``received`` that hold a payload
    spills: list[int]
    table: np.ndarray[Any, Any]
    generation: int  # of the channel's buffers


def _plan(
    call: Call, flow: Flow, pattern: str, out_numels: list[int], in_numels: list[int], turn: int
) -> Plan:
    """The plan for a step, made anew where the room or the buffers have changed."""
    channel: Channel = call.channel
    key = (pattern, *out_numels, *in_numels, turn)
    plan = flow.plans.get(key)
    if plan is not None and plan.rate == flow.rate and plan.generation == channel.generation:
        return plan
    size = call.comm.size
    out_layouts = [_layout(call, numel) if numel else None for numel in out_numels]
    in_layouts = [_layout(call, numel) if numel else None for numel in in_numels]
    out_bytes = [flow.room(lay) if lay else 0 for lay in out_layouts]
    in_bytes = [flow.room(lay) if lay else 0 for lay in in_layouts]
    gather = pattern == "gather" or (pattern == "pairs" and size == 2 and _alike(out_bytes, in_bytes))
    if gather:
        out_bytes = in_bytes = [max(out_bytes + in_bytes)] * size
    # Room never exceeds the largest payload, on 128 bytes.
    capacity = [align(lay.max_bytes) if lay else 0 for lay in out_layouts]
    most = max(capacity + [align(lay.max_bytes) for lay in in_layouts if lay])
    if pattern != "pairs" or size == 2:  # one payload; in a gather as large as the others'
        slots = channel.slots(f"send {turn}", [most]) * size
    else:
        slots = channel.slots(f"send {turn}", capacity)
    received = channel.slots(f"receive {turn}", in_bytes)
    spills = channel.slots("spill", [lay.max_dynamic_bytes if lay else 0 for lay in in_layouts])
    payloads: Parts = [slot if lay else None for slot, lay in zip(slots, out_layouts, strict=True)]
    entries = [Entry() for _ in range(size)]
    for peer, entry in enumerate(entries):
        payload, out_lay, in_lay = payloads[peer], out_layouts[peer], in_layouts[peer]
        if payload is not None and out_lay is not None:
            entry.set_send(payload, out_lay, out_bytes[peer])
        if in_lay is not None:
            entry.set_receive(received[peer], in_lay, in_bytes[peer], spills[peer].data_ptr())
    plan = Plan(
        flow.rate or 0, out_layouts, in_layouts, out_bytes, in_bytes, gather, payloads, received,
        [slot if lay else None for lay, slot in zip(in_layouts, received, strict=True)],
        [spill.data_ptr() for spill in spills], np.array([entry.row() for entry in entries]),
        channel.generation,
    )  # fmt: skip
    if len(flow.plans) >= MAX_PLANS:
        flow.plans.clear()
    flow.plans[key] = plan
    return plan


def _encode(parts: Parts, plan: Plan, pattern: str) -> None:
    """The payloads of ``parts``; where all peers get the same one, once."""
    with _record("zipccl::encode"):
        for part, lay, payload in zip(parts, plan.out_layouts, plan.payloads, strict=True):
            if part is not None and lay is not None and payload is not None:
                launch.encode(part, lay, payload)
                if pattern != "pairs":
                    return


def _communicate(channel: Channel, pattern: str, root: int, plan: Plan) -> None:
    """Starts the group's own collective of the payloads, as far as there is room, on the current stream."""
    backend, received, nothing = channel.backend, plan.received, plan.received[0][:0]
    mine = next((p for p in plan.payloads if p is not None), None)
    options: Any
    if pattern == "broadcast":
        options = dist.distributed_c10d.BroadcastOptions()
        options.rootRank, options.rootTensor, options.asyncOp = root, 0, False
        backend.broadcast([received[root] if mine is None else mine[: max(plan.out_bytes)]], options)
        return
    if plan.gather:
        options = dist.distributed_c10d.AllgatherOptions()
        options.asyncOp = False
        slot = plan.out_bytes[0]
        whole = torch.as_strided(received[0], (len(received) * slot,), (1,))
        # A rank without a part takes part: with what stands in its place of the buffer.
        mine = received[channel.comm.rank] if mine is None else mine[:slot]
        backend._allgather_base(whole, mine, options)
        return
    options = dist.distributed_c10d.AllToAllOptions()
    options.asyncOp = False
    sent = [
        nothing if payload is None else payload[:size]
        for payload, size in zip(plan.payloads, plan.out_bytes, strict=True)
    ]
    backend.alltoall(received, sent, options)


def _exchange(
    call: Call,
    pattern: str,
    num_steps: int,
    sends: Callable[[int], Parts],
    numels: Callable[[int], list[int]],
    consume: Consume,
    root: int = -1,
) -> None:
    """Exchanges payloads, step by step.

    ``sends(step)`` are the parts for the peers, ``numels(step)`` the elements that come from them, None and
    0 for this rank itself. ``pattern``: "gather" (a rank's part goes to all), "pairs" (each peer its
    own), "broadcast" (``root`` has a part, the others none).
    """
    channel: Channel = call.channel
    size = call.comm.size
    flow = channel.flow((call.name, call.stage, call.dtype, call.mode, call.kind))
    channel.learn(flow)
    stamped = pattern == "pairs" and size > 2
    if call.stage:  # it reads what the stage before decoded, not only what the caller wrote
        channel.encoding.wait_stream(channel.decoding)
    call.stage += 1
    exchanges = []
    for step in range(num_steps):
        channel.use(channel.encoding)
        turn = channel.next_turn()
        parts = sends(step)
        out_numels, in_numels = [0 if part is None else part.numel() for part in parts], numels(step)
        plan = _plan(call, flow, pattern, out_numels, in_numels, turn)
        _encode(parts, plan, pattern)
        if flow.rate is None:
            _calibrate(call, flow, plan)
            plan = _plan(call, flow, pattern, out_numels, in_numels, turn)
        started = channel.start(call.name, plan.table)
        exchanges.append(started)
        if stamped:
            launch.stamp(channel.index, channel.table(started), size)
        with _record("zipccl::exchange"):
            # Not async: the collective then runs on this stream, not on one of the backend's own, whose
            # Work costs 0.2 ms of host time (torch 2.11, 1 MiB).
            channel.follow(channel.exchanging, channel.encoding, turn)
            _communicate(channel, pattern, root, plan)
            channel.follow(channel.decoding, channel.exchanging, turn)
        channel.rest(started, stamped)
        with _record("zipccl::decode"):
            consume(step, plan.came, plan.spills)
        channel.end_turn(turn)
        call.raw_bytes += sum(out_numels) * call.dtype.itemsize
        call.sent_bytes += sum(b for b, numel in zip(plan.out_bytes, out_numels, strict=True) if numel)
        payloads = sum(map(bool, out_numels)) if pattern == "pairs" else any(out_numels)
        call.modes[call.mode.name.lower()] += payloads
    flow.pending.append(exchanges)


def _alike(out_bytes: list[int], in_bytes: list[int]) -> bool:
    """Whether the payloads of two ranks differ by less than a quarter.

    Then a gather exchanges them: NCCL's send and receive use fewer channels. Two H200, bus bandwidth in
    GB/s: over sockets on loopback 3.6 in an all-gather, 2.2 in an all-to-all; through host memory 25.2, 23.2.
    """
    return 4 * min(max(out_bytes), max(in_bytes)) > 3 * max(out_bytes + in_bytes)


def all_gather(call: Call, x: Tensor, outs: Sequence[Tensor]) -> None:
    """Every rank's flat ``x`` into ``outs[rank]``, flat, sizes as agreed. ``x`` may be ``outs[own rank]``."""
    rank, size, step = call.comm.rank, call.comm.size, piece(call)
    call.kind = tuple(out.numel() for out in outs)

    def cut(tensor: Tensor, k: int) -> Tensor:
        return tensor[k * step : (k + 1) * step]

    def sends(k: int) -> Parts:
        part = cut(x, k) if k * step < x.numel() else None
        return [None if peer == rank else part for peer in range(size)]

    def numels(k: int) -> list[int]:
        return [0 if peer == rank else cut(out, k).numel() for peer, out in enumerate(outs)]

    def consume(k: int, payloads: Parts, spills: list[int]) -> None:
        for peer, payload in enumerate(payloads):
            out = cut(outs[peer], k)
            if payload is not None:
                launch.decode(payload, _layout(call, out.numel()), out, None, spills[peer])
            elif peer == rank and outs[rank].data_ptr() != x.data_ptr():
                out.copy_(cut(x, k))

    _exchange(call, "gather", max(1, -(-max(call.kind) // step)), sends, numels, consume)


def _cuts(call: Call, parts: Sequence[Tensor], step: int) -> Callable[[int], Parts]:
    """Of the parts for the other ranks, the k-th pieces of ``step`` elements; None where there is none."""
    rank = call.comm.rank
    return lambda k: [
        part[k * step : (k + 1) * step] if peer != rank and k * step < part.numel() else None
        for peer, part in enumerate(parts)
    ]


def reduce_scatter(call: Call, parts: Sequence[Tensor], out: Tensor, scale: float) -> None:
    """``out``: the ranks' ``parts[own rank] * scale``, added in rank order; may be one of ``parts``."""
    rank, size, step = call.comm.rank, call.comm.size, piece(call)
    call.kind = tuple(part.numel() for part in parts)

    def consume(k: int, payloads: Parts, spills: list[int]) -> None:
        target = out[k * step : (k + 1) * step]
        if target.numel():
            own = parts[rank][k * step : (k + 1) * step]
            sources = [own if payload is None else payload for payload in payloads]
            launch.decode_sum(sources, _layout(call, target.numel()), scale, target, spills=spills)

    def numels(k: int) -> list[int]:
        mine = min(max(out.numel() - k * step, 0), step)
        return [0 if peer == rank else mine for peer in range(size)]

    # Every rank knows all sizes, so all take as many steps as the longest part needs.
    steps = max(1, -(-max(call.kind) // step))
    _exchange(call, "pairs", steps, _cuts(call, parts, step), numels, consume)


def all_to_all(call: Call, parts: Sequence[Tensor], outs: Sequence[Tensor]) -> None:
    """Sends ``parts[i]``, flat, to rank i, whose own for this rank comes into ``outs[i]``.

    With more than two ranks in one piece: no rank knows how long the others' longest part is.
    """
    rank, size = call.comm.rank, call.comm.size
    sizes = [t.numel() for peer in range(size) if peer != rank for t in (parts[peer], outs[peer])]
    step = piece(call) if size == 2 else max(*sizes, 1)
    call.kind = ()

    def numels(k: int) -> list[int]:
        return [0 if peer == rank else outs[peer][k * step : (k + 1) * step].numel() for peer in range(size)]

    def consume(k: int, payloads: Parts, spills: list[int]) -> None:
        for peer, payload in enumerate(payloads):
            out = outs[peer][k * step : (k + 1) * step]
            if payload is not None:
                launch.decode(payload, _layout(call, out.numel()), out, None, spills[peer])
            elif peer == rank and k == 0:
                outs[rank].copy_(parts[rank])

    _exchange(call, "pairs", max(1, -(-max(sizes) // step)), _cuts(call, parts, step), numels, consume)


def broadcast(call: Call, x: Tensor, root: int) -> None:
    """``x`` of rank ``root``, flat, into every rank's ``x``."""
    rank, size, step = call.comm.rank, call.comm.size, piece(call)
    call.kind = (x.numel(), root)

    def sends(k: int) -> Parts:
        part = x[k * step : (k + 1) * step]
        return [part if rank == root and peer != root else None for peer in range(size)]

    def numels(k: int) -> list[int]:
        mine = 0 if rank == root else x[k * step : (k + 1) * step].numel()
        return [mine if peer == root else 0 for peer in range(size)]

    def consume(k: int, payloads: Parts, spills: list[int]) -> None:
        payload = payloads[root]
        if payload is not None:
            out = x[k * step : (k + 1) * step]
            launch.decode(payload, _layout(call, out.numel()), out, None, spills[root])

    _exchange(call, "broadcast", max(1, -(-x.numel() // step)), sends, numels, consume, root)


class CudaWork(dist.Work):
    """Handle of a compressed collective on CUDA tensors: ``wait`` makes the current stream wait.

    The host does not, so it raises what went wrong in an earlier call of the group; what goes wrong in this
    one is known later only, as with a plain collective.
    """

    def __init__(self, channel: Channel, outputs: list[Tensor]) -> None:
        super().__init__()
        self._channel, self._outputs = channel, outputs
        self._end = torch.cuda.Event()
        self._end.record(channel.decoding)

    def wait(self, timeout: timedelta | None = None) -> bool:
        self._channel.check()
        torch.cuda.current_stream(self._channel.device).wait_event(self._end)
        return True

    def is_completed(self) -> bool:
        return self._end.query()

    def is_success(self) -> bool:
        return self.is_completed()

    def exception(self) -> None:
        return None

    def result(self) -> list[Tensor]:
        return self._outputs

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        future: torch.futures.Future[list[Tensor]] = torch.futures.Future(devices=[self._channel.device])
        with torch.cuda.stream(self._channel.decoding):  # what uses its value waits for this stream
            future.set_result(self._outputs)
        return future


def enqueue(
    call: Call,
    body: Callable[[], None],
    put_back: Callable[[], None],
    tensors: Sequence[Tensor],
    outputs: Sequence[Tensor],
    async_op: bool,
) -> CudaWork:
    """Enqueues a call: ``body``, then ``put_back`` behind its last decoding.

    ``body`` begins on the caller's stream; what it puts there comes before the first encoding.
    """
    channel: Channel = call.channel
    with torch.no_grad(), channel.issuing():
        body()
        channel.use(channel.decoding)
        put_back()
        work = CudaWork(channel, list(outputs))
    if async_op:
        # The caller may drop them before it waits. A call that is not async has the caller's stream wait.
        for tensor in tensors:
            tensor.record_stream(channel.encoding)
            tensor.record_stream(channel.decoding)
    call.finish()
    return work
