"""What the collectives of a group and the codec of a device cost, measured once; choose.py decides from it.

Every rank times the same calls, and each time is replaced by that of the slowest rank before anything
follows from it: all ranks stop at the same size and hold the same floats.
"""

from __future__ import annotations

import statistics
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from . import ops
from .choose import KINDS, MIB, PAIRWISE, PEERS, CodecSpeed, Cost, Link
from .config import node_name
from .format import Mode

# Bytes of everyone's tensors together in a gather or scatter, of the tensor otherwise: from where latency
# is all to where it is little, also on a fast link.
SIZES = (64 * 1024, MIB, 8 * MIB, 64 * MIB)
REPETITIONS = 3
# What should take longer is not timed. Six kinds, two ranks, 1 Gbit/s: 0.8 s in all.
ENOUGH_SECONDS = 0.08
CODEC_BYTES = {"cpu": (MIB // 4, 8 * MIB), "cuda": (MIB // 4, 64 * MIB)}
SLEEP_CYCLES = 1_000_000  # some 0.5 ms

Run = Callable[[str, int], float]  # (kind, bytes as choose.py counts them) -> seconds of one call
Agree = Callable[[Sequence[float]], list[float]]  # each number's maximum over the ranks


def fit(samples: Sequence[tuple[float, float]]) -> Cost:
    """The Cost of (bytes, seconds) pairs, by least squares weighted with 1 / seconds.

    So the large sizes, which are those to be predicted, count for more, and yet small ones set the latency.
    A latency below 0 is taken as 0. Where times do not grow with size, the best rate seen stands.
    """
    # Sums of w, w x, w x^2, w t and w x t, with w = 1 / t. Nothing whose last bit depends on a library.
    n, x = len(samples), sum(num_bytes for num_bytes, _ in samples)
    w, wx, wxx = (sum(num_bytes**k / t for num_bytes, t in samples) for k in (0, 1, 2))
    determinant = w * wxx - wx * wx
    latency, slope = wxx * n - wx * x, w * x - wx * n
    if n < 2 or determinant <= 0 or slope <= 0:
        return Cost(0.0, max(num_bytes / t for num_bytes, t in samples))
    return Cost(latency / determinant, determinant / slope) if latency >= 0 else Cost(0.0, wxx / x)


def _parts(kind: str, world: int) -> int:
    """How many ranks' parts of a tensor the bytes of a call count."""
    return {"all_gather": 1, "reduce_scatter": 1, PAIRWISE: world - 1, PEERS: world - 1}.get(kind, world)


def measure(
    run: Run, agree: Agree, world: int, nodes: int, kinds: Sequence[str] = KINDS, sizes: Sequence[int] = SIZES
) -> Link:
    """Times ``run`` on a few ``sizes``, ascending, of every kind. Collective: every rank calls it alike."""
    costs = {}
    for kind in kinds if world > 1 else ():
        calls = [max(size // (4 * world), 1) * 4 * _parts(kind, world) for size in sizes]
        run(kind, calls[0])  # warm-up
        samples: list[tuple[float, float]] = []
        for num_bytes in calls:
            # In proportion to the size before; not to the first, whose time is mostly latency.
            expected = samples[-1][1] * num_bytes / samples[-1][0] if len(samples) > 1 else 0.0
            if samples and max(expected, samples[-1][1]) > ENOUGH_SECONDS:
                break
            times = agree([run(kind, num_bytes)])
            # A surprise is repeated: the first call of a size may set up connections of its own.
            while len(times) < REPETITIONS and (
                sum(times) < ENOUGH_SECONDS / 2 or (len(times) < 2 and times[0] > 1.5 * expected)
            ):
                times += agree([run(kind, num_bytes)])
            samples.append((num_bytes, min(times)))  # the others waited for something else as well
        costs[kind] = fit(samples)
    return Link(world, nodes, costs)


def measure_backend(backend: Any, device: torch.device) -> Link:
    """The Link of a backend object's ranks for tensors on ``device``, with PAIRWISE on a CPU. Collective."""
    size, kinds = backend.size(), KINDS if device.type == "cuda" else (*KINDS, PAIRWISE)
    run, agree = backend_run(backend, backend.rank(), size, device), native_agree(backend, device)
    return measure(run, agree, size, count_nodes(backend, device), kinds)


# The native collectives, below the dispatcher, so that nothing that intercepts calls sees them


def native_agree(backend: Any, device: torch.device) -> Agree:
    """The maximum of each number over the ranks, on all of them. What it returns is collective."""
    options: Any = dist.AllreduceOptions()
    options.reduceOp = dist.ReduceOp.MAX

    def agree(numbers: Sequence[float]) -> list[float]:
        shared = torch.tensor(numbers, dtype=torch.float64, device=device)
        backend.allreduce([shared], options).wait()
        return shared.tolist()

    return agree


def count_nodes(backend: Any, device: torch.device) -> int:
    """How many nodes the ranks run on, by name. Collective."""
    mine = torch.tensor([zlib.crc32(node_name().encode())], dtype=torch.int64, device=device)
    names = torch.zeros(backend.size(), dtype=torch.int64, device=device)
    backend._allgather_base(names, mine).wait()
    return len(set(names.tolist()))


def backend_run(backend: Any, rank: int, size: int, device: torch.device) -> Run:
    """Runs and times one of a backend's collectives of fp32, or PAIRWISE's sends and receives."""
    peers = [peer for peer in range(size) if peer != rank]
    root = dist.BroadcastOptions()
    root.rootRank, root.rootTensor = 0, 0
    held: dict[str, Tensor] = {}

    def buffer(name: str, numel: int) -> Tensor:
        # Written, as data are, and kept: touching fresh pages is no part of a transfer.
        if name not in held or len(held[name]) < numel:
            held[name] = torch.arange(numel, dtype=torch.float32, device=device)
        return held[name][:numel]

    def run(kind: str, num_bytes: int) -> float:
        part = buffer("part", num_bytes // 4 // _parts(kind, size))
        whole, other = buffer("whole", size * len(part)), buffer("other", size * len(part))
        sends, receives, announced = list(whole.view(size, -1)), list(other.view(size, -1)), list[dist.Work]()
        if kind == PAIRWISE:
            # Before anyone sends: else the two directions may take turns, as exchange._pairwise tells.
            announced = [backend.recv([receives[peer]], peer, 0) for peer in peers]
            backend.barrier().wait()
        calls: dict[str, Callable[[], list[dist.Work]]] = {
            "all_gather": lambda: [backend._allgather_base(whole, part)],
            "reduce_scatter": lambda: [backend._reduce_scatter_base(part, whole)],
            "all_reduce": lambda: [backend.allreduce([whole])],
            "all_to_all": lambda: [backend.alltoall_base(other, whole, [], [])],
            "broadcast": lambda: [backend.broadcast([whole], root)],
            PAIRWISE: lambda: [backend.send([sends[peer]], peer, 0) for peer in peers],
        }
        meet = meeting(backend, device)
        return timed(lambda: [work.wait() for work in calls[kind]() + announced], device, meet)

    return run


def meeting(backend: Any, device: torch.device) -> Callable[[], object]:
    """What makes the current streams of all ranks meet: a collective of one element."""
    one = torch.zeros(1, device=device)
    return lambda: backend.allreduce([one]).wait()


def timed(
    call: Callable[[], object], device: torch.device, meet: Callable[[], object] = lambda: None
) -> float:
    """Seconds of ``call`` on the device, on a GPU by events on the current stream, behind ``meet``.

    Without that, a rank whose host is 50 us ahead would wait inside the call for so long.
    """
    if device.type != "cuda":
        start = time.perf_counter()
        call()
        return time.perf_counter() - start
    with torch.cuda.device(device):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        # The host gets ahead meanwhile, as in training: else its launches would be timed, not the device.
        torch.cuda._sleep(SLEEP_CYCLES)
        meet()
        begin.record()
        call()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3


# The codec


def measure_codec(
    device: torch.device, modes: Sequence[Mode] = (Mode.FAST, Mode.DENSE)
) -> dict[Mode, CodecSpeed]:
    """What each mode costs on ``device``, from Gaussian bf16 tensors of two sizes. This rank's own."""
    speeds = {}
    for mode in modes:
        rows = [_codec_times(device, mode, size) for size in CODEC_BYTES[device.type]]
        encode, decode, decode_sum = (fit(samples) for samples in zip(*rows, strict=True))
        speeds[mode] = CodecSpeed(encode, decode, decode_sum)
    return speeds


def _codec_times(device: torch.device, mode: Mode, num_bytes: int) -> list[tuple[float, float]]:
    """(bytes, seconds) of encode, decode and decode_sum."""
    generator = torch.Generator(device).manual_seed(0)  # the global one is the user's
    x = torch.randn(num_bytes // 2, dtype=torch.bfloat16, device=device, generator=generator)
    out, capacity = torch.empty_like(x), ops.payload_capacity(len(x), x.dtype, mode)
    payload = torch.empty(capacity, dtype=torch.uint8, device=device)
    # With the mode given, nothing waits for a GPU.
    calls: tuple[tuple[int, Callable[[], None]], ...] = (
        (num_bytes, lambda: ops.encode_out(x, mode, payload=payload)),
        (num_bytes, lambda: ops.decode_out(payload, wire_mode=mode, out=out)),
        (2 * num_bytes, lambda: ops.decode_sum_out([payload, x], wire_mode=mode, out=out)),
    )
    samples: list[tuple[float, float]] = []
    for counted, call in calls:
        call()  # compiles
        samples.append((counted, statistics.median(timed(call, device) for _ in range(REPETITIONS))))
    return samples


def agree_codec(speeds: Mapping[Mode, CodecSpeed], agree: Agree) -> dict[Mode, CodecSpeed]:
    """The slowest rank's speeds, on all ranks. Collective; all ranks measured the same modes."""

    def slowest(cost: Cost) -> Cost:
        latency, slope = agree([cost.latency, 1 / cost.bandwidth])
        return Cost(latency, 1 / slope)

    return {
        mode: CodecSpeed(slowest(s.encode), slowest(s.decode), slowest(s.decode_sum), s.batched)
        for mode, s in sorted(speeds.items())
    }
