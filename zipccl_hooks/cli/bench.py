"""``bench``: collectives, plain against compressed; a table in the style of nccl-tests.

    python -m zipccl_hooks bench                              # two GPUs, over each transport; else gloo
    torchrun --nproc-per-node 2 -m zipccl_hooks bench         # NCCL if there are GPUs, else gloo

Bits are compared before a time is printed; exit status 1 if any are wrong. Sums of more than two ranks
have "-", as the order of their additions is another. Bandwidths are of the uncompressed bytes. Plain and
compressed calls alternate in one run; times are medians over all repetitions of the slowest rank. On GPUs a
repetition is a batch of calls one behind the other, timed by events; "path" is what the switch chose for most
of them, "model" what it expects that to take. all_reduce and its plain twin include the copy that
restores the tensor.
"""

from __future__ import annotations

import argparse
import csv
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ..config import MODES, Policy, is_rank
from . import Failure
from .cases import ROWS, whole_parts
from .measure import Measured, measure
from .ranks import DEVICE, TRANSPORTS, default_transports, joined, start

HEAD = (
    f"# {'call':<15}{'dtype':<14}{'MiB':>6}{'plain ms':>10}{'busbw':>8}{'zipped ms':>11}{'busbw':>8}"
    f"{'model ms':>10}{'path':>8}{'ratio':>7}{'speedup':>9}{'#wrong':>8}"
)


def sizes(text: str) -> list[float]:
    """Comma-separated numbers above 0, an argument's."""
    found = [float(size) for size in text.split(",")]
    if min(found) <= 0:
        raise ValueError
    return found


def transports(text: str) -> list[str]:
    """Comma-separated names of TRANSPORTS, an argument's."""
    names = text.split(",")
    if unknown := set(names) - set(TRANSPORTS):
        raise argparse.ArgumentTypeError(f"expected some of {','.join(TRANSPORTS)}, got {','.join(unknown)}")
    return names


def add_arguments(parser: argparse.ArgumentParser) -> None:
    default = "2,8,64" if DEVICE == "cpu" else "1,4,16,64,256,1024"
    parser.add_argument(
        "--sizes", type=sizes, default=default, help="MiB of the whole tensor (default: %(default)s)"
    )
    parser.add_argument("--repetitions", type=int, default=9, help="(default: %(default)s)")
    parser.add_argument("--mode", choices=MODES, default="auto", help="(default: %(default)s)")
    parser.add_argument(
        "--always", action="store_true", help="compress on GPUs also what the switch would not"
    )
    parser.add_argument("--only", default="", help="rows whose name contains this")
    parser.add_argument(
        "--transports", type=transports, default=default_transports(), metavar="NAMES",
        help=f"some of {','.join(TRANSPORTS)} (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument("--ranks", type=int, default=2, help="processes to start (default: %(default)s)")
    parser.add_argument("--json", metavar="FILE", help="write the rows, a list of objects")
    parser.add_argument("--csv", metavar="FILE", help="write the rows, with a header")


def run(args: argparse.Namespace) -> int:
    if is_rank():
        with joined() as lead:
            rows = list(_measured(args, lead))
            if lead:
                _write(args, [row.as_dict() for row in rows])
        return int(lead and any(row.wrong for row in rows))
    _write(args, [])  # what cannot be written is known before anything is measured
    gathered, code = list[dict[str, Any]](), 0
    for name in args.transports:
        print(f"# transport {name}", flush=True)
        with tempfile.TemporaryDirectory() as folder:
            part = Path(folder) / "rows.json"
            command = ["-m", "zipccl_hooks", *args.argv, "--csv", "", "--json", str(part)]
            code = start(command, args.ranks, TRANSPORTS[name])
            if part.exists():
                gathered += [{"transport": name, **row} for row in json.loads(part.read_text())]
        if code != 0:
            break
    _write(args, gathered)
    return code


def _measured(args: argparse.Namespace, lead: bool) -> Iterator[Measured]:
    """Rows as they are measured, and printed by rank 0."""
    policy = Policy(mode=args.mode, min_bytes=0, adaptive=not args.always)
    if lead:
        who = f"{dist.get_backend()}, {dist.get_world_size()} ranks, torch {torch.__version__}"
        print(f"# {who}, mode {args.mode}\n{HEAD}", flush=True)
    for mib in args.sizes:
        for make, dtype, data, label in ROWS:
            if args.only not in f"{make.__name__} {label}":
                continue
            x = data(whole_parts(mib, dtype), dtype)
            found = measure(make, label, x, mib, policy, args.repetitions)
            if lead:
                print(_text(found), flush=True)
            yield found


def _text(m: Measured) -> str:
    model = "-" if m.model_seconds is None else f"{m.model_seconds * 1e3:.3f}"
    return (
        f"  {m.call:<15}{m.data:<14}{m.mib:>6g}{m.plain_seconds * 1e3:>10.3f}{m.plain_busbw:>8.2f}"
        f"{m.zipped_seconds * 1e3:>11.3f}{m.zipped_busbw:>8.2f}{model:>10}"
        f"{m.path:>8}{m.ratio:>7.3f}{m.speedup:>9.3f}{m.wrong_text:>8}"
    )


def _write(args: argparse.Namespace, rows: list[dict[str, Any]]) -> None:
    """The files that were asked for."""
    for path in (args.json, args.csv):
        if not path:
            continue
        try:
            with open(path, "w", newline="") as file:
                if path == args.json:
                    json.dump(rows, file, indent=1)
                elif rows:
                    writer = csv.DictWriter(file, list(rows[0]))
                    writer.writeheader()
                    writer.writerows(rows)
        except OSError as error:
            raise Failure(f"{path}: {error.strerror}") from None
