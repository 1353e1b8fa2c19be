"""The cost model: what it chooses, that it adds up, and that it gives back rows that were measured."""

from __future__ import annotations

import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from zipccl_hooks import choose, plot, theory
from zipccl_hooks.choose import (
    CROSS,
    GLOO_PIECES,
    KINDS,
    LOCAL,
    MARGIN,
    MIB,
    PAIRWISE,
    CodecSpeed,
    Cost,
    Link,
    Pieces,
    Plan,
    Prediction,
    Ratio,
    default_ratios,
    explain_text,
    predict,
)
from zipccl_hooks.format import DTYPES, Mode
from zipccl_hooks.scale import (
    H200,
    SHOWN,
    fabric_link,
    figure,
    scale_table,
    scale_text,
    shown_text,
)

BF16 = default_ratios("bfloat16")
WORLDS = (2, 3, 5, 8)


def link(bus: float, world: int = 2, latency: float = 20e-6) -> Link:
    """One node, every kind at the same bus bandwidth, bytes/s, as nccl-tests defines it."""
    p = world - 1
    bandwidths = (bus / p, bus / p, bus * world / (2 * p), bus * world / p, bus)
    return Link(world, 1, {k: Cost(latency, b) for k, b in zip(KINDS, bandwidths, strict=True)})


def one(ratio: float, sums: float | None = None) -> dict[Mode, Ratio]:
    return {Mode.DENSE: Ratio(ratio, ratio if sums is None else sums)}


# Choices


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_slow_link_takes_dense(kind: str, world: int) -> None:
    prediction = predict(kind, 256 * MIB, 2, link(3e9, world), H200, BF16)
    assert prediction.path == "dense" and prediction.plan is prediction.best
    assert 1.3 < prediction.gain < 1.5


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_fast_link_goes_native(kind: str, world: int) -> None:
    prediction = predict(kind, 256 * MIB, 2, link(2e12, world), H200, BF16)
    assert prediction.path == "native" and prediction.plan is None and prediction.gain < 1


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_tiny_call_goes_native(kind: str, world: int) -> None:
    for num_bytes in (0, 2, 64 * 1024):
        assert predict(kind, num_bytes, 2, link(25e9, world), H200, BF16).path == "native"


@pytest.mark.parametrize("bus", [1e8, 3.6e9, 25e9, 250e9])
@pytest.mark.parametrize("kind", KINDS)
def test_what_does_not_shrink_goes_native(kind: str, bus: float) -> None:
    for ratio in (0.98, 1.0, 1.01):
        for world in WORLDS:
            assert predict(kind, 512 * MIB, 2, link(bus, world), H200, one(ratio)).path == "native"


def test_fast_codes_win_between_slow_links_and_none() -> None:
    paths = [
        predict("all_gather", 512 * MIB, 2, link(g * 1e9, 8), H200, BF16).path for g in range(10, 2000, 5)
    ]
    assert list(dict.fromkeys(paths)) == ["dense", "fast", "native"]


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("kind", KINDS)
def test_there_is_one_crossover_by_size_and_by_bandwidth(kind: str, world: int) -> None:
    sizes = [predict(kind, 2**k, 2, link(25e9, world), H200, BF16) for k in range(10, 34)]
    by_size = [p.path != "native" for p in sizes]
    assert by_size == sorted(by_size) and any(by_size) and not all(by_size)
    speeds = [predict(kind, 512 * MIB, 2, link(2.0**k, world), H200, BF16) for k in range(28, 42)]
    by_speed = [p.path != "native" for p in speeds]
    assert by_speed == sorted(by_speed, reverse=True) and any(by_speed) and not all(by_speed)
    assert [p.gain for p in speeds] == sorted((p.gain for p in speeds), reverse=True)


