"""Messages between GPUs: compressed sends and receives, enqueued on streams. Reached through p2p.py.

A batch is one exchange, as it is plain: one coalesced call of the group's own backend carries all payloads.
So nothing depends on the order of sends and receives::

    caller's stream   x ready .                                    . y ready
    encoding                  '- encode x |                        |
    exchanging                            | send x, receive y |    |
    decoding                                                  | rest, decode y'

Each direction between two ranks has a channel (channel.py) of these two, so that what finds no room is
fetched as ever. But its ends ask each other for nothing before a message: the first LAG of a kind (dtype and
size) get room for any payload, and then both ends know the rates of those up to LAG ago from their headers.

Where the policy is adaptive, message_kind.py says whether that pays. A batch keeps its order, with the plain
messages in it, since the other end may receive it in several.
"""

from __future__ import annotations

import weakref
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .channel import Channel
from .codec import resolve_mode
from .communicator import group_backend, make_communicator
from .config import Policy
from .counters import recorder
from .cuda_work import CudaWork
from .eligible import FASTER_SO
from .format import Mode
from .message_kind import COMPRESSED, PLAIN, TIMED, Kind
from .ops import format_dtype
from .peers import TURNS
from .plan import Manner, find_plan
from .ranges import profiled_if_any

Group = dist.ProcessGroup


class _Transport:
    """The backend of a direction's channel: the group's own, whose messages carry the payloads."""

    def __init__(self, backend: Any, members: Sequence[int], rank: int) -> None:
        self.options = backend.options
        self._backend, self._peer, self._other = backend, members[1 - rank], 1 - rank

    def alltoall(self, received: list[Tensor], sent: list[Tensor], options: Any) -> None:
        """What there is for the other end, or from it; enqueued on the current stream."""
        if sent[self._other].numel():
            work = self._backend.send([sent[self._other]], self._peer, 0)
        else:
            work = self._backend.recv([received[self._other]], self._peer, 0)
        if work is not None:  # as in a coalesced call
            work.wait()


class _Direction:
    """An end of the messages from one rank of a group to another, on a device. Making it waits for no one."""

    def __init__(self, owner: Messages, group: Group, ends: tuple[int, int]) -> None:
        device, self.ends = owner.device, ends
        self.comm = make_communicator(group, f"zipccl {device.type} {ends[0]} to {ends[1]}", ends)
        self.sends = self.comm.rank == 0
        self.peer = ends[int(self.sends)]
        transport = _Transport(owner.backend, ends, self.comm.rank)
        self.channel = Channel(self.comm, transport, device, exchanging=owner.exchanging)
        self._kinds: dict[Any, Kind] = {}

    def kind(self, tensor: Tensor, mode: Mode) -> Kind:
        key = (tensor.dtype, tensor.numel(), mode)
        found = self._kinds.get(key)
        if found is None:
            found = self._kinds[key] = Kind(self.comm, self.channel.index, *key)
        return found

    def close(self) -> None:
        self.channel.close()
        self.comm.close()


@dataclass
class Plain:
    """A message of a batch that goes as it is; ``timed``: of a kind that wants to know how long."""

    sends: bool
    tensor: Tensor
    peer: int
    tag: int = 0
    timed: Kind | None = None

    def exchange(self, backend: Any) -> Any:
        """On the current stream, or the next coalesced call; returns the backend's work, if it has one."""
        if self.sends:
            return backend.send([self.tensor.detach().contiguous()], self.peer, self.tag)
        return backend.recv([self.tensor.detach()], self.peer, self.tag)


