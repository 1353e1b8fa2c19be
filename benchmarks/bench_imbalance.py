"""All-to-all of a mixture of experts whose ranks do not arrive together: what a round for sizes costs.

    python benchmarks/bench_imbalance.py                          # two GPUs, over each transport
    torchrun --nproc-per-node 2 benchmarks/bench_imbalance.py     # NCCL if there are GPUs, else gloo
    python examples/slow_link.py --rate 1gbit -- benchmarks/bench_imbalance.py

Three ways to move the same rows, which compared bit for bit before a time is printed:

    plain     torch.distributed's
    sizes     compressed; ranks encode, tell each other the sizes, look at them, send payloads of those sizes
    zipped    collectives.all_to_all_single: on GPUs one message with room for the dynamic part, which no host
              waits for; over gloo pieces, whose sizes follow the piece before them

Rank 0 arrives ``delay`` later than the others. "ms" are from its arrival to the end on the slowest rank,
"host" what the call took the host of a rank that was there before, until it came back: time in which it
could not issue what comes next. The load is "even", or "hot", where rank 0 gets three quarters of all rows.
Medians.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from zipccl_hooks import Policy, collectives, ops
from zipccl_hooks.cli.cases import gaussian
from zipccl_hooks.cli.measure import slowest, wrong_elements
from zipccl_hooks.cli.ranks import DEVICE, default_transports, joined, on_every_transport
from zipccl_hooks.codec import resolve_mode
from zipccl_hooks.config import is_rank
from zipccl_hooks.format import Header

WIDTH = 4096  # elements of a row: a token
WARM_UP = 12  # calls, after which the room is learnt
SLEEP_CYCLES = 20_000_000

Wait = Callable[[], object]


@dataclass
class Exchange:
    """Rows of bf16 from every rank to every rank; each method starts one and returns how to wait for it."""

    x: Tensor
    out: Tensor
    sends: list[int]  # rows for each rank
    expects: list[int]
    mode: str

    def plain(self) -> Wait:
        work = dist.all_to_all_single(self.out, self.x, self.expects, self.sends, async_op=True)
        return work.wait

    def zipped(self) -> Wait:
        policy = Policy(mode=self.mode, min_bytes=0, adaptive=False)
        work = collectives.all_to_all_single(
            self.out, self.x, self.expects, self.sends, async_op=True, policy=policy
        )
        assert work is not None
        return work.wait

    def sizes(self) -> Wait:
        rank, mode = dist.get_rank(), resolve_mode(self.mode, self.x.dtype)
        peers = [peer for peer in range(dist.get_world_size()) if peer != rank]
        parts, outs = self.x.split(self.sends), self.out.split(self.expects)
        payloads = {}
        for peer in peers:
            part = parts[peer].reshape(-1)
            payloads[peer] = self.buffer(f"to {peer}", part.numel())
            ops.encode_out(part, mode, payload=payloads[peer])
        mine = torch.zeros(len(parts), dtype=torch.int64)
        for peer in peers:
            mine[peer] = Header.read(payloads[peer]).payload_bytes  # waits for the encoder
        theirs = torch.empty_like(mine, device=DEVICE)
        dist.all_to_all_single(theirs, mine.to(DEVICE))
        sizes = theirs.tolist()  # waits for the other ranks' encoders
        received = {peer: self.buffer(f"from {peer}", outs[peer].numel())[: sizes[peer]] for peer in peers}
        batch = [dist.P2POp(dist.irecv, received[peer], peer) for peer in peers]
        batch += [dist.P2POp(dist.isend, payloads[peer][: mine[peer]], peer) for peer in peers]
        works = dist.batch_isend_irecv(batch)
        outs[rank].copy_(parts[rank])

        def wait() -> None:
            for work in works:
                work.wait()
            for peer in peers:
                ops.decode_out(received[peer], wire_mode=mode, out=outs[peer].view(-1))

        return wait

    def buffer(self, name: str, numel: int) -> Tensor:
        """Room for a payload of so many elements, kept."""
        if name not in _buffers or _buffers[name][0] < numel:
            capacity = ops.payload_capacity(numel, self.x.dtype, resolve_mode(self.mode, self.x.dtype))
            _buffers[name] = numel, torch.empty(capacity, dtype=torch.uint8, device=DEVICE)
        return _buffers[name][1]


_buffers: dict[str, tuple[int, Tensor]] = {}


def make(mib: float, load: str, mode: str) -> Exchange:
    """``mib`` of rows on each rank."""
    rank, size = dist.get_rank(), dist.get_world_size()
    rows = int(mib * 2**20) // (2 * WIDTH)
    hot = rows * 3 // 4 if load == "hot" else rows // size
    sends = [hot, *[(rows - hot) // (size - 1)] * (size - 1)]
    x = gaussian(sum(sends) * WIDTH, torch.bfloat16).view(-1, WIDTH)
    expects = [sends[rank]] * size
    return Exchange(x, torch.empty(sum(expects), WIDTH, dtype=x.dtype, device=DEVICE), sends, expects, mode)


def wrong(exchange: Exchange) -> int:
    """Elements that differ from the plain exchange's, over both others and all ranks."""
    exchange.plain()()
    expected, count = exchange.out.clone(), 0
    for start in (exchange.sizes, exchange.zipped):
        exchange.out.zero_()
        start()()
        count += wrong_elements(expected, exchange.out)
    return count


