"""Calls on CUDA tensors that are made again: the exchanges of the first, with the tensors of the next.

A training step makes the same calls as the one before, and between them the host has other work, so that
little of the Python that makes exchanges is in its caches: there it takes four times as long as in a loop.
So the first call of a kind notes what it enqueues (Recording), addresses as places in its tensors. Later ones
write their own addresses among the arguments of the same driver calls, and make these. An all_reduce of two
exchanges, less its driver calls, took an AMD EPYC 143 us in a loop, 590 with caches emptied between; now it
takes 50 and 370 (by a script that is not in the tree).

A recording is good as long as the room that payloads get, and the buffers, are those it was made with.
Ranks need not agree on who uses one: what is exchanged is the same.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from .channel import Channel, Flow
from .cuda.program import Program
from .exchange import Call
from .plan import Place, Plan
from .rests import Exchange


def likeness(detail: Hashable, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> Hashable | None:
    """What calls of one name have in common that enqueue the same; None of those that are not recorded.

    ``detail`` tells what else than tensors makes a difference.
    """
    if len(inputs) != 1 or len(outputs) != 1:
        return None
    (x,), (y,) = inputs, outputs
    start, end = x.data_ptr(), y.data_ptr()
    if (start | end) % 16 or not x.is_contiguous() or not y.is_contiguous():
        return None
    apart = end - start
    overlapping = apart if -y.nbytes < apart < x.nbytes else None
    return detail, x.dtype, x.get_device(), x.numel(), y.numel(), overlapping


@dataclass
class _Piece:
    """One exchange. ``places``: (arguments, index, number of the call's tensor, bytes from its start)."""

    stage: int
    plan: Plan
    steps: Program
    places: list[tuple[Any, int, int, int]]


class Recording:
    """What ``call``, on ``tensors``, enqueues."""

    def __init__(self, call: Call, tensors: Sequence[Tensor]) -> None:
        self.call = call  # what it counts, each other one counts too
        self.complete = True
        self._channel: Channel = call.channel
        self._tensors = [(t.data_ptr(), t.nbytes) for t in tensors]
        self._flows: list[tuple[Flow, int | None]] = []
        self._pieces: list[_Piece] = []
        self._generation = self._channel.generation

    # While the call is made that is recorded

    def add_stage(self, flow: Flow) -> None:
        self._flows.append((flow, None))

    def add_piece(self, plan: Plan, steps: Program, places: Sequence[Place]) -> None:
        """An exchange of the last stage: ``steps``, in which addresses are at ``places``."""
        flow, _ = self._flows[-1]
        self._flows[-1] = flow, flow.rate
        own = [(arguments, at, *self._within(address)) for arguments, at, address in places]
        self._pieces.append(_Piece(len(self._flows) - 1, plan, steps, own))

    def _within(self, address: int) -> tuple[int, int]:
        for k, (start, num_bytes) in enumerate(self._tensors):
            if start <= address < start + num_bytes:
                return k, address - start
        self.complete = False  # a tensor that the call made for itself
        return 0, 0

    # Later

    def is_good(self) -> bool:
        """Whether a call would enqueue the same now. Takes the flows' part in it, as the call would."""
        channel = self._channel
        for flow, _ in self._flows:
            channel.learn(flow)
        return self._generation == channel.generation and all(f.rate == rate for f, rate in self._flows)

    def play(self, tensors: Sequence[Tensor]) -> None:
        """Enqueues the call's exchanges with other tensors; within channel.begin and leave."""
        channel, addresses = self._channel, [t.data_ptr() for t in tensors]
        exchanges: list[list[Exchange]] = [[] for _ in self._flows]
        for piece in self._pieces:
            channel.next_turn()
            for arguments, at, k, offset in piece.places:
                arguments[at] = addresses[k] + offset
            started = channel.start(self.call.name, piece.plan.table)
            piece.plan.set_exchange(channel, started)
            channel.use(channel.encoding)
            piece.steps.run()
            exchanges[piece.stage].append(started)
        for (flow, _), made in zip(self._flows, exchanges, strict=True):
            flow.pending.append(made)
