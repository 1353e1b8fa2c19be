"""The compressed exchanges under the collectives, for CUDA tensors: enqueued on streams, as channel.py shows.

The same functions as exchange.py has for CPU tensors. What ranks say of a call is compared, over gloo,
when a kind of call is new; later calls of the kind do not wait for anyone. Tensors go in pieces, so
that one piece is encoded and another decoded while a third is under way, and buffers stay small.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import record_function

from . import exchange as host
from .channel import Channel, Entry, Flow
from .cuda import launch
from .exchange import Call
from .format import GROUP, TILE, Layout, align, cached_layout
from .ops import format_dtype

# Bytes of all ranks' tensors in one piece, and of one rank's.
PIECES_BYTES, MIN_PIECE_BYTES = 64 * 1024 * 1024, 1024 * 1024

Parts = list[Tensor | None]  # by peer; None: nothing goes to it
Consume = Callable[[int, Parts, list[int]], None]  # start, payloads by peer, their spill areas


def agree(call: Call, detail: float, sends: Sequence[int], expects: Sequence[int]) -> None:
    """Notes what this rank says of the call, for when its kind is new."""
    call.description = (detail, sends, expects)


def _layout(call: Call, numel: int) -> Layout:
    return cached_layout(numel, format_dtype(call.dtype), call.mode)


def piece(call: Call) -> int:
    """Elements of one rank's piece: whole groups of tiles, so that only the last has a tail."""
    size = max(PIECES_BYTES // call.comm.size, MIN_PIECE_BYTES)
    return size // call.dtype.itemsize // (GROUP * TILE) * GROUP * TILE


def _calibrate(call: Call, flow: Flow, payloads: Parts, layouts: list[Layout | None]) -> None:
    """The first call of a kind: compares what all ranks say of it, and asks them how much room they need."""
    rate = 0
    for payload, lay in zip(payloads, layouts, strict=True):
        if payload is not None and lay is not None and lay.num_tiles:
            dynamic = int(payload[16:24].view(torch.int64).item())  # waits for the encoder
            rate = max(rate, -(-16 * dynamic // lay.num_tiles))

    def ask() -> None:
        host.agree(call, *call.description)
        rates.extend(call.comm.gather_row([rate]))

    rates: list[list[int]] = []
    call.comm.submit(ask, []).wait()
    flow.rate = max(row[0] for row in rates)


def _slots(channel: Channel, name: str, sizes: Sequence[int]) -> list[Tensor]:
    """Parts of one of the channel's buffers, each on 128 bytes."""
    slots = [align(size) for size in sizes]
    parts = channel.buffer(name, sum(slots)).split(slots)
    return [part[:size] for part, size in zip(parts, sizes, strict=True)]


def _encode(channel: Channel, turn: int, parts: Parts, layouts: list[Layout | None]) -> Parts:
    """The payloads of ``parts``; one that goes to several peers is encoded once."""
    distinct = {id(part): lay.max_bytes for part, lay in zip(parts, layouts, strict=True) if lay is not None}
    slots = dict(zip(distinct, _slots(channel, f"send {turn}", list(distinct.values())), strict=True))
    done = set()
    for part, lay in zip(parts, layouts, strict=True):
        if part is not None and lay is not None and id(part) not in done:
            done.add(id(part))
            with record_function("zipccl::encode"):
                launch.encode(part, lay, slots[id(part)])
    return [None if part is None else slots[id(part)] for part in parts]


def _communicate(
    channel: Channel, pattern: str, root: int, payloads: Parts, out_bytes: list[int], received: list[Tensor]
) -> dist.Work:
    """Starts the group's own collective of ``out_bytes`` of the payloads; ``received`` is one buffer."""
    backend, nothing = channel.backend, received[0][:0]
    if pattern == "broadcast":
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = root, 0
        mine = next((p for p in payloads if p is not None), None)
        tensor = received[root] if mine is None else mine[: max(out_bytes)]
        return backend.broadcast([tensor], options)
    if pattern == "gather":
        whole = torch.as_strided(received[0], (len(received) * out_bytes[0],), (1,))
        mine = next((p for p in payloads if p is not None), None)
        # A rank without a part takes part: with what stands in its place of the buffer.
        return backend._allgather_base(
            whole, received[channel.comm.rank] if mine is None else mine[: out_bytes[0]]
        )
    sent = [
        nothing if payload is None else payload[:size]
        for payload, size in zip(payloads, out_bytes, strict=True)
    ]
    return backend.alltoall(received, sent)


def _exchange(
    call: Call,
    pattern: str,
    num_steps: int,
    sends: Callable[[int], Parts],
    numels: Callable[[int], list[int]],
    consume: Consume,
    root: int = -1,
) -> None:
    """Exchanges payloads, step by step.

    ``sends(step)`` are the parts for the peers, ``numels(step)`` the elements that come from them, None and
    0 for this rank itself. ``pattern``: "gather" (a rank's part goes to all), "pairs" (each peer its
    own), "broadcast" (``root`` has a part, the others none).
    """
    channel: Channel = call.channel
    size = call.comm.size
    flow = channel.flow((call.name, call.stage, call.dtype, call.mode, call.kind))
    channel.learn(flow)
    encoding, decoding = channel.encoding, channel.decoding
    # The first stage of a call reads what the caller's stream wrote, the next what the one before decoded.
    encoding.wait_stream(decoding if call.stage else torch.cuda.current_stream(channel.device))
    call.stage += 1
    exchanges = []
    for step in range(num_steps):
        with torch.cuda.stream(encoding):
            turn = channel.next_turn()
            parts = sends(step)
            out_layouts = [None if part is None else _layout(call, part.numel()) for part in parts]
            payloads = _encode(channel, turn, parts, out_layouts)
            call.modes[call.mode.name.lower()] += len({id(part) for part in parts if part is not None})
            if flow.rate is None:
                _calibrate(call, flow, payloads, out_layouts)
            in_layouts = [_layout(call, numel) if numel else None for numel in numels(step)]
            spills = _slots(channel, "spill", [lay.max_dynamic_bytes if lay else 0 for lay in in_layouts])
            out_bytes = [flow.room(lay) if lay else 0 for lay in out_layouts]
            in_bytes = [flow.room(lay) if lay else 0 for lay in in_layouts]
            gather = pattern == "gather" or (pattern == "pairs" and size == 2 and _alike(out_bytes, in_bytes))
            if gather:
                out_bytes = in_bytes = [max(out_bytes + in_bytes)] * size
            received = _slots(channel, f"receive {turn}", in_bytes)
            entries = [Entry() for _ in range(size)]
            for peer, entry in enumerate(entries):
                payload, out_lay, in_lay = payloads[peer], out_layouts[peer], in_layouts[peer]
                if payload is not None and out_lay is not None:
                    entry.set_send(payload, out_lay, out_bytes[peer])
                    call.sent_bytes += out_bytes[peer]
                    call.raw_bytes += out_lay.numel * call.dtype.itemsize
                if in_lay is not None:
                    entry.set_receive(received[peer], in_lay, in_bytes[peer], spills[peer].data_ptr())
            started = channel.start(call.name)
            exchanges.append(started)
            channel.write_table(started, entries)
            stamped = pattern == "pairs" and size > 2
            if stamped:
                launch.stamp(channel.index, channel.table(started), size)
            with record_function("zipccl::exchange"):
                how = "gather" if gather else pattern
                work = _communicate(channel, how, root, payloads, out_bytes, received)
        with torch.cuda.stream(decoding):
            work.wait()
            channel.rest(started, stamped)
            came = [slot if lay else None for lay, slot in zip(in_layouts, received, strict=True)]
            with record_function("zipccl::decode"):
                consume(step, came, [spill.data_ptr() for spill in spills])
            channel.end_turn(turn)
    flow.pending.append(exchanges)


def _alike(out_bytes: list[int], in_bytes: list[int]) -> bool:
    """Whether the payloads of two ranks differ by less than a quarter.

    Then a gather exchanges them: NCCL's send and receive use fewer channels. Two H200, bus bandwidth in
    GB/s: over sockets on loopback 3.6 in an all-gather, 2.2 in an all-to-all; through host memory 25.2, 23.2.
    """
    return 4 * min(max(out_bytes), max(in_bytes)) > 3 * max(out_bytes + in_bytes)


def all_gather(call: Call, x: Tensor, outs: Sequence[Tensor]) -> None:
    """Every rank's flat ``x`` into ``outs[rank]``, flat, sizes as agreed. ``x`` may be ``outs[own rank]``."""
    rank, size, step = call.comm.rank, call.comm.size, piece(call)
    call.kind = tuple(out.numel() for out in outs)

    def cut(tensor: Tensor, k: int) -> Tensor:
        return tensor[k * step : (k + 1) * step]

    def sends(k: int) -> Parts:
        part = cut(x, k) if k * step < x.numel() else None
        return [None if peer == rank else part for peer in range(size)]

    def numels(k: int) -> list[int]:
        return [0 if peer == rank else cut(out, k).numel() for peer, out in enumerate(outs)]

    def consume(k: int, payloads: Parts, spills: list[int]) -> None:
        for peer, payload in enumerate(payloads):
            out = cut(outs[peer], k)
            if payload is not None:
                launch.decode(payload, _layout(call, out.numel()), out, None, spills[peer])
            elif peer == rank and outs[rank].data_ptr() != x.data_ptr():
                out.copy_(cut(x, k))

    _exchange(call, "gather", max(1, -(-max(call.kind) // step)), sends, numels, consume)


def _cuts(call: Call, parts: Sequence[Tensor], step: int) -> Callable[[int], Parts]:
    """Of the parts for the other ranks, the k-th pieces of ``step`` elements; None where there is none."""
    rank = call.comm.rank
    return lambda k: [
        part[k * step : (k + 1) * step] if peer != rank and k * step < part.numel() else None
        for peer, part in enumerate(parts)
    ]


def reduce_scatter(call: Call, parts: Sequence[Tensor], out: Tensor, scale: float) -> None:
    """``out``: the ranks' ``parts[own rank] * scale``, added in rank order; may be one of ``parts``."""
    rank, size, step = call.comm.rank, call.comm.size, piece(call)
    call.kind = tuple(part.numel() for part in parts)

    def consume(k: int, payloads: Parts, spills: list[int]) -> None:
        target = out[k * step : (k + 1) * step]
        if target.numel():
            own = parts[rank][k * step : (k + 1) * step]
            sources = [own if payload is None else payload for payload in payloads]
            launch.decode_sum(sources, _layout(call, target.numel()), scale, target, spills=spills)

    def numels(k: int) -> list[int]:
        mine = min(max(out.numel() - k * step, 0), step)
        return [0 if peer == rank else mine for peer in range(size)]

    # Every rank knows all sizes, so all take as many steps as the longest part needs.
    steps = max(1, -(-max(call.kind) // step))
    _exchange(call, "pairs", steps, _cuts(call, parts, step), numels, consume)


def all_to_all(call: Call, parts: Sequence[Tensor], outs: Sequence[Tensor]) -> None:
    """Sends ``parts[i]``, flat, to rank i, whose own for this rank comes into ``outs[i]``.

    With more than two ranks in one piece: no rank knows how long the others' longest part is.
    """
    rank, size = call.comm.rank, call.comm.size
    sizes = [t.numel() for peer in range(size) if peer != rank for t in (parts[peer], outs[peer])]
    step = piece(call) if size == 2 else max(*sizes, 1)
    call.kind = ()

    def numels(k: int) -> list[int]:
        return [0 if peer == rank else outs[peer][k * step : (k + 1) * step].numel() for peer in range(size)]

    def consume(k: int, payloads: Parts, spills: list[int]) -> None:
        for peer, payload in enumerate(payloads):
            out = outs[peer][k * step : (k + 1) * step]
            if payload is not None:
                launch.decode(payload, _layout(call, out.numel()), out, None, spills[peer])
            elif peer == rank and k == 0:
                outs[rank].copy_(parts[rank])

    _exchange(call, "pairs", max(1, -(-max(sizes) // step)), _cuts(call, parts, step), numels, consume)


def broadcast(call: Call, x: Tensor, root: int) -> None:
    """``x`` of rank ``root``, flat, into every rank's ``x``."""
    rank, size, step = call.comm.rank, call.comm.size, piece(call)
    call.kind = (x.numel(), root)

    def sends(k: int) -> Parts:
        part = x[k * step : (k + 1) * step]
        return [part if rank == root and peer != root else None for peer in range(size)]

    def numels(k: int) -> list[int]:
        mine = 0 if rank == root else x[k * step : (k + 1) * step].numel()
        return [mine if peer == root else 0 for peer in range(size)]

    def consume(k: int, payloads: Parts, spills: list[int]) -> None:
        payload = payloads[root]
        if payload is not None:
            out = x[k * step : (k + 1) * step]
            launch.decode(payload, _layout(call, out.numel()), out, None, spills[root])

    _exchange(call, "broadcast", max(1, -(-x.numel() // step)), sends, numels, consume, root)


class CudaWork(dist.Work):
    """Handle of a compressed collective on CUDA tensors: ``wait`` makes the current stream wait.

    The host does not, so it raises what went wrong in an earlier call of the group; what goes wrong in this
    one is known later only, as with a plain collective.
    """

    def __init__(self, channel: Channel, outputs: list[Tensor]) -> None:
        super().__init__()
        self._channel, self._outputs = channel, outputs
        self._end = torch.cuda.Event()
        self._end.record(channel.decoding)

    def wait(self, timeout: timedelta | None = None) -> bool:
        self._channel.check()
        torch.cuda.current_stream(self._channel.device).wait_event(self._end)
        return True

    def is_completed(self) -> bool:
        return self._end.query()

    def is_success(self) -> bool:
        return self.is_completed()

    def exception(self) -> None:
        return None

    def result(self) -> list[Tensor]:
        return self._outputs

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        future: torch.futures.Future[list[Tensor]] = torch.futures.Future(devices=[self._channel.device])
        with torch.cuda.stream(self._channel.decoding):  # what uses its value waits for this stream
            future.set_result(self._outputs)
        return future


def enqueue(
    call: Call,
    body: Callable[[], None],
    put_back: Callable[[], None],
    tensors: Sequence[Tensor],
    outputs: Sequence[Tensor],
    async_op: bool,
) -> CudaWork:
    """Enqueues a call: ``body``, then ``put_back`` behind its last decoding."""
    channel: Channel = call.channel
    channel.check()
    with torch.no_grad():
        body()
        with torch.cuda.stream(channel.decoding):
            put_back()
    if async_op:
        # The caller may drop them before it waits. A call that is not async has the caller's stream wait.
        for tensor in tensors:
            tensor.record_stream(channel.encoding)
            tensor.record_stream(channel.decoding)
    call.finish()
    return CudaWork(channel, list(outputs))
