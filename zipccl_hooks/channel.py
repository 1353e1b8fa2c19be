"""The CUDA side of a communicator: streams, buffers, and what kernels and host share during an exchange.

A compressed exchange on GPUs is enqueued whole by the thread that calls, like a plain collective, and
no host waits for it::

    caller's stream  x ready .                                                . result ready
    encoding                 '- encode 0 | encode 1 |                         |
    exchanging                           | exchange 0 | exchange 1 |          |
    decoding                                          | rest, decode 0 | rest, decode 1'

The exchange is one of the group's own backend, or among peers (peers.py), of ranks' payloads cut to the
*room* that all ranks gave them: the static part, whose size follows from the shape, and space for a dynamic
part as large as earlier calls of the same kind needed (Flow). The kernel ``rest`` (cuda/rest.py) then looks
at the headers. What found no room stays on the device of the sender; the kernel asks this channel's thread
(rests.py) for it, which gets it over gloo while the stream waits. That is rare, slow, counted, and always
right. So the static part never waits for the sizes of the dynamic one, and nothing is sent twice.

The paper sends two messages, the second of a size that the first tells; a host must look at it in
between. Repeating the call natively after an overflow needs inputs that in-place calls no longer have.

All ranks make the same room: it follows from rates (16ths of a dynamic byte per tile, the maximum over
all ranks' payloads) of the calls up to LAG calls ago, never from what happens to have finished.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from .communicator import Communicator, communicator, group_backend
from .cuda import ENTRY_BYTES, launch
from .cuda.program import Program
from .errors import CorruptPayload, ZipcclError
from .format import DType, Layout, Mode, align, cached_layout
from .peers import Peers, find_peers
from .rests import CORRUPT, DONE, RING, Exchange, Shared

LAG = 8  # calls of a kind whose rates are not looked at yet: so far may the host run ahead of the device

# A rate that is too high is kept for so many calls, unless by more than LARGE, a sixth of a payload of bf16:
# then data that did not compress do so again.
KEPT, LARGE = 64, 4096


@dataclass
class Flow:
    """The room for one kind of payload. Equal on all ranks: its calls are, and so are the rates."""

    rate: int | None = None  # None until the first call, which asks all ranks
    pending: deque[list[Exchange]] = field(default_factory=deque)
    recent: deque[int] = field(default_factory=lambda: deque(maxlen=LAG))
    plans: dict[Any, Any] = field(default_factory=dict)  # plan.Plan by sizes
    _calls: int = 0  # since the rate was changed or looked at, and the highest that they needed
    _highest: int = 0

    def set_rate(self, rate: int) -> None:
        """Makes room for ``rate``, and does not change it for little, so that plans last.

        Layers share a flow, and need more or less: a rate that followed each of them had plans made anew in
        every step.
        """
        self._calls += 1
        self._highest = max(self._highest, rate)
        if self.rate is None or not self.rate - LARGE <= rate <= self.rate:
            self._highest = rate
        elif self._calls < KEPT:
            return
        self.rate, self._highest, self._calls = align(self._highest, 32), 0, 0

    def room(self, lay: Layout) -> int:
        """Bytes of a payload of layout ``lay`` that are exchanged.

        A thirty-second, half a byte a tile and a kilobyte more than was needed: the sizes of Gaussian data
        differ by less from call to call, and it is 0.2% of a large payload.
        """
        if self.rate is None or not lay.num_tiles:
            return lay.static_bytes
        dynamic = lay.num_tiles * (self.rate * 33 // 32 + 8) // 16 + 1024
        return lay.static_bytes + min(align(dynamic), align(lay.max_dynamic_bytes))

    def ratio(self, dtype: DType, mode: Mode) -> float:
        """Bytes of a tensor over those exchanged for it, for a large one."""
        lay = cached_layout(1 << 20, dtype, mode)
        return lay.numel * dtype.itemsize / self.room(lay)


def _set_stream(stream: torch.cuda.Stream) -> None:
    torch._C._cuda_setStream(
        stream_id=stream.stream_id, device_index=stream.device_index, device_type=stream.device_type
    )


class Channel:
    """Issues the compressed exchanges of one group and device, from the thread that calls.

    ``peers``: where payloads are copied among these; ``exchanging``: a stream that several channels share.
    """

    def __init__(
        self,
        comm: Communicator,
        backend: Any,
        device: torch.device,
        peers: Peers | None = None,
        exchanging: torch.cuda.Stream | None = None,
    ) -> None:
        self.comm, self.backend, self.device, self.index = comm, backend, device, device.index
        self.timeout: float = backend.options._timeout.total_seconds()
        with torch.cuda.device(device):
            self.encoding, self.decoding = (torch.cuda.Stream(priority=-1) for _ in range(2))
            self.exchanging = exchanging or torch.cuda.Stream(priority=-1)
            # When a turn's buffers are no longer read; behind its encoding and its exchange.
            self.free, self.encoded, self.arrived = ([self._event(), self._event()] for _ in range(3))
            self._called, self._joined = torch.cuda.Event(), self._event()
        self.peers = peers
        self._buffers: dict[str, Tensor] = {}
        self._flows: dict[Any, Flow] = {}
        self.recordings: dict[Any, Any] = {}  # of calls (replay.py), to be made again with the same buffers
        self.turn = 0  # of the last exchange: 0 or 1, which buffers it used
        self._device_before = self.index
        self._ready: torch.cuda.Stream | None = None  # the caller's, until the encoding stream waits for it
        self.generation = 0  # of the buffers
        self._shared = Shared(comm)
        if self.peers is not None:
            self._shared.timeout = self.timeout
        # Addresses, for the kernels.
        shared = self._shared
        self._control, self._staging = shared.pinned.data_ptr(), shared.staging.data_ptr()
        self._rates, self._wants, self._tables = (
            part.ctypes.data for part in (shared.rates, shared.wants, shared.tables)
        )
        self._thread = threading.Thread(target=self._shared.serve, name="zipccl-rests", daemon=True)
        self._thread.start()

    def _event(self) -> torch.cuda.Event:
        """One that has its handle, which torch makes when it is first recorded."""
        event = torch.cuda.Event()
        event.record(self.encoding)
        return event

    def check(self) -> None:
        """Raises what went wrong on the device in an earlier call."""
        if self._shared.error is not None:
            raise self._shared.error
        if self._shared.words[CORRUPT]:
            message = "payload: damaged in an earlier call of this group"
            raise CorruptPayload(message, rank=self.comm.group_rank)

    def begin(self) -> torch.cuda.Stream:
        """Begins a call; returns the caller's stream, which the encoding stream follows when first used."""
        self.check()
        self._device_before = torch._C._cuda_getDevice()
        if self._device_before != self.index:
            torch._C._cuda_setDevice(self.index)
        stream_id, device_index, device_type = torch._C._cuda_getCurrentStream(self.index)
        self._ready = torch.cuda.Stream(
            stream_id=stream_id, device_index=device_index, device_type=device_type
        )
        return self._ready

    def leave(self, caller: torch.cuda.Stream) -> None:
        """Ends a call: the caller's stream and device are the current ones again."""
        self._ready = None
        _set_stream(caller)
        if self._device_before != self.index:
            torch._C._cuda_setDevice(self._device_before)

    def use(self, stream: torch.cuda.Stream) -> None:
        """Makes a stream the current one; torch.cuda.stream does so in ten microseconds."""
        if self._ready is not None:
            self._called.record(self._ready)
            self.encoding.wait_event(self._called)
            self._ready = None
        _set_stream(stream)

    def join(self, stream: torch.cuda.Stream, other: torch.cuda.Stream) -> None:
        """Makes ``stream`` wait for what ``other`` has got so far."""
        self._joined.record(other)
        stream.wait_event(self._joined)

    def add_join(self, steps: Program, stream: torch.cuda.Stream, other: torch.cuda.Stream) -> None:
        """Adds ``join`` to a program."""
        steps.record(self._joined.cuda_event, other.cuda_stream)
        steps.wait(stream.cuda_stream, self._joined.cuda_event)

    def flow(self, key: Any) -> Flow:
        found = self._flows.get(key)
        if found is None:
            found = self._flows[key] = Flow()
        return found

    def next_turn(self) -> int:
        self.turn ^= 1
        return self.turn

    def slots(self, name: str, sizes: list[int]) -> list[Tensor]:
        """uint8 tensors of these sizes, each on 128 bytes, in a buffer kept from call to call.

        To be asked for on the encoding stream. ``generation`` tells when a buffer has been replaced.
        """
        starts = [align(size) for size in sizes]
        held = self._buffers.get(name)
        if held is None or held.numel() < sum(starts):
            # The old one returns to the encoding stream's memory: what still reads it comes first.
            self.encoding.wait_stream(self.decoding)
            self._buffers.pop(name, None)
            self._replaced()
            del held
            held = self._buffers[name] = torch.empty(sum(starts), dtype=torch.uint8, device=self.device)
        parts = held[: sum(starts)].split(starts)
        return [part[:size] for part, size in zip(parts, sizes, strict=True)]

    def _replaced(self) -> None:
        """Forgets the plans and recordings, which hold the buffers that were."""
        self.generation += 1
        self.recordings.clear()
        for flow in self._flows.values():
            flow.plans.clear()

    def reserve(self, num_bytes: int) -> Peers | None:
        """The peers, with room for payloads of so many bytes, if there are; all ranks ask alike."""
        if self.peers is None:
            return None
        before = self.peers.region
        if num_bytes > before:
            # Not the whole device, where kernels may wait for ranks that wait for this one.
            self.decoding.synchronize()
        usable = self.peers.reserve(num_bytes)
        if self.peers.region != before:
            self._replaced()
        return self.peers if usable else None

    def drop_peers(self) -> None:
        """Leaves payloads to the backend from now on; on all ranks alike."""
        self.peers = None
        self._replaced()

    def start(self, name: str, table: np.ndarray[Any, Any]) -> Exchange:
        """Takes a number and a place for an exchange and its table. Waits if RING are under way."""
        shared = self._shared
        exchange = Exchange(shared.number + 1, name)
        slot = exchange.number % RING
        old = shared.ring[slot]
        if old is not None:
            self.rate(old)
        shared.ring[slot] = exchange
        shared.tables[slot] = table
        shared.number += 1
        if not shared.busy.is_set():
            shared.busy.set()
        return exchange

    def table(self, exchange: Exchange) -> int:
        """Address of an exchange's table."""
        return self._tables + exchange.number % RING * self.comm.size * ENTRY_BYTES

    def rest(self, stamped: bool) -> launch.Launch:
        """The kernel behind an exchange; set_rest says of which."""
        return launch.resting(
            self.index, 0, self.comm.size, self._control, 0, self._wants, self._staging, self._shared.stage,
            0, int(stamped),
        )  # fmt: skip

    def set_rest(self, arguments: Any, exchange: Exchange) -> None:
        """Its table, the word for its rate, its number."""
        arguments[launch.REST_TABLE] = self.table(exchange)
        arguments[launch.REST_RATE] = self._rates + 8 * (exchange.number % RING)
        arguments[launch.REST_NUMBER] = exchange.number

    def rate(self, exchange: Exchange) -> int:
        """What an exchange needed; waits for the device where it is not that far."""
        if exchange.rate is None:
            shared, deadline = self._shared, time.monotonic() + self.timeout
            while shared.words[DONE] < exchange.number:
                self.check()
                if time.monotonic() > deadline:
                    raise ZipcclError(
                        f"{exchange.name}: not complete after {self.timeout} s", rank=self.comm.group_rank
                    )
                time.sleep(20e-6)
            exchange.rate = int(shared.rates[exchange.number % RING])
        return exchange.rate

    def learn(self, flow: Flow) -> None:
        """Sets a flow's rate for its next call, from the call LAG calls ago and those before it."""
        if len(flow.pending) >= LAG:
            flow.recent.append(max(map(self.rate, flow.pending.popleft()), default=0))
            flow.set_rate(max(flow.recent))

    def close(self) -> None:
        """Ends the thread."""
        if self.peers is not None and self.decoding.query():
            self.peers.close()
        self._shared.closed = True
        self._shared.busy.set()
        if threading.current_thread() is not self._thread:
            self._thread.join()


_channels: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[int, Channel]] = weakref.WeakKeyDictionary()


def channel(group: dist.ProcessGroup, device: torch.device) -> Channel:
    """The channel of a group on a device; the first call for a group is collective."""
    held = _channels.setdefault(group, {})
    found = held.get(device.index)
    if found is None:
        comm = communicator(group)
        backend = group_backend(group, device)
        found = held[device.index] = Channel(comm, backend, device, find_peers(comm, device))
        weakref.finalize(group, found.close)
    return found


def opened(group: dist.ProcessGroup, device: torch.device) -> Channel | None:
    """The channel of a group on a device, if there was a call for it."""
    return _channels.get(group, {}).get(device.index)
