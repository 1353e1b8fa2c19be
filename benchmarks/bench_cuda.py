"""The CUDA codec beside a device-to-device copy of the same tensor and beside other GPU codecs, as tables.

    python benchmarks/bench_cuda.py [--data bf16,fp32] [--sizes 16,1024] [--json rows.jsonl]

Bits are compared before anything is timed; a row with wrong bytes has no times. GB/s count the tensor's
bytes; "of copy" compares bytes read plus written, codec against copy, in the same run. Calls are timed
back to back, in batches of a few milliseconds between two CUDA events, over one warm buffer set: where the
host starts calls more slowly than the GPU ends them, its time is what counts. Medians of the batches.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from cuda_baselines import Codec, baselines
from real_gradients import tiled_gradients
from torch import Tensor

from zipccl_hooks import ops
from zipccl_hooks.cuda import launch
from zipccl_hooks.format import Header, Mode

MODES = (Mode.FAST, Mode.DENSE)
# MiB. All of them for bf16 alone, so that the whole run stays under four minutes on an H200.
BF16_SIZES = (0.0625, 1, 16, 64, 256, 1024, 4096)
OTHER_SIZES = (16, 1024)
SUM_SIZES = (256, 1024)
BASELINE_SIZES = (16, 256, 1024)
SUM_DATA = ("bf16", "fp32 of bf16")
BATCH_MILLISECONDS = 4.0
POISON = 0xA5


# Data: bytes to a flat tensor of that size


def gaussian(numel: int) -> Tensor:
    return torch.randn(numel, device="cuda").mul_(0.02)


def half_zeros(numel: int) -> Tensor:
    keep = torch.rand(numel, device="cuda") < 0.5
    return torch.where(keep, gaussian(numel), 0.0)


DATA: dict[str, Callable[[int], Tensor]] = {
    "bf16": lambda n: gaussian(n // 2).bfloat16(),
    "bf16 gradients": lambda n: tiled_gradients(n // 2).bfloat16(),
    "bf16 sparse": lambda n: half_zeros(n // 2).bfloat16(),
    "bf16 zeros": lambda n: torch.zeros(n // 2, dtype=torch.bfloat16, device="cuda"),
    "bf16 random": lambda n: torch.randint(256, (n,), dtype=torch.uint8, device="cuda").view(torch.bfloat16),
    "fp32 autocast gradients": lambda n: tiled_gradients(n // 4),
    "fp32 of bf16": lambda n: gaussian(n // 4).bfloat16().float(),
    "fp32": lambda n: gaussian(n // 4),
    "fp16": lambda n: gaussian(n // 2).half(),
    "e4m3": lambda n: torch.randn(n, device="cuda").to(torch.float8_e4m3fn),
    "e5m2": lambda n: torch.randn(n, device="cuda").to(torch.float8_e5m2),
}


def make(name: str, mib: float) -> Tensor:
    return DATA[name](int(mib * 2**20))


# Times


def milliseconds(call: Callable[[], object], repetitions: int) -> float:
    def batch(calls: int) -> float:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(calls):
            call()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / calls

    batch(3)  # compiles and allocates
    calls = min(1000, max(1, round(BATCH_MILLISECONDS / batch(3))))
    batch(calls)
    return statistics.median(batch(calls) for _ in range(repetitions))


def copy_rate(x: Tensor, out: Tensor, repetitions: int) -> float:
    """Bytes read plus written a millisecond, by a device-to-device copy."""
    return 2 * x.nbytes / milliseconds(lambda: out.copy_(x), repetitions)


def host_microseconds(call: Callable[[], object], repetitions: int = 500) -> float:
    call()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(repetitions):
        call()
    elapsed = time.perf_counter() - start
    torch.cuda.synchronize()
    return elapsed / repetitions * 1e6


# Tables


@dataclass(frozen=True)
class Column:
    key: str
    title: str
    align: str
    form: str = ""

    def cell(self, value: object) -> str:
        return f"{'-' if value is None else format(value, self.form):{self.align}}"


CODEC_COLUMNS = (
    Column("data", "data", "<23"),
    Column("mib", "MiB", ">7", "g"),
    Column("codec", "codec", "<14"),
    Column("ratio", "ratio", ">7", ".4f"),
    Column("copy_gbps", "copy r+w", ">8", ".1f"),
    Column("encode_gbps", "encode", ">8", ".1f"),
    Column("encode_of_copy", "of copy", ">8", ".1%"),
    Column("decode_gbps", "decode", ">8", ".1f"),
    Column("decode_of_copy", "of copy", ">8", ".1%"),
    Column("wrong_bytes", "#wrong", ">7", "d"),
)
SUM_COLUMNS = (
    Column("data", "data", "<14"),
    Column("mib", "MiB", ">7", "g"),
    Column("codec", "codec", "<6"),
    Column("sources", "sources", "<16"),
    Column("copy_gbps", "copy r+w", ">9", ".1f"),
    Column("sum_gbps", "GB/s out", ">9", ".1f"),
    Column("of_limit", "of traffic limit", ">17", ".1%"),
    Column("wrong_bytes", "#wrong", ">8", "d"),
)


class Report:
    """Rows on stdout as they come and, if there is a path, in a file of JSON lines; counts our wrong ones."""

    def __init__(self, path: str | None) -> None:
        self.path, self.num_wrong = Path(path) if path else None, 0
        if self.path is not None:
            self.path.write_text("")

    def note(self, text: str) -> None:
        print(f"# {text}", flush=True)

    def head(self, columns: Sequence[Column]) -> None:
        self.note(" ".join(f"{column.title:{column.align}}" for column in columns))

    def record(self, section: str, row: dict[str, Any]) -> None:
        if self.path is not None:
            with self.path.open("a") as file:
                file.write(json.dumps({"section": section, **row}) + "\n")

    def row(self, section: str, columns: Sequence[Column], row: dict[str, Any]) -> None:
        print("  " + " ".join(column.cell(row.get(column.key)) for column in columns), flush=True)
        self.record(section, row)
        self.num_wrong += section != "baselines" and row["wrong_bytes"] > 0


# Section "codec"


class Zipccl(Codec):
    """Ours in one mode, as the collectives call it."""

    def __init__(self, mode: Mode) -> None:
        self.name, self.mode = mode.name.lower(), mode

    def prepare(self, x: Tensor) -> None:
        capacity = ops.payload_capacity(x.numel(), x.dtype, self.mode)
        self.buffer = torch.empty(capacity, dtype=torch.uint8, device=x.device)

    def encode(self, x: Tensor) -> Tensor:
        ops.encode_out(x, self.mode, payload=self.buffer)
        return self.buffer

    def decode(self, encoded: Tensor, out: Tensor) -> None:
        ops.decode_out(encoded, wire_mode=self.mode, out=out)

    def encoded_bytes(self, encoded: Tensor) -> int:
        return Header.read(encoded).payload_bytes


def wrong_bytes(found: Tensor, expected: Tensor) -> int:
    return int((found.view(torch.uint8) != expected.view(torch.uint8)).sum())


def measure(codec: Codec, x: Tensor, repetitions: int) -> dict[str, Any]:
    """The columns of ``codec`` on ``x``; no times unless every bit comes back."""
    out = torch.empty_like(x)
    codec.prepare(x)
    encoded = codec.encode(x)
    size = codec.encoded_bytes(encoded)
    out.view(torch.uint8).fill_(POISON)
    codec.decode(encoded, out)
    row: dict[str, Any] = {"ratio": x.nbytes / size, "wrong_bytes": wrong_bytes(out, x)}
    if row["wrong_bytes"]:
        return row
    copy = copy_rate(x, out, repetitions)
    encode = milliseconds(lambda: codec.encode(x), repetitions)
    decode = milliseconds(lambda: codec.decode(encoded, out), repetitions)
    moved = x.nbytes + size
    return row | {
        "copy_gbps": copy / 1e6,
        "encode_gbps": x.nbytes / encode / 1e6,
        "encode_of_copy": moved / encode / copy,
        "decode_gbps": x.nbytes / decode / 1e6,
        "decode_of_copy": moved / decode / copy,
    }


def codec_section(report: Report, names: Sequence[str], sizes: Sequence[float], repetitions: int) -> None:
    report.head(CODEC_COLUMNS)
    for name in names:
        for mib in sizes or (BF16_SIZES if name == "bf16" else OTHER_SIZES):
            try:
                x = make(name, mib)
                for codec in map(Zipccl, MODES):
                    row = {"data": name, "mib": mib, "codec": codec.name, **measure(codec, x, repetitions)}
                    report.row("codec", CODEC_COLUMNS, row)
            except torch.OutOfMemoryError:
                report.note(f"{name} of {mib:g} MiB: not enough memory")


# Section "decode_sum"


def payload_of(x: Tensor, mode: Mode) -> Tensor:
    codec = Zipccl(mode)
    codec.prepare(x)
    encoded = codec.encode(x)
    return encoded[: codec.encoded_bytes(encoded)]


def sum_in_order(terms: Sequence[Tensor]) -> Tensor:
    """What decode_sum promises: added in fp32, in order, rounded once."""
    total = terms[0].to(torch.float32, copy=True)
    for term in terms[1:]:
        total += term
    return total.to(terms[0].dtype)


def measure_sum(
    sources: Sequence[Tensor], terms: Sequence[Tensor], mode: Mode, copy: float, repetitions: int
) -> dict[str, Any]:
    """The columns of one decode_sum of ``sources``, which hold ``terms``; ``copy`` is copy_rate's."""
    out = torch.empty_like(terms[0])
    out.view(torch.uint8).fill_(POISON)
    ops.decode_sum_out(sources, wire_mode=mode, out=out)
    row: dict[str, Any] = {"copy_gbps": copy / 1e6, "wrong_bytes": wrong_bytes(out, sum_in_order(terms))}
    if row["wrong_bytes"]:
        return row
    elapsed = milliseconds(lambda: ops.decode_sum_out(sources, wire_mode=mode, out=out), repetitions)
    moved = sum(source.nbytes for source in sources) + out.nbytes
    return row | {"sum_gbps": out.nbytes / elapsed / 1e6, "of_limit": moved / elapsed / copy}


