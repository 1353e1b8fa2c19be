"""Peers: the ranks of a group on one node, which write payloads straight into each other's GPU memory.

Where all ranks can map the others' memory (NVLink, or peer-to-peer over PCIe), a copy engine carries a
payload from the sender's buffer into the receiver's. No multiprocessor takes part, as in NCCL's
collectives: those of the codec run meanwhile. Two H200 over NVLink, GB/s in each direction: copy engines 356
with 16 MiB, 390 with 256 MiB; NCCL's all-gather 243 to 270; a copy is enqueued in 5 us, NCCL's in 37 (by a
script that is not in the tree).

Every rank has a region for each turn of the channel's buffers and each peer, and two words with it::

    arrived   in the receiver's memory   the last exchange whose payload the sender has written there
    free      in the sender's memory     the last exchange whose payload the receiver has decoded

    sender's exchanging stream     wait free >= n - 1 | copy payload n | write arrived = n
    receiver's exchanging stream   wait arrived >= n -> receiver's decoding stream | decode n | write free = n

Exchanges of a turn are counted alike on all ranks. Streams wait for words; hosts and kernels do not.
"""

from __future__ import annotations

import logging
import struct
import zlib
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from .communicator import Communicator
from .config import node_name, peer_to_peer
from .cuda import ipc, program

logger = logging.getLogger(__name__)

MIN_REGION = 1024 * 1024  # bytes
TURNS = 2  # of the channel's buffers

# A process keeps what it exported and mapped: memory that a peer has mapped must not be freed, and when
# that ends is known to no one. Regions of groups that are gone serve later ones.
_spare: list[Tensor] = []
_attached: dict[bytes, int] = {}


