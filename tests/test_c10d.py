"""Compression underneath torch.distributed: at 2 ranks the bits of plain gloo, and what is compressed."""

from __future__ import annotations

import dataclasses
import logging
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import Ranks
from test_collectives import assert_bits, compressed_calls, data, fresh_pair, rank_order_sum
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from zipccl_hooks import (
    Policy,
    c10d,
    collectives,
    compressed,
    disable,
    enable,
    exchange,
    handshake,
    operators,
    reset_stats,
    stats,
)
from zipccl_hooks.errors import PeerMismatch, ZipcclError
from zipccl_hooks.methods import HAS_HOOKS

ALL = Policy(min_bytes=0)
WORLD = 3
BF16, FP32 = torch.bfloat16, torch.float32
NUMEL = 2 * 8192 + 77


@pytest.fixture(scope="module")
def trio() -> Iterator[Ranks]:
    """Small, as making groups takes everyone."""
    pool = Ranks(WORLD)
    yield pool
    pool.stop()


def counts(group: dist.ProcessGroup) -> dict[str, int]:
    """Compressed calls by name."""
    return {name: c.compressed_calls for name, c in stats(group).calls.items() if c.compressed_calls}


def newer(name: str, older: str) -> Callable[..., Any]:
    return getattr(dist, name, None) or getattr(dist, older)


all_gather_single = newer("all_gather_single", "all_gather_into_tensor")
reduce_scatter_single = newer("reduce_scatter_single", "reduce_scatter_tensor")

# Every collective of torch.distributed: name -> (function of group, tensors, async_op; compressed calls).
Call = Callable[[dist.ProcessGroup, Tensor, bool], tuple[Any, list[Tensor]]]


def root(group: dist.ProcessGroup) -> int:
    return dist.get_global_rank(group, 1)


def all_reduce(group: dist.ProcessGroup, x: Tensor, async_op: bool) -> tuple[Any, list[Tensor]]:
    return dist.all_reduce(x, group=group, async_op=async_op), [x]


def all_reduce_coalesced(group: dist.ProcessGroup, x: Tensor, async_op: bool) -> tuple[Any, list[Tensor]]:
    tensors = [x, x[:100].clone(), x.clone().view(-1, 1)]
    return dist.all_reduce_coalesced(tensors, group=group, async_op=async_op), tensors


def all_gather(group: dist.ProcessGroup, x: Tensor, async_op: bool) -> tuple[Any, list[Tensor]]:
    outs = [torch.empty_like(x) for _ in range(group.size())]
    return dist.all_gather(outs, x, group, async_op), outs


def all_gather_into_tensor(group: dist.ProcessGroup, x: Tensor, async_op: bool) -> tuple[Any, list[Tensor]]:
    out = x.new_empty(group.size() * x.numel())
    return all_gather_single(out, x, group, async_op), [out]


def reduce_scatter(group: dist.ProcessGroup, x: Tensor, async_op: bool) -> tuple[Any, list[Tensor]]:
    out, parts = torch.empty_like(x), [x * (k + 1) for k in range(group.size())]
    return dist.reduce_scatter(out, parts, group=group, async_op=async_op), [out]


def reduce_scatter_tensor(group: dist.ProcessGroup, x: Tensor, async_op: bool) -> tuple[Any, list[Tensor]]:
    out, wide = torch.empty_like(x), torch.cat([x * (k + 1) for k in range(group.size())])
    return reduce_scatter_single(out, wide, group=group, async_op=async_op), [out]


def all_to_all_single(group: dist.ProcessGroup, x: Tensor, async_op: bool) -> tuple[Any, list[Tensor]]:
    wide = torch.cat([x * (k + 1) for k in range(group.size())])
    out = torch.empty_like(wide)
    return dist.all_to_all_single(out, wide, group=group, async_op=async_op), [out]


def all_to_all(group: dist.ProcessGroup, x: Tensor, async_op: bool) -> tuple[Any, list[Tensor]]:
    outs = [torch.empty_like(x) for _ in range(group.size())]
    parts = [x * (k + 1) for k in range(group.size())]
    return dist.all_to_all(outs, parts, group, async_op), outs


