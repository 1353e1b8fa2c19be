"""What is told of a run: numbers for loggers, a line now and then, ranges of the profiler."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator

import pytest
import torch
from ranks import Ranks
from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerActivity, profile

from zipccl_hooks import Policy, collectives, log_every, reset_stats, stats
from zipccl_hooks.counters import FLAT, CallStats, Recorder, Stats


@pytest.fixture(scope="module")
def pair() -> Iterator[Ranks]:
    pool = Ranks(2)
    yield pool
    pool.stop()


def counted() -> Stats:
    gather = CallStats(3, 3000, 2000, Counter(dense=6), Counter({"below min_bytes": 2}), 50)
    return Stats("7", {"all_gather": gather, "all_reduce": CallStats(1, 1000, 500, overflows=1)})


def test_flat_has_the_same_keys_whatever_happened() -> None:
    flat = counted().flat()
    prefixes = ("zipccl", "zipccl/all_gather", "zipccl/all_reduce")
    assert list(flat) == [f"{prefix}/{name}" for prefix in prefixes for name in FLAT]
    assert {type(value) for value in flat.values()} <= {int, float}
    assert flat["zipccl/all_gather/calls"] == 5 and flat["zipccl/all_gather/compressed_calls"] == 3
    assert flat["zipccl/all_gather/ratio"] == 1.5 and flat["zipccl/all_reduce/ratio"] == 2.0
    assert flat["zipccl/ratio"] == 4000 / 2500 and flat["zipccl/overflows"] == 1
    assert Stats("7").flat() == {f"zipccl/{name}": 1.0 if name == "ratio" else 0 for name in FLAT}


def test_summary_is_one_line() -> None:
    expected = "zipccl, group 7: 4 of 6 calls compressed, 0.0 MB as 0.0 MB, ratio 1.600"
    assert counted().summary() == expected


def test_log_every(caplog: pytest.LogCaptureFixture) -> None:
    one = Recorder("3")
    try:
        with caplog.at_level(logging.INFO, "zipccl_hooks"):
            log_every(3)
            for _ in range(4):
                one.compressed("all_reduce", 3_000_000, 2_000_000, Counter())
                one.native("broadcast", "below min_bytes", 10)
            log_every(0)
            one.compressed("all_reduce", 3_000_000, 2_000_000, Counter())
    finally:
        log_every(0)
    lines = [record.getMessage() for record in caplog.records if "calls compressed" in record.getMessage()]
    assert lines == [
        "zipccl, group 3: 2 of 3 calls compressed, 6.0 MB as 4.0 MB, ratio 1.500",
        "zipccl, group 3: 3 of 6 calls compressed, 9.0 MB as 6.0 MB, ratio 1.500",
    ]


@pytest.mark.parametrize("calls", [-1, 2.5, "often"])
def test_log_every_refuses(calls: object) -> None:
    with pytest.raises(ValueError, match="calls: expected an integer of at least 0"):
        log_every(calls)  # type: ignore[arg-type]


def ranges_in(profiler: profile) -> dict[str, list[int]]:
    """Bytes of the ranges by name, of a profile that recorded shapes."""
    found: dict[str, list[int]] = {}
    for event in profiler.events():
        # Operators have names like that, too; their input is a tensor.
        if event.name.startswith("zipccl::") and isinstance(event.concrete_inputs[0], int):
            found.setdefault(event.name.removeprefix("zipccl::"), []).append(event.concrete_inputs[0])
    return found


def ranges(group: torch.distributed.ProcessGroup) -> tuple[dict[str, list[int]], dict[str, float]]:
    """Bytes of the ranges by name."""
    x = torch.randn(5003).bfloat16()
    collectives.all_reduce(x, group=group, policy=Policy(min_bytes=0))  # the thread is there
    reset_stats(group)
    every_thread = _ExperimentalConfig(profile_all_threads=True)
    activities = [ProfilerActivity.CPU]
    with profile(activities=activities, record_shapes=True, experimental_config=every_thread) as profiler:
        collectives.all_reduce(x, group=group, policy=Policy(min_bytes=0))
    return ranges_in(profiler), stats(group).flat()


def test_profiler_of_all_threads_sees_what_a_call_is_made_of(pair: Ranks) -> None:
    (first, flat), (second, _) = pair.run(2, ranges)
    for mine, theirs, shards in ((first, second, [3072, 1931]), (second, first, [1931, 3072])):
        # The peer's shard of this rank's tensor, then this rank's sum; what comes is what the peer sent.
        assert mine["encode"] == [2 * shards[1], 2 * shards[0]]
        assert mine["exchange"] == mine["decode"]
        assert theirs["encode"] == [2 * shards[0], 2 * shards[1]]
        assert all(0.6 < got / raw < 1 for got, raw in zip(mine["decode"], theirs["encode"], strict=True))
    assert flat["zipccl/all_reduce/compressed_calls"] == 1


LOGS = """
import tempfile, torch, torch.distributed as dist
from zipccl_hooks import collectives
dist.init_process_group("gloo", init_method="file://" + tempfile.mktemp(), rank=0, world_size=1)
collectives.all_reduce(torch.ones(5))
dist.destroy_process_group()
"""


def test_torch_logs_shows_our_loggers() -> None:
    env = {**os.environ, "TORCH_LOGS": "+zipccl_hooks"}
    done = subprocess.run([sys.executable, "-c", LOGS], capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr
    assert "all_reduce in group 0 goes native: below min_bytes (20 bytes)" in done.stderr
