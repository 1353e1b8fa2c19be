"""The switch's choices from given measurements; test_cuda_collectives.py has it at work."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from zipccl_hooks import explain, link, nodes
from zipccl_hooks import switch as switch_module
from zipccl_hooks.channel import KEPT, LAG, LARGE, Flow
from zipccl_hooks.choose import CROSS, KINDS, LOCAL, Cost, Link
from zipccl_hooks.exchange import Call
from zipccl_hooks.format import Mode
from zipccl_hooks.scale import H200
from zipccl_hooks.switch import KIND, LOOK, RETRY, REVIEW, Switch

MIB = 2**20
BF16, FP32 = torch.bfloat16, torch.float32


def switch(bandwidth: float, world: int = 2, least_seconds: float = 0.0) -> Switch:
    made = Switch.__new__(Switch)  # without measuring
    made.link = made.flat = Link(world, 1, {kind: Cost(1e-5, bandwidth) for kind in KINDS})
    made.speeds, made.least_seconds, made._kinds = H200, least_seconds, {}
    made._last, made._decoding = None, SimpleNamespace(query=lambda: True)  # type: ignore[assignment]
    return made


def run(
    chooser: Switch,
    calls: int,
    ratios: list[float],
    dtype: torch.dtype = BF16,
    num_bytes: int | None = 64 * MIB,
) -> list[Mode | None]:
    """The choices for so many all_gathers whose data show these ratios."""
    chosen = []
    for _ in range(calls):
        mode = chooser.choose("all_gather", num_bytes, dtype, "auto")
        if mode is not None:
            call = Call(None, "all_gather", dtype, mode)  # type: ignore[arg-type]
            call.ratios = ratios
            chooser.kind("all_gather", num_bytes, dtype, "auto").learn(call)
        chosen.append(mode)
    return chosen


@pytest.mark.parametrize("name", KIND)
@pytest.mark.parametrize("dtype", [BF16, FP32, torch.float16, torch.float8_e5m2])
def test_slow_and_fast_links(name: str, dtype: torch.dtype) -> None:
    assert switch(1e9).choose(name, 256 * MIB, dtype, "auto") is not None
    assert switch(1e13).choose(name, 256 * MIB, dtype, "auto") is None
    assert switch(1e9).choose(name, 256 * MIB, dtype, "fast") == Mode.FAST


def test_the_hosts_time_counts() -> None:
    """Through host memory, 16 MiB: native takes 0.35 ms, which an exchange takes the host alone."""
    assert switch(25e9).choose("all_gather", 8 * MIB, BF16, "auto") is not None
    assert switch(25e9, least_seconds=5e-4).choose("all_gather", 8 * MIB, BF16, "auto") is None
    assert switch(25e9, least_seconds=5e-4).choose("all_gather", 256 * MIB, BF16, "auto") == Mode.DENSE


def test_data_that_do_not_shrink_go_plainly_and_are_tried_again() -> None:
    chooser = switch(3e9)
    hard = run(chooser, LAG + 1 + RETRY + 2 * LAG + 1 + 5, [0.99])
    tried = [None if mode is None else "tried" for mode in hard]
    expected = ["tried"] * (LAG + 1) + [None] * RETRY + ["tried"] * (2 * LAG + 1) + [None] * 5
    assert tried == expected
    # When they shrink again, the next trial finds out, and it stays.
    easy = run(chooser, 3 * RETRY, [1.49])
    assert None in easy and None not in easy[RETRY:]


def watch(chooser: Switch, complete: bool, others: list[int], calls: int) -> list[Mode | None]:
    """Choices for calls on whose issue the last one is complete or not, and what another rank saw of them."""
    chooser._comm = SimpleNamespace(gather_in_turn=lambda row: [row, others])  # type: ignore[assignment]
    chosen = []
    for _ in range(calls):
        chosen += run(chooser, 1, [1.44])
        kind = chooser.kind("all_gather", 64 * MIB, BF16, "auto")
        if kind.watched:
            chooser.issuing(kind)
            chooser.issued(SimpleWork(complete))
    return chosen


class SimpleWork(dist.Work):
    def __init__(self, complete: bool) -> None:
        super().__init__()
        self._complete = complete

    def is_completed(self) -> bool:
        return self._complete


@pytest.mark.parametrize(("complete", "others"), [(True, [0, 31]), (False, [16, 31]), (False, [15, 31])])
def test_where_the_device_waits_for_the_host_little_gain_is_none(complete: bool, others: list[int]) -> None:
    """64 MiB at 90 GB/s: less than 0.2 ms of 0.75 is to be saved."""
    chooser = switch(90e9, least_seconds=1e-4)
    *watched, after = watch(chooser, complete, others, LOOK + 1)
    host_bound = complete or others[0] == 16
    assert watched == [None] * LOOK and (after is None) == host_bound
    explained = chooser.explain("all_gather", 32 * MIB, BF16, "auto")
    assert ("the device waits for the host" in explained) == host_bound
    # Looked at again, and what it finds then counts.
    kind = chooser.kind("all_gather", 64 * MIB, BF16, "auto")
    stood = 0
    while not kind.watched:
        (again,) = watch(chooser, complete, others, 1)
        stood += 1
        assert (again is None) == host_bound or kind.watched
    assert 0.9 * RETRY < stood <= RETRY
    assert (watch(chooser, not complete, [0, 31], LOOK)[-1] is None) == (not complete)


def test_a_large_gain_is_taken_at_once() -> None:
    assert run(switch(25e9, least_seconds=1e-4), 1, [1.49], num_bytes=256 * MIB) == [Mode.DENSE]


def test_data_that_shrink_much_less_are_looked_at_at_once() -> None:
    """Not only when REVIEW calls are over; a little less waits."""
    chooser = switch(25e9)
    assert None not in run(chooser, LAG + 1 + 5, [1.49])
    assert None not in run(chooser, 5, [1.45])
    assert [mode is None for mode in run(chooser, 4, [1.0])] == [False, True, True, True]


def test_one_mode_tells_of_the_other() -> None:
    """fp32 is tried as if it held bf16 values. Once one mode showed that it does not, the other is not."""
    chosen = run(switch(25e9), 10 * REVIEW, [1.17], FP32)
    assert len({mode for mode in chosen if mode is not None}) == 1
    assert None not in run(switch(25e9), 10 * REVIEW, [2.9], FP32)


def test_all_ranks_choose_alike() -> None:
    ratios = [1.2, 1.4]
    assert run(switch(10e9), 3000, ratios) == run(switch(10e9), 3000, ratios)


def test_fast_links_ask_for_more() -> None:
    chooser = switch(220e9)
    prediction = chooser.expected("all_gather", 512 * MIB, BF16, "auto")
    assert 1.05 < prediction.gain < 1.25 and prediction.plan is None


def test_sizes_that_no_rank_knows_are_decided_alike() -> None:
    chooser = switch(3e9)
    assert chooser.choose("all_to_all_single", None, BF16, "auto") == Mode.DENSE
    assert switch(1e13).choose("all_to_all_single", None, BF16, "auto") is None


def test_explain() -> None:
    chooser = switch(3e9)
    text = chooser.explain("all_gather", 32 * MIB, BF16, "auto")
    assert text.startswith("all_gather of 64.0 MiB, 2 ranks") and "assumed" in text
    run(chooser, 1, [1.4])
    assert "Ratios: measured." in chooser.explain("all_gather", 32 * MIB, BF16, "auto")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("reduce", 5, BF16), "op: expected one of"),
        (("all_gather", 5, torch.int64), "dtype: expected one that is compressed, got torch.int64"),
        (("all_gather", 5, BF16, object()), "group: expected one of this rank's with NCCL"),
    ],
)
def test_explain_of_what_it_cannot(arguments: tuple, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        explain(*arguments)


def test_nodes_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inside the node with its ranks, between nodes with as many as there are; and only if there are any."""
    seen = []

    def measure(run: object, agree: object, world: int, num_nodes: int, kinds: list[str]) -> Link:
        seen.append((run, world, num_nodes, kinds))
        return Link(world, num_nodes, {kinds[0]: Cost(world * 1e-6, 1e9)})

    columns = [[0, 4], [1, 5], [2, 6], [3, 7]]
    between = SimpleNamespace(backend="between")
    tree = SimpleNamespace(columns=columns, inside="inside", local=2, node=1, channel=between)
    monkeypatch.setattr(nodes, "tree", lambda comm, channel: tree)
    monkeypatch.setattr(link, "backend_run", lambda *arguments: arguments[:3])
    monkeypatch.setattr(link, "measure", measure)
    flat = switch(1e9, 8).link
    channel = SimpleNamespace(comm=None, device=None)
    found = switch_module._with_nodes(flat, channel, max)  # type: ignore[arg-type]
    assert (found.world, found.nodes) == (8, 2)
    assert found.costs == {**flat.costs, LOCAL: Cost(4e-6, 1e9), CROSS: Cost(2e-6, 1e9)}
    assert seen == [
        (("inside", 2, 4), 4, 1, ["reduce_scatter"]),
        (("between", 1, 2), 2, 2, ["all_to_all"]),
    ]
    monkeypatch.setattr(nodes, "tree", lambda comm, channel: None)
    assert switch_module._with_nodes(flat, channel, max) is flat  # type: ignore[arg-type]


# Room


def test_room_changes_seldom() -> None:
    """Raised at once; lowered at once only by much, else to what KEPT calls needed."""
    flow = Flow()
    seen = []

    def needs(*rates: int) -> list[int | None]:
        seen.clear()
        for rate in rates:
            flow.set_rate(rate)
            seen.append(flow.rate)
        return list(dict.fromkeys(seen))

    assert needs(1000) == [1024]
    assert needs(900, 1024, 700) == [1024]
    assert needs(1025) == [1056]
    assert needs(*[800, 901] * (KEPT // 2)) == [1056, 928] and seen.index(928) == KEPT - 1
    assert needs(*[700] * (KEPT - 1), 928) == [928]
    assert needs(LARGE + 2000) == [LARGE + 2016]
    assert needs(2016) == [LARGE + 2016]
    assert needs(2015) == [2016]
