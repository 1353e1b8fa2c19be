"""Collectives, plain against compressed: a table in the style of nccl-tests.

    python benchmarks/bench_collectives.py                          # two GPUs, over each transport
    torchrun --nproc-per-node 2 benchmarks/bench_collectives.py     # NCCL if there are GPUs, else gloo
    python examples/slow_link.py --rate 1gbit -- benchmarks/bench_collectives.py

Bits are compared before a time is printed. Bandwidths are of the uncompressed bytes, so rows compare.
Plain and compressed calls alternate in one run; times are medians over all repetitions of the slowest
rank. On GPUs a repetition is a batch of calls one behind the other, timed by events; "path" is what the
switch chose for most of them, "model" what it expects that to take. all_reduce and its plain twin
include the copy that restores the tensor.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

import zipccl_hooks
from zipccl_hooks import Policy, channel, collectives, switch


@dataclass
class Case:
    """One row: ``plain`` and ``zipped`` fill ``plain_out`` and ``zipped_out`` from the same inputs."""

    plain: Callable[[], object]
    zipped: Callable[[], object]
    plain_out: Tensor
    zipped_out: Tensor
    bus_factor: float  # bus bandwidth over size / time, as nccl-tests defines it


DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def gaussian(numel: int, dtype: torch.dtype) -> Tensor:
    return (torch.randn(numel, device=DEVICE) * 0.02).to(dtype)


def autocast_gradients(numel: int, dtype: torch.dtype) -> Tensor:
    """fp32 that holds bf16 values, as autocast leaves gradients."""
    return gaussian(numel, torch.bfloat16).to(dtype)


def all_gather(x: Tensor, policy: Policy) -> Case:
    size = dist.get_world_size()
    mine = x[: len(x) // size].clone()
    outs = torch.empty_like(x), torch.empty_like(x)
    plain = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
    return Case(
        lambda: plain(outs[0], mine),
        lambda: collectives.all_gather_into_tensor(outs[1], mine, policy=policy),
        *outs, (size - 1) / size,
    )  # fmt: skip


def reduce_scatter(x: Tensor, policy: Policy) -> Case:
    size = dist.get_world_size()
    outs = x.new_empty(len(x) // size), x.new_empty(len(x) // size)
    plain = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
    return Case(
        lambda: plain(outs[0], x),
        lambda: collectives.reduce_scatter_tensor(outs[1], x, policy=policy),
        *outs, (size - 1) / size,
    )  # fmt: skip


def all_reduce(x: Tensor, policy: Policy) -> Case:
    outs = x.clone(), x.clone()

    def restored(out: Tensor, call: Callable[[], object]) -> None:
        out.copy_(x)
        call()

    return Case(
        lambda: restored(outs[0], lambda: dist.all_reduce(outs[0])),
        lambda: restored(outs[1], lambda: collectives.all_reduce(outs[1], policy=policy)),
        *outs, 2 * (dist.get_world_size() - 1) / dist.get_world_size(),
    )  # fmt: skip


def all_to_all(x: Tensor, policy: Policy) -> Case:
    outs = torch.empty_like(x), torch.empty_like(x)
    return Case(
        lambda: dist.all_to_all_single(outs[0], x),
        lambda: collectives.all_to_all_single(outs[1], x, policy=policy),
        *outs, (dist.get_world_size() - 1) / dist.get_world_size(),
    )  # fmt: skip


def broadcast(x: Tensor, policy: Policy) -> Case:
    outs = x.clone(), x.clone()
    return Case(
        lambda: dist.broadcast(outs[0], 0),
        lambda: collectives.broadcast(outs[1], 0, policy=policy),
        *outs, 1.0,
    )  # fmt: skip


def send_recv(x: Tensor, policy: Policy) -> Case:
    """To the next rank and from the one before, as nccl-tests' sendrecv."""
    outs = torch.empty_like(x), torch.empty_like(x)
    rank, size = dist.get_rank(), dist.get_world_size()

    def ring(batch: Callable[..., list[dist.Work]], out: Tensor) -> None:
        ops = [dist.P2POp(dist.isend, x, (rank + 1) % size), dist.P2POp(dist.irecv, out, (rank - 1) % size)]
        for work in batch(ops):
            work.wait()

    return Case(
        lambda: ring(dist.batch_isend_irecv, outs[0]),
        lambda: ring(partial(collectives.batch_isend_irecv, policy=policy), outs[1]),
        *outs, 1.0,
    )  # fmt: skip


Row = tuple[Callable[[Tensor, Policy], Case], torch.dtype, Callable[[int, torch.dtype], Tensor], str]
ROWS: Sequence[Row] = (
    (all_gather, torch.bfloat16, gaussian, "bf16"),
    (all_to_all, torch.bfloat16, gaussian, "bf16"),
    (broadcast, torch.bfloat16, gaussian, "bf16"),
    (send_recv, torch.bfloat16, gaussian, "bf16"),
    (reduce_scatter, torch.bfloat16, gaussian, "bf16"),
    (reduce_scatter, torch.float32, autocast_gradients, "fp32 of bf16"),
    (all_reduce, torch.bfloat16, gaussian, "bf16"),
    (all_reduce, torch.float32, autocast_gradients, "fp32 of bf16"),
    (all_reduce, torch.float32, gaussian, "fp32"),
)


