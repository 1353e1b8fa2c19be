"""``profile``: what link and codec cost here, and what compression is expected to gain.

    python -m zipccl_hooks profile                           # two ranks on this machine
    torchrun --nproc-per-node 8 -m zipccl_hooks profile      # the ranks and the link that a job would have

Measured are each plain collective, the codec, and how far a sample compresses: tensors of --file, of the
dtype that has most bytes there, else Gaussian bf16. From these the cost model (choose.py) predicts every
collective; --measure runs them, too, compressed in the mode that is best by the model. On GPUs "choice" is
the switch's. On CPUs it is advice: there all calls from min_bytes on are compressed.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .. import link, plot
from ..channel import channel
from ..choose import GLOO_PIECES, KINDS, MIB, CodecSpeed, Link, Prediction, Ratio, predict
from ..communicator import group_backend
from ..config import Policy, is_rank
from ..eligible import MOVABLE_DTYPES
from ..format import Mode
from ..ops import SUM_DTYPES
from ..switch import switch
from . import Failure, cases, progress
from .inspect import BLOCK, SAMPLE, inspect, sample
from .measure import Measured, measure
from .ranks import DEVICE, TRANSPORTS, default_transports, joined, start
from .tensors import tensors

SIZES = (1, 4, 16, 64, 256)  # MiB of the whole tensor
MEASURED_MIB = {"cpu": 16, "cuda": 256}  # larger ones are only predicted
REPETITIONS = 5

Predict = Callable[[str, int], Prediction]  # (kind, bytes of the whole tensor)
Row = tuple[int, Prediction, Measured | None]  # MiB of the whole tensor, and what is known of it


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--file", help="of tensors, as inspect reads them: the sample")
    parser.add_argument("--measure", action="store_true", help="run the collectives, too")
    parser.add_argument("--plot", metavar="FILE", help="draw the gains (.png, .svg, .pdf)")
    parser.add_argument("--ranks", type=int, default=2, help="processes to start (default: %(default)s)")


def run(args: argparse.Namespace) -> int:
    if not is_rank():
        if args.plot:
            _require_plot()
        if args.file:
            tensors(args.file)  # what cannot be read is known before anything is measured
        transport = default_transports(args.ranks).split(",")[0]
        return start(["-m", "zipccl_hooks", *args.argv], args.ranks, TRANSPORTS[transport])
    with joined() as lead:
        x = _shared_sample(args.file, lead)
        ratios = _ratios(x)
        progress("measuring link and codec" if lead else "")
        began = time.perf_counter()
        found, speeds, model = _measured(x.dtype, ratios)
        if lead:
            progress("")
            print(_costs(found, speeds, ratios, x.dtype))
            print(f"# links and codec measured in {time.perf_counter() - began:.2f} s", flush=True)
        rows = _rows(args, x, model, lead)
        if lead and args.plot:
            _require_plot()
            try:
                plot.save(partial(figure, rows), args.plot)
            except (OSError, ValueError) as error:
                raise Failure(f"{args.plot}: {error}") from None
    return int(lead and any(measured is not None and measured.wrong for _, _, measured in rows))


def _require_plot() -> None:
    try:
        plot.require()
    except ImportError as error:
        raise Failure(str(error)) from None


# The sample


def _shared_sample(path: str | None, lead: bool) -> Tensor:
    """Flat, on the CPU, the same on all ranks: rank 0 alone needs the file. Collective."""
    shared: list[Any] = [None]
    if lead:
        try:
            shared = [file_sample(path) if path else (torch.randn(SAMPLE) * 0.02).bfloat16()]
        except Failure as failure:
            shared = [failure]
    dist.broadcast_object_list(shared)
    if isinstance(shared[0], Failure):
        raise shared[0] if lead else SystemExit(1)
    return shared[0]


def file_sample(path: str) -> Tensor:
    """Blocks of a file's tensors of the dtype with most bytes, about SAMPLE elements, flat."""
    count, named = tensors(path)
    parts: dict[torch.dtype, list[Tensor]] = {}
    num_bytes: dict[torch.dtype, int] = {}
    for k, (_, x) in enumerate(named):
        progress(f"{path}: {k + 1} of {count}")
        if x.dtype in MOVABLE_DTYPES:
            parts.setdefault(x.dtype, []).append(sample(x, max(BLOCK, SAMPLE // count)))
            num_bytes[x.dtype] = num_bytes.get(x.dtype, 0) + x.nbytes
    progress("")
    if not any(num_bytes.values()):
        raise Failure(f"{path}: no tensors of a dtype that is compressed")
    return torch.cat(parts[max(num_bytes, key=num_bytes.__getitem__)])


def _ratios(x: Tensor) -> dict[Mode, Ratio]:
    """Of the sample by mode, and of sums of as many parts of it as there are ranks."""
    parts, sums = inspect("", x), None
    if x.dtype in SUM_DTYPES:
        step = len(x) // dist.get_world_size()
        terms = [x.roll(rank * step).float() for rank in range(dist.get_world_size())]
        sums = inspect("", torch.stack(terms).sum(0).to(x.dtype))
    return {mode: Ratio(parts.ratio(mode), (sums or parts).ratio(mode)) for mode in parts.payload_bytes}


# Costs and predictions


def _measured(
    dtype: torch.dtype, ratios: dict[Mode, Ratio]
) -> tuple[Link, Mapping[Mode, CodecSpeed], Predict]:
    """The default group's link and codec, and the model of both. Collective."""
    group = dist.distributed_c10d._get_default_group()
    world = group.size()

    def of_call(kind: str, total: int) -> int:
        return total // world if kind in ("all_gather", "reduce_scatter") else total

    if DEVICE == "cuda":
        chooser = switch(channel(group, torch.device("cuda", torch.cuda.current_device())))
        return (
            chooser.link,
            chooser.speeds,
            lambda kind, total: chooser.predict(kind, of_call(kind, total), dtype, "auto", ratios),
        )
    device = torch.device("cpu")
    backend = group_backend(group, device)
    found = link.measure_backend(backend, device)
    speeds = link.agree_codec(link.measure_codec(device), link.native_agree(backend, device))
    return (
        found,
        speeds,
        lambda kind, total: predict(
            kind, of_call(kind, total), dtype.itemsize, found, speeds, ratios, GLOO_PIECES
        ),
    )


def _costs(
    found: Link, speeds: Mapping[Mode, CodecSpeed], ratios: Mapping[Mode, Ratio], dtype: torch.dtype
) -> str:
    lines = [
        f"# {dist.get_backend()}, {found.world} ranks on {found.nodes} node(s), torch {torch.__version__}"
    ]
    lines.append(f"# {'plain':<26}{'latency us':>12}{'GB/s':>9}")
    for kind, cost in found.costs.items():
        lines.append(f"  {kind:<26}{cost.latency * 1e6:>12.0f}{cost.bandwidth / 1e9:>9.3f}")
    lines.append(f"# {'codec, GB/s of bf16':<26}{'encode':>12}{'decode':>9}{'decode_sum':>12}")
    for mode, s in speeds.items():
        encode, decode, decode_sum = (c.bandwidth / 1e9 for c in (s.encode, s.decode, s.decode_sum))
        lines.append(f"  {mode.name.lower():<26}{encode:>12.2f}{decode:>9.2f}{decode_sum:>12.2f}")
    lines.append(f"# {'ratio of ' + str(dtype):<26}{'sample':>12}{'sums':>9}")
    for mode, ratio in ratios.items():
        lines.append(f"  {mode.name.lower():<26}{ratio.parts:>12.3f}{ratio.sums:>9.3f}")
    return "\n".join(lines)


def _rows(args: argparse.Namespace, x: Tensor, model: Predict, lead: bool) -> list[Row]:
    """Every collective and size, as they are printed. Collective with --measure."""
    rows: list[Row] = []
    more = f"{'plain ms':>12}{'zipped ms':>11}{'gain':>7}{'#wrong':>8}" if args.measure else ""
    if lead:
        print(f"# {'predicted':<16}{'MiB':>5}{'plain ms':>10}{'zipped ms':>11}{'gain':>7}{'choice':>8}{more}")
    for kind in KINDS:
        if kind in cases.SUMS and x.dtype not in SUM_DTYPES:
            continue
        for mib in SIZES:
            expected, measured = model(kind, mib * MIB), None
            best = expected.best
            if args.measure and best is not None and mib <= MEASURED_MIB[DEVICE]:
                policy = Policy(mode=best.mode.name.lower(), min_bytes=0, adaptive=False, enabled=True)
                measured = measure(
                    getattr(cases, kind), str(x.dtype), _tiled(x, mib), mib, policy, REPETITIONS
                )
            rows.append((mib, expected, measured))
            if lead:
                print(_text(*rows[-1]), flush=True)
    return rows


def _tiled(x: Tensor, mib: int) -> Tensor:
    """The sample, repeated to that size, starting elsewhere on every rank, on the device of the ranks."""
    numel = cases.whole_parts(mib, x.dtype)
    mine = x.view(torch.uint8).roll(dist.get_rank() * BLOCK * x.itemsize).view(x.dtype)
    return mine.repeat(-(-numel // len(x)))[:numel].to(DEVICE)


def _text(mib: int, p: Prediction, m: Measured | None) -> str:
    zipped = "-" if p.best is None else f"{p.best.seconds * 1e3:.3f}"
    path = p.path if p.plan else "plain"
    line = f"  {p.kind:<16}{mib:>5}{p.native * 1e3:>10.3f}{zipped:>11}{p.gain:>6.2f}x{path:>8}"
    if m is not None:
        line += f"{m.plain_seconds * 1e3:>12.3f}{m.zipped_seconds * 1e3:>11.3f}{m.speedup:>6.2f}x"
        line += f"{m.wrong_text:>8}"
    return line


def figure(rows: list[Row]) -> Any:
    """Gain by size, a line a collective, as a matplotlib Figure."""
    from matplotlib.figure import Figure

    drawn = Figure(figsize=(7, 4.5), layout="constrained")
    axes = drawn.subplots()
    for kind in dict.fromkeys(p.kind for _, p, _ in rows):
        own = [row for row in rows if row[1].kind == kind]
        (curve,) = axes.plot([mib for mib, *_ in own], [p.gain for _, p, _ in own], label=kind)
        for mib, p, m in own:
            face = curve.get_color() if p.plan else "white"
            axes.plot(mib, p.gain, "o", color=curve.get_color(), markerfacecolor=face)
            if m is not None:
                axes.plot(mib, m.speedup, "x", color=curve.get_color())
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set_xscale("log", base=2)
    axes.set_xticks(SIZES)
    axes.xaxis.set_major_formatter("{x:g}")
    axes.set(xlabel="MiB of the whole tensor", ylabel="speed over the plain collective")
    axes.set_title("Filled: compress. Hollow: leave plain. Crosses: measured.", fontsize="medium")
    axes.grid(alpha=0.3)
    axes.legend()
    return drawn
