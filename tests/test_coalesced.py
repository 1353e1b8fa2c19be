"""Coalesced collectives: the bits of one call a tensor, in one exchange; over gloo and on CUDA tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import transports
from ranks import Ranks
from test_collectives import assert_bits, data, rank_order_sum
from torch import Tensor
from transports import OnRanks, on_cpu, over, put, room

from zipccl_hooks import Policy, coalesced, collectives, reset_stats, stats
from zipccl_hooks.communicator import Works, communicator
from zipccl_hooks.errors import PeerMismatch

ALL = Policy(min_bytes=0, adaptive=False)
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
# Sizes and dtypes mixed; the last two of BF16 and FP32 go by themselves where ALONE_BYTES is 40 KB.
LIST = [
    (3, BF16),
    (20_001, BF16),
    (1, FP32),
    (0, BF16),
    (16_385, FP32),
    (777, FP16),
    (9001, FP32),
    (30_007, BF16),
]
NAMES = ("all_reduce_coalesced", "all_gather_into_tensor_coalesced", "reduce_scatter_tensor_coalesced")


def inputs(rank: int, times: int = 1) -> list[Tensor]:
    return [data(rank + 100 * k, times * n, dtype) for k, (n, dtype) in enumerate(LIST)]


def bits_of_single_calls(group: dist.ProcessGroup, alone_bytes: int, async_op: bool) -> None:
    rank, size = group.rank(), group.size()
    coalesced.ALONE_BYTES = alone_bytes

    def finished(work: Works | None) -> None:
        assert (work is None) == (not async_op)
        if work is not None:
            assert work.wait() and work.is_completed() and work.exception() is None
            if transports.cuda.DEVICE == "cuda" or not transports.STREAMS:  # futures know no emulated device
                assert work.get_future().wait() is work.result()

    for turn in range(2):
        reset_stats(group)
        everyone = [inputs(r + 10 * turn) for r in range(size)]
        outs = [room(size * n, dtype) for n, dtype in LIST]
        mine = [put(rank + 10 * turn + 100 * k, n, dtype) for k, (n, dtype) in enumerate(LIST)]
        finished(collectives.all_gather_into_tensor_coalesced(outs, mine, group, async_op, policy=ALL))
        for out, terms in zip(outs, zip(*everyone, strict=True), strict=True):
            assert_bits(out.cpu(), torch.cat(terms))

        finished(collectives.all_reduce_coalesced(mine, dist.ReduceOp.AVG, group, async_op, policy=ALL))
        for x, terms in zip(mine, zip(*everyone, strict=True), strict=True):
            assert_bits(x.cpu(), rank_order_sum(list(terms), 1 / size))

        wide = [inputs(r + 10 * turn, size) for r in range(size)]
        outs = [room(n, dtype) for n, dtype in LIST]
        mine = [put(rank + 10 * turn + 100 * k, size * n, dtype) for k, (n, dtype) in enumerate(LIST)]
        finished(
            collectives.reduce_scatter_tensor_coalesced(
                outs, mine, group=group, async_op=async_op, policy=ALL
            )
        )
        for out, terms in zip(outs, zip(*wide, strict=True), strict=True):
            assert_bits(out.cpu(), rank_order_sum([t.view(size, -1)[rank] if len(t) else t for t in terms]))
        # One call a dtype, whatever the number of tensors.
        assert {name: stats(group).calls[name].compressed_calls for name in NAMES} == dict.fromkeys(NAMES, 3)


@over("gloo", "emulated", "staged", "nccl")
@pytest.mark.parametrize("alone_bytes", [0, 40_000, 1 << 24])
@pytest.mark.parametrize("async_op", [False, True], ids=["sync", "async"])
def test_bits_are_those_of_single_calls(on_ranks: OnRanks, alone_bytes: int, async_op: bool) -> None:
    on_ranks(2, bits_of_single_calls, alone_bytes, async_op)


@over("gloo", "emulated", "staged")
def test_in_a_group_of_three(on_ranks: OnRanks) -> None:
    on_ranks(3, bits_of_single_calls, 40_000, True)


def strides(group: dist.ProcessGroup) -> None:
    rank, size = group.rank(), group.size()
    parts = [[data(r + k, 9000, FP32).view(100, 90).t() for k in (0, 50)] for r in range(size)]
    for alone_bytes in (0, 1 << 24):
        coalesced.ALONE_BYTES = alone_bytes
        xs = [put(rank + k, 9000, FP32).view(100, 90).t() for k in (0, 50)]
        assert not any(x.is_contiguous() for x in xs)
        collectives.all_reduce_coalesced(xs, group=group, policy=ALL)
        for k, x in enumerate(xs):
            assert_bits(x.cpu().contiguous(), rank_order_sum([p[k].contiguous() for p in parts]))
        # The input of an all-gather is often a view of its place in the output.
        outs = [room(size * 9000, FP32) for _ in range(2)]
        for k, out in enumerate(outs):
            out.view(size, -1)[rank] = parts[rank][k].reshape(-1).to(out.device)
        slots = [out.view(size, -1)[rank] for out in outs]
        collectives.all_gather_into_tensor_coalesced(outs, slots, group, policy=ALL)
        for k, out in enumerate(outs):
            assert_bits(out.cpu(), torch.cat([p[k].reshape(-1) for p in parts]))


@over("gloo", "emulated", "staged", "nccl")
def test_strides_and_views(on_ranks: OnRanks) -> None:
    on_ranks(2, strides)


# What goes natively


def native(group: dist.ProcessGroup) -> dict[str, dict[str, int]]:
    """A dtype goes natively by the size of its tensors together, and coalesced."""
    rank, size = group.rank(), group.size()
    reset_stats(group)
    policy = Policy(min_bytes=60_000, adaptive=False)
    sizes = [(20_000, BF16), (10_000, BF16), (10_000, FP32), (4999, FP32), (9000, torch.int64)]
    xs = [torch.full((n,), rank + 1, dtype=d) for n, d in sizes]
    outs = [torch.empty(size * n, dtype=d) for n, d in sizes]
    collectives.all_gather_into_tensor_coalesced(outs, xs, group, policy=policy)
    for out, (n, _) in zip(outs, sizes, strict=True):
        assert out.view(size, n).eq(torch.arange(1, size + 1).view(size, 1)).all()
    work = collectives.all_reduce_coalesced(xs, group=group, async_op=True, policy=policy)
    assert work is not None and work.wait()
    for x in xs:
        assert x.eq(size * (size + 1) // 2).all()
    wide = [torch.arange(size, dtype=d).repeat_interleave(n) for n, d in sizes]
    outs = [torch.empty(n, dtype=d) for n, d in sizes]
    collectives.reduce_scatter_tensor_coalesced(outs, wide, dist.ReduceOp.MAX, group, policy=policy)
    for out in outs:
        assert out.eq(rank).all()
    calls = stats(group).calls
    assert [calls[name].compressed_calls for name in NAMES] == [1, 1, 0]
    return {name: dict(calls[name].native_calls) for name in NAMES}


def test_what_does_not_pay_goes_natively(ranks: Ranks) -> None:
    small = {"below min_bytes": 1, "dtype torch.int64": 1}
    expected = dict(zip(NAMES, (small, small, {"below min_bytes": 1, "dtype torch.int64": 1, "reduce op": 1}),
                        strict=True))  # fmt: skip
    assert ranks.run(2, on_cpu, "native", (), "gloo", __name__) == [expected] * 2


# Messages


def messages(group: dist.ProcessGroup, count: int) -> int:
    """What a rank hands to the backend for an all-reduce of 6000 elements in so many tensors."""
    comm, calls = communicator(group), 0

    class Counting:
        def __getattr__(self, method: str) -> Any:
            nonlocal calls
            calls += method in ("send", "_allgather_base")
            return getattr(backend, method)

    backend, comm.backend = comm.backend, Counting()
    try:
        collectives.all_reduce_coalesced(
            [put(k, 6000 // count, FP32) for k in range(count)], group=group, policy=ALL
        )
    finally:
        comm.backend = backend
    return calls


def test_many_small_tensors_take_as_many_messages_as_one(ranks: Ranks) -> None:
    one, many = (ranks.run(2, on_cpu, "messages", (count,), "gloo", __name__) for count in (1, 50))
    assert one == many


# Errors


def contradiction(group: dist.ProcessGroup) -> str:
    """The same elements in all, cut differently."""
    sizes = (3000, 5000) if group.rank() else (5000, 3000)
    with pytest.raises(PeerMismatch) as caught:
        collectives.all_reduce_coalesced([put(0, n) for n in sizes], group=group, policy=ALL)
    xs = [put(group.rank(), 300)]
    collectives.all_reduce_coalesced(xs, group=group, policy=ALL)  # the group goes on
    assert_bits(xs[0].cpu(), rank_order_sum([data(r, 300, BF16) for r in range(group.size())]))
    return caught.value.message


@over("gloo", "emulated", "staged", "nccl")
def test_lists_that_are_cut_differently_raise_on_all_ranks(on_ranks: OnRanks) -> None:
    message = "all_reduce_coalesced: ranks 0 and 1 call it with different operation, sizes or policy"
    assert on_ranks(2, contradiction) == [message] * 2


def bad_arguments(group: dist.ProcessGroup) -> None:
    x: Any = torch.randn(10)
    wide = torch.empty(20)
    gather, scatter = (getattr(collectives, name) for name in NAMES[1:])
    with pytest.raises(TypeError, match="tensors: expected a list of tensors, got Tensor"):
        collectives.all_reduce_coalesced(x, group=group)
    with pytest.raises(ValueError, match="tensors: expected at least one tensor, got 0"):
        collectives.all_reduce_coalesced([], group=group)
    with pytest.raises(ValueError, match="output_tensors: expected 1 tensors, got 2"):
        gather([wide, wide], [x], group)
    with pytest.raises(ValueError, match=r"output_tensors\[1\]: expected 20 elements, got 10"):
        gather([wide, x], [x, x], group)
    with pytest.raises(
        ValueError, match=r"input_tensors\[0\]: expected torch.float32 on cpu, got torch.float16"
    ):
        scatter([x], [wide.half()], group=group)
    part = dist.distributed_c10d.GroupMember.NON_GROUP_MEMBER
    assert gather([wide], [x], part) is None and scatter([x], [wide], group=part, async_op=True) is None


def test_bad_arguments_raise_before_anything_is_sent(ranks: Ranks) -> None:
    ranks.run(2, on_cpu, "bad_arguments", (), "gloo", __name__)
