"""Calls of Python at ProcessGroup's methods: what takes the short way to the backend, and what may not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from ranks import Ranks
from test_c10d import reduce_scatter_single
from test_collectives import compressed_calls
from torch import Tensor

from zipccl_hooks import Policy, compressed, reset_stats, stats

ALL = Policy(min_bytes=0)
HAS_HOOKS = hasattr(dist.ProcessGroup, "register_pre_hook")


@pytest.fixture(scope="module")
def pair() -> Iterator[Ranks]:
    pool = Ranks(2)
    yield pool
    pool.stop()


def dispatched(call: Callable[[], Any]) -> int:
    """How many collectives a call sends through the dispatcher."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        call()
    return sum(event.key.startswith("c10d::") for event in profiler.events())


def short_way(group: dist.ProcessGroup) -> None:
    integers, small, large = torch.ones(90, dtype=torch.int64), torch.ones(9), torch.ones(9000)

    def all_reduce(x: Tensor) -> Callable[[], Any]:
        return lambda: dist.all_reduce(x, group=group)

    assert dispatched(all_reduce(integers)) == dispatched(all_reduce(large)) == 1
    with compressed(Policy(min_bytes=100)):
        for x in integers, small:
            assert dispatched(all_reduce(x)) == HAS_HOOKS
        assert dispatched(all_reduce(large)) == 0
        parameter = torch.nn.Parameter(torch.ones(9))
        assert dispatched(all_reduce(parameter)) == 1
        with torch.no_grad():
            assert dispatched(all_reduce(parameter)) == HAS_HOOKS
    with compressed(Policy(enabled=False)):
        assert dispatched(all_reduce(large)) == HAS_HOOKS
    assert dispatched(all_reduce(large)) == 1
    assert [x[0].item() for x in (integers, small, large, parameter)] == [4, 2, 16, 4]


def test_a_call_of_python_passes_the_dispatcher_by(pair: Ranks) -> None:
    pair.run(2, short_way)


def wrapped_by_others(group: dist.ProcessGroup) -> None:
    original, seen = dist.ProcessGroup.allreduce, []
    with compressed(ALL):
        ours = dist.ProcessGroup.allreduce

        def theirs(self: dist.ProcessGroup, *arguments: Any) -> Any:
            seen.append(self.group_name)
            return ours(self, *arguments)

        dist.ProcessGroup.allreduce = theirs  # type: ignore[method-assign, assignment]
        dist.all_reduce(torch.ones(9000), group=group)
    try:
        dist.all_reduce(torch.ones(9000), group=group)
    finally:
        dist.ProcessGroup.allreduce = original  # type: ignore[method-assign]
    assert seen == [group.group_name] * 2
    assert stats(group).calls["all_reduce"].calls == 1


def test_wrappers_of_others_stay(pair: Ranks) -> None:
    pair.run(2, fresh, wrapped_by_others)


def forms(group: dist.ProcessGroup) -> None:
    """Those of the methods that torch.distributed's functions do not use."""
    x = torch.ones(9000)
    calls: list[Callable[[], Any]] = [
        lambda: group.allreduce(x),
        lambda: group.allreduce([x]),
        lambda: group.allreduce([x], dist.ReduceOp.SUM),
        lambda: group.allreduce(tensors=[x], opts=dist.AllreduceOptions()),
        lambda: group.broadcast(x, 0),
    ]
    with compressed(ALL):
        for number, call in enumerate(calls, 1):
            before = sum(c.compressed_calls for c in stats(group).calls.values())
            call().wait()
            assert sum(c.compressed_calls for c in stats(group).calls.values()) == before + 1, number
        with pytest.raises(TypeError, match="incompatible function arguments"):
            group.allreduce()
        with pytest.raises(TypeError, match="incompatible function arguments"):
            group.allreduce(5, dist.AllreduceOptions())
    assert x.eq(16).all()


def test_every_form_of_a_method(pair: Ranks) -> None:
    pair.run(2, forms)


def subclasses(group: dist.ProcessGroup, policy: Policy) -> None:
    """Only the first tensor tells dtype and device; but any may be one that the dispatcher must unwrap."""
    with compressed(policy):
        summed = functional.all_reduce(torch.ones(9000), "sum", group)
        assert type(summed) is functional.AsyncCollectiveTensor
        out, other = torch.empty(4500), torch.empty(4500)
        assert dispatched(lambda: reduce_scatter_single(out, summed, group=group)) > 0
        halves = list(functional.all_reduce(torch.ones(2, 4500), "sum", group))
        assert type(halves[0]) is functional.AsyncCollectiveTensor
        assert dispatched(lambda: dist.reduce_scatter(other, halves, group=group)) > 0
    assert out.eq(4).all() and other.eq(4).all()


@pytest.mark.parametrize("policy", [ALL, Policy(min_bytes=1 << 30)], ids=["compressed", "plain"])
def test_subclasses_anywhere_in_a_call(pair: Ranks, policy: Policy) -> None:
    pair.run(2, subclasses, policy)


def registered(group: dist.ProcessGroup) -> None:
    """Works that torch keeps for wait_tensor, of compressed calls and of others."""
    module = torch._C._distributed_c10d
    with compressed(ALL), functional.allow_inflight_collective_as_graph_input_ctx():
        for x in torch.ones(9000), torch.ones(9000, dtype=torch.int64):
            dist.all_reduce(x, group=group, async_op=True)
            assert module._get_work_registry_size() == 1
            torch.ops._c10d_functional.wait_tensor(x)
            assert module._get_work_registry_size() == 0 and x.eq(2).all()
    assert compressed_calls(group, "all_reduce") == 1


def test_works_are_registered(pair: Ranks) -> None:
    pair.run(2, fresh, registered)


def fresh(group: dist.ProcessGroup, function: Callable[[dist.ProcessGroup], None]) -> None:
    reset_stats(group)
    function(group)


def hooked(group: dist.ProcessGroup) -> None:
    seen: list[str] = []
    group.register_pre_hook(7, lambda arguments: seen.append(str(arguments.name)))
    with compressed(ALL):
        dist.all_reduce(torch.ones(9, dtype=torch.int64), group=group)
    group.unregister_pre_hook(7)
    assert len(seen) == 1


@pytest.mark.skipif(not HAS_HOOKS, reason="torch 2.14's groups have hooks")
def test_hooks_of_a_group_see_what_stays_plain(pair: Ranks) -> None:
    pair.run(2, hooked)