def broadcast(group: dist.ProcessGroup, x: Tensor, async_op: bool) -> tuple[Any, list[Tensor]]:
    return dist.broadcast(x, root(group), group, async_op), [x]


def gather(group: dist.ProcessGroup, x: Tensor, async_op: bool) -> tuple[Any, list[Tensor]]:
    outs = [torch.empty_like(x) for _ in range(group.size())] if group.rank() == 1 else None
    return dist.gather(x, outs, root(group), group, async_op), outs or []


def scatter(group: dist.ProcessGroup, x: Tensor, async_op: bool) -> tuple[Any, list[Tensor]]:
    out, parts = torch.empty_like(x), [x * (k + 1) for k in range(group.size())]
    return dist.scatter(out, parts if group.rank() == 1 else None, root(group), group, async_op), [out]


CALLS: dict[str, Call] = {
    call.__name__: call
    for call in (
        all_reduce, all_reduce_coalesced, all_gather, all_gather_into_tensor, reduce_scatter,
        reduce_scatter_tensor, all_to_all_single, all_to_all, broadcast, gather, scatter,
    )
}  # fmt: skip


# Plain gloo has no list form of all_to_all before torch 2.13.
GLOO_CALLS = {n: c for n, c in CALLS.items() if n != "all_to_all" or hasattr(dist, "all_gather_single")}