def test_a_gain_within_the_margin_is_left_alone() -> None:
    gains = {}
    for margin in (MARGIN, 0.5):
        prediction = predict("all_gather", 512 * MIB, 2, link(25e9), H200, BF16, margin=margin)
        gains[prediction.path] = prediction.gain
        assert (prediction.gain > 1 + margin) == (prediction.path != "native")
    assert len(gains) == 2 and len(set(gains.values())) == 1
    assert "more than 1.50x is asked for" in explain_text(prediction)


def test_without_a_mode_or_a_peer_there_is_only_native() -> None:
    assert default_ratios("int64") == {}
    for prediction in (
        predict("all_gather", MIB, 8, link(1e9), H200, default_ratios("int64")),
        predict("all_gather", MIB, 2, link(1e9), {}, BF16),
        predict("all_gather", MIB, 2, Link(1, 1, {}), H200, BF16),
    ):
        assert prediction.path == "native" and prediction.plans == () and prediction.gain == 1.0
        assert "no compressed mode" in explain_text(prediction)
    with pytest.raises(ValueError, match=r"kind: expected one of .* got 'gather'"):
        predict("gather", MIB, 2, link(1e9), H200, BF16)


def test_default_ratios_are_those_of_the_theory() -> None:
    assert set(choose.DEFAULT_RATIOS) == {name for name, d in DTYPES.items() if d.exponent_bits}
    for name, modes in choose.DEFAULT_RATIOS.items():
        sigma = 1.0 if name.startswith("float8") else 0.02
        assert set(modes) == {Mode.FAST, Mode.DENSE}
        for mode, ratio in modes.items():
            assert ratio == pytest.approx(theory.expected_ratio(sigma, DTYPES[name], mode), abs=1e-3)
            assert default_ratios(name)[mode] == Ratio(ratio, ratio)


# Times


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("kind", KINDS)
def test_pieces_are_within_bounds(kind: str, world: int) -> None:
    """Also where pieces cost nothing, so that the smallest are the best."""
    p, free = world - 1, Pieces(seconds=0, call_seconds=0)
    quick = {Mode.DENSE: CodecSpeed(Cost(0, 2e11), Cost(0, 2e11), Cost(0, 2e11))}
    for num_bytes in (2**k + 2 for k in range(12, 34)):
        received = {"all_gather": p, "reduce_scatter": p, "broadcast": 1}.get(kind, p / world) * num_bytes
        plans = predict(kind, num_bytes, 2, link(25e9, world), H200, BF16).plans
        small = predict(kind, num_bytes, 2, link(25e9, world, 0.0), quick, BF16, free).plans
        for plan in (*plans, *small):
            assert len(plan.pieces) == (2 if kind == "all_reduce" else 1)
            for count in plan.pieces:
                assert received / count <= free.max_bytes
                assert count == 1 or received / count >= free.min_bytes
        if received > 2 * free.max_bytes:
            assert all(received / count < 2 * free.min_bytes for count in small[0].pieces)


def schedule(count: int, encode: float, exchange: float, decode: float, one_device: bool = True) -> float:
    """The loop of exchange.py, step by step: while a piece travels, the next and the last are coded."""
    now = encode
    for piece in range(count):
        steps = (encode if piece + 1 < count else 0.0, decode if piece else 0.0)
        now += max(exchange, sum(steps) if one_device else max(steps))
    return now + decode


@pytest.mark.parametrize("rate", [1e8, 1e9, 4e9, 1e11])
@pytest.mark.parametrize("count", [1, 2, 3, 8])
def test_time_is_that_of_the_schedule(count: int, rate: float) -> None:
    speed = CodecSpeed(Cost(1e-3, 2e9), Cost(2e-3, 3e9), Cost(0, 1e20))
    pieces = Pieces(MIB, MIB, seconds=1e-4, call_seconds=5e-4)
    two = Link(2, 1, {"all_gather": Cost(1e-3, rate)})
    (plan,) = predict("all_gather", count * MIB, 2, two, {Mode.DENSE: speed}, one(1.5), pieces).plans
    assert plan.pieces == (count,)
    parts = (1e-3 + MIB / 2e9, 1e-3 + MIB / 1.5 / rate, 2e-3 + MIB / 3e9)
    assert (plan.encode, plan.exchange, plan.decode) == pytest.approx(tuple(count * part for part in parts))
    assert plan.overhead == pytest.approx(5e-4 + count * 1e-4)
    assert plan.seconds == pytest.approx(schedule(count, *parts) + plan.overhead)
    assert (plan.raw_bytes, plan.wire_bytes) == pytest.approx((count * MIB, count * MIB / 1.5))


