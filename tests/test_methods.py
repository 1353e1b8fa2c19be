"""Calls of Python at ProcessGroup's methods: what takes the short way to the backend, and what may not."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from ranks import Ranks
from test_c10d import all_gather_single, reduce_scatter_single
from test_collectives import compressed_calls
from torch import Tensor

from zipccl_hooks import Policy, compressed, reset_stats, stats
from zipccl_hooks.methods import HAS_HOOKS, METHODS
from zipccl_hooks.operators import OPERATORS

ALL = Policy(min_bytes=0)


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
        assert dispatched(all_reduce(large)) == HAS_HOOKS
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


def special(group: dist.ProcessGroup, policy: Policy) -> None:
    """Tensors of the usual type that are not what lies at their address, and those of functorch."""
    x, out = torch.arange(1.0, 4501), torch.empty(9000)
    with compressed(policy):
        all_gather_single(out, torch._neg_view(x), group)
        assert out.equal(torch.cat([-x, -x]))
        outs = [torch.empty(4500) for _ in range(2)]
        dist.all_gather(outs, torch._neg_view(x), group)
        assert torch.cat(outs).equal(torch.cat([-x, -x]))
        all_gather_single(out, torch._efficientzerotensor(4500), group)
        assert out.eq(0).all()

        def loss(y: Tensor) -> Tensor:
            dist.all_reduce(summed := y.detach() * 2, group=group)
            return (y * summed).sum()

        assert torch.func.grad(loss)(x).equal(4 * x)
        with pytest.raises(RuntimeError, match="c10d::allreduce_"):
            torch.vmap(lambda y: dist.all_reduce(y, group=group))(torch.ones(2, 4500))
        with pytest.raises((RuntimeError, NotImplementedError)):
            dist.all_reduce(torch.nested.nested_tensor([x, x[:9]]), group=group)
        dist.all_reduce(x, group=group)  # the group is in order
    assert x[0] == 2


@pytest.mark.parametrize("policy", [ALL, Policy(min_bytes=1 << 30)], ids=["compressed", "plain"])
def test_tensors_that_are_no_plain_ones(pair: Ranks, policy: Policy) -> None:
    pair.run(2, special, policy)


def wrapped_by_others(group: dist.ProcessGroup) -> None:
    """Before a scope, in it, and still there in the next one."""
    original = vars(dist.ProcessGroup)["allreduce"]  # what getattr gives does not bind when put back
    seen: list[str] = []

    def wrap(name: str) -> None:
        inner = dist.ProcessGroup.allreduce

        def theirs(self: dist.ProcessGroup, *arguments: Any) -> Any:
            seen.append(name)
            return inner(self, *arguments)

        dist.ProcessGroup.allreduce = theirs  # type: ignore[method-assign, assignment]

    def all_reduce() -> list[str]:
        seen.clear()
        dist.all_reduce(torch.ones(9000), group=group)
        dist.all_reduce(torch.ones(9, dtype=torch.int64), group=group)
        return seen

    try:
        wrap("early")
        with compressed(ALL):
            assert all_reduce() == ["early"] * 2
            wrap("late")
            assert all_reduce() == ["late", "early"] * 2
        assert all_reduce() == ["late", "early"] * 2
        with compressed(ALL):
            assert all_reduce() == ["late", "early"] * 2
    finally:
        dist.ProcessGroup.allreduce = original
    assert compressed_calls(group, "all_reduce") == 3


def test_wrappers_of_others_see_every_call(pair: Ranks) -> None:
    pair.run(2, fresh, wrapped_by_others)


def test_arguments_are_those_of_the_schemas() -> None:
    operators = {one.name: one for one in OPERATORS}
    for method in METHODS:
        options, found = method.options(), {"Tensor? sparse_indices": None}
        for name, value in (
            ("reduceOp", dist.ReduceOp.MAX),
            ("rootRank", 3),
            ("rootTensor", 4),
            ("asyncOp", False),
        ):
            if hasattr(options, name):
                setattr(options, name, value)
        found |= {"int root_rank": 3, "int root_tensor": 4, "bool async_op=True": False}
        found |= {
            "int[] output_split_sizes": [5],
            "int[] input_split_sizes": [6],
            "ProcessGroup process_group": 0,
        }
        given: list[Any] = [f"tensors {k}" for k in range(len(method.levels))]
        arguments = method.arguments(0, [*given, *([[5], [6]] * method.splits), options], options)  # type: ignore[arg-type]
        names = operators[method.operator].schema.split(" ->")[0].strip("()").split(", ")
        for argument, name in zip(arguments, names, strict=False):
            if "Tensor" in name and "?" not in name:
                assert argument == given.pop(0)
            elif name == "ReduceOp reduce_op":
                assert argument == dist.ReduceOp.MAX
            else:
                assert argument == found[name], (method.name, name)
        assert not given and names[len(arguments) - 1].startswith("bool async_op")


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
            before = stats(group).total.compressed_calls
            call().wait()
            assert stats(group).total.compressed_calls == before + 1, number
        with pytest.raises(TypeError, match="incompatible function arguments"):
            group.allreduce()
        options = dist.AllreduceOptions()
        for wrong in (5, torch.ones(1, 300)):
            with pytest.raises(TypeError, match="incompatible function arguments"):
                group.allreduce(wrong, options)
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


def synchronized(group: dist.ProcessGroup) -> None:
    x = torch.ones(9000)
    with compressed(ALL):
        dist.all_reduce(torch.ones(9000), group=group)  # connected
        if group.rank() == 1:
            time.sleep(0.5)
        work = dist.all_reduce(x, group=group, async_op=True)
        work.synchronize()
    assert work.is_completed() and x.eq(2).all()


@pytest.mark.skipif(HAS_HOOKS, reason="c10d.py's works are torch's, of futures, which wait in wait only")
def test_synchronize_waits(pair: Ranks) -> None:
    pair.run(2, synchronized)


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
        dist.all_reduce(torch.ones(9), dist.ReduceOp.MAX, group)
    group.unregister_pre_hook(7)
    assert len(seen) == 2


@pytest.mark.skipif(not HAS_HOOKS, reason="torch 2.14's groups have hooks")
def test_hooks_of_a_group_see_what_stays_plain(pair: Ranks) -> None:
    pair.run(2, hooked)
