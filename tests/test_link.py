"""Measuring a link: the fit, when it stops, and that all ranks end with the same numbers. No real clock."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
import torch.distributed as dist
from ranks import Ranks

from zipccl_hooks import link
from zipccl_hooks.choose import KINDS, MIB, PAIRWISE, CodecSpeed, Cost, Link, default_ratios, predict
from zipccl_hooks.format import Mode

CPU = torch.device("cpu")
COSTS = (Cost(30e-6, 25e9), Cost(0.0, 1e9), Cost(5e-3, 125e6), Cost(1e-6, 3e11))


def alone(numbers: Sequence[float]) -> list[float]:
    return list(numbers)


def names(cost: Cost) -> str:
    return f"{cost.latency:g}s-{cost.bandwidth:g}"


class FakeLink:
    """Calls that take what ``costs`` say, and what was called."""

    def __init__(self, costs: dict[str, Cost]) -> None:
        self.costs = costs
        self.calls: list[tuple[str, int]] = []
        self.clock = 0.0

    def __call__(self, kind: str, num_bytes: int) -> float:
        self.calls.append((kind, num_bytes))
        seconds = self.costs[kind].seconds(num_bytes)
        self.clock += seconds
        return seconds

    def sizes(self, kind: str) -> list[int]:
        return sorted({num_bytes for called, num_bytes in self.calls if called == kind})


def close(got: Cost, expected: Cost, num_bytes: int = MIB) -> None:
    """Equal costs: a latency too small to matter beside the transfer of ``num_bytes`` may be off."""
    assert got.bandwidth == pytest.approx(expected.bandwidth, rel=1e-9)
    assert got.latency == pytest.approx(expected.latency, rel=1e-9, abs=1e-9 * num_bytes / expected.bandwidth)


# The fit


@pytest.mark.parametrize("cost", COSTS, ids=names)
@pytest.mark.parametrize("sizes", [(65536, MIB), (65536, MIB, 8 * MIB), (3, 70, 1000, 123456789)])
def test_fit_recovers_a_line(cost: Cost, sizes: tuple[int, ...]) -> None:
    close(link.fit([(size, cost.seconds(size)) for size in sizes]), cost, max(sizes))


def test_fit_has_no_negative_latency() -> None:
    """Twice the size takes three times as long: the line through both cuts zero below it."""
    samples = [(1000.0, 1.0), (2000.0, 3.0)]
    cost = link.fit(samples)
    assert cost.latency == 0.0 and 2000 / 3 < cost.bandwidth < 1000


def test_fit_of_times_that_do_not_grow_is_the_best_rate() -> None:
    for times in ((1.0, 1.0, 1.0), (1.0, 0.9, 0.8)):
        cost = link.fit(list(zip((10.0, 100.0, 1000.0), times, strict=True)))
        assert cost.bandwidth > 0 and cost.latency >= 0
    assert link.fit([(10, 1.0), (1000, 0.5)]) == Cost(0.0, 2000)
    assert link.fit([(512, 2.0)]) == Cost(0.0, 256)
    assert link.fit([(512, 2.0), (512, 1.0)]) == Cost(0.0, 512)


def test_fit_leans_to_the_large_sizes() -> None:
    cost = Cost(1e-4, 1e9)
    samples = [(size, cost.seconds(size)) for size in (MIB, 8 * MIB, 64 * MIB)]
    disturbed = link.fit([(65536, 2 * cost.seconds(65536)), *samples])
    assert disturbed.seconds(64 * MIB) == pytest.approx(cost.seconds(64 * MIB), rel=1e-2)


# measure


@pytest.mark.parametrize("world", [2, 3, 8])
@pytest.mark.parametrize("cost", COSTS, ids=names)
def test_measure_recovers_every_kind(cost: Cost, world: int) -> None:
    kinds = (*KINDS, PAIRWISE)
    costs = {kind: Cost(cost.latency * (i + 1), cost.bandwidth / (i + 1)) for i, kind in enumerate(kinds)}
    run = FakeLink(costs)
    found = link.measure(run, alone, world, 1, kinds)
    assert (found.world, found.nodes, set(found.costs)) == (world, 1, set(kinds))
    for kind in kinds:
        close(found.costs[kind], costs[kind], max(run.sizes(kind)))


@pytest.mark.parametrize("world", [2, 3, 8])
def test_measure_counts_bytes_as_choose_does(world: int) -> None:
    """The whole tensor has about the size asked for, whatever a kind's bytes count, and divides by ranks."""
    run = FakeLink(dict.fromkeys((*KINDS, PAIRWISE), Cost(1e-5, 1e12)))
    link.measure(run, alone, world, 1, (*KINDS, PAIRWISE), sizes=(MIB,))
    part = MIB // (4 * world) * 4
    expected = {"all_gather": part, "reduce_scatter": part, PAIRWISE: part * (world - 1)}
    for kind in (*KINDS, PAIRWISE):
        assert run.sizes(kind) == [expected.get(kind, part * world)]


