"""What kernels and host share of exchanges under way, and the thread that fetches rests of payloads.

It stands in pinned memory: a table for each exchange, which tells the kernel ``rest`` (cuda/rest.py) what
goes where; the rates that it found; and words by which it asks the thread for bytes that found no room.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .communicator import Communicator
from .cuda import ENTRY_BYTES
from .errors import ZipcclError
from .format import Layout

logger = logging.getLogger(__name__)

RING = 256  # exchanges that may be under way
STAGE = 256 * 1024  # bytes of a rest that are exchanged at a time, per peer and direction
DONE, REQUEST, REPLY, CORRUPT = range(4)  # the control words
NUM_CONTROL = 4
WORDS = ENTRY_BYTES // 8  # of a table's entry: see Entry
GLOO_TAG = 1  # of rests; the compressed collectives on CPU tensors use 0


@dataclass
class Entry:
    """What an exchange does with one peer: a row of its table, in this order."""

    send: int = 0  # address of the payload, 0: none
    send_static: int = 0  # bytes of its static part
    send_bytes: int = 0  # exchanged
    send_tiles: int = 0
    receive: int = 0
    receive_static: int = 0
    receive_bytes: int = 0
    receive_tiles: int = 0
    spill: int = 0  # address of where the whole dynamic part has room
    longest: int = 0  # bytes there

    def set_send(self, payload: Tensor, lay: Layout, num_bytes: int) -> None:
        self.send, self.send_static = payload.data_ptr(), lay.static_bytes
        self.send_bytes, self.send_tiles = num_bytes, lay.num_tiles

    def set_receive(self, payload: Tensor, lay: Layout, num_bytes: int, spill: int) -> None:
        self.receive, self.receive_static = payload.data_ptr(), lay.static_bytes
        self.receive_bytes, self.receive_tiles = num_bytes, lay.num_tiles
        self.spill, self.longest = spill, lay.max_dynamic_bytes

    def row(self) -> tuple[int, ...]:
        return (
            self.send, self.send_static, self.send_bytes, self.send_tiles, self.receive,
            self.receive_static, self.receive_bytes, self.receive_tiles, self.spill, self.longest,
        )  # fmt: skip


@dataclass
class Exchange:
    """One exchange under way; ``rate`` is what it turned out to need, once that was looked at."""

    number: int
    name: str
    rate: int | None = None
    issued: float = field(default_factory=time.monotonic)


class Shared:
    """What the channel's thread needs, and nothing that keeps the channel alive."""

    def __init__(self, comm: Communicator) -> None:
        self.rank, self.size, self.recorder, self.group_rank = (
            comm.rank,
            comm.size,
            comm.recorder,
            comm.group_rank,
        )
        self._comm = comm
        cut = NUM_CONTROL, NUM_CONTROL + RING, NUM_CONTROL + RING + 2 * comm.size
        num_words = cut[2] + RING * comm.size * WORDS
        self.pinned = torch.zeros(num_words, dtype=torch.int64).pin_memory()
        self.stage = STAGE
        self.staging = torch.zeros(comm.size, 2, STAGE, dtype=torch.uint8).pin_memory()
        self.words: np.ndarray[Any, Any] = self.pinned.numpy()
        self.rates = self.words[cut[0] : cut[1]]
        self.wants = self.words[cut[1] : cut[2]].reshape(comm.size, 2)
        self.tables = self.words[cut[2] :].reshape(RING, comm.size, WORDS)
        self.ring: list[Exchange | None] = [None] * RING
        self.number = 0  # of exchanges issued
        self.error: ZipcclError | None = None
        self.timeout: float | None = None  # seconds that an exchange may take, where nobody else watches
        self.busy = threading.Event()
        self.closed = False

    def serve(self) -> None:
        """The thread: exchanges what kernels ask for; looks for requests while exchanges are under way."""
        served = seen = idle = 0
        while not self.closed:
            request = int(self.words[REQUEST])
            if request != served and self.error is None:
                served = request
                try:
                    self._fetch(request)
                    self.words[REPLY] = request
                except Exception as error:
                    self.error = ZipcclError(f"rest of a payload: {error}", rank=self.group_rank)
                    logger.error("%s", self.error)
                    self.words[REPLY] = -1
            elif self.words[DONE] >= self.number and self.number == seen:
                # Idle for a second: sleep until there is a call. Not at once, since waking would have the
                # thread and its caller pass the GIL to and fro in every call, 0.1 ms each time.
                if (idle := idle + 1) > 1000:
                    self.busy.clear()
                    if self.number == seen:
                        self.busy.wait()
                    idle = 0
                time.sleep(0.001)
            else:
                seen, idle = self.number, 0
                self._end_if_overdue()
                time.sleep(0.001)

    def _end_if_overdue(self) -> None:
        """Ends the process where a peer does not come, as NCCL's watchdog does with its collectives.

        Letting the stream go on would hand out a wrong result; leaving it would hang this rank for good.
        """
        done = int(self.words[DONE])
        oldest = self.ring[(done + 1) % RING]
        if self.timeout is None or oldest is None or oldest.number != done + 1:
            return
        if time.monotonic() - oldest.issued > self.timeout:
            logger.critical(
                "rank %d: %s not complete after %.0f s", self.group_rank, oldest.name, self.timeout
            )
            os.abort()

    def _fetch(self, request: int) -> None:
        """One round of the rests of an exchange: pairs know each other's sizes from the headers."""
        number, turn = request >> 16, (request & 0xFFFF) - 1
        exchange = self.ring[number % RING]
        if turn == 0 and exchange is not None:
            self.recorder.overflow(exchange.name)
        self._comm.connect()  # the two ends of messages are not, until there is something to fetch
        works, backend = [], self._comm.backend
        peers = [p for p in range(self.size) if p != self.rank]
        sizes = np.clip(self.wants - turn * self.stage, 0, self.stage)
        for p in peers:
            if sizes[p, 1]:
                works.append(backend.recv([self.staging[p, 1, : sizes[p, 1]]], p, GLOO_TAG))
        for p in peers:
            if sizes[p, 0]:
                works.append(backend.send([self.staging[p, 0, : sizes[p, 0]]], p, GLOO_TAG))
        for work in works:
            work.wait()