def sum_section(report: Report, sizes: Sequence[float], repetitions: int) -> None:
    report.note("decode_sum; traffic limit: payloads read and the sum written, as fast as a copy moves bytes")
    report.head(SUM_COLUMNS)
    for name in SUM_DATA:
        for mib in sizes or SUM_SIZES:
            terms = [make(name, mib) for _ in range(8)]
            copy = copy_rate(terms[0], torch.empty_like(terms[0]), repetitions)
            for mode in MODES:
                payloads = [payload_of(x, mode) for x in terms]
                own = {"own + 1 payload": [terms[0], payloads[1]]}
                cases = own | {f"{world} payloads": payloads[:world] for world in (2, 4, 8)}
                for label, sources in cases.items():
                    measured = measure_sum(sources, terms[: len(sources)], mode, copy, repetitions)
                    row = {"data": name, "mib": mib, "codec": mode.name.lower(), "sources": label}
                    report.row("decode_sum", SUM_COLUMNS, row | measured)


# Section "host"


def host_section(report: Report) -> None:
    x = make("bf16", 0.0625)
    out, payload = torch.empty_like(x), payload_of(x, Mode.FAST)
    codec, sources = Zipccl(Mode.FAST), [payload, payload]
    codec.prepare(x)
    row = {
        "encode_us": host_microseconds(lambda: codec.encode(x)),
        "decode_us": host_microseconds(lambda: codec.decode(payload, out)),
        "decode_sum_us": host_microseconds(lambda: ops.decode_sum_out(sources, wire_mode=Mode.FAST, out=out)),
    }
    report.note(
        f"host microseconds a call: encode {row['encode_us']:.1f}, decode {row['decode_us']:.1f}, "
        f"decode_sum of 2 {row['decode_sum_us']:.1f}"
    )
    report.record("host", row)