class Message:
    """A message that may be compressed; ``tensor`` is sent, or receives it.

    Made, which counts it, and handed to ``issue`` in the order of the messages.
    """

    def __init__(
        self, name: str, tensor: Tensor, owner: Messages, direction: _Direction, policy: Policy
    ) -> None:
        self.name, self.tensor, self.owner, self.direction = name, tensor, owner, direction
        self.sends, self.peer, self.channel = direction.sends, direction.peer, direction.channel
        self.mode = resolve_mode(policy.mode, tensor.dtype)
        self.kind = direction.kind(tensor, self.mode)
        self._policy = policy
        self._turn = self.kind.next_turn() if policy.adaptive else 1  # at which nothing is reviewed
        self.way = PLAIN
        self._plan: Any = None
        self._flat = tensor

    def as_plain(self) -> Plain:
        """It, going as it is."""
        return Plain(self.sends, self.tensor, self.peer, 0, self.kind if self.way == TIMED else None)

    def tell(self) -> None:
        self.kind.tell(self._turn, self.channel.encoding)

    def choose(self) -> None:
        """Sets ``way``; in the order of the messages."""
        self.way = self.kind.way(self._turn, self.name)
        if self.kind.left and self.way == PLAIN:
            key = (self.name, self.peer, self.tensor.dtype, self.tensor.numel())
            self.owner.resting[key] = self._policy, self.kind

    # What is enqueued

    def encode(self) -> None:
        channel = self.channel
        caller = channel.begin()
        try:
            self._lay_flat()
            self._prepare()
            channel.use(channel.encoding)
            with profiled_if_any("encode", self._plan.raw_bytes):
                self._plan.encode.run()
        finally:
            channel.leave(caller)

    def _lay_flat(self) -> None:
        """What is sent or received: the tensor itself, where it is as the kernels want it."""
        x = self.tensor.detach()
        if not x.is_contiguous() or x.data_ptr() % 16:
            flat = torch.empty_like(x, memory_format=torch.contiguous_format)
            x = flat.copy_(x) if self.sends else flat
        self._flat = x.view(-1)

    def _prepare(self) -> None:
        channel, flow, numel = self.channel, self.kind.flow, self._flat.numel()
        channel.learn(flow)
        manner = Manner(format_dtype(self.tensor.dtype), self.mode, "message", -1, None, None)
        nothing: list[int | None] = [None, None]
        sizes = ([None, numel], nothing) if self.sends else (nothing, [numel, None])
        self._plan = plan = find_plan(channel, flow, manner, *sizes, channel.next_turn())
        address = [self._flat.data_ptr()] * 2
        plan.place(address, address, 0, 0)
        started = channel.start(self.name, plan.table)
        plan.set_exchange(channel, started)
        flow.pending.append([started])

    def exchange(self, backend: Any) -> None:
        with profiled_if_any("exchange", self._plan.sent_bytes):
            self._plan.exchange.run()

    def decode(self) -> CudaWork:
        channel, plan = self.channel, self._plan
        caller = channel.begin()
        try:
            channel.use(channel.decoding)
            with profiled_if_any("decode", plan.received_bytes):
                plan.decode.run()
            if not self.sends and self._flat.data_ptr() != self.tensor.data_ptr():
                self.tensor.detach().copy_(self._flat.view(self.tensor.shape))
            work = CudaWork(channel, [self.tensor])
            for tensor in (self.tensor, self._flat):  # may be dropped now; nothing comes after decoding
                tensor.record_stream(channel.decoding)
        finally:
            channel.leave(caller)
        modes = Counter({self.mode.name.lower(): len(plan.payloads)})
        self.direction.comm.recorder.compressed(self.name, plan.raw_bytes, plan.sent_bytes, modes)
        return work