@pytest.mark.parametrize("rate", [1e8, 1e9, 1e11])
def test_broadcast_encodes_and_decodes_on_different_ranks(rate: float) -> None:
    speed = CodecSpeed(Cost(0, 2e9), Cost(0, 3e9), Cost(0, 1e20))
    pieces, two = Pieces(MIB, MIB, 0, 0), Link(2, 1, {"broadcast": Cost(0, rate)})
    (plan,) = predict("broadcast", 8 * MIB, 2, two, {Mode.DENSE: speed}, one(1.5), pieces).plans
    assert plan.seconds == pytest.approx(
        schedule(8, MIB / 2e9, MIB / 1.5 / rate, MIB / 3e9, one_device=False)
    )


def test_what_the_processor_copies_keeps_it_from_coding() -> None:
    """A link as fast as the copy: then nothing hides behind the exchange."""
    speed, rate = CodecSpeed(Cost(0, 2e9), Cost(0, 3e9), Cost(0, 1e20)), 1e9
    pieces, two = Pieces(MIB, MIB, 0, 0, rate), Link(2, 1, {"all_gather": Cost(0, rate)})
    (plan,) = predict("all_gather", 64 * MIB, 2, two, {Mode.DENSE: speed}, one(1.5), pieces).plans
    parts = plan.encode + plan.exchange + plan.decode
    assert parts * 62 / 64 < plan.seconds <= parts


# kind, world, native call that carries payloads, what it is given, encoded, decoded (in bytes of b)
PATTERNS = [
    ("all_gather", 2, "all_gather", 1, 1, 1),
    ("all_gather", 8, "all_gather", 1, 1, 7),
    ("reduce_scatter", 2, "all_gather", 1, 1, 2),
    ("reduce_scatter", 8, "all_to_all", 8, 7, 8),
    ("all_to_all", 2, "all_gather", 1 / 2, 1 / 2, 1 / 2),
    ("all_to_all", 8, "all_to_all", 1, 7 / 8, 7 / 8),
    ("broadcast", 8, "broadcast", 1, 1, 1),
]


@pytest.mark.parametrize(("kind", "world", "carrier", "carried", "encoded", "decoded"), PATTERNS)
def test_pattern(kind: str, world: int, carrier: str, carried: float, encoded: float, decoded: float) -> None:
    """Each native collective has a bandwidth of its own, and codec calls cost nothing but bytes."""
    costs = {k: Cost(0, 10.0**n) for n, k in enumerate(KINDS)}
    speed = CodecSpeed(Cost(0, 7), Cost(0, 5), Cost(0, 3))
    (plan,) = predict(kind, 4096, 2, Link(world, 1, costs), {Mode.DENSE: speed}, one(2.0)).plans
    assert plan.exchange == pytest.approx(costs[carrier].seconds(carried * 4096 / 2))
    assert plan.encode == pytest.approx(encoded * 4096 / 7)
    assert plan.decode == pytest.approx(decoded * 4096 / (3 if kind == "reduce_scatter" else 5))