def cycles_per_second() -> float:
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    torch.cuda._sleep(SLEEP_CYCLES)
    end.record()
    end.synchronize()
    return SLEEP_CYCLES / begin.elapsed_time(end) * 1e3


def seconds(start: Callable[[], Wait], delay: float, rate: float) -> tuple[float, float]:
    """(from the last arrival to the last end, of a punctual rank's host in the call).

    ``rate`` is the GPU's, in cycles a second.
    """
    late = dist.get_rank() == 0
    if DEVICE == "cpu":
        dist.barrier()
        begin = time.perf_counter()
        if late:
            time.sleep(delay)
        arrived = time.perf_counter()
        wait = start()
        returned = time.perf_counter()
        wait()
        times = arrived - begin, time.perf_counter() - begin
    else:
        events = [torch.cuda.Event(enable_timing=True) for _ in range(3)]
        dist.barrier()
        torch.cuda.synchronize()
        events[0].record()
        if late and delay:
            torch.cuda._sleep(int(delay * rate))
        events[1].record()
        arrived = time.perf_counter()
        wait = start()
        returned = time.perf_counter()
        wait()
        events[2].record()
        torch.cuda.synchronize()
        times = events[0].elapsed_time(events[1]) / 1e3, events[0].elapsed_time(events[2]) / 1e3
    host = 0.0 if late else returned - arrived
    last_arrival, last_end = slowest(times[0]), slowest(times[1])
    return last_end - last_arrival, slowest(host)


def medians(exchange: Exchange, delay: float, repetitions: int, rate: float) -> list[tuple[float, float]]:
    """(seconds, host seconds) of plain, sizes and zipped, which take turns."""
    ways = (exchange.plain, exchange.sizes, exchange.zipped)
    for _ in range(WARM_UP if DEVICE == "cuda" else 1):
        for way in ways:
            way()()
    runs = [[seconds(way, delay, rate) for way in ways] for _ in range(repetitions)]
    return [
        (statistics.median(t for t, _ in column), statistics.median(host for _, host in column))
        for column in zip(*runs, strict=True)
    ]


HEAD = ("delay ms", "load", "plain ms", "host", "sizes ms", "host", "zipped ms", "host", "gain", "#wrong")


def row(cells: Sequence[object]) -> str:
    return "".join(str(cell).rjust(10) for cell in cells)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--mib", type=float, default=16 if DEVICE == "cpu" else 64, help="of each rank's rows"
    )
    delays = "0,50,200" if DEVICE == "cpu" else "0,1,5"
    parser.add_argument("--delays", default=delays, help="milliseconds (default: %(default)s)")
    parser.add_argument("--repetitions", type=int, default=9)
    parser.add_argument("--mode", default="auto")
    parser.add_argument("--transports", default=default_transports(), help="(default: %(default)s)")
    args = parser.parse_args()
    if not is_rank():
        return on_every_transport([__file__, *sys.argv[1:]], args.transports)
    with joined() as lead:
        rate = cycles_per_second() if DEVICE == "cuda" else 0.0
        if lead:
            print(f"# {dist.get_backend()}, {dist.get_world_size()} ranks, {args.mib:g} MiB each")
            print(f"# torch {torch.__version__}, mode {args.mode}; gain: of zipped over sizes")
            print(row(HEAD))
        for load in ("even", "hot"):
            exchange = make(args.mib, load, args.mode)
            count = wrong(exchange)
            for delay in (float(ms) for ms in args.delays.split(",")):
                plain, sizes, zipped = medians(exchange, delay / 1e3, args.repetitions, rate)
                times = [f"{1e3 * value:.3f}" for value in (*plain, *sizes, *zipped)]
                if lead:
                    print(row([f"{delay:g}", load, *times, f"{sizes[0] / zipped[0]:.3f}", count]), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