# Section "baselines"


def baseline_section(report: Report, sizes: Sequence[float], repetitions: int) -> None:
    """The last: a failure in somebody else's kernel can leave the device unusable."""
    torch.cuda.empty_cache()  # nvCOMP has an allocator of its own
    report.head(CODEC_COLUMNS)
    for codec in baselines():
        if (why := codec.available()) is not None:
            report.note(f"{codec.name}: {why}")
            continue
        for mib in sizes or BASELINE_SIZES:
            row = {"data": "bf16", "mib": mib, "codec": codec.name}
            try:
                row |= measure(codec, make("bf16", mib), repetitions)
            except Exception as error:  # of any library; the other rows are still of use
                report.note(f"{codec.name} on {mib:g} MiB: {type(error).__name__}: {error}")
                continue
            report.row("baselines", CODEC_COLUMNS, row)


# The program


def version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "-"


def commit() -> str:
    command = ["git", "describe", "--always", "--dirty"]
    try:
        said = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True)
    except OSError:
        return "unknown"
    return said.stdout.strip() or "unknown"


def describe(report: Report) -> None:
    packages = ("torch", "numba-cuda", "triton", "nvidia-nvcomp-cu13")
    run = {
        "device": torch.cuda.get_device_name(),
        "versions": {name: version(name) for name in packages},
        "commit": commit(),
        "command": shlex.join(["python", *sys.argv]),
    }
    report.note(f"{run['device']}, {', '.join(f'{name} {version(name)}' for name in packages)}")
    report.note(f"commit {run['commit']}: {run['command']}")
    report.note("GB/s of tensor bytes")
    report.record("run", run)


def main() -> int:
    parser = argparse.ArgumentParser(description="CUDA codec beside a device copy and other GPU codecs.")
    parser.add_argument("--data", default=",".join(DATA))
    parser.add_argument("--sizes", help="MiB, for all data and tables (default: a choice for each)")
    parser.add_argument("--repetitions", type=int, default=15, help="batches (default: %(default)s)")
    parser.add_argument("--decode-sum", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--baselines", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--json", metavar="PATH", help="write the rows there too, a line each")
    args = parser.parse_args()
    names, sizes = args.data.split(","), [float(size) for size in args.sizes.split(",")] if args.sizes else []
    if unknown := sorted(set(names) - set(DATA)):
        parser.error(f"--data: unknown {', '.join(unknown)}; there are {', '.join(DATA)}")
    if (why := launch.missing()) is not None:
        print(f"bench_cuda: {why}", file=sys.stderr)
        return 2
    torch.manual_seed(0)
    report = Report(args.json)
    describe(report)
    with torch.cuda.stream(torch.cuda.Stream()):
        codec_section(report, names, sizes, args.repetitions)
        if args.decode_sum:
            sum_section(report, sizes, args.repetitions)
        host_section(report)
        if args.baselines:
            baseline_section(report, sizes, args.repetitions)
    report.note(f"FAILED: {report.num_wrong} rows with wrong bytes" if report.num_wrong else "OK")
    return int(report.num_wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
