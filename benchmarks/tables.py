"""The tables of collectives and training steps in README and docs, made of saved runs.

    python benchmarks/bench_collectives.py --json benchmarks/saved/h200-collectives.json   # a run
    python benchmarks/bench_training.py --json benchmarks/saved/h200-training.json
    make tables                                  # rewrites what stands between the marks, and the picture

A mark says which run, and of collectives which transports and sizes in MiB::

    <!-- saved collectives nvlink:256,1024 host:64 -->  ...  <!-- end of saved -->

Speed-ups below LOSS are bold.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from zipccl_hooks import plot

ROOT = Path(__file__).parent.parent
PAGES = ("README.md", "docs/benchmarks.md")
PICTURE = ROOT / "docs" / "benchmarks.svg"
LOSS = 0.97
MARKED = re.compile(r"(<!-- saved (\w+)([^\n]*) -->\n)(.*?)(<!-- end of saved -->)", re.DOTALL)
NAMES = {"nvlink": "NVLink", "host": "host memory", "socket": "sockets"}
DATA = {"fp32 of bf16": "fp32 holding bf16 values (autocast)"}
CONTENTS = {"fsdp2": "FSDP2, bf16 gathers, fp32 reduction", "ddp": "DDP, autocast"}

Row = dict[str, Any]


def saved(run: str) -> list[Row]:
    return json.loads((ROOT / "benchmarks" / "saved" / f"h200-{run}.json").read_text())


def speedup(row: Row) -> str:
    text = f"{row['speedup']:.2f}x"
    return f"**{text}**" if row["speedup"] < LOSS else text


def collectives(arguments: str) -> list[str]:
    """A row for each call and data, a column for each transport and size."""
    columns = [
        (transport, float(mib))
        for transport, _, sizes in (part.partition(":") for part in arguments.split())
        for mib in sizes.split(",")
    ]
    found = {(r["call"], r["data"], r["transport"], r["mib"]): r for r in saved("collectives")}
    heads = [f"{NAMES[transport]}, {mib:g} MiB" for transport, mib in columns]
    lines = [f"| call | data | {' | '.join(heads)} |", "|---|---|" + "---|" * len(columns)]
    for call, data in dict.fromkeys((call, data) for call, data, *_ in found):
        cells = [speedup(found[call, data, *column]) for column in columns]
        lines.append(f"| {call} | {DATA.get(data, data)} | {' | '.join(cells)} |")
    return lines


def training(arguments: str) -> list[str]:
    lines = ["| step | link | plain | compressed | |", "|---|---|---|---|---|"]
    for row in saved("training"):
        plain, zipped = (f"{1e3 * row[key]:.0f} ms" for key in ("plain_seconds", "zipped_seconds"))
        kind = CONTENTS[row["kind"]] + (", blocks compiled" if row["compiled"] else "")
        lines.append(f"| {kind} | {NAMES[row['transport']]} | {plain} | {zipped} | {speedup(row)} |")
    return lines


def filled(page: str) -> str:
    """The page with its tables as the saved runs have them."""
    make = {"collectives": collectives, "training": training}
    return MARKED.sub(lambda m: m[1] + "\n".join(make[m[2]](m[3])) + "\n" + m[5], page)


def draw() -> Any:
    """Speed-ups over sizes, a panel for each transport."""
    from matplotlib.figure import Figure

    rows = saved("collectives")
    figure = Figure(figsize=(11, 4), layout="constrained")
    panels = figure.subplots(1, len(NAMES), sharey=True)
    for axes, (transport, name) in zip(panels, NAMES.items(), strict=True):
        for call, data in dict.fromkeys((r["call"], r["data"]) for r in rows):
            line = [r for r in rows if (r["call"], r["data"], r["transport"]) == (call, data, transport)]
            sizes, speedups = ([r[key] for r in line] for key in ("mib", "speedup"))
            axes.plot(sizes, speedups, marker=".", label=f"{call}, {data}")
        axes.axhline(1.0, color="grey", linewidth=0.8)
        axes.set(title=name, xscale="log", xlabel="MiB", xlim=(0.7, 1500))
        axes.set_xticks([1, 4, 16, 64, 256, 1024], labels=["1", "4", "16", "64", "256", "1024"])
    panels[0].set_ylabel("speed over the plain collective")
    panels[-1].legend(fontsize="x-small", loc="center left", bbox_to_anchor=(1.0, 0.5))
    return figure


def main() -> None:
    for page in PAGES:
        path = ROOT / page
        path.write_text(filled(path.read_text()))
    plot.save(draw, str(PICTURE), "Speed-ups of benchmarks/saved/h200-collectives.json")


if __name__ == "__main__":
    main()
