"""The compressed exchanges under the collectives, for CUDA tensors: enqueued on streams, as channel.py shows.

The same functions as exchange.py has for CPU tensors. What ranks say of a call is compared, over gloo,
when a kind of call is new; later calls of the kind do not wait for anyone. Tensors go in pieces, so
that one piece is encoded and another decoded while a third is under way, and buffers stay small.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from . import exchange as host
from .channel import Channel, Flow
from .cuda.program import Program
from .exchange import Call
from .format import GROUP, TILE, Header
from .ops import format_dtype
from .plan import Manner, Numels, Place, Plan, find_plan
from .ranges import profiled_if_any

# Bytes of all ranks' tensors in one piece, and of one rank's. Two H200, all-gather of bf16, over NCCL with
# 32 / 64 / 128 MiB: through host memory 64 MiB 1.25 / 1.28 / 1.25, 256 MiB 1.30 / 1.37 / 1.35,
# 1 GiB 1.38 / 1.41 / 1.43.
PIECES_BYTES, MIN_PIECE_BYTES = 128 * 1024 * 1024, 1024 * 1024

Parts = list[Tensor | None]  # by peer


def agree(call: Call, detail: float, sends: Sequence[int], expects: Sequence[int]) -> None:
    """Notes what this rank says of the call, for when its kind is new."""
    call.description = (detail, sends, expects)


def piece_bytes(world: int) -> int:
    """Bytes of one rank's piece."""
    return max(PIECES_BYTES // world, MIN_PIECE_BYTES)


def piece(call: Call) -> int:
    """Elements of one rank's piece: whole groups of tiles, so that only the last has a tail."""
    return piece_bytes(call.comm.size) // call.dtype.itemsize // (GROUP * TILE) * GROUP * TILE


def _calibrate(call: Call, flow: Flow, plan: Plan) -> None:
    """The first call of a kind: compares what all ranks say of it, and asks them how much room they need."""
    rate = 0
    for lay, payload in plan.payloads:
        if lay.num_tiles:
            dynamic_bytes = Header.read(payload).dynamic_bytes  # waits for the encoder
            rate = max(rate, -(-16 * dynamic_bytes // lay.num_tiles))

    def ask() -> None:
        host.agree(call, *call.description)
        rates.extend(call.comm.gather_row([rate]))

    rates: list[list[int]] = []
    call.comm.in_turn(ask)
    flow.set_rate(max(row[0] for row in rates))


@dataclass
class _Sides:
    """What an exchange sends and where what it receives goes: flat tensors by peer, None: nothing.

    ``own`` is this rank's term where what comes is added up, into ``total`` (which is what it receives).
    ``always``: payloads are sent also of what is empty.
    """

    sends: Parts
    receives: Parts
    own: Tensor | None = None
    total: Tensor | None = None
    always: bool = False

    def numels(self, parts: Parts, start: int, step: int) -> Numels:
        """Elements of each part in the step at ``start``; None where there is no payload."""
        lefts = [None if p is None else min(max(p.numel() - start, 0), step) for p in parts]
        return lefts if self.always else [left or None for left in lefts]


def _aligned(channel: Channel, call: Call, sides: _Sides) -> tuple[_Sides, list[tuple[Tensor, Tensor]]]:
    """Sides whose tensors start on 16 bytes, as kernels want it; (target, source) of copies at the end."""
    given = [t for t in (*sides.sends, *sides.receives, sides.own, sides.total) if t is not None]
    if not any(t.data_ptr() % 16 for t in given):
        return sides, []
    call.recording = None
    channel.use(channel.encoding)
    back: dict[int, tuple[Tensor, Tensor]] = {}

    def copied(t: Tensor | None) -> Tensor | None:
        return t if t is None or t.data_ptr() % 16 == 0 else t.clone()

    def staged(t: Tensor | None) -> Tensor | None:
        if t is None or t.data_ptr() % 16 == 0:
            return t
        return back.setdefault(t.data_ptr(), (t, torch.empty_like(t)))[1]

    aligned = _Sides(
        [copied(t) for t in sides.sends],
        [staged(t) for t in sides.receives],
        copied(sides.own),
        staged(sides.total),
        sides.always,
    )
    call.tensors += [t for t in (*aligned.sends, *aligned.receives, aligned.own) if t is not None]
    return aligned, list(back.values())


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _add_copy(steps: Program, channel: Channel, target: Tensor, source: Tensor) -> list[Place]:
    """Adds a copy of a rank's own part, behind its encoding and before the end of the decoding."""
    if target.numel() != source.numel():
        raise ValueError(f"own part: expected {target.numel()} elements, got {source.numel()}")
    if not target.numel():
        return []
    to, from_ = target.data_ptr(), source.data_ptr()
    values = steps.copy(to, from_, target.nbytes, channel.encoding.cuda_stream)
    channel.add_join(steps, channel.decoding, channel.encoding)
    return [(values, 0, to), (values, 1, from_)]


def _exchange(
    call: Call,
    manner: Manner,
    sides: _Sides,
    step: int,
    longest: int,
    own: tuple[Tensor, Tensor] | None = None,
) -> None:
    """Exchanges payloads of ``step`` elements, until the ``longest`` part is through, on any rank alike.

    ``own``: (target, source) of this rank's own part, which is copied while the last exchange is under way.
    """
    channel: Channel = call.channel
    encoding, decoding = channel.encoding, channel.decoding
    flow = channel.flow((call.name, call.stage, call.dtype, call.mode, call.kind))
    channel.learn(flow)
    before = Program()
    if call.stage:  # it reads what the stage before decoded, not only what the caller wrote
        channel.add_join(before, encoding, decoding)
        before.run()
    call.stage += 1
    sides, back = _aligned(channel, call, sides)
    sources, targets = [_address(t) for t in sides.sends], [_address(t) for t in sides.receives]
    own_term, total = _address(sides.own), _address(sides.total)
    exchanges = []
    if call.recording is not None:
        call.recording.add_stage(flow)
    for start in range(0, max(longest, 1), step):
        channel.use(encoding)
        turn, at = channel.next_turn(), start * call.dtype.itemsize
        sizes = sides.numels(sides.sends, start, step), sides.numels(sides.receives, start, step)
        plan = find_plan(channel, flow, manner, *sizes, turn)
        addresses = [s + at for s in sources], [t + at for t in targets], own_term + at, total + at
        places = plan.place(*addresses)
        with profiled_if_any("encode", plan.raw_bytes):
            plan.encode.run()
        if flow.rate is None:
            _calibrate(call, flow, plan)
            plan = find_plan(channel, flow, manner, *sizes, turn)
            places = plan.place(*addresses)
        started = channel.start(call.name, plan.table)
        exchanges.append(started)
        plan.set_exchange(channel, started)
        with profiled_if_any("exchange", plan.sent_bytes):
            plan.exchange.run()
        copying = Program()
        if own is not None and start + step >= longest:
            places += _add_copy(copying, channel, *own)
            copying.run()
        with profiled_if_any("decode", plan.received_bytes):
            plan.decode.run()
        if call.recording is not None:
            steps = Program.joined(before, plan.encode, plan.exchange, copying, plan.decode)
            call.recording.add_piece(plan, steps, places)
        before = Program()
        call.raw_bytes += plan.raw_bytes
        call.sent_bytes += plan.sent_bytes
        call.modes[call.mode.name.lower()] += len(plan.payloads)
    channel.use(decoding)
    for target, copied in back:
        target.copy_(copied)
    flow.pending.append(exchanges)
    call.ratios.append(flow.ratio(manner.dtype, call.mode))


def _manner(
    call: Call, pattern: str, longest: int | None, root: int = -1, scale: float | None = None
) -> Manner:
    return Manner(format_dtype(call.dtype), call.mode, pattern, root, longest, scale)


def all_gather(call: Call, x: Tensor, outs: Sequence[Tensor]) -> None:
    """Every rank's flat ``x`` into ``outs[rank]``, flat, sizes as agreed. ``x`` may be ``outs[own rank]``."""
    rank, size, step = call.comm.rank, call.comm.size, piece(call)
    call.kind = tuple(out.numel() for out in outs)
    longest = max(call.kind)
    others = [peer != rank for peer in range(size)]
    sides = _Sides(
        [x if other else None for other in others],
        [out if other else None for out, other in zip(outs, others, strict=True)],
    )
    in_place = outs[rank].data_ptr() == x.data_ptr()
    own = None if in_place else (outs[rank], x)
    _exchange(call, _manner(call, "gather", min(longest, step)), sides, step, longest, own)


def reduce_scatter(call: Call, parts: Sequence[Tensor], out: Tensor, scale: float) -> None:
    """``out``: the ranks' ``parts[own rank] * scale``, added in rank order; may be one of ``parts``."""
    rank, size, step = call.comm.rank, call.comm.size, piece(call)
    call.kind = tuple(part.numel() for part in parts)
    longest = max(call.kind)  # every rank knows all sizes
    sides = _Sides(
        [None if peer == rank else part for peer, part in enumerate(parts)],
        [None if peer == rank else out for peer in range(size)],
        parts[rank],
        out,
        size > 2,
    )
    _exchange(call, _manner(call, "pairs", min(longest, step), scale=scale), sides, step, longest)


def all_to_all(call: Call, parts: Sequence[Tensor], outs: Sequence[Tensor]) -> None:
    """Sends ``parts[i]``, flat, to rank i, whose own for this rank comes into ``outs[i]``.

    In one piece where more than two ranks have parts and ``call.kind`` does not tell how long the longest is.
    """
    rank, size, step = call.comm.rank, call.comm.size, piece(call)
    longest = max(t.numel() for peer in range(size) if peer != rank for t in (parts[peer], outs[peer]))
    known = None
    if size == 2 or call.kind:
        call.kind = call.kind or (longest,)
        (longest,) = call.kind
        known = min(longest, step)
    else:
        step = max(longest, 1)
    sides = _Sides(
        [None if peer == rank else part for peer, part in enumerate(parts)],
        [None if peer == rank else out for peer, out in enumerate(outs)],
        always=size > 2,
    )
    _exchange(call, _manner(call, "pairs", known), sides, step, longest, (outs[rank], parts[rank]))


def broadcast(call: Call, x: Tensor, root: int) -> None:
    """``x`` of rank ``root``, flat, into every rank's ``x``."""
    rank, size, step = call.comm.rank, call.comm.size, piece(call)
    call.kind = (x.numel(), root)
    sides = _Sides(
        [x if rank == root and peer != root else None for peer in range(size)],
        [x if peer == root != rank else None for peer in range(size)],
        always=True,
    )
    _exchange(call, _manner(call, "broadcast", min(x.numel(), step), root), sides, step, x.numel())
