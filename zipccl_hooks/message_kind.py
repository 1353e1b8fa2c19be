"""Which way messages between GPUs of one kind go: plain, or compressed where that pays (messages.py).

The first LAG of a kind go plain and are timed at both ends, of which the later one sees the transfer alone.
LAG messages later both have put what they saw into the group's store, and come to the same answer: there one
may wait for the other, which has then issued the same message. From then on the kind is reviewed with the
ratio that its payloads show, which both ends know. What does not pay is looked at again after RETRY messages.
"""

from __future__ import annotations

import math
from functools import cache

import torch

from . import link
from .channel import LAG, Flow
from .choose import MARGIN, CodecSpeed, default_ratios
from .communicator import Communicator
from .eligible import FASTER_SO
from .errors import ZipcclError
from .format import Mode
from .ops import format_dtype
from .switch import FP32_RATIOS, RETRY

ANY_RATE = 1 << 20  # of a flow: room for any payload
PLAIN, TIMED, COMPRESSED = "plain", "timed", "compressed"  # ways of a message; those timed are plain, too
REVIEW = 2 * LAG + 1  # messages: so many until a flow has forgotten what it needed before
# What a compressed message may take beside codec and transfer: mostly the host's time, see switch.py, where a
# group's own is measured. All exchanges of two H200 took 100 to 150 us.
LEAST_SECONDS = 150e-6

Span = tuple[torch.cuda.Event, torch.cuda.Event]  # from, to


class Kind:
    """What both ends of a direction know, alike, of its messages of one dtype, size and mode."""

    def __init__(self, comm: Communicator, index: int, dtype: torch.dtype, numel: int, mode: Mode) -> None:
        self.flow = Flow(rate=ANY_RATE)
        self.timed: list[Span] = []  # exchanges of those messages
        self.left = 0  # messages that go plain before the next look
        self._comm, self._index, self._dtype, self._numel, self._mode = comm, index, dtype, numel, mode
        self._issued = 0  # since the last look began
        self._looks = 0
        self._plain_seconds = self._codec_seconds = 0.0

    def next_turn(self) -> int | None:
        """Counts a message: from -2 LAG on, 0 is the first that may be compressed; None: it rests."""
        if self.left:
            self.left -= 1
            return None
        self._issued += 1
        return self._issued - 1 - 2 * LAG

    def tell(self, turn: int | None, stream: torch.cuda.Stream) -> None:
        """Tells the other end what this one saw, if it is time to compare; the codec is timed on a stream."""
        if turn != 0:
            return
        for _, end in self.timed:
            end.synchronize()
        # None of so many in one batch, of which this is one; then the other end's count.
        plain = min((start.elapsed_time(end) / 1e3 for start, end in self.timed), default=math.inf)
        self.timed.clear()
        self._looks += 1
        with torch.cuda.stream(stream):
            speed = codec_speeds(self._index)[self._mode]
        num_bytes = self._numel * max(2, self._dtype.itemsize)  # smaller elements take as long as two bytes
        codec = speed.encode.seconds(num_bytes) + speed.decode.seconds(num_bytes)
        self._comm.store.set(self._key(self._comm.rank), f"{plain.hex()} {codec.hex()}")

    def way(self, turn: int | None, name: str) -> str:
        """Which way a message goes; counts those that go plain. Waits for the other end if it must tell."""
        if turn is None or -LAG <= turn < 0:
            way = PLAIN
        elif turn < 0:
            way = TIMED
        elif turn % REVIEW or self._pays(turn, name):
            return COMPRESSED
        else:
            way = PLAIN
            self.left, self._issued = RETRY, 0
        reason = FASTER_SO if turn is None or turn >= 0 else "not timed yet"
        self._comm.recorder.native(name, reason, self._numel * self._dtype.itemsize)
        return way

    def _key(self, rank: int) -> str:
        return f"{self._dtype} {self._numel} {self._mode.name} {self._looks} {rank}"

    def _pays(self, turn: int, name: str) -> bool:
        dtype = format_dtype(self._dtype)
        if turn == 0:
            plain, codec = zip(*(self._told(rank, name) for rank in (0, 1)), strict=True)
            self._plain_seconds, self._codec_seconds = min(plain), max(codec)
            hoped = FP32_RATIOS if self._dtype == torch.float32 else default_ratios(dtype.name)
            ratio = hoped[self._mode].parts if self._mode in hoped else 1.0
        else:
            ratio = self.flow.ratio(dtype, self._mode)
        expected = LEAST_SECONDS + self._codec_seconds + self._plain_seconds / ratio
        return expected * (1 + MARGIN) < self._plain_seconds

    def _told(self, rank: int, name: str) -> tuple[float, float]:
        """What an end saw: seconds of the transfer, of its codec."""
        comm, key = self._comm, self._key(rank)
        try:
            comm.store.wait([key], comm.timeout)
        except RuntimeError as error:
            message = f"{name}: the other end has not issued this message: {error}"
            raise ZipcclError(message, rank=comm.group_rank, peer=comm.members[rank]) from error
        plain, codec = map(float.fromhex, comm.store.get(key).decode().split())
        return plain, codec


@cache
def codec_speeds(index: int) -> dict[Mode, CodecSpeed]:
    """Those of a device, measured once."""
    return link.measure_codec(torch.device("cuda", index))
