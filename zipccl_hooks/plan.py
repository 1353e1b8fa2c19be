"""How payloads of certain sizes are exchanged between GPUs: room, buffers, and the programs that do it.

A training step exchanges the same sizes over and over. Everything that does not change is made once and
kept with the flow: the host time of a small exchange is mostly that of making it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from .channel import Channel, Flow
from .cuda import MAX_SOURCES, launch
from .cuda.program import Program, Values
from .format import DType, Layout, Mode, align, cached_layout
from .rests import Entry, Exchange

MAX_PLANS = 256  # kept for a kind of call: an all_to_all may have other splits each time

Numels = list[int | None]  # elements by peer; None: nothing goes to it, or comes
Place = tuple[Values, int, int]  # arguments of a driver call, which of them, and the address to be there


@dataclass(frozen=True)
class Manner:
    """What all exchanges of one flow have in common.

    ``pattern``: "gather" (a rank's part goes to all), "pairs" (each peer its own), "broadcast" (``root`` has
    a part, the others none), "message" (one of two ranks has). ``longest``: elements of the longest part that
    any rank sends in a step; None where that is not known to all, and payloads must travel over the backend.
    ``scale``: what terms are multiplied by before they are added up; None where what comes is not added up.
    """

    dtype: DType
    mode: Mode
    pattern: str
    root: int
    longest: int | None
    scale: float | None

    @property
    def same(self) -> bool:
        """Whether all peers get the same payload."""
        return self.pattern in ("gather", "broadcast")


@dataclass
class Plan:
    """One exchange, with a turn's buffers; valid for a rate and a generation of the channel's buffers.

    Three programs: on the encoding stream, from there on to the exchanging and on to the decoding stream.
    """

    rate: int | None
    generation: int
    table: np.ndarray[Any, Any]
    raw_bytes: int  # of the tensors sent
    sent_bytes: int
    received_bytes: int
    keep: list[Any]  # what the programs hold addresses of
    payloads: list[tuple[Layout, Tensor]] = field(default_factory=list)  # that this rank encodes
    encode: Program = field(default_factory=Program)
    exchange: Program = field(default_factory=Program)
    decode: Program = field(default_factory=Program)
    # Arguments of the kernels that change.
    sources: list[tuple[int, Values]] = field(default_factory=list)  # with the peer whose part is encoded
    targets: list[tuple[int, Values]] = field(default_factory=list)  # with the peer whose part is decoded
    own_term: tuple[Values, int] | None = None  # of a sum, and its place among these
    total: Values = None
    stamp: Values = None
    rest: Values = None

    def place(self, sources: Sequence[int], targets: Sequence[int], own: int, total: int) -> list[Place]:
        """Writes addresses where they belong, and tells where that is.

        Of parts to encode, to decode into, by peer; of a sum's own term, and of that sum.
        """
        found: list[Place] = [(given, launch.ENCODE_SOURCE, sources[peer]) for peer, given in self.sources]
        found += [(given, launch.DECODE_TARGET, targets[peer]) for peer, given in self.targets]
        if self.own_term is not None:
            found += [(*self.own_term, own), (self.total, launch.SUM_TARGET, total)]
        for arguments, at, address in found:
            arguments[at] = address
        return found

    def set_exchange(self, channel: Channel, started: Exchange) -> None:
        channel.set_rest(self.rest, started)
        if self.stamp is not None:
            self.stamp[launch.STAMP_TABLE] = channel.table(started)


def find_plan(
    channel: Channel,
    flow: Flow,
    manner: Manner,
    out_numels: Numels,
    in_numels: Numels,
    turn: int,
) -> Plan:
    """The plan for an exchange of so many elements to and from each peer, made where there is none."""
    key = (turn, manner.scale, *out_numels, *in_numels)
    plan = flow.plans.get(key)
    if plan is None or plan.rate != flow.rate or plan.generation != channel.generation:
        plan = _make(channel, flow, manner, out_numels, in_numels, turn)
        if len(flow.plans) >= MAX_PLANS:
            flow.plans.clear()
        flow.plans[key] = plan
    return plan


def _make(
    channel: Channel,
    flow: Flow,
    manner: Manner,
    out_numels: Numels,
    in_numels: Numels,
    turn: int,
) -> Plan:
    size, dtype, mode, pattern = channel.comm.size, manner.dtype, manner.mode, manner.pattern
    out_layouts = [None if numel is None else cached_layout(numel, dtype, mode) for numel in out_numels]
    in_layouts = [None if numel is None else cached_layout(numel, dtype, mode) for numel in in_numels]
    out_bytes = [flow.room(lay) if lay else 0 for lay in out_layouts]
    in_bytes = [flow.room(lay) if lay else 0 for lay in in_layouts]
    peers = None
    if manner.longest is not None:
        peers = channel.reserve(flow.room(cached_layout(manner.longest, dtype, mode)))
    if peers is None:
        if pattern == "pairs" and size == 2 and _alike(out_bytes, in_bytes):
            pattern = "gather"
        if pattern == "gather":
            out_bytes = in_bytes = [max(out_bytes + in_bytes)] * size
    # Room never exceeds the largest payload, on 128 bytes. A slot for all is as large as the others' slots.
    largest = [align(lay.max_bytes) if lay else 0 for lay in out_layouts]
    if pattern != "message" and (manner.same or size == 2):
        most = max(largest + [align(lay.max_bytes) for lay in in_layouts if lay])
        slots = channel.slots(f"send {turn}", [most]) * size
    else:
        slots = channel.slots(f"send {turn}", largest)
    received = peers.received(turn, in_bytes) if peers else channel.slots(f"receive {turn}", in_bytes)
    spills = channel.slots("spill", [lay.max_dynamic_bytes if lay else 0 for lay in in_layouts])
    entries = [Entry() for _ in range(size)]
    for peer, lay in enumerate(out_layouts):
        if lay:
            entries[peer].set_send(slots[peer], lay, out_bytes[peer])
    for peer, lay in enumerate(in_layouts):
        if lay:
            entries[peer].set_receive(received[peer], lay, in_bytes[peer], spills[peer].data_ptr())
    to = [peer for peer, lay in enumerate(out_layouts) if lay]
    plan = Plan(
        flow.rate,
        channel.generation,
        np.array([entry.row() for entry in entries]),
        sum(lay.numel * dtype.itemsize for lay in out_layouts if lay),
        sum(out_bytes[peer] for peer in to),
        sum(num_bytes for lay, num_bytes in zip(in_layouts, in_bytes, strict=True) if lay),
        [slots, received, spills],
    )
    coded = to[:1] if manner.same else to
    _add_encoding(channel, plan, turn, [(peer, out_layouts[peer], slots[peer]) for peer in coded])

    encoding, exchanging = channel.encoding.cuda_stream, channel.exchanging.cuda_stream
    if stamped := manner.pattern == "pairs" and size > 2:
        # Each rank sees only what it exchanges, so payloads tell the rate that all must know.
        plan.stamp = plan.exchange.launch(launch.stamping(channel.index, 0, size), encoding)
    plan.exchange.record(channel.encoded[turn].cuda_event, encoding)
    plan.exchange.wait(exchanging, channel.encoded[turn].cuda_event)
    sent = [slots[peer][: out_bytes[peer]] for peer in range(size)]
    if peers is not None:
        senders = [peer for peer, lay in enumerate(in_layouts) if lay]
        peers.exchange(plan.exchange, turn, [(peer, sent[peer]) for peer in to], senders, exchanging)
    else:
        plan.exchange.call(lambda: channel.use(channel.exchanging))
        plan.exchange.call(_collective(channel, pattern, manner.root, sent, received, to))

    decoding = channel.decoding.cuda_stream
    # Not in the exchange: a batch of messages is under way only when all of it has been enqueued.
    plan.decode.record(channel.arrived[turn].cuda_event, exchanging)
    plan.decode.wait(decoding, channel.arrived[turn].cuda_event)
    plan.rest = plan.decode.launch(channel.rest(stamped), decoding)
    if manner.scale is None:
        _add_decoding(channel, plan, in_layouts, received, spills)
    else:
        _add_sum(channel, plan, manner.scale, in_layouts, received, spills)
    if peers is not None:
        peers.release(plan.decode, turn, decoding)
    plan.decode.record(channel.free[turn].cuda_event, decoding)
    return plan


def _add_encoding(
    channel: Channel, plan: Plan, turn: int, payloads: list[tuple[int, Layout | None, Tensor]]
) -> None:
    stream = channel.encoding.cuda_stream
    plan.encode.wait(stream, channel.free[turn].cuda_event)
    for peer, lay, payload in payloads:
        assert lay is not None
        scratch = launch.scan_scratch(lay, channel.index, stream)
        kernel = launch.encoding(lay, channel.index, 0, payload.data_ptr(), scratch.data_ptr())
        plan.keep.append(scratch)
        plan.payloads.append((lay, payload))
        arguments = plan.encode.launch(kernel, stream)
        if lay.numel:
            plan.sources.append((peer, arguments))


def _add_decoding(
    channel: Channel,
    plan: Plan,
    layouts: list[Layout | None],
    received: list[Tensor],
    spills: list[Tensor],
) -> None:
    flag = launch.corrupt_flag(channel.index).data_ptr()
    for peer, (lay, payload, spill) in enumerate(zip(layouts, received, spills, strict=True)):
        if lay and lay.numel:
            kernel = launch.decoding(
                lay, channel.index, payload.data_ptr(), payload.numel(), 0, flag, spill.data_ptr()
            )
            plan.targets.append((peer, plan.decode.launch(kernel, channel.decoding.cuda_stream)))


def _add_sum(
    channel: Channel,
    plan: Plan,
    scale: float,
    layouts: list[Layout | None],
    received: list[Tensor],
    spills: list[Tensor],
) -> None:
    """Adds up, in rank order, what comes and this rank's own term."""
    rank, lay = channel.comm.rank, next((lay for lay in layouts if lay), None)
    if lay is None or not lay.numel:
        return
    terms = [(0, 0) if peer == rank else (p.data_ptr(), p.numel()) for peer, p in enumerate(received)]
    wide = channel.slots("sums", [4 * lay.numel if len(terms) > MAX_SOURCES else 0])[0]
    plan.keep.append(wide)
    kernels = launch.summing(
        lay, channel.index, terms, [spill.data_ptr() for spill in spills], scale, 0, 0, wide.data_ptr(),
        launch.corrupt_flag(channel.index).data_ptr(), 0,
    )  # fmt: skip
    arguments = [plan.decode.launch(kernel, channel.decoding.cuda_stream) for kernel in kernels]
    plan.own_term, plan.total = (arguments[rank // MAX_SOURCES], rank % MAX_SOURCES), arguments[-1]


def _alike(out_bytes: list[int], in_bytes: list[int]) -> bool:
    """Whether the payloads of two ranks differ by less than a quarter.

    Then a gather exchanges them: NCCL's send and receive use fewer channels. Two H200, bus bandwidth in
    GB/s: over sockets on loopback 3.6 in an all-gather, 2.2 in an all-to-all; through host memory 25.2, 23.2.
    """
    return 4 * min(max(out_bytes), max(in_bytes)) > 3 * max(out_bytes + in_bytes)


# The group's own collectives. Not async: they then run on the current stream, and no Work is made.


def _collective(
    channel: Channel, pattern: str, root: int, sent: list[Tensor], received: list[Tensor], to: list[int]
) -> Callable[[], object]:
    """The one that carries payloads: those in ``sent`` to the peers ``to``."""
    if pattern == "broadcast":
        return _broadcast(channel, sent[to[0]] if to else received[root], root)
    if pattern == "gather":
        # A rank without a part takes part: with what stands in its place of the buffer.
        mine = sent[to[0]] if to else received[channel.comm.rank]
        whole = torch.as_strided(received[0], (len(received) * received[0].numel(),), (1,))
        return _gather(channel, whole, mine)
    return _all_to_all(channel, received, sent)


def _broadcast(channel: Channel, tensor: Tensor, root: int) -> Callable[[], object]:
    options = dist.distributed_c10d.BroadcastOptions()
    options.rootRank, options.rootTensor, options.asyncOp = root, 0, False
    return lambda: channel.backend.broadcast([tensor], options)


def _gather(channel: Channel, whole: Tensor, mine: Tensor) -> Callable[[], object]:
    options = dist.distributed_c10d.AllgatherOptions()
    options.asyncOp = False
    return lambda: channel.backend._allgather_base(whole, mine, options)


def _all_to_all(channel: Channel, received: list[Tensor], sent: list[Tensor]) -> Callable[[], object]:
    options = dist.distributed_c10d.AllToAllOptions()
    options.asyncOp = False
    return lambda: channel.backend.alltoall(received, sent, options)