class Watching(TorchDispatchMode):
    """Sees operators on their way, as CommDebugMode does: Python's calls go through the dispatcher, too."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.namespace == "c10d":
            self.seen.append(function.overloadpacket.__name__)
        return function(*args, **(kwargs or {}))


def every_collective(group: dist.ProcessGroup, async_op: bool, watching: bool) -> dict[str, int]:
    plain = {}
    for name, call in GLOO_CALLS.items():
        _, plain[name] = call(group, data(group.rank(), NUMEL, BF16), False)
    reset_stats(group)
    # One rank alone watches: nothing may depend on it.
    watch = Watching() if watching and group.rank() == 1 else nullcontext()
    with compressed(ALL), watch as watched:
        for name, call in GLOO_CALLS.items():
            work, outputs = call(group, data(group.rank(), NUMEL, BF16), async_op)
            assert (work is not None) == async_op
            if async_op:
                work.wait()
                future = work if name == "all_reduce_coalesced" else work.get_future()
                assert [len(x) for x in future.wait()] == [len(x) for x in outputs]
            for got, expected in zip(outputs, plain[name], strict=True):
                assert_bits(got, expected)
    assert watched is None or len(watched.seen) == len(GLOO_CALLS)
    return counts(group)


@pytest.mark.parametrize("watching", [False, True], ids=["methods", "dispatcher"])
@pytest.mark.parametrize("async_op", [False, True], ids=["sync", "async"])
def test_every_collective_is_compressed(trio: Ranks, async_op: bool, watching: bool) -> None:
    assert trio.run(2, every_collective, async_op, watching) == [dict.fromkeys(GLOO_CALLS, 1)] * 2


def moved_at_three(group: dist.ProcessGroup) -> None:
    rank, size = group.rank(), group.size()
    inputs = [data(r, NUMEL, FP32) for r in range(size)]
    with compressed(ALL):
        assert_bits(torch.cat(all_gather(group, inputs[rank], False)[1]), torch.cat(inputs))
        assert_bits(all_reduce(group, inputs[rank].clone(), False)[1][0], rank_order_sum(inputs))
        assert_bits(broadcast(group, inputs[rank].clone(), False)[1][0], inputs[1])
        gathered = gather(group, inputs[rank], True)
        gathered[0].wait()
        assert_bits(torch.cat(gathered[1] or inputs), torch.cat(inputs))


def test_three_ranks(trio: Ranks) -> None:
    trio.run(3, moved_at_three)


def passed_on(group: dist.ProcessGroup) -> None:
    """What is not compressed gives what it gives plain, and is no compressed call."""
    rank, size = group.rank(), group.size()
    reset_stats(group)
    with compressed(Policy(min_bytes=1000)):
        x = torch.full((900,), rank + 1)
        dist.all_reduce(x, group=group)
        assert x.eq(3).all()
        assert not stats(group).calls  # integers are not even counted
        y = torch.full((249,), rank + 1.0)
        dist.all_reduce(y, group=group)
        assert y.eq(3).all()
        y = torch.full((900,), rank + 1.0)
        dist.all_reduce(y, dist.ReduceOp.MAX, group)
        assert y.eq(2).all()
        dist.barrier(group)
        objects = [None] * size
        dist.all_gather_object(objects, {"rank": rank}, group)
        assert objects == [{"rank": r} for r in range(size)]
        one = dist.P2POp(dist.isend, torch.ones(900), 1 - rank, group)
        other = dist.P2POp(dist.irecv, torch.zeros(900), 1 - rank, group)
        for work in dist.batch_isend_irecv([one, other]):
            work.wait()
        assert other.tensor.eq(1).all()
        with pytest.raises(
            RuntimeError, match="ProcessGroupGloo::allgather: invalid tensor size"
        ):  # torch's own words
            all_gather_single(torch.empty(7), y, group)
        sparse = torch.eye(900).to_sparse()
        dist.all_reduce(sparse, group=group)
        assert sparse.to_dense().diagonal().eq(2).all()
    native = stats(group).calls["all_reduce"].native_calls
    assert native == {"below min_bytes": 1, "reduce op": 1}
    assert counts(group) == {}


def test_what_is_not_compressed_passes(trio: Ranks) -> None:
    trio.run(2, passed_on)


def mixed_coalesced(group: dist.ProcessGroup) -> None:
    """A coalesced call of tensors that are compressed and others."""
    rank = group.rank()
    for async_op in (False, True):
        reset_stats(group)
        tensors = [data(rank, NUMEL, FP32), torch.full((3,), rank + 1), data(9 + rank, NUMEL, FP32)]
        with compressed(ALL):
            options = dist.AllreduceCoalescedOptions()
            options.asyncOp = async_op
            work = group.allreduce_coalesced(tensors, options)
            work.wait()
            if async_op:
                assert all(x is y for x, y in zip(work.get_future().wait(), tensors, strict=True))
        assert_bits(tensors[0], rank_order_sum([data(r, NUMEL, FP32) for r in (0, 1)]))
        assert tensors[1].eq(3).all()
        assert_bits(tensors[2], rank_order_sum([data(9 + r, NUMEL, FP32) for r in (0, 1)]))
        counted = stats(group).calls["all_reduce_coalesced"]
        assert (counted.compressed_calls, counted.native_calls) == (1, {"dtype torch.int64": 1})


def test_coalesced_calls_of_both_kinds(trio: Ranks) -> None:
    trio.run(2, mixed_coalesced)


def coalescing_manager(group: dist.ProcessGroup) -> dict[str, int]:
    rank, size = group.rank(), group.size()
    xs = [data(10 * k + rank, NUMEL, BF16) for k in range(3)]
    outs = [x.new_empty(size * NUMEL) for x in xs]
    reset_stats(group)
    with compressed(ALL):
        with dist.distributed_c10d._coalescing_manager(group, async_ops=True) as manager:
            for out, x in zip(outs, xs, strict=True):
                all_gather_single(out, x, group)
        manager.wait()
    for k, out in enumerate(outs):
        assert_bits(out, torch.cat([data(10 * k + r, NUMEL, BF16) for r in range(size)]))
    return counts(group)


def test_coalescing_manager(trio: Ranks) -> None:
    assert trio.run(2, coalescing_manager) == [{"all_gather_into_tensor_coalesced": 1}] * 2


def inference(group: dist.ProcessGroup) -> None:
    """Inference tensors, which may be written to in inference mode only, and parameters."""
    with torch.inference_mode(), compressed(ALL):
        x = torch.full((90, 100), 1.5)
        dist.all_reduce(x, group=group)
        dist.all_reduce(x, group=group, async_op=True).wait()
        assert x.eq(6).all()
        strided = torch.full((90, 100), 1.5).t()
        dist.all_reduce(strided, group=group)
        assert strided.eq(3).all()
    parameter = torch.nn.Parameter(torch.full((9000,), 1.5 + group.rank()))
    with compressed(ALL):
        dist.broadcast(parameter, dist.get_global_rank(group, 0), group)
        dist.all_reduce(x, group=group)
    assert parameter.eq(1.5).all() and parameter.requires_grad and x.eq(12).all()


def test_inference_mode(trio: Ranks) -> None:
    trio.run(2, inference)


def premul(group: dist.ProcessGroup, watching: bool) -> None:
    rank, scale = group.rank(), torch.tensor(0.3).item()
    op = dist._make_nccl_premul_sum(0.3)
    inputs = [data(r, NUMEL, FP32) for r in (0, 1)]
    watch = Watching() if watching and rank == 1 else nullcontext()
    with compressed(ALL), watch:
        x = inputs[rank].clone()
        dist.all_reduce(x, op, group)
        assert_bits(x, rank_order_sum(inputs, scale))
        dist.all_reduce_coalesced([y := inputs[rank].clone()], op, group)
        assert_bits(y, rank_order_sum(inputs, scale))
        out = torch.empty(NUMEL)
        reduce_scatter_single(out, torch.cat([inputs[rank]] * 2), op, group)
        assert_bits(out, rank_order_sum(inputs, scale))
        dist.all_reduce(y := inputs[rank].clone(), group=group)
        assert_bits(y, rank_order_sum(inputs))


@pytest.mark.parametrize("watching", [False, True], ids=["methods", "dispatcher"])
def test_factor_of_premul_sum(trio: Ranks, watching: bool) -> None:
    trio.run(2, premul, watching)


class Asking(TorchDispatchMode):
    """Reduces something by another operation while it sees a call."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.group, self.largest = group, torch.full((9000,), group.rank() + 1.0)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.ops.c10d.allreduce_.default:
            functional = torch.ops._c10d_functional
            reduced = functional.all_reduce(self.largest, "max", self.group.group_name)
            self.largest = functional.wait_tensor(reduced)
        return function(*args, **(kwargs or {}))


