"""The compressed exchanges under the collectives, in pieces, on the communicator's thread.

Each begins with every rank's description of the call, so that contradicting calls raise on all ranks
instead of hanging some. Then the tensors go in pieces, so that encoding and decoding hide behind the
transfer and buffers stay small:

    this rank   encode 0 | encode 1     | decode 0, encode 2 | decode 1 ...
    network              | sizes, data 0| sizes, data 1      | ...

Sizes of a piece follow the data of the piece before it through the same connection, so they have
arrived when that data has, and cost no round trip of their own.

With ``Policy(verify=True)`` every payload has the checksum of its tensor, and whoever decodes it compares;
also those of sums, whose addition is not checked. Every 64th call of a kind, from the first on, then moves
its tensors uncompressed as well and compares bits: a checksum does not see a part in the wrong place.
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from . import ops
from .codec import check_seal, encode_into, seal
from .communicator import Communicator
from .errors import PeerMismatch, VerificationFailed, ZipcclError
from .format import GROUP, TILE, Header, Mode, align
from .ranges import profiled

# What a call is in descriptions: its place here, and for the two ends of a message the same one.
CALLS = (
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_into_tensor_coalesced",
    "all_reduce",
    "all_reduce_coalesced",
    "all_to_all",
    "all_to_all_single",
    "broadcast",
    "gather",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "reduce_scatter_tensor_coalesced",
    "scatter",
    "send",
)
CODES = {name: code for code, name in enumerate(CALLS)} | {"recv": CALLS.index("send")}
FAILED = -1  # in place of a payload's size: this rank cannot send it, see Call.error
MIN_PIECE_BYTES = 256 * 1024
# Bytes of a tensor that a rank sends to others as one piece. Two processes, 1 Gbit/s, 64 MiB, pieces of
# 1 / 2 / 4 / 8 MiB: all_gather bf16 203 / 215 / 216 / 228 ms, all_reduce bf16 467 / 441 / 453 / 469 ms.
PIECE_BYTES = 2 * 1024 * 1024


@dataclass
class Call:
    """One compressed call: who does it, in which mode, and what it has sent so far.

    A rank that cannot decode what it got keeps its part of the exchange, so that the others are not
    left waiting, and raises at the end. ``error`` is what it will raise; it decodes no more after it.
    ``longest`` is the largest part that any rank sends to any other, as agreed. The fields from ``channel``
    on are those of calls on CUDA tensors (cuda_exchange.py).
    """

    comm: Communicator
    name: str
    dtype: torch.dtype
    mode: Mode
    raw_bytes: int = 0
    sent_bytes: int = 0
    modes: Counter[str] = field(default_factory=Counter)
    error: Exception | None = None
    longest: int = 0
    verify: bool = False  # check the checksum of every payload
    turn: int = 0  # of a call that is repeated uncompressed, its number among those of its kind; else 0
    digest: int = 0  # 32 bits of what else must be alike: sizes of coalesced tensors, a message's policy
    channel: Any = None
    stage: int = 0  # exchanges of the call so far
    ratios: list[float] = field(default_factory=list)  # of each, as all ranks know them
    kind: tuple[int, ...] = ()  # sizes, where all ranks know them
    description: tuple[float, Sequence[int], Sequence[int]] = (0.0, (), ())
    recording: Any = None  # replay.Recording, while what the call enqueues is worth noting
    tensors: list[Tensor] = field(
        default_factory=list
    )  # whose memory streams use, when the caller may be gone

    @property
    def peers(self) -> int:
        return self.comm.size - 1

    @property
    def piece(self) -> int:
        """Elements of one peer's piece: whole groups of tiles, so that only the last has a tail."""
        size = max(PIECE_BYTES // max(self.peers, 1), MIN_PIECE_BYTES)
        return size // self.dtype.itemsize // (GROUP * TILE) * GROUP * TILE

    def encode(self, part: Tensor, buffer: Tensor) -> int:
        with profiled("encode", part.nbytes):
            header = encode_into(part, self.mode, buffer)
            if self.verify:
                seal(header, part, buffer)
        self.modes[header.mode.name.lower()] += 1
        return header.payload_bytes

    def decode(self, payload: Tensor, out: Tensor, peer: int) -> None:
        with profiled("decode", payload.numel()), self._named(peer):
            ops.decode_out(payload, out=out)
            if self.verify:
                check_seal(Header.read(payload), out)

    def decode_sum(self, sources: list[Tensor], scale: float, out: Tensor) -> None:
        if self.verify:
            # Before the sum takes the place of a source.
            for peer, source in enumerate(sources):
                if source.dtype == torch.uint8:
                    self.decode(source, torch.empty_like(out), peer)
        num_bytes = sum(source.numel() for source in sources if source.dtype == torch.uint8)
        with profiled("decode", num_bytes), self._named(None):
            ops.decode_sum_out(sources, scale=scale, out=out)

    @contextmanager
    def _named(self, peer: int | None) -> Iterator[None]:
        """Adds rank and peer to a codec error; decode_sum numbers its sources, which are the peers."""
        try:
            yield
        except ZipcclError as error:
            whose = error.peer if peer is None else peer
            named = None if whose is None else self.comm.members[whose]
            raise type(error)(error.message, rank=self.comm.group_rank, peer=named) from None

    def capacity(self, numel: int) -> int:
        return align(ops.payload_capacity(numel, self.dtype, self.mode))

    def finish(self) -> None:
        """Raises what went wrong, or counts the call."""
        if self.error is not None:
            raise self.error
        self.comm.recorder.compressed(self.name, self.raw_bytes, self.sent_bytes, self.modes)


def agree(call: Call, detail: float, sends: Sequence[int], expects: Sequence[int]) -> None:
    """Compares this rank's description of the call with everyone's.

    ``detail`` is what else must be equal (root, scale); ``sends[i]`` counts the elements for rank i,
    ``expects[i]`` those from it. Raises PeerMismatch, on every rank alike.
    """
    comm, size, members = call.comm, call.comm.size, call.comm.members
    (detail_bits,) = struct.unpack("<q", struct.pack("<d", detail))
    dtype = ops.format_dtype(call.dtype).code
    operation = call.digest << 9 | call.verify << 8 | CODES[call.name]
    rows = comm.gather_row([operation, dtype, detail_bits, *sends, *expects])
    call.sent_bytes += call.peers * 8 * len(rows[0])
    for what, column in (("operation, sizes or policy", 0), ("dtype", 1), ("root or reduce operation", 2)):
        for peer in range(1, size):
            if rows[peer][column] != rows[0][column]:
                message = f"ranks {members[0]} and {members[peer]} call it with different {what}"
                raise PeerMismatch(f"{call.name}: {message}", rank=comm.group_rank, peer=members[peer])
    for source in range(size):
        for target in range(size):
            sent, expected = rows[source][3 + target], rows[target][3 + size + source]
            if sent != expected:
                message = (
                    f"{call.name}: rank {members[target]} expects {expected} elements "
                    f"of rank {members[source]}, got {sent}"
                )
                raise PeerMismatch(message, rank=comm.group_rank, peer=members[source])
    call.longest = max(max(row[3 : 3 + size]) for row in rows)


def _in_pieces(
    call: Call,
    longest: int,
    encode: Callable[[int], Any],
    exchange: Callable[[int, Any], tuple[list[dist.Work], list[Tensor]]],
    decode: Callable[[int, list[Tensor]], None],
) -> None:
    """Runs the pieces of parts of up to ``longest`` elements, overlapped.

    ``encode`` starts the exchange of a piece's sizes, ``exchange`` awaits it and starts that of its data: it
    returns works and the payloads that arrive.
    """

    def guarded_decode(piece: int, received: list[Tensor]) -> None:
        try:
            if call.error is None:
                decode(piece, received)
        except Exception as error:
            call.error = error

    num_pieces = max(1, -(-longest // call.piece))
    started = encode(0)
    received: list[Tensor] = []
    for piece in range(num_pieces):
        works, receiving = exchange(piece, started)
        if piece + 1 < num_pieces:
            started = encode(piece + 1)
        if piece:
            guarded_decode(piece - 1, received)
        with profiled("exchange", sum(payload.numel() for payload in receiving)):
            _wait(works)
        received = receiving
    guarded_decode(num_pieces - 1, received)


def _wait(works: list[dist.Work]) -> None:
    for work in works:
        work.wait()


def _pairwise(comm: Communicator, sends: Sequence[Tensor], receives: Sequence[Tensor]) -> list[dist.Work]:
    """Starts ``sends[i]`` to and ``receives[i]`` from every other rank i; empty tensors are not sent.

    All receives are posted first. Gloo announces a receive to its sender behind whatever it is sending
    there itself, so a late one makes the two directions of a link take turns: its own all_to_all of
    64 MiB over 1 Gbit/s took 560 ms in most runs and 284 in the others.
    """
    peers = [i for i in range(comm.size) if i != comm.rank]
    works = [comm.backend.recv([receives[i]], i, 0) for i in peers if receives[i].numel()]
    return works + [comm.backend.send([sends[i]], i, 0) for i in peers if sends[i].numel()]


def _compare(call: Call, sends: Sequence[Tensor], outs: Sequence[Tensor]) -> None:
    """Where a call is to be repeated, moves the tensors themselves, and expects the same in ``outs``."""
    if not call.turn:
        return
    plain = [torch.empty_like(out) for out in outs]
    plain[call.comm.rank] = sends[call.comm.rank]
    _wait(_pairwise(call.comm, [s.view(torch.uint8) for s in sends], [p.view(torch.uint8) for p in plain]))
    for peer, (moved, out) in enumerate(zip(plain, outs, strict=True)):
        _expect(call, moved, out, peer)


def _expect(call: Call, plain: Tensor, out: Tensor, peer: int) -> None:
    """A difference is an error of the call, unless it has one."""
    if call.error is None and not torch.equal(plain.view(torch.uint8), out.view(torch.uint8)):
        message = f"{call.name}: call {call.turn} of its kind has other bits than uncompressed"
        members = call.comm.members
        call.error = VerificationFailed(message, rank=call.comm.group_rank, peer=members[peer])


def _exchange(
    call: Call,
    longest: int,
    encode: Callable[[int, Tensor], list[Tensor]],
    capacity: int,
    consume: Callable[[int, list[Tensor]], None],
) -> None:
    """Exchanges payloads between all ranks, piece by piece.

    ``encode(start, buffer)`` encodes the piece that starts at element ``start`` into a buffer of
    ``capacity`` bytes and returns the payload for each rank, empty for this one and where there is
    nothing to send. ``consume(start, payloads)`` gets what came from each rank, likewise.
    """
    comm = call.comm

    def start(piece: int) -> tuple[list[Tensor], Tensor, list[dist.Work]]:
        payloads = [torch.empty(0, dtype=torch.uint8)] * comm.size
        if call.error is None:
            payloads = encode(piece * call.piece, comm.buffer(f"send {piece % 2}", capacity))
        sizes = torch.tensor([FAILED if call.error else len(p) for p in payloads])
        theirs = torch.zeros(comm.size, dtype=torch.int64)
        call.sent_bytes += sum(map(len, payloads)) + call.peers * sizes.itemsize
        return payloads, theirs, _pairwise(comm, sizes.split(1), theirs.split(1))

    def exchange(piece: int, started: tuple[list[Tensor], Tensor, list[dist.Work]]) -> Any:
        payloads, theirs, sizes_works = started
        _wait(sizes_works)
        sizes = theirs.tolist()
        if FAILED in sizes and call.error is None:
            peer = comm.members[sizes.index(FAILED)]
            call.error = ZipcclError(f"{call.name}: rank {peer} failed", rank=comm.group_rank, peer=peer)
        slots = [align(max(size, 0)) for size in sizes]
        buffer = comm.buffer(f"receive {piece % 2}", sum(slots))
        received = [slot[: max(size, 0)] for slot, size in zip(buffer.split(slots), sizes, strict=True)]
        return _pairwise(comm, payloads, received), received

    def finish(piece: int, received: list[Tensor]) -> None:
        consume(piece * call.piece, received)

    _in_pieces(call, longest, start, exchange, finish)


def all_gather(call: Call, x: Tensor, outs: Sequence[Tensor]) -> None:
    """Every rank's flat ``x`` into ``outs[rank]``, flat, sizes as agreed. ``x`` may be ``outs[own rank]``."""
    rank, step = call.comm.rank, call.piece

    def encode(start: int, buffer: Tensor) -> list[Tensor]:
        part = x[start : start + step]
        payload = buffer[: call.encode(part, buffer) if part.numel() else 0]
        call.raw_bytes += call.peers * part.nbytes
        return [payload[:0] if peer == rank else payload for peer in range(call.comm.size)]

    def consume(start: int, payloads: list[Tensor]) -> None:
        for peer, (payload, out) in enumerate(zip(payloads, outs, strict=True)):
            piece = out[start : start + step]
            if peer == rank and out.data_ptr() != x.data_ptr():
                piece.copy_(x[start : start + step])
            elif payload.numel():
                call.decode(payload, piece, peer)

    longest = max(out.numel() for out in outs)
    _exchange(call, longest, encode, call.capacity(min(x.numel(), step)), consume)
    _compare(call, [x] * call.comm.size, outs)


def _all_to_all(
    call: Call, parts: Sequence[Tensor], longest: int, consume: Callable[[int, list[Tensor]], None]
) -> None:
    """Sends ``parts[i]``, flat, to rank i; ``consume(start, sources)`` gets what arrives, piece by piece.

    ``sources`` are the piece's payloads (uint8) in rank order, empty where a rank has nothing in it; for
    this rank, its part itself.
    """
    rank, step = call.comm.rank, call.piece
    capacities = [0 if i == rank else call.capacity(min(len(p), step)) for i, p in enumerate(parts)]

    def encode(start: int, buffer: Tensor) -> list[Tensor]:
        payloads = []
        for slot, capacity, part in zip(buffer.split(capacities), capacities, parts, strict=True):
            piece = part[start : start + step]
            used = call.encode(piece, slot) if capacity and piece.numel() else 0
            call.raw_bytes += piece.nbytes if used else 0
            payloads.append(slot[:used])
        return payloads

    def with_own(start: int, payloads: list[Tensor]) -> None:
        consume(start, [*payloads[:rank], parts[rank][start : start + step], *payloads[rank + 1 :]])

    _exchange(call, longest, encode, sum(capacities), with_own)


def reduce_scatter(call: Call, parts: Sequence[Tensor], out: Tensor, scale: float) -> None:
    """``out``: the ranks' ``parts[own rank] * scale``, added in rank order; may be one of ``parts``."""

    def consume(start: int, sources: list[Tensor]) -> None:
        piece = out[start : start + call.piece]
        if piece.numel():
            call.decode_sum(sources, scale, piece)

    _all_to_all(call, parts, max(part.numel() for part in parts), consume)


def all_to_all(call: Call, parts: Sequence[Tensor], outs: Sequence[Tensor]) -> None:
    """Sends ``parts[i]``, flat, to rank i, whose own for this rank comes into ``outs[i]``."""

    def consume(start: int, sources: list[Tensor]) -> None:
        for peer, (source, out) in enumerate(zip(sources, outs, strict=True)):
            piece = out[start : start + call.piece]
            if peer == call.comm.rank:
                piece.copy_(source)
            elif source.numel():
                call.decode(source, piece, peer)

    _all_to_all(call, parts, call.longest, consume)
    _compare(call, parts, outs)


def broadcast(call: Call, x: Tensor, root: int) -> None:
    """``x`` of rank ``root``, flat, into every rank's ``x``."""
    comm, step = call.comm, call.piece
    capacity = call.capacity(min(x.numel(), step))
    options = dist.BroadcastOptions()
    options.rootRank, options.rootTensor = root, 0

    def encode(piece: int) -> tuple[Tensor, Tensor, dist.Work]:
        buffer, size = comm.buffer(f"send {piece % 2}", capacity), torch.zeros(1, dtype=torch.int64)
        if comm.rank == root:
            part = x[piece * step : (piece + 1) * step]
            size[0] = call.encode(part, buffer)
            call.raw_bytes += call.peers * part.nbytes
            call.sent_bytes += call.peers * (int(size) + size.itemsize)
        return buffer, size, comm.backend.broadcast([size], options)

    def exchange(
        piece: int, started: tuple[Tensor, Tensor, dist.Work]
    ) -> tuple[list[dist.Work], list[Tensor]]:
        buffer, size, size_work = started
        size_work.wait()
        payload = buffer[: int(size)]
        return [comm.backend.broadcast([payload], options)], [payload]

    def decode(piece: int, received: list[Tensor]) -> None:
        if comm.rank != root:
            call.decode(received[0], x[piece * step : (piece + 1) * step], root)

    _in_pieces(call, x.numel(), encode, exchange, decode)
    if call.turn:
        plain = x.clone().view(torch.uint8)
        comm.backend.broadcast([plain], options).wait()
        _expect(call, plain, x, root)
