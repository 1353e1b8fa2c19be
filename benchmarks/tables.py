"""The tables of README and docs, made of saved runs.

    python benchmarks/bench_collectives.py --json benchmarks/saved/h200-collectives.json
    python benchmarks/bench_training.py --json benchmarks/saved/h200-training.json
    python benchmarks/bench_cuda.py --json benchmarks/saved/h200-codec.jsonl
    make bench-slow-link SAVE="--json benchmarks/saved/gloo-1gbit.json"
    python -m pytest benchmarks --benchmark-only --json benchmarks/saved/cpu-codec.json
    make tables                                  # rewrites what stands between the marks, and the picture

A mark says which run and what of it: transports and sizes in MiB of collectives, sizes and data of a codec::

    <!-- saved collectives nvlink:256,1024 host:64 -->  ...  <!-- end of saved -->
    <!-- saved gpu_codec 1024: bf16, fp32; 16: bf16 -->  ...  <!-- end of saved -->

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
NAMES = {"nvlink": "NVLink", "host": "host memory", "socket": "sockets", "gloo": "1 Gbit/s"}
GPU_LINKS = ("nvlink", "host", "socket")
DATA = {
    "fp32 of bf16": "fp32 holding bf16 values (autocast)",
    "bf16 gradients": "bf16 gradients of a small GPT",
    "fp32 autocast gradients": "fp32 gradients of its autocast",
    "bf16 random": "random bits",
}
CONTENTS = {"fsdp2": "FSDP2, bf16 gathers, fp32 reduction", "ddp": "DDP, autocast"}
OURS = ("fast", "dense", "zipccl-fast", "zipccl-dense")

Row = dict[str, Any]


def saved(run: str) -> list[Row]:
    """The rows of a run: a list, or an object a line."""
    path = ROOT / "benchmarks" / "saved" / run
    text = path.read_text()
    return json.loads(text) if path.suffix == ".json" else [json.loads(line) for line in text.splitlines()]


def table(heads: list[str], rows: list[list[str]]) -> list[str]:
    lines = [f"| {' | '.join(cells)} |" for cells in (heads, *rows)]
    return [lines[0], "|" + "---|" * len(heads), *lines[1:]]


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
    runs = {"gloo-1gbit.json" if transport == "gloo" else "h200-collectives.json" for transport, _ in columns}
    found = {
        (r["call"], r["data"], r.get("transport", "gloo"), r["mib"]): r for run in runs for r in saved(run)
    }
    heads = [f"{NAMES[transport]}, {mib:g} MiB" for transport, mib in columns]
    rows = [
        [call, DATA.get(data, data), *(speedup(found[call, data, *column]) for column in columns)]
        for call, data in dict.fromkeys((call, data) for call, data, *_ in found)
    ]
    return table(["call", "data", *heads], rows)


def training(arguments: str) -> list[str]:
    rows = []
    for row in saved("h200-training.json"):
        plain, zipped = (f"{1e3 * row[key]:.0f} ms" for key in ("plain_seconds", "zipped_seconds"))
        kind = CONTENTS[row["kind"]] + (", blocks compiled" if row["compiled"] else "")
        rows.append([kind, NAMES[row["transport"]], row.get("machine", ""), plain, zipped, speedup(row)])
    return table(["step", "link", "machine", "plain", "compressed", ""], rows)


def codec(columns: dict[str, str], rows: list[Row]) -> list[list[str]]:
    """Cells of codecs on the same data; bold is what others do better than ours."""
    ours = {key: max(row[key] for row in rows if row["codec"] in OURS) for key in columns}
    made = []
    for row in rows:
        cells = [format(row[key], how) for key, how in columns.items()]
        better = [row["codec"] not in OURS and row[key] > ours[key] for key in columns]
        made.append([f"**{cell}**" if bold else cell for cell, bold in zip(cells, better, strict=True)])
    return made


def gpu_codec(arguments: str) -> list[str]:
    """Of each size the data named."""
    columns = {
        "ratio": ".3f", "encode_gbps": ".0f", "encode_of_copy": ".0%",
        "decode_gbps": ".0f", "decode_of_copy": ".0%",
    }  # fmt: skip
    run = [row for row in saved("h200-codec.jsonl") if row["section"] in ("codec", "baselines")]
    rows = []
    for mib, _, names in (part.partition(":") for part in arguments.split(";")):
        for name in map(str.strip, names.split(",")):
            found = [row for row in run if (row["data"], row["mib"]) == (name, float(mib))]
            for row, cells in zip(found, codec(columns, found), strict=True):
                first = [DATA.get(name, name), mib.strip()] if row is found[0] else ["", ""]
                rows.append([*first, row["codec"], *cells])
    return table(["data", "MiB", "codec", "ratio", "encode", "of copy", "decode", "of copy"], rows)


def cpu_codec(arguments: str) -> list[str]:
    """The codecs named, on the data named before the colon."""
    directions = {"encode": ".2f", "decode": ".2f"}
    lines: dict[tuple[str, str], Row] = {}
    for row in saved("cpu-codec.json"):
        line = lines.setdefault((row["data"], row["codec"]), dict(row))
        line[row["direction"]] = row["gbps"]
    rows = []
    for name, _, names in (part.partition(":") for part in arguments.split(";")):
        found = [lines[name.strip(), one.strip()] for one in names.split(",")]
        for row, cells in zip(found, codec({"ratio": ".3f"} | directions, found), strict=True):
            rows.append([name.strip() if row is found[0] else "", row["codec"], *cells])
    return table(["data", "codec", "ratio", *directions], rows)


def decode_sum(arguments: str) -> list[str]:
    """Of the size named, mode fast."""
    run = [row for row in saved("h200-codec.jsonl") if row["section"] == "decode_sum"]
    run = [row for row in run if (row["mib"], row["codec"]) == (float(arguments), "fast")]
    rows = [
        [
            DATA.get(row["data"], row["data"]),
            row["sources"],
            f"{row['sum_gbps']:.0f}",
            f"{row['of_limit']:.0%}",
        ]
        for row in run
    ]
    return table(["data", "sources", "GB/s out", "of the traffic limit"], rows)


TABLES = {f.__name__: f for f in (collectives, training, gpu_codec, cpu_codec, decode_sum)}


def filled(page: str) -> str:
    """The page with its tables as the saved runs have them."""
    return MARKED.sub(lambda m: m[1] + "\n".join(TABLES[m[2]](m[3])) + "\n" + m[5], page)


def draw() -> Any:
    """Speed-ups over sizes, a panel for each transport."""
    from matplotlib.figure import Figure

    rows = saved("h200-collectives.json")
    figure = Figure(figsize=(11, 4), layout="constrained")
    panels = figure.subplots(1, len(GPU_LINKS), sharey=True)
    for axes, transport in zip(panels, GPU_LINKS, strict=True):
        for call, data in dict.fromkeys((r["call"], r["data"]) for r in rows):
            line = [r for r in rows if (r["call"], r["data"], r["transport"]) == (call, data, transport)]
            sizes, speedups = ([r[key] for r in line] for key in ("mib", "speedup"))
            axes.plot(sizes, speedups, marker=".", label=f"{call}, {data}")
        axes.axhline(1.0, color="grey", linewidth=0.8)
        axes.set(title=NAMES[transport], xscale="log", xlabel="MiB", xlim=(0.7, 1500))
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