def nested(group: dist.ProcessGroup) -> None:
    x, factor = torch.full((9000,), group.rank() + 1.0), dist._make_nccl_premul_sum(0.5)
    with compressed(ALL), Asking(group) as asking:
        dist.all_reduce(x, group=group)
        dist.all_reduce(y := x.clone(), factor, group)
    assert x.eq(3).all() and asking.largest.eq(2).all() and y.eq(3).all()


def test_a_call_within_another_has_its_own_operation(trio: Ranks) -> None:
    trio.run(2, nested)


# Scopes


def activation(group: dist.ProcessGroup) -> None:
    group, other = fresh_pair(), dist.new_group(list(range(WORLD)))
    if other.rank() > 1:
        return
    methods = dict(vars(dist.ProcessGroup))
    reset_stats(group)

    def calls_of(count: int) -> None:
        before = compressed_calls(group, "all_reduce")
        dist.all_reduce(torch.ones(9000), group=group)
        assert compressed_calls(group, "all_reduce") - before == count

    calls_of(0)
    enable(ALL)
    try:
        calls_of(1)
        with pytest.raises(RuntimeError, match=r"enabled already, with Policy\(.*min_bytes=0"):
            enable(ALL)
        with compressed(Policy(enabled=False)):
            calls_of(0)
            with compressed(ALL, groups=[group]):
                calls_of(1)
            with compressed(ALL, groups=[other, dist.GroupMember.NON_GROUP_MEMBER]):
                calls_of(0)
        calls_of(1)
        # An explicit call decides for itself.
        collectives.all_reduce(torch.ones(9000), group=group, policy=Policy(enabled=False))
        calls_of(1)
    finally:
        disable()
    disable()
    calls_of(0)
    with pytest.raises(ZeroDivisionError), compressed(ALL):
        calls_of(1)
        raise ZeroDivisionError
    calls_of(0)
    assert c10d._kernels is None
    assert dict(vars(dist.ProcessGroup)) == methods