def test_a_fast_link_is_timed_at_every_size_three_times_after_a_warm_up() -> None:
    run = FakeLink({"broadcast": Cost(1e-5, 1e11)})
    link.measure(run, alone, 2, 1, ["broadcast"])
    assert [num_bytes for _, num_bytes in run.calls] == [
        link.SIZES[0],
        *(size for size in link.SIZES for _ in range(link.REPETITIONS)),
    ]


@pytest.mark.parametrize("world", [2, 8])
def test_a_slow_link_is_left_early(world: int) -> None:
    """1 Gbit/s, each kind with the bandwidth that a ring has there."""
    bus, p = 125e6, world - 1
    bandwidths = (bus / p, bus / p, bus * world / (2 * p), bus * world / p, bus, bus)
    kinds = (*KINDS, PAIRWISE)
    run = FakeLink({k: Cost(1e-4, b) for k, b in zip(kinds, bandwidths, strict=True)})
    found = link.measure(run, alone, world, 1, kinds)
    assert run.clock < 1
    for kind in kinds:
        assert len(run.sizes(kind)) in (2, 3)
        assert run.costs[kind].seconds(run.sizes(kind)[-1]) < link.ENOUGH_SECONDS
        close(found.costs[kind], run.costs[kind])


def test_a_very_slow_link_is_timed_at_one_size() -> None:
    run = FakeLink({"broadcast": Cost(0.0, 1e5)})
    assert link.measure(run, alone, 2, 1, ["broadcast"]).costs["broadcast"].bandwidth == pytest.approx(1e5)
    assert run.sizes("broadcast") == [link.SIZES[0]] and len(run.calls) == 3


@pytest.mark.parametrize("bandwidth", [125e6, 25e9])
def test_connections_that_a_size_sets_up_do_not_count(bandwidth: float) -> None:
    fake = FakeLink({"broadcast": Cost(1e-5, bandwidth)})

    def run(kind: str, num_bytes: int) -> float:
        first = num_bytes not in fake.sizes(kind)
        return fake(kind, num_bytes) + (0.3 if first else 0.0)

    close(link.measure(run, alone, 2, 1, ["broadcast"]).costs["broadcast"], fake.costs["broadcast"])


def test_the_slowest_rank_counts() -> None:
    run = FakeLink({"broadcast": Cost(1e-5, 1e9)})
    found = link.measure(run, lambda times: [2 * t for t in times], 2, 1, ["broadcast"])
    close(found.costs["broadcast"], Cost(2e-5, 5e8))


def test_one_rank_has_no_link() -> None:
    assert link.measure(FakeLink({}), alone, 1, 1) == Link(1, 1, {})


# On real ranks


def measured(group: dist.ProcessGroup) -> Link:
    return link.measure_backend(group._get_backend(CPU), CPU, (*KINDS, PAIRWISE))


@pytest.mark.parametrize("size", [2, 3])
def test_all_ranks_hold_the_same_link(ranks: Ranks, size: int) -> None:
    links = ranks.run(size, measured)
    assert links == [links[0]] * size
    assert (links[0].world, links[0].nodes, set(links[0].costs)) == (size, 1, {*KINDS, PAIRWISE})
    assert all(cost.latency >= 0 and cost.bandwidth > 0 for cost in links[0].costs.values())
    speeds = {Mode.DENSE: CodecSpeed(*[Cost(0.0, 2e9)] * 3)}
    for kind in KINDS:
        predict(kind, MIB, 2, links[0], speeds, default_ratios("bfloat16"))  # has what a prediction needs


def agreed(group: dist.ProcessGroup) -> tuple[list[float], dict[Mode, CodecSpeed]]:
    rank = group.rank()
    agree = link.native_agree(group._get_backend(CPU), CPU)
    mine = CodecSpeed(Cost(1e-5 * (rank + 1), 1e9 * (rank + 1)), Cost(rank, 3e9), Cost(0.0, 1e9), True)
    return agree([rank, -rank, 0.1]), link.agree_codec({Mode.DENSE: mine}, agree)


def test_ranks_agree_on_the_slowest(ranks: Ranks) -> None:
    results = ranks.run(3, agreed)
    assert results == [results[0]] * 3
    numbers, speeds = results[0]
    assert numbers == [2, 0, 0.1]
    speed = speeds[Mode.DENSE]
    assert (speed.encode.latency, speed.decode.latency) == pytest.approx((3e-5, 2))
    assert (speed.encode.bandwidth, speed.decode.bandwidth) == pytest.approx((1e9, 3e9))
    assert speed.batched


# The codec


def check_codec(device: torch.device) -> None:
    before = torch.random.get_rng_state()
    speeds = link.measure_codec(device)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert set(speeds) == {Mode.FAST, Mode.DENSE}
    for speed in speeds.values():
        for cost in (speed.encode, speed.decode, speed.decode_sum):
            assert cost.latency >= 0 and cost.bandwidth > 0


def test_measure_codec() -> None:
    check_codec(CPU)
    assert set(link.measure_codec(CPU, [Mode.FAST])) == {Mode.FAST}


@pytest.mark.gpu
def test_measure_codec_on_a_gpu() -> None:
    check_codec(torch.device("cuda"))
