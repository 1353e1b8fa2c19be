"""The cost model on paper: 16 to 1024 GPUs on fabrics of 100 to 800 Gbit/s, with nodes of 8.

    python -m zipccl_hooks.scale [--plot FILE]

prints the tables, and draws them into a file (.svg, .png, .pdf; needs the extra "plot"). What is assumed
stands in ``fabric_link`` and ``scale_table``; nothing here was measured.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

from . import plot
from .choose import (
    CROSS,
    LOCAL,
    MIB,
    CodecSpeed,
    Cost,
    Link,
    Pieces,
    Prediction,
    Ratio,
    default_ratios,
    predict,
)
from .format import Mode

# H200, 1 GiB of bf16 (README). Taken as given: decode_sum, fused, is as fast as decode, and a small call
# keeps the device busy for 10 us.
H200 = {
    Mode.FAST: CodecSpeed(Cost(1e-5, 1789e9), Cost(1e-5, 2119e9), Cost(1e-5, 2119e9)),
    Mode.DENSE: CodecSpeed(Cost(1e-5, 1246e9), Cost(1e-5, 1401e9), Cost(1e-5, 1401e9)),
}
NODE = 8  # GPUs


def fabric_link(gpus: int, gigabits: float, nvlink: float = 250e9) -> Link:
    """A link by assumption: nodes of 8 GPUs, each with a NIC of its own of ``gigabits`` Gb/s.

    ``nvlink`` is NCCL's bus bandwidth inside a node, bytes/s (243 to 270 GB/s between two H200). Gathers,
    reductions and broadcasts are rings: every byte enters a node once, spread over its NICs, and passes
    NVLink, so the slower of the two counts. An all_to_all sends what is for other nodes through each
    GPU's own NIC. The fabric has no contention. Latencies are what NCCL's tuner assumes of its simple
    protocol: 8.4 us a call, 3.4 a hop over NVLink, 14 over the network; and 1 a peer in an all_to_all.
    """
    nodes, nic = -(-gpus // NODE), gigabits * 1e9 / 8
    far = nodes if nodes > 1 else 0
    ring = min(nvlink, NODE * nic) if far else nvlink
    latency = 8.4e-6 + (gpus - 1 - far) * 3.4e-6 + far * 14e-6
    gather = Cost(latency, ring / (gpus - 1))
    exchange = nic * gpus / (gpus - NODE) if far else nvlink * gpus / (gpus - 1)
    costs = {
        "all_gather": gather,
        "reduce_scatter": gather,
        "all_reduce": Cost(2 * latency, ring * gpus / (2 * (gpus - 1))),
        "all_to_all": Cost(22.4e-6 + gpus * 1e-6, exchange),
        "broadcast": Cost(latency, ring),
    }
    if far:
        costs[LOCAL] = Cost(8.4e-6 + (NODE - 1) * 3.4e-6, nvlink / (NODE - 1))
        costs[CROSS] = Cost(22.4e-6 + nodes * 1e-6, nic * nodes / (nodes - 1))
    return Link(gpus, nodes, costs)


def scale_table(
    kind: str,
    total_bytes: int = 1024 * MIB,
    itemsize: int = 2,
    speeds: Mapping[Mode, CodecSpeed] = H200,
    ratios: Mapping[Mode, Ratio] | None = None,
    pieces: Pieces | None = None,
    gpus: Sequence[int] = (16, 64, 256, 1024),
    fabrics: Sequence[float] = (100, 200, 400, 800),
) -> list[tuple[float, Prediction]]:
    """What the same model says of ``fabric_link``: (Gb/s of a NIC, Prediction), by GPUs, then fabric.

    ``total_bytes`` is the whole tensor, gathered, scattered, reduced or exchanged: a layer of a large
    model. Reductions add up inside the node at NVLink's speed while equal local ranks exchange the piece
    before compressed, with the ratio of sums; native ones are a ring over all GPUs, so part of a gain is
    the hierarchy's. ``ratios`` default to Gaussian bf16.
    """
    ratios = default_ratios("bfloat16") if ratios is None else ratios
    rows = []
    for world, gigabits in product(gpus, fabrics):
        b = total_bytes // world if kind in ("all_gather", "reduce_scatter") else total_bytes
        link = fabric_link(world, gigabits)
        rows.append((gigabits, predict(kind, b, itemsize, link, speeds, ratios, pieces or Pieces())))
    return rows


def scale_text(rows: Sequence[tuple[float, Prediction]]) -> str:
    """``scale_table`` as a grid: speed over native, and what is chosen."""
    fabrics = list(dict.fromkeys(gigabits for gigabits, _ in rows))
    lines = ["  GPUs" + "".join(f"{gigabits:g} Gb/s".rjust(15) for gigabits in fabrics)]
    for world in dict.fromkeys(p.link.world for _, p in rows):
        cells = [f"{p.gain:.2f}x {p.path}" for _, p in rows if p.link.world == world]
        lines.append(f"{world:>6}" + "".join(cell.rjust(15) for cell in cells))
    return "\n".join(lines)


SHOWN = ("all_gather", "reduce_scatter", "all_to_all")


def shown_text() -> str:
    """The tables of SHOWN."""
    return "\n".join(f"{kind} of 1 GiB of bf16\n{scale_text(scale_table(kind))}" for kind in SHOWN)


def figure() -> Any:
    """The tables of SHOWN as a matplotlib Figure: a panel each, a line for each fabric."""
    from matplotlib.figure import Figure

    drawn = Figure(figsize=(11, 4), layout="constrained")
    for axes, kind in zip(drawn.subplots(1, len(SHOWN), sharey=True), SHOWN, strict=True):
        rows = scale_table(kind)
        fabrics = dict.fromkeys(gigabits for gigabits, _ in rows)
        for gigabits, style in zip(fabrics, ("-", "--", "-.", ":"), strict=True):  # some lie on each other
            line = [(p.link.world, p.gain, p.plan is not None) for fabric, p in rows if fabric == gigabits]
            worlds, gains, compressed = zip(*line, strict=True)
            (curve,) = axes.plot(worlds, gains, style, label=f"{gigabits:g} Gb/s")
            for world, gain, filled in zip(worlds, gains, compressed, strict=True):
                face = curve.get_color() if filled else "white"
                axes.plot(world, gain, "o", color=curve.get_color(), markerfacecolor=face)
        axes.axhline(1, color="black", linewidth=0.8)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log", base=2)
        axes.set_xticks(worlds)
        axes.xaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_major_formatter("{x:g}x")
        axes.set(title=f"{kind}, 1 GiB of bf16", xlabel="GPUs")
        axes.grid(alpha=0.3)
    drawn.axes[0].set_ylabel("speed over the plain collective")
    drawn.axes[0].legend(title="NIC of each GPU")
    drawn.suptitle(
        "On paper. Filled: the switch compresses. Hollow: it leaves the call plain, whose speed is 1."
    )
    return drawn


if __name__ == "__main__":
    plot.command("What the cost model says of 16 to 1024 GPUs.", shown_text, figure)
