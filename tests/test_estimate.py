"""What Inductor's overlap scheduler is told, on graphs as it sees them, by a switch with given numbers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from test_switch import MIB, switch
from torch import fx
from torch.testing._internal.distributed.fake_pg import FakeStore

from zipccl_hooks import Policy, compile, compressed, estimate_ms

BF16 = torch.bfloat16
ops = torch.ops._c10d_functional


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> Iterator[dist.ProcessGroup]:
    """Two ranks that do nothing, over 25 GB/s."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    slow = switch(25e9)
    monkeypatch.setattr(compile, "known_switch", lambda group, device: slow)
    with compressed():
        yield dist.group.WORLD
    dist.destroy_process_group()


def node(op: Any, numel: int | torch.SymInt, *arguments: Any, dtype: torch.dtype = BF16) -> fx.Node:
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.empty(numel, dtype=dtype, device="meta")
    return graph.call_function(op, (x, *arguments))


def test_it_is_the_switchs_choice(group: dist.ProcessGroup) -> None:
    name, numel = group.group_name, 32 * MIB
    cases = [
        (node(ops.all_gather_into_tensor.default, numel, 2, name), "all_gather_into_tensor", 64),
        (node(ops.reduce_scatter_tensor.default, 2 * numel, "sum", 2, name), "reduce_scatter_tensor", 64),
        (node(ops.all_reduce.default, numel, "avg", name), "all_reduce", 64),
        (node(ops.all_to_all_single.default, numel, [1, 1], [1, 1], name), "all_to_all_single", 64),
    ]
    for collective, called, mib in cases:
        expected = switch(25e9).expected(called, mib * MIB, BF16, "auto")
        assert expected.plan is not None
        assert estimate_ms(collective) == 1e3 * expected.plan.seconds < 1e3 * expected.native
        latency = estimate_ms(collective, 0)
        assert latency is not None and 0 < latency < 0.1


def test_a_fast_link_takes_its_native_time(group: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile, "known_switch", lambda group, device: switch(1e13))
    gather = node(ops.all_gather_into_tensor.default, 32 * MIB, 2, group.group_name)
    assert estimate_ms(gather) == pytest.approx(1e3 * (1e-5 + 64 * MIB / 1e13))


def test_the_rest_is_left_to_inductor(group: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    name, gather = group.group_name, ops.all_gather_into_tensor.default
    assert estimate_ms(node(torch.ops.aten.relu.default, MIB)) is None
    assert estimate_ms(node(ops.wait_tensor.default, MIB)) is None
    assert estimate_ms(node(gather, 5, 2, name)) is None
    assert estimate_ms(node(gather, 32 * MIB, 2, name, dtype=torch.int64)) is None
    assert estimate_ms(node(ops.all_reduce.default, 32 * MIB, "max", name)) is None
    with compressed(Policy(enabled=False)):
        assert estimate_ms(node(gather, 32 * MIB, 2, name)) is None
    with compressed(Policy(reduce="native")):
        assert estimate_ms(node(ops.all_reduce.default, 32 * MIB, "sum", name)) is None
        assert estimate_ms(node(gather, 32 * MIB, 2, name)) is not None
    monkeypatch.undo()  # no call has measured this group
    assert estimate_ms(node(gather, 32 * MIB, 2, name)) is None


def test_the_scheduler_asks_it(group: dist.ProcessGroup) -> None:
    """Inductor's own gathering of estimates, where it has that."""
    scheduling = pytest.importorskip("torch._inductor.fx_passes.overlap_scheduling")
    if not hasattr(scheduling, "gather_node_runtime_estimations"):
        pytest.skip("this torch has no such function")
    gather = node(ops.all_gather_into_tensor.default, 32 * MIB, 2, group.group_name)
    gather.meta["val"] = torch.empty(64 * MIB, dtype=BF16, device="meta")
    graph = gather.graph
    waited = graph.call_function(ops.wait_tensor.default, (gather,))
    waited.meta["val"] = gather.meta["val"]
    graph.output(waited)
    found = scheduling.gather_node_runtime_estimations(fx.GraphModule(torch.nn.Module(), graph), estimate_ms)
    assert found[gather] == estimate_ms(gather)