class Peers:
    """This rank's memory that its peers write into, and where theirs is."""

    def __init__(self, comm: Communicator, device: torch.device) -> None:
        self.rank, self.size, self.device = comm.rank, comm.size, device
        self.usable = True
        self.region = 0  # bytes
        self._comm = comm
        self._words: list[int] = []  # addresses of every rank's words (kind, turn, peer)
        self._regions: list[int] = []  # addresses of every rank's regions (turn, peer)
        self._memory = torch.empty(0, dtype=torch.uint8, device=device)  # this rank's regions
        self._counts = [0] * TURNS

    def reserve(self, num_bytes: int) -> bool:
        """Whether payloads of that size have room; all ranks ask alike. Collective where regions grow.

        Then nothing may be on its way to the old ones.
        """
        if self.usable and num_bytes > self.region:
            self._comm.in_turn(lambda: self._grow(max(MIN_REGION, 1 << (num_bytes - 1).bit_length())))
        return self.usable

    def _grow(self, region: int) -> None:
        old = self._memory
        try:
            if not self._words:
                _, self._words = self._share(lambda: ipc.allocate(self._num_words() * 4, self.device))
            num_bytes = TURNS * self.size * region
            self._memory, self._regions = self._share(lambda: _allocate(num_bytes, self.device))
            self.region = region
            self._probe()
        except _Unusable as reason:
            logger.warning("no peer-to-peer copies: %s", reason)
            self.usable = False
        if old.numel():
            _spare.append(old)  # every rank was idle when it said what it allocated

    def _share(self, allocate: Callable[[], Tensor]) -> tuple[Tensor, list[int]]:
        """Memory that every rank allocates, and where all ranks' is. Fails on all ranks or on none."""
        memory, handle, why = None, bytes(ipc.HANDLE_BYTES), ""
        try:
            memory = allocate()
            handle = ipc.export(memory)
        except (RuntimeError, OSError) as error:
            why = str(error)
        words = struct.unpack(f"<{ipc.HANDLE_BYTES // 8}q", handle)
        rows = self._comm.gather_row(list(words))
        self._agree(why)
        assert memory is not None
        bases = []
        try:
            for rank, row in enumerate(rows):
                bases.append(memory.data_ptr() if rank == self.rank else _attach(row, self.device))
        except (RuntimeError, OSError) as error:
            why = str(error)
        self._agree(why)
        return memory, bases

    def _agree(self, why: str) -> None:
        """Raises _Unusable on all ranks where one says why."""
        if not all(row[0] for row in self._comm.gather_row([not why])):
            raise _Unusable(why or "another rank cannot")

    def _probe(self) -> None:
        """Writes this rank's number into its region at every peer: some machines map memory in vain."""
        with torch.cuda.device(self.device):
            mine = torch.full((128,), self.rank + 1, dtype=torch.uint8, device=self.device)
            stream = torch._C._cuda_getCurrentRawStream(self.device.index)
            copies = program.Program()
            for peer in range(self.size):
                copies.copy(self._slot(peer, 0, self.rank), mine.data_ptr(), len(mine), stream)
            copies.run()
            torch.cuda.current_stream(self.device).synchronize()
            self._agree("")  # all have written
            slots = [slot.tolist() for slot in self.received(0, [128] * self.size)]
        self._agree(
            "" if slots == [[rank + 1] * 128 for rank in range(self.size)] else "copies do not arrive"
        )

    # Layout

    def _num_words(self) -> int:
        return 2 * TURNS * self.size

    def _arrived(self, owner: int, turn: int, sender: int) -> int:
        return self._words[owner] + 4 * (turn * self.size + sender)

    def _free(self, owner: int, turn: int, receiver: int) -> int:
        return self._words[owner] + 4 * ((TURNS + turn) * self.size + receiver)

    def _slot(self, owner: int, turn: int, sender: int) -> int:
        return self._regions[owner] + (turn * self.size + sender) * self.region

    # Exchanges

    def received(self, turn: int, sizes: Sequence[int]) -> list[Tensor]:
        """Where the peers' payloads of these bytes arrive."""
        regions = self._memory[: TURNS * self.size * self.region].view(TURNS, self.size, -1)[turn]
        return [slot[:size] for slot, size in zip(regions, sizes, strict=True)]

    def exchange(
        self,
        steps: program.Program,
        turn: int,
        sends: Sequence[tuple[int, Tensor]],
        senders: Sequence[int],
        stream: int,
    ) -> None:
        """Adds an exchange to a program: of payloads to peers, from ``senders``, on a stream.

        Peers take their turns one rank apart, so that no one is written to by all at a time.
        """
        ordered = sorted(sends, key=lambda send: (send[0] - self.rank) % self.size)
        to = [peer for peer, _ in ordered]
        until_free = program.word_operations([], [self._free(self.rank, turn, peer) for peer in to])
        until_arrived = program.word_operations(
            [self._arrived(peer, turn, self.rank) for peer in to],
            [self._arrived(self.rank, turn, peer) for peer in senders],
        )
        counts = self._counts

        def count() -> None:
            program.set_number(until_free, counts[turn])
            counts[turn] += 1
            program.set_number(until_arrived, counts[turn])

        steps.call(count)
        steps.words(until_free, stream)
        for peer, payload in ordered:
            target = self._slot(peer, turn, self.rank)
            steps.copy(target, payload.data_ptr(), payload.numel(), stream)
        steps.words(until_arrived, stream)

    def release(self, steps: program.Program, turn: int, stream: int) -> None:
        """Adds to a program what tells all peers that a turn's payloads are decoded."""
        others = [peer for peer in range(self.size) if peer != self.rank]
        decoded = program.word_operations([self._free(peer, turn, self.rank) for peer in others], [])
        steps.call(lambda: program.set_number(decoded, self._counts[turn]))
        steps.words(decoded, stream)

    def close(self) -> None:
        """When the group goes and its streams are idle: they waited for all that came."""
        self.usable = False
        if self._memory.numel():
            _spare.append(self._memory)


class _Unusable(Exception):
    """Some rank cannot; the text says why."""


def _allocate(num_bytes: int, device: torch.device) -> Tensor:
    for k, memory in enumerate(_spare):
        if memory.device == device and memory.numel() >= num_bytes:
            return _spare.pop(k)
    return ipc.allocate(num_bytes, device)


def _attach(words: Sequence[int], device: torch.device) -> int:
    handle = struct.pack(f"<{len(words)}q", *words)
    if handle not in _attached:
        _attached[handle] = ipc.attach(handle, device)
    return _attached[handle]


def find_peers(comm: Communicator, device: torch.device) -> Peers | None:
    """Peers, if all ranks of a communicator are on one node and may use its copies. Collective."""
    rows = comm.gather_in_turn([zlib.crc32(node_name().encode()), peer_to_peer()])
    usable = comm.size > 1 and len({row[0] for row in rows}) == 1 and all(row[1] for row in rows)
    return Peers(comm, device) if usable else None