# What NCCL is told, and what it stands in for. Multicast stays off: hosts may be shared.
TRANSPORTS = {
    "nvlink": {},
    "host": {"NCCL_P2P_DISABLE": "1"},  # through host memory: a NIC of 200 Gbit/s per GPU
    "socket": {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1", "NCCL_SOCKET_IFNAME": "lo"},  # 25 Gbit/s
}
BATCH_SECONDS = 0.02


def slowest(value: float) -> float:
    """The largest of the ranks' values."""
    number = torch.tensor(value, dtype=torch.float64, device=DEVICE)
    dist.all_reduce(number, op=dist.ReduceOp.MAX)
    return number.item()


def seconds(call: Callable[[], object], calls: int) -> float:
    """Time of one call in a batch of ``calls``, of the slowest rank."""
    dist.barrier()
    if DEVICE == "cpu":
        start = time.perf_counter()
        for _ in range(calls):
            call()
        return slowest((time.perf_counter() - start) / calls)
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(calls):
        call()
    end.record()
    end.synchronize()
    return slowest(begin.elapsed_time(end) / 1e3 / calls)


def wrong_elements(plain: Tensor, zipped: Tensor) -> int:
    """Whose bits differ, on all ranks together."""
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[plain.element_size()]
    wrong = (plain.view(bits) != zipped.view(bits)).sum()
    dist.all_reduce(wrong)
    return int(wrong)


def measure(case: Case, repetitions: int) -> tuple[float, float, int]:
    """(plain seconds, compressed seconds, wrong elements)."""
    case.plain()
    case.zipped()
    wrong = wrong_elements(case.plain_out, case.zipped_out)
    calls = 1
    if DEVICE == "cuda":
        for _ in range(10):  # the room for what does not compress statically is learnt by now
            case.zipped()
        calls = max(1, min(50, int(BATCH_SECONDS / seconds(case.plain, 3))))
    zipccl_hooks.reset_stats()
    pairs = [(seconds(case.plain, calls), seconds(case.zipped, calls)) for _ in range(repetitions)]
    plain, zipped = (statistics.median(column) for column in zip(*pairs, strict=True))
    return plain, zipped, wrong


def expected(name: str, x: Tensor, policy: Policy, native: bool) -> str:
    """Milliseconds that the switch expects, where there is one."""
    if DEVICE == "cpu" or not policy.adaptive or name == "send":  # each direction has a switch of its own
        return "-"
    group = dist.distributed_c10d._get_default_group()
    found = switch.switch(channel.channel(group, x.device))
    shared = "gather" in name or "scatter" in name
    num_bytes = None if "all_to_all" in name else x.nbytes // (dist.get_world_size() if shared else 1)
    prediction = found.expected(name, num_bytes, x.dtype, policy.mode)
    plan = None if native or num_bytes is None else prediction.best
    return "-" if num_bytes is None else f"{(plan.seconds if plan else prediction.native) * 1e3:.3f}"


def on_every_transport(program: str, names: Sequence[str], arguments: Sequence[str]) -> int:
    """Starts a program under torchrun once for each transport."""
    for name in names:
        print(f"# transport {name}: {TRANSPORTS[name] or 'as NCCL chooses'}", flush=True)
        command = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--nproc-per-node",
            "2",
            program,
            *arguments,
        ]
        env = {**os.environ, "NCCL_NVLS_ENABLE": "0", **TRANSPORTS[name]}
        if (code := subprocess.run(command, env=env).returncode) != 0:
            return code
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    sizes = "2,8,64" if DEVICE == "cpu" else "1,4,16,64,256,1024"
    parser.add_argument("--sizes", default=sizes, help="MiB of the whole tensor (default: %(default)s)")
    parser.add_argument("--repetitions", type=int, default=9)
    parser.add_argument("--mode", default="auto")
    parser.add_argument(
        "--always", action="store_true", help="compress on GPUs also what the switch would not"
    )
    parser.add_argument("--only", default="", help="rows whose name contains this")
    parser.add_argument("--transports", default=",".join(TRANSPORTS), help="of NCCL (default: %(default)s)")
    args = parser.parse_args()
    if "RANK" not in os.environ:
        return on_every_transport(__file__, args.transports.split(","), sys.argv[1:])
    if DEVICE == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    backend = "nccl" if DEVICE == "cuda" else "gloo"
    dist.init_process_group(backend)
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    torch.manual_seed(dist.get_rank())
    lead = dist.get_rank() == 0
    if lead:
        print(f"# {backend}, {dist.get_world_size()} ranks, torch {torch.__version__}, mode {args.mode}")
        print(f"# {'call':<15}{'dtype':<14}{'MiB':>6}{'plain ms':>10}{'busbw':>8}{'zipped ms':>11}"
              f"{'busbw':>8}{'model ms':>10}{'path':>8}{'ratio':>7}{'speedup':>9}{'#wrong':>8}")  # fmt: skip
    for mib in (float(size) for size in args.sizes.split(",")):
        for make, dtype, data, label in ROWS:
            if args.only not in f"{make.__name__} {label}":
                continue
            x = data(int(mib * 2**20) // dtype.itemsize, dtype)
            policy = Policy(mode=args.mode, min_bytes=0, adaptive=not args.always)
            case = make(x, policy)
            zipccl_hooks.reset_stats()
            plain, zipped, wrong = measure(case, args.repetitions)
            name, counted = max(zipccl_hooks.stats().calls.items())  # of two, send rather than recv
            native = counted.native_calls.total() > counted.compressed_calls
            path = "native" if native else max(counted.modes, key=counted.modes.__getitem__, default="-")
            if lead:
                bus = case.bus_factor * x.nbytes / 1e9
                print(f"  {make.__name__:<15}{label:<14}{mib:>6g}{plain * 1e3:>10.3f}{bus / plain:>8.2f}"
                      f"{zipped * 1e3:>11.3f}{bus / zipped:>8.2f}{expected(name, x, policy, native):>10}"
                      f"{path:>8}{counted.ratio:>7.3f}{plain / zipped:>9.3f}{wrong:>8}")  # fmt: skip
                sys.stdout.flush()
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
