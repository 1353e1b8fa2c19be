"""The compressed exchanges under the collectives, for CUDA tensors: enqueued on streams, as channel.py shows.

The same functions as exchange.py has for CPU tensors. What ranks say of a call is compared, over gloo,
when a kind of call is new; later calls of the kind do not wait for anyone. Tensors go in pieces, so
that one piece is encoded and another decoded while a third is under way, and buffers stay small.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch
from torch import Tensor
from torch.profiler import record_function

from . import exchange as host
from .channel import Channel, Flow
from .cuda import launch
from .exchange import Call
from .format import GROUP, TILE, Header, Layout, cached_layout
from .ops import format_dtype
from .plan import Manner, Numels, Parts, Plan, find_plan

# Bytes of all ranks' tensors in one piece, and of one rank's. Two H200, all-gather of bf16, over NCCL with
# 32 / 64 / 128 MiB: through host memory 64 MiB 1.25 / 1.28 / 1.25, 256 MiB 1.30 / 1.37 / 1.35,
# 1 GiB 1.38 / 1.41 / 1.43.
PIECES_BYTES, MIN_PIECE_BYTES = 128 * 1024 * 1024, 1024 * 1024

_NO_RANGE = nullcontext()

Consume = Callable[[int, Parts, list[int]], None]  # start, payloads by peer, their spill areas


def agree(call: Call, detail: float, sends: Sequence[int], expects: Sequence[int]) -> None:
    """Notes what this rank says of the call, for when its kind is new."""
    call.description = (detail, sends, expects)


def _layout(call: Call, numel: int) -> Layout:
    return cached_layout(numel, format_dtype(call.dtype), call.mode)


def _cut(tensor: Tensor, k: int, step: int) -> Tensor:
    """The k-th piece of ``step`` elements."""
    return tensor if k == 0 and tensor.numel() <= step else tensor[k * step : (k + 1) * step]


def _left(tensor: Tensor, k: int, step: int) -> int:
    """Elements of that piece."""
    return min(max(tensor.numel() - k * step, 0), step)


def _steps(longest: int, step: int) -> int:
    return max(1, -(-longest // step))


def piece_bytes(world: int) -> int:
    """Bytes of one rank's piece."""
    return max(PIECES_BYTES // world, MIN_PIECE_BYTES)


def piece(call: Call) -> int:
    """Elements of one rank's piece: whole groups of tiles, so that only the last has a tail."""
    return piece_bytes(call.comm.size) // call.dtype.itemsize // (GROUP * TILE) * GROUP * TILE


def _calibrate(call: Call, flow: Flow, plan: Plan) -> None:
    """The first call of a kind: compares what all ranks say of it, and asks them how much room they need."""
    rate = 0
    for _, lay, payload in plan.encodings:
        if lay.num_tiles:
            dynamic_bytes = Header.read(payload).dynamic_bytes  # waits for the encoder
            rate = max(rate, -(-16 * dynamic_bytes // lay.num_tiles))

    def ask() -> None:
        host.agree(call, *call.description)
        rates.extend(call.comm.gather_row([rate]))

    rates: list[list[int]] = []
    call.comm.in_turn(ask)
    flow.set_rate(max(row[0] for row in rates))


def _record(name: str) -> AbstractContextManager[object]:
    """A range of the profiler; it costs ten microseconds, so only where one runs."""
    return record_function(name) if torch.autograd._profiler_enabled() else _NO_RANGE


def _exchange(
    call: Call,
    pattern: str,
    num_steps: int,
    sends: Callable[[int], Parts],
    numels: Callable[[int], Numels],
    consume: Consume,
    longest: int | None,
    root: int = -1,
    own: Callable[[int], None] | None = None,
) -> None:
    """Exchanges payloads, step by step.

    ``sends(step)`` are the parts for the peers, ``numels(step)`` the elements that come from them, None for
    this rank itself and where there is nothing. ``pattern``, ``longest`` and ``root`` are plan.Manner's.
    ``own(step)`` puts this rank's own part in its place, while the exchange is under way.
    """
    channel: Channel = call.channel
    encoding, exchanging, decoding = channel.encoding, channel.exchanging, channel.decoding
    size = call.comm.size
    flow = channel.flow((call.name, call.stage, call.dtype, call.mode, call.kind))
    channel.learn(flow)
    dtype = format_dtype(call.dtype)
    plan = partial(find_plan, channel, flow, Manner(dtype, call.mode, pattern, root, longest))
    stamped = pattern == "pairs" and size > 2
    if call.stage:  # it reads what the stage before decoded, not only what the caller wrote
        encoding.wait_stream(decoding)
    call.stage += 1
    exchanges = []
    for step in range(num_steps):
        channel.use(encoding)
        turn = channel.next_turn()
        parts = sends(step)
        out_numels = [None if part is None else part.numel() for part in parts]
        in_numels = numels(step)
        current = plan(out_numels, in_numels, turn)
        with _record("zipccl::encode"):
            current.encode(parts)
        if flow.rate is None:
            _calibrate(call, flow, current)
            current = plan(out_numels, in_numels, turn)
        started = channel.start(call.name, current.table)
        exchanges.append(started)
        if stamped:
            launch.stamp(channel.index, channel.table(started), size)
        with _record("zipccl::exchange"):
            channel.follow(exchanging, encoding, turn)
            current.communicate()
        if own is not None:
            channel.use(encoding)
            own(step)
            channel.join(decoding, encoding)
        channel.follow(decoding, exchanging, turn)
        channel.rest(started, stamped)
        with _record("zipccl::decode"):
            consume(step, current.received, current.spills)
        channel.end_turn(turn, current.peers)
        call.raw_bytes += current.raw_bytes
        call.sent_bytes += current.sent_bytes
        call.modes[call.mode.name.lower()] += len(current.encodings)
    flow.pending.append(exchanges)
    call.ratios.append(flow.ratio(dtype, call.mode))


def all_gather(call: Call, x: Tensor, outs: Sequence[Tensor]) -> None:
    """Every rank's flat ``x`` into ``outs[rank]``, flat, sizes as agreed. ``x`` may be ``outs[own rank]``."""
    rank, size, step = call.comm.rank, call.comm.size, piece(call)
    call.kind = tuple(out.numel() for out in outs)

    def sends(k: int) -> Parts:
        part = _cut(x, k, step) if k * step < x.numel() else None
        return [None if peer == rank else part for peer in range(size)]

    def numels(k: int) -> Numels:
        return [None if peer == rank else _left(out, k, step) or None for peer, out in enumerate(outs)]

    def consume(k: int, payloads: Parts, spills: list[int]) -> None:
        for peer, payload in enumerate(payloads):
            if payload is not None:
                out = _cut(outs[peer], k, step)
                launch.decode(payload, _layout(call, out.numel()), out, None, spills[peer])

    def own(k: int) -> None:
        _cut(outs[rank], k, step).copy_(_cut(x, k, step))

    longest = max(call.kind)
    in_place = outs[rank].data_ptr() == x.data_ptr()
    _exchange(
        call, "gather", _steps(longest, step), sends, numels, consume, min(longest, step),
        own=None if in_place else own,
    )  # fmt: skip


def _pairs(
    call: Call,
    parts: Sequence[Tensor],
    outs: Sequence[Tensor],
    step: int,
    longest: int,
    known: bool,
    consume: Consume,
    own: Callable[[int], None] | None = None,
) -> None:
    """Sends ``parts[i]`` to rank i; ``outs[i]`` is as long as what comes from there.

    ``longest`` is the longest of these on any rank if ``known``, else on this one, and ``step`` no shorter.
    With more than two ranks each sends to each other in every step, if only a header: the stamp in it tells
    the rate that all must know.
    """
    rank, size = call.comm.rank, call.comm.size

    def sends(k: int) -> Parts:
        return [
            _cut(part, k, step) if peer != rank and (size > 2 or _left(part, k, step)) else None
            for peer, part in enumerate(parts)
        ]

    def numels(k: int) -> Numels:
        lefts: Numels = [_left(out, k, step) for out in outs]
        return [None if peer == rank or not (n or size > 2) else n for peer, n in enumerate(lefts)]

    most = min(longest, step) if known else None
    _exchange(call, "pairs", _steps(longest, step), sends, numels, consume, most, own=own)


def reduce_scatter(call: Call, parts: Sequence[Tensor], out: Tensor, scale: float) -> None:
    """``out``: the ranks' ``parts[own rank] * scale``, added in rank order; may be one of ``parts``."""
    rank, size, step = call.comm.rank, call.comm.size, piece(call)
    call.kind = tuple(part.numel() for part in parts)

    def consume(k: int, payloads: Parts, spills: list[int]) -> None:
        target = _cut(out, k, step)
        if target.numel():
            own = _cut(parts[rank], k, step)
            sources = [own if payload is None else payload for payload in payloads]
            launch.decode_sum(sources, _layout(call, target.numel()), scale, target, spills=spills)

    # Every rank knows all sizes, so all take as many steps as the longest part needs.
    _pairs(call, parts, [out] * size, step, max(call.kind), True, consume)


def all_to_all(call: Call, parts: Sequence[Tensor], outs: Sequence[Tensor]) -> None:
    """Sends ``parts[i]``, flat, to rank i, whose own for this rank comes into ``outs[i]``.

    In one piece where more than two ranks have parts and ``call.kind`` does not tell how long the longest is.
    """
    rank, size = call.comm.rank, call.comm.size
    longest = max(t.numel() for peer in range(size) if peer != rank for t in (parts[peer], outs[peer]))
    if size == 2 or call.kind:
        call.kind = call.kind or (longest,)
        (longest,), step = call.kind, piece(call)
    else:
        step = max(longest, 1)

    def consume(k: int, payloads: Parts, spills: list[int]) -> None:
        for peer, payload in enumerate(payloads):
            out = _cut(outs[peer], k, step)
            if payload is not None and out.numel():
                launch.decode(payload, _layout(call, out.numel()), out, None, spills[peer])

    def own(k: int) -> None:
        if k == 0:
            outs[rank].copy_(parts[rank])

    _pairs(call, parts, outs, step, longest, bool(call.kind), consume, own)


def broadcast(call: Call, x: Tensor, root: int) -> None:
    """``x`` of rank ``root``, flat, into every rank's ``x``."""
    rank, size, step = call.comm.rank, call.comm.size, piece(call)
    call.kind = (x.numel(), root)

    def sends(k: int) -> Parts:
        part = _cut(x, k, step)
        return [part if rank == root and peer != root else None for peer in range(size)]

    def numels(k: int) -> Numels:
        return [_left(x, k, step) if peer == root != rank else None for peer in range(size)]

    def consume(k: int, payloads: Parts, spills: list[int]) -> None:
        payload = payloads[root]
        if payload is not None:
            out = _cut(x, k, step)
            launch.decode(payload, _layout(call, out.numel()), out, None, spills[root])

    _exchange(call, "broadcast", _steps(x.numel(), step), sends, numels, consume, min(x.numel(), step), root)
