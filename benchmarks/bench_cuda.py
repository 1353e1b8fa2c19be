"""The CUDA codec beside a device-to-device copy of the same tensor, as a table.

    python benchmarks/bench_cuda.py [--sizes 1,16,64,1024]

Bits are compared before a time is printed. GB/s count the tensor's bytes; "of copy" compares bytes read
plus written, codec against copy, in the same run. Medians of CUDA-event times over one warm buffer set.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable

import torch
from torch import Tensor

from zipccl_hooks import ops
from zipccl_hooks.codec import read_header
from zipccl_hooks.cuda import launch
from zipccl_hooks.format import Mode

DATA: dict[str, Callable[[int], Tensor]] = {
    "bf16": lambda n: (torch.randn(n // 2, device="cuda") * 0.02).bfloat16(),
    "bf16 zeros": lambda n: torch.zeros(n // 2, dtype=torch.bfloat16, device="cuda"),
    "bf16 random": lambda n: torch.randint(256, (n,), dtype=torch.uint8, device="cuda").view(torch.bfloat16),
    "fp32 of bf16": lambda n: (torch.randn(n // 4, device="cuda") * 0.02).bfloat16().float(),
    "fp32": lambda n: torch.randn(n // 4, device="cuda") * 0.02,
    "fp16": lambda n: (torch.randn(n // 2, device="cuda") * 0.02).half(),
    "e4m3": lambda n: torch.randn(n, device="cuda").to(torch.float8_e4m3fn),
    "e5m2": lambda n: torch.randn(n, device="cuda").to(torch.float8_e5m2),
}


def milliseconds(call: Callable[[], object], repetitions: int) -> float:
    times = []
    for k in range(repetitions + 3):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        call()
        end.record()
        end.synchronize()
        if k >= 3:
            times.append(start.elapsed_time(end))
    return statistics.median(times)


def host_microseconds(call: Callable[[], object], repetitions: int = 500) -> float:
    call()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(repetitions):
        call()
    elapsed = time.perf_counter() - start
    torch.cuda.synchronize()
    return elapsed / repetitions * 1e6


def row(name: str, mib: float, mode: Mode, repetitions: int) -> str:
    x = DATA[name](int(mib * 2**20))
    out = torch.empty_like(x)
    flat, flat_out = x.view(torch.uint8), out.view(torch.uint8)
    buffer = torch.empty(ops.payload_capacity(x.numel(), x.dtype, mode), dtype=torch.uint8, device="cuda")
    ops.encode_out(x, mode, payload=buffer)
    flat_out.fill_(0xA5)
    ops.decode_out(buffer, wire_mode=mode, out=out)
    wrong = int((flat != flat_out).sum())
    size = read_header(buffer).payload_bytes
    copy = 2 * x.nbytes / milliseconds(lambda: flat_out.copy_(flat), repetitions)
    encode = milliseconds(lambda: ops.encode_out(x, mode, payload=buffer), repetitions)
    decode = milliseconds(lambda: ops.decode_out(buffer, wire_mode=mode, out=out), repetitions)
    moved = x.nbytes + size
    return (
        f"  {name:<14}{mib:>8g}  {mode.name.lower():<6}{x.nbytes / size:>8.4f}{copy / 1e6:>9.0f}"
        f"{x.nbytes / encode / 1e6:>9.0f}{moved / encode / copy:>9.0%}{x.nbytes / decode / 1e6:>9.0f}"
        f"{moved / decode / copy:>9.0%}{wrong:>8}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description="CUDA codec beside a device copy.")
    parser.add_argument("--sizes", default="0.0625,1,16,64,256,1024", help="MiB (default: %(default)s)")
    parser.add_argument("--repetitions", type=int, default=15)
    parser.add_argument("--data", default=",".join(DATA))
    args = parser.parse_args()
    if (why := launch.missing()) is not None:
        print(f"bench_cuda: {why}", file=sys.stderr)
        return 2
    print(f"# {torch.cuda.get_device_name()}, torch {torch.__version__}; GB/s of tensor bytes")
    print(f"# {'data':<14}{'MiB':>8}  {'mode':<6}{'ratio':>8}{'copy r+w':>9}{'encode':>9}{'of copy':>9}"
          f"{'decode':>9}{'of copy':>9}{'#wrong':>8}")  # fmt: skip
    for name in args.data.split(","):
        for mib in (float(size) for size in args.sizes.split(",")):
            for mode in (Mode.FAST, Mode.DENSE):
                print(row(name, mib, mode, args.repetitions), flush=True)
    x = DATA["bf16"](2**16)
    out = torch.empty_like(x)
    buffer = torch.empty(
        ops.payload_capacity(x.numel(), x.dtype, Mode.FAST), dtype=torch.uint8, device="cuda"
    )
    encode = host_microseconds(lambda: ops.encode_out(x, Mode.FAST, payload=buffer))
    decode = host_microseconds(lambda: ops.decode_out(buffer, wire_mode=Mode.FAST, out=out))
    print(f"# host microseconds a call: encode {encode:.1f}, decode {decode:.1f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
