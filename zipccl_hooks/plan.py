"""How payloads of certain sizes are exchanged between GPUs: room, buffers, and the collective itself.

A training step exchanges the same sizes over and over. Everything that does not change is made once and
kept with the flow: the host time of a small exchange is mostly that of making it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from .channel import Channel, Flow
from .cuda import launch
from .format import DType, Layout, Mode, align, cached_layout
from .peers import Peers
from .rests import Entry

MAX_PLANS = 256  # kept for a kind of call: an all_to_all may have other splits each time

Parts = list[Tensor | None]  # by peer; None: nothing goes to it, or comes
Numels = list[int | None]  # likewise


@dataclass(frozen=True)
class Manner:
    """What all exchanges of one flow have in common.

    ``pattern``: "gather" (a rank's part goes to all), "pairs" (each peer its own), "broadcast" (``root`` has
    a part, the others none). ``longest``: elements of the longest part that any rank sends in a step; None
    where that is not known to all, and payloads must travel over the backend.
    """

    dtype: DType
    mode: Mode
    pattern: str
    root: int
    longest: int | None


@dataclass
class Plan:
    """One exchange, with a turn's buffers; valid for a rate and a generation of the channel's buffers."""

    rate: int | None
    generation: int
    encodings: list[tuple[int, Layout, Tensor]]  # peer whose part, its layout, its payload
    received: Parts  # payloads that come, by peer
    spills: list[int]  # addresses
    table: np.ndarray[Any, Any]
    communicate: Callable[[], object]  # starts the exchange on the current stream
    peers: Peers | None  # whose copies that are; None: the group's own collective
    raw_bytes: int  # of the tensors sent
    sent_bytes: int

    def encode(self, parts: Parts) -> None:
        for peer, lay, payload in self.encodings:
            part = parts[peer]
            assert part is not None
            launch.encode(part, lay, payload)


def find_plan(
    channel: Channel,
    flow: Flow,
    manner: Manner,
    out_numels: Numels,
    in_numels: Numels,
    turn: int,
) -> Plan:
    """The plan for an exchange of so many elements to and from each peer, made where there is none."""
    key = (turn, *out_numels, *in_numels)
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
    size, rank = channel.comm.size, channel.comm.rank
    dtype, mode, pattern, root = manner.dtype, manner.mode, manner.pattern, manner.root
    out_layouts = [None if numel is None else cached_layout(numel, dtype, mode) for numel in out_numels]
    in_layouts = [None if numel is None else cached_layout(numel, dtype, mode) for numel in in_numels]
    out_bytes = [flow.room(lay) if lay else 0 for lay in out_layouts]
    in_bytes = [flow.room(lay) if lay else 0 for lay in in_layouts]
    peers = None
    if manner.longest is not None:
        peers = channel.reserve(flow.room(cached_layout(manner.longest, dtype, mode)))
    same = pattern != "pairs"  # all peers get the same payload
    if peers is None:
        if pattern == "pairs" and size == 2 and _alike(out_bytes, in_bytes):
            pattern = "gather"
        if pattern == "gather":
            out_bytes = in_bytes = [max(out_bytes + in_bytes)] * size
    # Room never exceeds the largest payload, on 128 bytes. A slot for all is as large as the others' slots.
    largest = [align(lay.max_bytes) if lay else 0 for lay in out_layouts]
    if same or size == 2:
        most = max(largest + [align(lay.max_bytes) for lay in in_layouts if lay])
        slots = channel.slots(f"send {turn}", [most]) * size
    else:
        slots = channel.slots(f"send {turn}", largest)
    received = peers.received(turn, in_bytes) if peers else channel.slots(f"receive {turn}", in_bytes)
    spills = channel.slots("spill", [lay.max_dynamic_bytes if lay else 0 for lay in in_layouts])
    encodings = [(peer, lay, slots[peer]) for peer, lay in enumerate(out_layouts) if lay]
    entries = [Entry() for _ in range(size)]
    for peer, lay, payload in encodings:
        entries[peer].set_send(payload, lay, out_bytes[peer])
    for peer, in_lay in enumerate(in_layouts):
        if in_lay:
            entries[peer].set_receive(received[peer], in_lay, in_bytes[peer], spills[peer].data_ptr())
    sent_bytes = sum(out_bytes[peer] for peer, _, _ in encodings)
    raw_bytes = sum(lay.numel * dtype.itemsize for _, lay, _ in encodings)
    mine = encodings[0][2] if encodings else None
    communicate: Callable[[], object]
    if peers is not None:
        sends = [(peer, payload[: out_bytes[peer]]) for peer, _, payload in encodings]
        communicate = peers.exchange(turn, sends, [peer for peer, lay in enumerate(in_layouts) if lay])
    elif pattern == "broadcast":
        communicate = plain_broadcast(
            channel, received[root] if mine is None else mine[: max(out_bytes)], root
        )
    elif pattern == "gather":
        # A rank without a part takes part: with what stands in its place of the buffer.
        slot = received[rank] if mine is None else mine[: out_bytes[0]]
        communicate = _gather(channel, torch.as_strided(received[0], (size * out_bytes[0],), (1,)), slot)
    else:
        sent = [slots[peer][: out_bytes[peer]] for peer in range(size)]
        communicate = _all_to_all(channel, received, sent)
    return Plan(
        flow.rate,
        channel.generation,
        encodings[:1] if same else encodings,
        [slot if lay else None for lay, slot in zip(in_layouts, received, strict=True)],
        [spill.data_ptr() for spill in spills],
        np.array([entry.row() for entry in entries]),
        communicate,
        peers,
        raw_bytes,
        sent_bytes,
    )


def _alike(out_bytes: list[int], in_bytes: list[int]) -> bool:
    """Whether the payloads of two ranks differ by less than a quarter.

    Then a gather exchanges them: NCCL's send and receive use fewer channels. Two H200, bus bandwidth in
    GB/s: over sockets on loopback 3.6 in an all-gather, 2.2 in an all-to-all; through host memory 25.2, 23.2.
    """
    return 4 * min(max(out_bytes), max(in_bytes)) > 3 * max(out_bytes + in_bytes)


# The group's own collectives. Not async: they then run on the current stream, and no Work is made.


def plain_broadcast(channel: Channel, tensor: Tensor, root: int) -> Callable[[], object]:
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