@pytest.mark.parametrize("world", [2, 8])
def test_gloo_sends_payloads_pairwise(world: int) -> None:
    costs = link(1e8, world).costs
    gloo = Link(world, 1, {**costs, PAIRWISE: Cost(0, 1e6)})
    for kind, parts in (("all_gather", 1), ("reduce_scatter", 1), ("all_to_all", 1 / world)):
        (plan,) = predict(kind, MIB, 2, gloo, {Mode.DENSE: H200[Mode.DENSE]}, one(2.0)).plans
        assert plan.exchange == pytest.approx((world - 1) * parts * MIB / 2 / 1e6)
    (plan,) = predict("broadcast", MIB, 2, gloo, {Mode.DENSE: H200[Mode.DENSE]}, one(2.0)).plans
    assert plan.exchange == pytest.approx(costs["broadcast"].seconds(MIB / 2))


def test_all_reduce_is_both_stages_with_ratios_of_their_own() -> None:
    four, num_bytes = link(25e9, 4), 400 * MIB
    scatter = predict("reduce_scatter", num_bytes // 4, 4, four, H200, one(3.0)).plans[0]
    gather = predict("all_gather", num_bytes // 4, 4, four, H200, one(1.7)).plans[0]
    (both,) = predict("all_reduce", num_bytes, 4, four, H200, one(3.0, 1.7)).plans
    assert both.seconds == pytest.approx(scatter.seconds + gather.seconds)
    assert both.wire_bytes == pytest.approx(scatter.wire_bytes + gather.wire_bytes)
    assert both.pieces == scatter.pieces + gather.pieces


def test_across_nodes_sums_travel_among_equal_local_ranks() -> None:
    costs = {**link(1e9, 16).costs, LOCAL: Cost(0, 1e12), CROSS: Cost(0, 1e9)}
    nodes = Link(16, 2, costs)
    (plan,) = predict("reduce_scatter", 16 * MIB, 2, nodes, H200, one(3.0, 2.0)).plans
    assert plan.local == pytest.approx(2 * 16 * MIB / 1e12)
    assert plan.exchange == pytest.approx(2 * 16 * MIB / 2.0 / 1e9)
    flat = predict("reduce_scatter", 16 * MIB, 2, Link(16, 2, link(1e9, 16).costs), H200, one(3.0, 2.0))
    assert flat.plans[0].local == 0 and flat.plans[0].wire_bytes == pytest.approx(16 * 16 * MIB / 3.0)


def test_codec_time_goes_with_elements_below_bf16() -> None:
    times = {size: predict("all_gather", MIB, size, link(1e9), H200, BF16).plans[0] for size in (1, 2, 4)}
    latency = H200[Mode.FAST].encode.latency
    assert times[1].encode - latency == pytest.approx(2 * (times[2].encode - latency))
    assert times[4] == times[2]


def test_batched_calls_pay_their_latency_once() -> None:
    batched = {mode: replace(speed, batched=True) for mode, speed in H200.items()}
    by_peer = predict("all_gather", MIB, 2, link(1e9, 8), H200, BF16).plans[0]
    at_once = predict("all_gather", MIB, 2, link(1e9, 8), batched, BF16).plans[0]
    assert by_peer.decode - at_once.decode == pytest.approx(6 * H200[Mode.FAST].decode.latency)
    assert by_peer.encode == at_once.encode


# Measured rows

PROBE = {Mode.FAST: CodecSpeed(Cost(1e-5, 1834e9), Cost(1e-5, 2174e9), Cost(1e-5, 2174e9))}


@pytest.mark.parametrize(
    ("bus", "mib", "speed_up"),
    [(25.2, 16, 1.22), (25.2, 64, 1.34), (25.2, 256, 1.35), (25.2, 1024, 1.37),
     (3.6, 16, 1.36), (3.6, 64, 1.36), (3.6, 256, 1.39)],
)  # fmt: skip
def test_all_gather_of_two_h200(bus: float, mib: int, speed_up: float) -> None:
    """Host-memory link and sockets, GB/s and MiB gathered, with the probe codec: DESIGN.md 1.1, 1.2, 1.5."""
    ratios = {Mode.FAST: Ratio(1.424, 1.424)}
    prediction = predict("all_gather", mib * MIB // 2, 2, link(bus * 1e9), PROBE, ratios)
    assert prediction.gain == pytest.approx(speed_up, rel=0.2)


def test_all_gather_of_256_mib_over_a_host_memory_link() -> None:
    prediction = predict("all_gather", 128 * MIB, 2, link(25e9), H200, BF16)
    assert prediction.path == "dense" and prediction.gain == pytest.approx(1.45, rel=0.05)


@pytest.mark.parametrize(
    ("kind", "itemsize", "ratio", "sums", "of_8_mib", "of_64_mib"),
    [
        ("all_gather", 2, 1.50, 1.50, 1.58, 2.14),
        ("all_to_all", 2, 1.50, 1.50, 1.98, 2.62),
        ("broadcast", 2, 1.50, 1.50, 1.35, 1.47),
        ("reduce_scatter", 2, 1.50, 1.50, 2.08, 2.85),
        ("reduce_scatter", 4, 2.99, 2.00, 3.59, 4.92),
        ("all_reduce", 2, 1.50, 1.50, 1.05, 1.30),
        ("all_reduce", 4, 2.99, 2.00, 1.55, 1.92),
        ("all_reduce", 4, 1.20, 1.20, 0.91, 1.07),
    ],
)
def test_readme_rows_over_1_gbit(
    kind: str, itemsize: int, ratio: float, sums: float, of_8_mib: float, of_64_mib: float
) -> None:
    """README, gloo over 1 Gbit/s; link (MB/s) and codec (one core) as link.py measured them there."""
    rates = {"all_gather": 83, "reduce_scatter": 55, "all_reduce": 123, "all_to_all": 136, "broadcast": 123}
    slow = Link(2, 2, {k: Cost(1e-4, rate * 1e6) for k, rate in (rates | {PAIRWISE: 120}).items()})
    speeds = {Mode.DENSE: CodecSpeed(Cost(2e-5, 2.7e9), Cost(2e-5, 2.7e9), Cost(1e-4, 2.3e9))}
    for mib, speed_up in ((8, of_8_mib), (64, of_64_mib)):
        b = mib * MIB // (2 if kind in ("all_gather", "reduce_scatter") else 1)
        prediction = predict(kind, b, itemsize, slow, speeds, one(ratio, sums), GLOO_PIECES)
        assert prediction.gain == pytest.approx(speed_up, rel=0.2)


# Texts and tables


def test_explain_text_shows_the_numbers() -> None:
    prediction = predict("all_reduce", 256 * MIB, 2, link(25e9), H200, BF16)
    text, plan = explain_text(prediction), prediction.plan
    assert plan is not None
    assert text.startswith("all_reduce of 256.0 MiB, 2 ranks on 1 node(s)\n")
    for seconds in (prediction.native, plan.seconds, plan.encode, plan.exchange, plan.decode, plan.overhead):
        assert f"{seconds * 1e3:.3f}" in text
    assert f"{prediction.gain:.2f}x" in text and "1.497" in text and "2+2" in text
    assert f"dense: {plan.wire_bytes / MIB:.1f} MiB travel in place of 256.0 MiB" in text
    assert all(len(line) <= 110 for line in text.splitlines())


def test_explain_text_says_why_not() -> None:
    prediction = predict("all_gather", 512 * 1024, 2, link(250e9), H200, BF16)
    assert prediction.best is not None
    text = explain_text(prediction)
    assert "512.0 KiB" in text and f"would be {prediction.gain:.2f}x as fast: its exchange takes" in text
    assert f"{prediction.best.exchange * 1e3:.3f} ms" in text


def test_fabric_link_is_made_as_its_docstring_says() -> None:
    made = fabric_link(64, 400, nvlink=250e9)
    assert (made.world, made.nodes) == (64, 8)
    assert made.costs["all_gather"].bandwidth == pytest.approx(250e9 / 63)  # 8 NICs bring 400 GB/s
    assert fabric_link(64, 100).costs["broadcast"].bandwidth == pytest.approx(8 * 12.5e9)
    assert made.costs["all_to_all"].bandwidth == pytest.approx(50e9 * 64 / 56)
    assert made.costs[CROSS].bandwidth == pytest.approx(50e9 * 8 / 7)
    assert made.costs["all_gather"].latency == pytest.approx((8.4 + 55 * 3.4 + 8 * 14) * 1e-6)
    inside = fabric_link(8, 100)
    assert inside.nodes == 1 and LOCAL not in inside.costs
    assert inside.costs["all_to_all"].bandwidth == pytest.approx(250e9 * 8 / 7)


@pytest.mark.parametrize("kind", KINDS)
def test_scale_table_has_a_row_for_every_size_and_fabric(kind: str) -> None:
    rows = scale_table(kind)
    assert [(g, p.link.world) for g, p in rows] == [
        (g, w) for w in (16, 64, 256, 1024) for g in (100, 200, 400, 800)
    ]
    assert all(p.link.nodes == math.ceil(p.link.world / 8) and p.kind == kind for _, p in rows)
    lines = scale_text(rows).splitlines()
    assert len(lines) == 5 and "800 Gb/s" in lines[0] and lines[-1].split()[0] == "1024"
    assert lines[1].split()[1:3] == [f"{rows[0][1].gain:.2f}x", rows[0][1].path]


def test_an_exchange_takes_the_host_its_time() -> None:
    """However small it is; a large one hides it, but each piece has its share."""
    slow = Pieces(MIB, MIB, 0.0, 0.0, least_seconds=5e-4, least_piece_seconds=2e-4)
    free = Pieces(MIB, MIB, 0.0, 0.0)

    def fast(num_bytes: int, bandwidth: float, pieces: Pieces) -> Plan:
        speeds = {Mode.FAST: H200[Mode.FAST]}
        return predict("all_gather", num_bytes, 2, link(bandwidth), speeds, BF16, pieces).plans[0]

    small, many = fast(MIB // 4, 1e12, slow), fast(4 * MIB, 1e12, slow)
    assert small.pieces == (1,) and small.seconds == 5e-4
    assert many.pieces == (4,) and many.seconds == pytest.approx(5e-4 + 3 * 2e-4)
    assert fast(MIB, 1e8, slow).seconds == fast(MIB, 1e8, free).seconds > 5e-4


def test_the_page_shows_what_the_program_prints() -> None:
    root = Path(__file__).parent.parent
    printed = subprocess.run(
        [sys.executable, "-m", "zipccl_hooks.scale"], capture_output=True, text=True, cwd=root, check=True
    ).stdout
    assert f"```\n{printed}```" in (root / "docs" / "scale.md").read_text()


def test_the_picture_is_of_the_table() -> None:
    """It holds the table that it was drawn from. Else: python -m zipccl_hooks.scale --plot docs/scale.svg"""
    assert shown_text() in (Path(__file__).parent.parent / "docs" / "scale.svg").read_text()


def test_the_plot_shows_gains_and_choices() -> None:
    pytest.importorskip("matplotlib")
    for axes, kind in zip(figure().axes, SHOWN, strict=True):
        drawn = {
            (line.get_label(), x): y
            for line in axes.lines
            for x, y in zip(line.get_xdata(), line.get_ydata(), strict=True)
        }
        markers = [line for line in axes.lines if line.get_marker() == "o"]
        by_fabric: list[tuple[float, Prediction]] = sorted(scale_table(kind), key=lambda row: row[0])
        for (gigabits, p), marker in zip(by_fabric, markers, strict=True):
            assert drawn[f"{gigabits:g} Gb/s", p.link.world] == p.gain == marker.get_ydata()[0]
            assert (marker.get_markerfacecolor() == "white") == (p.path == "native")


def test_a_plot_without_matplotlib_names_the_extra(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r"needs matplotlib, pip install zipccl_hooks\[plot\]"):
        plot.save(figure, str(tmp_path / "scale.svg"), "")
