"""``inspect``: how far the tensors of files would shrink, in which mode, and why.

A row a tensor: its ratio in modes fast and dense; the mode that "auto" takes, raw where nothing shrinks; the
entropy of its exponents, bits; and the share of the likeliest seven neighbouring ones (0.97 of a Gaussian).
Files are .safetensors, torch.save's .pt, .pth and .bin (weights only), folders of distributed checkpoints.
Of tensors above 4 Mi elements blocks of 8192 at equal distances are looked at, unless --all is given.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .. import ops, plot
from ..codec import encode_into
from ..format import DTYPES, GROUP, TILE, Mode
from ..theory import entropy, window_probability
from . import Failure, progress
from .tensors import tensors

SAMPLE = 4 * 1024 * 1024  # elements
BLOCK = GROUP * TILE  # what is coded together
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
SHOWN = 0.0005  # of a histogram: exponents at least as frequent


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("files", nargs="+", metavar="FILE")
    parser.add_argument("--all", action="store_true", help="look at every element of large tensors, too")
    parser.add_argument("--histogram", action="store_true", help="print how frequent exponents are, by dtype")
    parser.add_argument("--plot", metavar="FILE", help="draw exponents and ratios (.png, .svg, .pdf)")


@dataclass
class Inspected:
    """What was found of a tensor. Sizes in bytes, of what was looked at where named so."""

    name: str
    dtype: str
    num_bytes: int
    seen_bytes: int
    payload_bytes: dict[Mode, int]  # of what was looked at
    exponents: list[
        int
    ]  # how often each exponent field was seen; empty where the dtype has none that is coded

    @property
    def sampled(self) -> bool:
        return self.seen_bytes < self.num_bytes

    def ratio(self, mode: Mode) -> float:
        """1.0 for an empty tensor."""
        return self.seen_bytes / self.payload_bytes[mode] if self.seen_bytes else 1.0

    @property
    def mode(self) -> Mode:
        """The densest that shrinks it, as ``encode`` takes it."""
        return (
            Mode.DENSE if self.payload_bytes.get(Mode.DENSE, self.seen_bytes) < self.seen_bytes else Mode.RAW
        )

    @property
    def sent_bytes(self) -> float:
        """What the whole would take in ``mode``."""
        return self.num_bytes / self.ratio(self.mode) if self.mode != Mode.RAW else self.num_bytes

    @property
    def frequencies(self) -> list[float]:
        total = sum(self.exponents)
        return [count / total for count in self.exponents]


def sample(x: Tensor, most: int = SAMPLE) -> Tensor:
    """``x``, flat; of more than ``most`` elements whole blocks at equal distances, the same each time."""
    flat = x.detach().reshape(-1)
    step = -(-len(flat) // most)
    if step <= 1:
        return flat.contiguous()
    return flat[: len(flat) // BLOCK * BLOCK].view(-1, BLOCK)[::step].reshape(-1)


def exponent_counts(x: Tensor) -> list[int]:
    """How often each value of the exponent field occurs in a flat tensor of a coded dtype."""
    known = DTYPES[str(x.dtype).removeprefix("torch.")]
    mantissa_bits = 8 * known.itemsize - 1 - known.exponent_bits
    fields = 2**known.exponent_bits
    counts = torch.zeros(fields, dtype=torch.int64)
    for part in x.view(BITS[known.itemsize]).split(SAMPLE):  # bincount takes eight bytes an element
        counts += torch.bincount((part >> mantissa_bits & fields - 1).int(), minlength=fields)
    return counts.tolist()


def inspect(name: str, x: Tensor, most: int = SAMPLE) -> Inspected:
    """Codes what ``sample`` takes of a tensor. TypeError for a dtype that the format cannot hold."""
    known = ops.format_dtype(x.dtype)
    found = Inspected(name, known.name, x.nbytes, x.nbytes, {}, [])
    if known.exponent_bits:
        seen = sample(x, most)
        found.seen_bytes, found.exponents = seen.nbytes, exponent_counts(seen)
        for mode in (Mode.FAST, Mode.DENSE):
            payload = torch.empty(ops.payload_capacity(len(seen), x.dtype, mode), dtype=torch.uint8)
            found.payload_bytes[mode] = encode_into(seen, mode, payload).payload_bytes
    return found


def run(args: argparse.Namespace) -> int:
    if args.plot:
        try:
            plot.require()
        except ImportError as error:
            raise Failure(str(error)) from None
    rows: list[Inspected] = []
    print(_row("tensor", "dtype", "MB", "fast", "dense", "mode", "entropy", "window"))
    for path in args.files:
        for found in _inspected(path, sys.maxsize if args.all else SAMPLE):
            rows.append(found)
            print(_text(found), flush=True)
    print(_total(rows))
    if any(found.sampled for found in rows):
        print(f"* of {SAMPLE} elements in blocks at equal distances; --all looks at every one")
    if args.histogram:
        print(*_histograms(rows), sep="\n")
    if args.plot:
        try:
            plot.save(partial(figure, rows), args.plot)
        except (OSError, ValueError) as error:
            raise Failure(f"{args.plot}: {error}") from None
    return 0


def _inspected(path: str, most: int) -> Iterator[Inspected]:
    count, named = tensors(path)
    for k, (name, x) in enumerate(named):
        progress(f"{Path(path).name}: {k + 1} of {count}")
        try:
            found = inspect(name, x, most)
        except TypeError as error:
            found = None
            progress("")
            print(f"{name}: left out, {error}", file=sys.stderr)
        progress("")
        if found is not None:
            yield found


def _row(name: str, dtype: str, *columns: str) -> str:
    return f"{name:<44} {dtype:<14}" + "".join(column.rjust(9) for column in columns)


def _text(found: Inspected) -> str:
    name = found.name if len(found.name) <= 43 else f"...{found.name[-40:]}"
    columns = ["", "", "raw", "", ""]
    if found.exponents:
        ratios = [f"{found.ratio(mode):.3f}" for mode in (Mode.FAST, Mode.DENSE)]
        p = found.frequencies if found.seen_bytes else [1.0]
        columns = [*ratios, found.mode.name.lower(), f"{entropy(p):.3f}", f"{window_probability(p):.4f}"]
    size = f"{found.num_bytes / 1e6:.3f}"
    return _row(f"{name}{'*' if found.sampled else ''}", found.dtype, size, *columns)


def _total(rows: list[Inspected]) -> str:
    raw, sent = sum(found.num_bytes for found in rows), sum(found.sent_bytes for found in rows)
    modes = Counter(found.mode.name.lower() for found in rows)
    chosen = ", ".join(f"{mode} {count}" for mode, count in modes.items())
    sizes = f"{raw / 1e6:.3f} MB as {sent / 1e6:.3f} MB"
    return f"{len(rows)} tensors, {sizes}: ratio {raw / max(sent, 1):.3f} ({chosen})"


def _by_dtype(rows: list[Inspected]) -> dict[str, list[tuple[int, float]]]:
    """(floor(log2 |x|), share) by dtype, rare ones left out; zeros and subnormals are below the least."""
    totals: dict[str, Counter[int]] = {}
    for found in rows:
        counts = {e: n for e, n in enumerate(found.exponents) if n}
        totals.setdefault(found.dtype, Counter()).update(counts)
    shares = {}
    for dtype, counter in totals.items():
        bias = 2 ** (DTYPES[dtype].exponent_bits - 1) - 1
        shares[dtype] = [
            (e - bias, n / counter.total())
            for e, n in sorted(counter.items())
            if n >= SHOWN * counter.total()
        ]
    return {dtype: share for dtype, share in shares.items() if share}


def _histograms(rows: list[Inspected]) -> Iterator[str]:
    for dtype, shares in _by_dtype(rows).items():
        most = max(share for _, share in shares)
        yield f"\nexponents of {dtype}, floor(log2 |x|); rarer than {SHOWN:.2%} left out"
        for exponent, share in shares:
            yield f"{exponent:>6} {share:>8.2%} {'#' * max(1, round(50 * share / most))}"


def figure(rows: list[Inspected]) -> Any:
    """Exponents by dtype, and ratios by size, as a matplotlib Figure."""
    from matplotlib.figure import Figure

    drawn = Figure(figsize=(10, 4), layout="constrained")
    left, right = drawn.subplots(1, 2)
    for dtype, shares in _by_dtype(rows).items():
        share_of = dict(shares)
        exponents = range(min(share_of), max(share_of) + 1)
        left.plot(exponents, [share_of.get(e, 0.0) for e in exponents], "o-", markersize=3, label=dtype)
    left.set(title="Exponents", xlabel="floor(log2 |x|)", ylabel="share")
    for mode, mark in ((Mode.FAST, "x"), (Mode.DENSE, "o")):
        coded = [found for found in rows if found.exponents and found.seen_bytes]
        sizes, ratios = [found.num_bytes for found in coded], [found.ratio(mode) for found in coded]
        right.plot(sizes, ratios, mark, markersize=5, fillstyle="none", label=mode.name.lower())
    right.axhline(1, color="black", linewidth=0.8)
    right.set(title="Tensors", xlabel="bytes", ylabel="ratio", xscale="log")
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.legend()
    return drawn