class Messages:
    """Those of one group on one device."""

    def __init__(self, group: Group, device: torch.device) -> None:
        self.backend, self.device = group_backend(group, device), device
        with torch.cuda.device(device):
            self.exchanging = torch.cuda.Stream(priority=-1)
        self._directions: dict[tuple[int, int], _Direction] = {}
        self.resting: dict[Any, tuple[Policy, Kind]] = {}  # by name, peer, dtype and size

    def message(
        self, name: str, tensor: Tensor, ends: tuple[int, int], group: Group, policy: Policy
    ) -> Message:
        """A message between ranks ``ends`` of the group, sender first."""
        found = self._directions.get(ends)
        if found is None:
            found = self._directions[ends] = _Direction(self, group, ends)
            weakref.finalize(group, found.close)
        return Message(name, tensor, self, found, policy)

    def enqueue(self, batch: Sequence[Message | Plain], coalesced: bool) -> list[dist.Work]:
        """Enqueues messages; the works of those that are compressed, then the backend's."""
        compressed = [one for one in batch if isinstance(one, Message)]
        for message in compressed:
            message.channel.check()
        # As many of a direction at a time as its channel has buffers: its two ends count them alike.
        rounds: defaultdict[int, list[Message | Plain]] = defaultdict(list)
        counts: Counter[tuple[bool, int]] = Counter()
        for one in batch:
            direction = one.sends, one.peer
            rounds[counts[direction] // TURNS].append(one)
            counts[direction] += isinstance(one, Message)
        works: list[dist.Work] = []
        with torch.no_grad(), torch.cuda.device(self.device):
            for _, some in sorted(rounds.items()):
                works += self._enqueue(some, coalesced)
        return works

    def _enqueue(self, batch: Sequence[Message | Plain], coalesced: bool) -> list[dist.Work]:
        messages = [one for one in batch if isinstance(one, Message)]
        plain = [one for one in batch if isinstance(one, Plain)]
        for message in messages:
            message.encode()
        if plain:
            self.exchanging.wait_stream(torch.cuda.current_stream())
        kinds = [one.timed for one in plain if one.timed is not None]
        with torch.cuda.stream(self.exchanging):
            start = self._time() if kinds else None
            works = self._exchange(batch, coalesced)
            if start is not None:
                end = self._time()
                for kind in kinds:
                    kind.timed.append((start, end))
        for one in plain:
            one.tensor.record_stream(self.exchanging)  # the backend's work has let go of it
        # Directions in the same order on all ranks: a rest is fetched by both ends at once.
        decoded = [message.decode() for message in sorted(messages, key=lambda m: m.direction.ends)]
        return [*decoded, *(works if plain else [])]

    def _exchange(self, batch: Sequence[Message | Plain], coalesced: bool) -> list[dist.Work]:
        """The backend's works, for which the exchanging stream waits."""
        if coalesced:
            self.backend._start_coalescing()
        works: list[dist.Work | None] = []
        try:
            for one in batch:
                works.append(one.exchange(self.backend))
        finally:
            if coalesced:
                works = [self.backend._end_coalescing()]
        found = [work for work in works if work is not None]
        for work in found:
            work.wait()
        return found

    def _time(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(self.exchanging)
        return event


_messages: weakref.WeakKeyDictionary[Group, dict[int, Messages]] = weakref.WeakKeyDictionary()


def messages(group: Group, device: torch.device) -> Messages:
    """The messages of a group on a device."""
    held = _messages.setdefault(group, {})
    if device.index not in held:
        held[device.index] = Messages(group, device)
    return held[device.index]


def rests(name: str, tensor: Tensor, peer: int | None, group: Group, policy: Policy) -> bool:
    """Whether a message is of a kind that goes plain for now; then it is counted.

    Asked before anything else, for plain messages must not notice.
    """
    held = _messages.get(group)
    if held is None or (owner := held.get(tensor.device.index)) is None:
        return False
    found = owner.resting.get((name, peer, tensor.dtype, tensor.numel()))
    if found is None or found[0] is not policy or not found[1].left:
        return False
    found[1].next_turn()
    recorder(group).native(name, FASTER_SO, tensor.nbytes)
    return True


def issue(batch: Sequence[Message | Plain], coalesced: bool) -> list[dist.Work] | None:
    """Issues a batch, in its order; None where all of it goes plain, which is then the caller's.

    ``coalesced``: in one call of the group's backend, as torch does a batch, else by themselves.
    """
    messages = [one for one in batch if isinstance(one, Message)]
    for message in messages:
        message.tell()  # all, before one waits for the other end of its own
    for message in messages:
        message.choose()
    if all(message.way == PLAIN for message in messages):
        return None
    ordered = [one if isinstance(one, Plain) or one.way == COMPRESSED else one.as_plain() for one in batch]
    return messages[0].owner.enqueue(ordered, coalesced)