def test_scopes_nest_and_leave_nothing(trio: Ranks) -> None:
    trio.run(WORLD, activation)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"policy": "fast"}, "policy: expected a Policy or None, got str"),
        ({"groups": [5]}, r"groups\[0\]: expected a ProcessGroup, got int"),
    ],
)
def test_bad_arguments(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        enable(**arguments)
    with pytest.raises(TypeError, match=message), compressed(**arguments):
        pass
    enable()  # it was not
    disable()


def test_another_schema_stays_plain(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:

    first, *rest = operators.OPERATORS
    odd = dataclasses.replace(first, schema=first.schema + "?")
    monkeypatch.setattr(c10d, "OPERATORS", (odd, *rest))
    key = torch._C.DispatchKey.BackendSelect
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            with compressed(ALL):
                assert not first.overload.has_kernel_for_dispatch_key(key)
                assert rest[0].overload.has_kernel_for_dispatch_key(key)
    assert not rest[0].overload.has_kernel_for_dispatch_key(key)
    assert [r.message.split(":")[0] for r in caplog.records] == ["c10d"]
    assert "allreduce_ stays plain: expected schema" in caplog.text


# Ranks that contradict each other, fail, or do not come


@contextmanager
def raising(error: type[Exception]) -> Iterator[list[str]]:
    messages: list[str] = []
    with pytest.raises(error) as caught:
        yield messages
    messages.append(str(caught.value))


def mixed_policies(group: dist.ProcessGroup) -> list[str]:
    own = fresh_pair(seconds=20)
    if group.rank() > 1:
        return []
    with compressed(Policy(min_bytes=4 * group.rank())):
        with raising(PeerMismatch) as messages:
            dist.all_reduce(torch.ones(1), group=own)
        with raising(PeerMismatch):
            dist.all_reduce(torch.ones(9000), group=own)
    return messages


def test_mixed_policies_raise_everywhere(trio: Ranks) -> None:
    first, second = trio.run(WORLD, mixed_policies)[:2]
    for rank, (message,) in enumerate((first, second)):
        assert message.startswith(f"rank {rank}: ranks 0 and 1 compress differently: wire format 1, Policy(")
        assert "min_bytes=0," in message and "min_bytes=4," in message


def mixed_versions(group: dist.ProcessGroup) -> list[str]:
    own, before = fresh_pair(seconds=20), handshake.VERSION
    if group.rank() > 1:
        return []
    handshake.VERSION = before + group.rank()
    try:
        with compressed(ALL), raising(PeerMismatch) as messages:
            dist.all_reduce(torch.ones(9000), group=own)
    finally:
        handshake.VERSION = before
    return messages


def test_mixed_versions_raise_everywhere(trio: Ranks) -> None:
    for rank, (message,) in enumerate(trio.run(WORLD, mixed_versions)[:2]):
        assert message.startswith(f"rank {rank}: ranks 0 and 1 compress differently: wire format 1, Policy(")
        assert " and wire format 2, Policy(" in message


def strange_groups(group: dist.ProcessGroup) -> None:
    """A group that torch.distributed does not know of."""
    rank = group.rank()
    store = dist.PrefixStore("strange", dist.distributed_c10d._get_process_group_store(group))
    strange = dist.ProcessGroup(store, rank, 2)
    gloo = dist.ProcessGroupGloo(store, rank, 2, timedelta(seconds=20))
    strange._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo)
    x = torch.ones(9000)
    with compressed(ALL):
        strange.allreduce([x]).wait()
    assert x.eq(2).all()


def test_groups_of_others_are_left_alone(trio: Ranks) -> None:
    trio.run(2, strange_groups)


def one_enabled(group: dist.ProcessGroup) -> list[str]:
    own = fresh_pair(seconds=2)
    if group.rank() != 0:
        return []
    with compressed(ALL), raising(ZipcclError) as messages:
        dist.all_reduce(torch.ones(9000), group=own)
    return messages


def test_a_rank_that_is_not_enabled_ends_in_the_groups_timeout(trio: Ranks) -> None:
    (message,) = trio.run(WORLD, one_enabled)[0]
    known = (
        r"rank 0: policy of ranks \[1\] not known after 2\.0 s: are all ranks enabled, and know the group as"
    )
    assert re.fullmatch(known + r" '\w+'\?", message)


def missing_rank(group: dist.ProcessGroup) -> None:
    """Rank 1 raises before a compressed call."""
    own = fresh_pair(seconds=3)
    if group.rank() > 1:
        return
    with compressed(ALL):
        dist.all_reduce(torch.ones(9000), group=own)
        if group.rank() == 0:
            with pytest.raises(RuntimeError, match=r"(?i)timed? ?out"):
                dist.all_reduce(torch.ones(9000), group=own)


def test_a_missing_rank_ends_in_the_groups_timeout(trio: Ranks) -> None:
    trio.run(WORLD, missing_rank)


def raises_inside(group: dist.ProcessGroup, underneath: bool) -> str:
    """Rank 1 runs out of memory while it encodes."""
    own = fresh_pair(seconds=3)
    if group.rank() > 1:
        return ""
    x = torch.ones(9000)

    def call() -> None:
        if underneath:
            with compressed(ALL):
                dist.all_reduce(x, group=own)
        else:
            collectives.all_reduce(x, group=own, policy=ALL)

    def encode(*_: Any) -> int:
        raise MemoryError("no room for the payload")

    call()
    with pytest.MonkeyPatch.context() as patch:
        if group.rank() == 1:
            patch.setattr(exchange.Call, "encode", encode)
        try:
            call()
        except Exception as error:
            return f"{type(error).__name__}: {error}"
    return "no error"


@pytest.mark.parametrize("underneath", [True, False])
def test_a_rank_that_raises_inside_a_call_ends_the_others_in_the_groups_timeout(
    trio: Ranks, underneath: bool
) -> None:
    waiting, failed = trio.run(WORLD, raises_inside, underneath)[:2]
    assert failed == "MemoryError: no room for the payload"
    assert re.fullmatch(r"RuntimeError: .*Timed out waiting 3000ms for recv.*", waiting)


def contradiction(group: dist.ProcessGroup) -> str:
    own = fresh_pair()
    rank = group.rank()
    if rank > 1:
        return ""
    x = torch.ones(9000 + rank)
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("zipccl_hooks").addHandler(handler)
    with compressed(ALL):
        with raising(PeerMismatch) as messages:
            dist.all_reduce(x, group=own)
        # Asynchronous: the work and its future have it.
        work = dist.all_reduce(x, group=own, async_op=True)
        with nullcontext() if HAS_HOOKS else raising(PeerMismatch):
            work.wait()
        with pytest.raises(RuntimeError, match="rank 1 expects 9001 elements of rank 0, got 9000"):
            work.get_future().wait()
        # Where c10d.py sees a call, it is in the log, and in the next call.
        if not HAS_HOOKS:
            functional = torch.ops._c10d_functional
            functional.wait_tensor(functional.all_reduce(x, "sum", own.group_name))
        assert lines[-1].startswith("all_reduce in group ") and "rank 1 expects 9001" in lines[-1]
        with pytest.raises(ZipcclError, match=r"an earlier asynchronous all_reduce failed: .*9001"):
            dist.all_reduce(torch.ones(9000), group=own)
        y = torch.ones(9000)
        dist.all_reduce(y, group=own)
        assert y.eq(2).all()
    logging.getLogger("zipccl_hooks").removeHandler(handler)
    return messages[0]


def test_contradicting_calls_raise_on_every_rank(trio: Ranks) -> None:
    for rank, message in enumerate(trio.run(WORLD, contradiction)[:2]):
        assert message.startswith(f"rank {rank}: all_reduce: rank 1 expects 9001 elements of rank 0")
