"""Collectives over gloo on real processes. Expected values are computed locally from every rank's seed."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from corpus import CODED, bits, name_of
from ranks import LARGEST, Ranks
from torch import Tensor

from zipccl_hooks import Policy, collectives, encode, exchange, reset_stats, stats
from zipccl_hooks.communicator import communicator
from zipccl_hooks.errors import CorruptPayload, FormatMismatch, PeerMismatch, ZipcclError

SIZES = (2, 3, 5, 8)
SUMMED = (torch.bfloat16, torch.float16, torch.float32)
ALL = Policy(min_bytes=0)  # compress whatever can be


def data(rank: int, numel: int, dtype: torch.dtype, hostile: bool = False) -> Tensor:
    """What ``rank`` puts in: Gaussian, or random bits."""
    generator = torch.Generator().manual_seed(1000 * numel + rank)
    if hostile:
        return torch.randint(256, (numel * dtype.itemsize,), generator=generator, dtype=torch.uint8).view(
            dtype
        )
    return (torch.randn(numel, generator=generator) * 0.02).to(dtype)


def assert_bits(got: Tensor, expected: Tensor) -> None:
    assert got.dtype == expected.dtype and got.numel() == expected.numel()
    wrong = (bits(got) != bits(expected)).nonzero()[0]
    assert not len(wrong), f"{len(wrong)} elements differ, the first at {wrong[0]}"


def rank_order_sum(terms: list[Tensor], scale: float = 1.0) -> Tensor:
    scaled = [(t if scale == 1.0 else t * scale).float() for t in terms]
    total = scaled[0]
    for term in scaled[1:]:
        total = total + term
    return total.to(terms[0].dtype)


@contextmanager
def small_pieces() -> Any:
    """Pieces of one group of tiles, so that a few thousand elements take several."""
    before = exchange.PIECE_BYTES, exchange.MIN_PIECE_BYTES
    exchange.PIECE_BYTES = exchange.MIN_PIECE_BYTES = 32 * 1024
    try:
        yield
    finally:
        exchange.PIECE_BYTES, exchange.MIN_PIECE_BYTES = before


def fresh_pair(seconds: float = 60) -> dist.ProcessGroup:
    """A new group of ranks 0 and 1; every rank of the pool must call it, the others get a non-member."""
    return dist.new_group([0, 1], timedelta(seconds=seconds))


def compressed_calls(group: dist.ProcessGroup, name: str) -> int:
    counted = stats(group).calls.get(name)
    return counted.compressed_calls if counted else 0


# Data movement: the very bits


def move(group: dist.ProcessGroup, dtype: torch.dtype, numel: int, hostile: bool) -> None:
    rank, size = group.rank(), group.size()
    inputs = [data(r, numel, dtype, hostile) for r in range(size)]
    x = inputs[rank]
    reset_stats(group)
    with small_pieces():
        out = torch.empty(size * numel, dtype=dtype)
        assert collectives.all_gather_into_tensor(out, x, group, policy=ALL) is None
        assert_bits(out, torch.cat(inputs))

        outs = [torch.empty(numel, dtype=dtype) for _ in range(size)]
        collectives.all_gather(outs, x, group, policy=ALL)
        assert_bits(torch.cat(outs), torch.cat(inputs))

        for root in (0, size - 1):
            y = x.clone()
            collectives.broadcast(y, group=group, group_src=root, policy=ALL)
            assert_bits(y, inputs[root])

        for root in (0, size - 1):
            gathered = [torch.empty(numel, dtype=dtype) for _ in range(size)] if rank == root else None
            collectives.gather(x, gathered, group=group, group_dst=root, policy=ALL)
            if gathered is not None:
                assert_bits(torch.cat(gathered), torch.cat(inputs))
            y = torch.empty(numel, dtype=dtype)
            collectives.scatter(y, inputs if rank == root else None, group=group, group_src=root, policy=ALL)
            assert_bits(y, x)

        wide = [data(r, size * numel, dtype, hostile) for r in range(size)]
        out = torch.empty(size * numel, dtype=dtype)
        collectives.all_to_all_single(out, wide[rank], group=group, policy=ALL)
        expected = torch.cat([w.view(size, numel)[rank] for w in wide])
        assert_bits(out, expected)

        outs = [torch.empty(numel, dtype=dtype) for _ in range(size)]
        if size > 1 or hasattr(dist, "all_gather_single"):  # plain gloo has no list form before torch 2.13
            collectives.all_to_all(outs, list(wide[rank].view(size, numel)), group, policy=ALL)
            assert_bits(torch.cat(outs), expected)
    counts = {"all_gather_into_tensor": 1, "all_gather": 1, "all_to_all_single": 1, "all_to_all": 1}
    counts |= {"broadcast": 2, "gather": 2, "scatter": 2}
    assert {n: compressed_calls(group, n) for n in counts} == {n: c * (size > 1) for n, c in counts.items()}


@pytest.mark.parametrize("hostile", [False, True], ids=["gaussian", "hostile"])
@pytest.mark.parametrize("dtype", CODED, ids=name_of)
@pytest.mark.parametrize("numel", [0, 1, 1023, 3 * 8192 + 77])
def test_moves_the_very_bits(ranks: Ranks, dtype: torch.dtype, numel: int, hostile: bool) -> None:
    ranks.run(3, move, dtype, numel, hostile)


@pytest.mark.parametrize("size", [1, 2, 5, 8])
def test_moves_in_groups_of_any_size(ranks: Ranks, size: int) -> None:
    ranks.run(size, move, torch.bfloat16, 2 * 8192 + 5, False)


def move_uneven(group: dist.ProcessGroup) -> None:
    rank, size = group.rank(), group.size()
    numels = [(7 * r * r + 1000 * r) % 40000 for r in range(size)]  # rank 0 has nothing
    inputs = [data(r, n, torch.bfloat16) for r, n in enumerate(numels)]
    with small_pieces():
        outs = [torch.empty(n, dtype=torch.bfloat16) for n in numels]
        collectives.all_gather(outs, inputs[rank], group, policy=ALL)
        assert_bits(torch.cat(outs), torch.cat(inputs))

        # Rows of 3 elements; splits[i][j] rows go from i to j, some none.
        splits = [[(i * 5 + j * 3) % 7 * 1500 for j in range(size)] for i in range(size)]
        x = [data(r, 3 * sum(splits[r]), torch.float32).view(-1, 3) for r in range(size)]
        received = [splits[source][rank] for source in range(size)]
        out = torch.empty(sum(received), 3)
        collectives.all_to_all_single(out, x[rank], received, splits[rank], group, policy=ALL)
        expected = torch.cat([x[source].split(splits[source])[rank] for source in range(size)])
        assert_bits(out, expected)

        parts = [[data(97 * r + t, numels[t], torch.float32) for t in range(size)] for r in range(size)]
        out = torch.empty(numels[rank])
        collectives.reduce_scatter(out, parts[rank], group=group, policy=ALL)
        assert_bits(out, rank_order_sum([parts[r][rank] for r in range(size)]))


@pytest.mark.parametrize("size", SIZES)
def test_uneven_sizes(ranks: Ranks, size: int) -> None:
    ranks.run(size, move_uneven)


def mixed_splits(group: dist.ProcessGroup) -> None:
    """Rank 0's parts are equal, so it may pass no splits, while rank 1's are not."""
    rank = group.rank()
    x = data(rank, 8 if rank == 0 else 6, torch.float32)
    out = torch.empty(8 if rank == 0 else 6)
    splits = (None, None) if rank == 0 else ([4, 2], [4, 2])
    collectives.all_to_all_single(out, x, *splits, group, policy=ALL)
    theirs = data(1 - rank, 6 if rank == 0 else 8, torch.float32)
    expected = torch.cat([x[:4], theirs[:4]]) if rank == 0 else torch.cat([theirs[4:], x[4:]])
    assert_bits(out, expected)


def test_all_to_all_with_and_without_splits(ranks: Ranks) -> None:
    ranks.run(2, mixed_splits)


def strides(group: dist.ProcessGroup) -> None:
    rank, size = group.rank(), group.size()
    x = [data(r, 100 * 90, torch.float32).view(100, 90).t() for r in range(size)]
    assert not x[rank].is_contiguous()
    out = torch.empty(100, size * 90).t()
    collectives.all_gather_into_tensor(out, x[rank], group, policy=ALL)
    assert_bits(out, torch.cat(x))
    y = x[rank].clone(memory_format=torch.preserve_format)
    assert not y.is_contiguous()
    collectives.all_reduce(y, group=group, policy=ALL)
    assert_bits(y, rank_order_sum(x))
    y = x[rank].clone(memory_format=torch.preserve_format)
    collectives.broadcast(y, group=group, group_src=1, policy=ALL)
    assert_bits(y, x[1])
    # The input of FSDP2's all-gather is a view of its own slot in the output.
    out = torch.empty(size * 9000)
    out.view(size, -1)[rank] = x[rank].reshape(-1)
    collectives.all_gather_into_tensor(out, out.view(size, -1)[rank], group, policy=ALL)
    assert_bits(out, torch.cat([t.reshape(-1) for t in x]))
    # Starting off any alignment.
    y = torch.cat([torch.zeros(1), x[rank].reshape(-1)]).bfloat16()[1:]
    collectives.all_reduce(y, group=group, policy=ALL)
    assert_bits(y, rank_order_sum([t.reshape(-1).bfloat16() for t in x]))


def test_strides_views_and_alignment(ranks: Ranks) -> None:
    ranks.run(3, strides)


# Reductions


def reduce(group: dist.ProcessGroup, dtype: torch.dtype, numel: int) -> None:
    rank, size = group.rank(), group.size()
    inputs = [data(r, numel, dtype) for r in range(size)]
    wide = [data(r, size * numel, dtype) for r in range(size)]
    mine = [w.view(size, numel)[rank] for w in wide]
    ops = [
        (dist.ReduceOp.SUM, 1.0),
        (dist.ReduceOp.AVG, 1.0 / size),
        (dist._make_nccl_premul_sum(0.3), torch.tensor(0.3, dtype=dtype).item()),
    ]
    with small_pieces():
        for op, scale in ops:
            x = inputs[rank].clone()
            collectives.all_reduce(x, op, group, policy=ALL)
            assert_bits(x, rank_order_sum(inputs, scale))
            out = torch.empty(numel, dtype=dtype)
            collectives.reduce_scatter_tensor(out, wide[rank], op, group, policy=ALL)
            assert_bits(out, rank_order_sum(mine, scale))
            out = torch.empty(numel, dtype=dtype)
            collectives.reduce_scatter(out, list(wide[rank].view(size, numel)), op, group, policy=ALL)
            assert_bits(out, rank_order_sum(mine, scale))
    if size == 2:
        ours, plain = inputs[rank].clone(), inputs[rank].clone()
        collectives.all_reduce(ours, group=group, policy=ALL)
        dist.all_reduce(plain, group=group)
        assert_bits(ours, plain)


@pytest.mark.parametrize("dtype", SUMMED, ids=name_of)
@pytest.mark.parametrize("numel", [0, 1, 1025, 2 * 8192 + 77])
def test_sums_in_rank_order(ranks: Ranks, dtype: torch.dtype, numel: int) -> None:
    ranks.run(3, reduce, dtype, numel)


@pytest.mark.parametrize("size", [2, 5, 8])
def test_sums_in_groups_of_any_size(ranks: Ranks, size: int) -> None:
    ranks.run(size, reduce, torch.float32, 3 * 8192 + 5)


def special_values(group: dist.ProcessGroup) -> None:
    values = torch.tensor([-0.0, 0.0, float("inf"), float("nan"), 3.4e38, 1e-45, -1e-45])
    x = values.repeat(2000)
    collectives.all_reduce(x, group=group, policy=ALL)
    expected = rank_order_sum([values.repeat(2000)] * group.size())
    assert torch.equal(x.isnan(), expected.isnan())
    finite = ~expected.isnan()
    assert_bits(x[finite], expected[finite])
    assert torch.signbit(x[0])


def test_sums_of_special_values(ranks: Ranks) -> None:
    ranks.run(3, special_values)


# Async, groups


def overlapping(group: dist.ProcessGroup) -> None:
    rank, size = group.rank(), group.size()
    inputs = [[data(10 * k + r, 20000 + k, torch.bfloat16) for r in range(size)] for k in range(6)]
    works, plain = [], []
    for k in range(6):
        x = inputs[k][rank].clone()
        works.append((x, collectives.all_reduce(x, group=group, async_op=True, policy=ALL)))
        y = torch.full((3,), float(k))
        plain.append((y, dist.all_reduce(y, group=group, async_op=True)))
    for k in reversed(range(6)):
        x, work = works[k]
        assert work is not None and work.wait() and work.is_completed()
        assert work.result()[0] is x and work.get_future().wait()[0] is x
        assert_bits(x, rank_order_sum(inputs[k]))
        plain[k][1].wait()
        assert plain[k][0].tolist() == [size * k] * 3


def test_async_calls_beside_plain_ones(ranks: Ranks) -> None:
    ranks.run(3, overlapping)


def several_groups(group: dist.ProcessGroup) -> None:
    rank, works = group.rank(), []
    base = rank // 2 * 2
    pair = [dist.new_group([a, a + 1]) for a in range(0, LARGEST, 2)][rank // 2]
    for k in range(4):
        x, y = data(rank + 50 * k, 9000, torch.float32), data(rank + 70 * k, 9000, torch.float32)
        works.append((k, y, collectives.all_reduce(y, group=pair, async_op=True, policy=ALL)))
        collectives.all_reduce(x, group=group, policy=ALL)
        assert_bits(x, rank_order_sum([data(r + 50 * k, 9000, torch.float32) for r in range(LARGEST)]))
    for k, y, work in works:
        assert work is not None
        work.wait()
        pair_terms = [data(r + 70 * k, 9000, torch.float32) for r in (base, base + 1)]
        assert_bits(y, rank_order_sum(pair_terms))
    # broadcast's src is a global rank
    z = data(rank, 9000, torch.float32)
    collectives.broadcast(z, src=base + 1, group=pair, policy=ALL)
    assert_bits(z, data(base + 1, 9000, torch.float32))


def test_several_groups_at_once(ranks: Ranks) -> None:
    ranks.run(LARGEST, several_groups)


def outside_a_group(group: dist.ProcessGroup) -> None:
    part = dist.distributed_c10d.GroupMember.NON_GROUP_MEMBER
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        x = torch.ones(10)
        assert collectives.all_reduce(x, group=part, policy=ALL) is None
        assert collectives.all_gather_into_tensor(torch.empty(7), x, part, policy=ALL) is None
    assert "does not belong to the given group" in str(caught[0].message)
    assert x.tolist() == [1.0] * 10


def test_a_rank_outside_the_group_does_nothing(ranks: Ranks) -> None:
    ranks.run(1, outside_a_group)


# What goes native


def goes_native(group: dist.ProcessGroup) -> dict[str, int]:
    size = group.size()
    reset_stats(group)

    def reduced(x: Tensor, op: Any = dist.ReduceOp.SUM, **policy: Any) -> Tensor:
        collectives.all_reduce(x, op, group, policy=Policy(**{"min_bytes": 0} | policy))
        return x

    assert reduced(torch.ones(9000, dtype=torch.int64)).eq(size).all()
    assert reduced(torch.ones(9000, dtype=torch.float64)).eq(size).all()
    assert reduced(torch.ones(9000), enabled=False).eq(size).all()
    assert reduced(torch.ones(9000), min_bytes=36001).eq(size).all()
    assert reduced(torch.ones(9000), min_bytes=36000).eq(size).all()  # this one is compressed
    assert reduced(torch.ones(9000), reduce="native").eq(size).all()
    assert reduced(torch.ones(9000), mode="raw").eq(size).all()
    assert reduced(torch.full((9000,), float(group.rank())), dist.ReduceOp.MAX).eq(size - 1).all()
    counted = stats(group).calls["all_reduce"]
    assert counted.compressed_calls == 1 and counted.calls == 8
    assert counted.native_bytes == 9000 * (8 + 8 + 5 * 4)
    return dict(counted.native_calls)


def test_what_does_not_pay_goes_native(ranks: Ranks) -> None:
    expected = {
        "dtype torch.int64": 1,
        "dtype torch.float64": 1,
        "disabled by policy": 1,
        "below min_bytes": 1,
        "reduce=native": 1,
        "mode raw": 1,
        "reduce op": 1,
    }
    assert ranks.run(2, goes_native) == [expected] * 2


def one_log_line(group: dist.ProcessGroup) -> list[str]:
    import logging

    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("zipccl_hooks")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    own = fresh_pair()
    for _ in range(3):
        collectives.all_reduce(torch.ones(5, dtype=torch.int32), group=own, policy=ALL)
        collectives.broadcast(torch.ones(5, dtype=torch.int32), group=own, group_src=0, policy=ALL)
    logger.removeHandler(handler)
    return lines


def test_each_reason_is_logged_once(ranks: Ranks) -> None:
    for lines in ranks.run(LARGEST, one_log_line)[:2]:
        assert len(lines) == 2
        assert lines[0].startswith("all_reduce in group ") and lines[1].startswith("broadcast in group ")
        assert lines[0].endswith("goes native: dtype torch.int32 (20 bytes)")


# Bytes on the wire


def wire_bytes(group: dist.ProcessGroup, name: str) -> tuple[int, int, int, int]:
    """(bytes handed to the backend, counted bytes, raw bytes, expected payload bytes) of one call."""
    rank, size, numel = group.rank(), group.size(), 3 * 8192
    comm = communicator(group)
    x = data(rank, size * numel, torch.bfloat16)
    handed = 0

    class Counting:
        def __getattr__(self, method: str) -> Any:
            real = getattr(backend, method)

            def counted(*args: Any) -> Any:
                nonlocal handed
                if method == "send":
                    handed += args[0][0].nbytes
                elif method == "_allgather_base":
                    handed += (size - 1) * args[1].nbytes
                return real(*args)

            return counted if method in ("send", "_allgather_base") else real

    backend, comm.backend = comm.backend, Counting()
    reset_stats(group)
    try:
        if name == "all_gather_into_tensor":
            part = x[:numel]
            collectives.all_gather_into_tensor(torch.empty(size * numel).bfloat16(), part, group, policy=ALL)
            payloads = (size - 1) * len(encode(part))
        else:
            collectives.all_to_all_single(torch.empty_like(x), x, group=group, policy=ALL)
            payloads = sum(len(encode(p)) for r, p in enumerate(x.split(numel)) if r != rank)
    finally:
        comm.backend = backend
    counted = stats(group).calls[name]
    return handed, counted.sent_bytes, counted.raw_bytes, payloads


@pytest.mark.parametrize("name", ["all_gather_into_tensor", "all_to_all_single"])
def test_counts_the_bytes_it_sends(ranks: Ranks, name: str) -> None:
    size = 3
    for handed, counted, raw, payloads in ranks.run(size, wire_bytes, name):
        assert handed == counted
        descriptions = (size - 1) * 8 * (3 + 2 * size) + (size - 1) * 8  # agreement, then sizes
        assert counted == payloads + descriptions
        assert raw == (size - 1) * 3 * 8192 * 2
        assert raw / counted > 1.47


def buffers(group: dist.ProcessGroup) -> tuple[int, int]:
    comm = communicator(group)
    comm._buffers.clear()
    x = data(group.rank(), 1 << 20, torch.float32)
    with small_pieces():
        collectives.all_reduce(x, group=group, policy=ALL)
        collectives.all_gather_into_tensor(torch.empty(group.size() << 20), x, group, policy=ALL)
    return sum(b.nbytes for b in comm._buffers.values()), x.nbytes


def test_buffers_hold_a_few_pieces(ranks: Ranks) -> None:
    for held, tensor_bytes in ranks.run(3, buffers):
        assert held <= 4 * 2 * (32 * 1024 + 2048)  # 2 pieces each way, to and from 2 peers
        assert held < tensor_bytes / 10


# Ranks that contradict each other


def contradiction(group: dist.ProcessGroup, kind: str) -> str:
    rank = group.rank()
    odd = rank == 1
    x = torch.randn(9000 + odd) if kind == "numel" else torch.randn(9000)
    try:
        if kind == "dtype":
            collectives.all_reduce(x.bfloat16() if odd else x.half(), group=group, policy=ALL)
        elif kind == "op":
            op = dist.ReduceOp.AVG if odd else dist.ReduceOp.SUM
            collectives.all_reduce(x, op, group, policy=ALL)
        elif kind == "call":
            if odd:
                collectives.broadcast(x, group=group, group_src=0, policy=ALL)
            else:
                collectives.all_reduce(x, group=group, policy=ALL)
        elif kind == "root":
            collectives.broadcast(x, group=group, group_src=int(odd), policy=ALL)
        elif kind == "splits":
            splits = [5000, 2000, 2000] if odd else [3000, 3000, 3000]
            collectives.all_to_all_single(torch.empty(9000), x, None, splits, group, policy=ALL)
        else:
            collectives.all_reduce(x, group=group, policy=ALL)
    except PeerMismatch as error:
        assert error.rank == rank
        y = data(rank, 9000, torch.float32)  # the group goes on working
        collectives.all_reduce(y, group=group, policy=ALL)
        assert_bits(y, rank_order_sum([data(r, 9000, torch.float32) for r in range(group.size())]))
        return error.message
    raise AssertionError("no error")


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("numel", "all_reduce: rank 1 expects 9001 elements of rank 0, got 9000"),
        ("dtype", "all_reduce: ranks 0 and 1 call it with different dtype"),
        ("op", "all_reduce: ranks 0 and 1 call it with different root or reduce operation"),
        ("call", "ranks 0 and 1 call it with different operation"),
        ("root", "broadcast: ranks 0 and 1 call it with different root or reduce operation"),
        ("splits", "all_to_all_single: rank 0 expects 3000 elements of rank 1, got 5000"),
    ],
)
def test_contradicting_calls_raise_on_every_rank(ranks: Ranks, kind: str, message: str) -> None:
    assert all(message in got for got in ranks.run(3, contradiction, kind))


def damaged(group: dist.ProcessGroup, name: str) -> tuple[str, int | None, str]:
    """Rank 1 sends a payload with another magic; who raises what?"""
    rank, size = group.rank(), group.size()
    original = exchange.Call.encode

    def spoiled(self: exchange.Call, part: Tensor, buffer: Tensor) -> int:
        used = original(self, part, buffer)
        buffer[0] ^= 1
        return used

    if rank == 1:
        exchange.Call.encode = spoiled  # type: ignore[method-assign]
    caught: ZipcclError | None = None
    try:
        with small_pieces():
            x = data(rank, 100_000, torch.float32)
            if name == "all_reduce":
                collectives.all_reduce(x, group=group, policy=ALL)
            else:
                out = torch.empty(size * len(x))
                collectives.all_gather_into_tensor(out, x, group, policy=ALL)
    except ZipcclError as error:
        caught = error
    finally:
        exchange.Call.encode = original  # type: ignore[method-assign]
    y = data(rank, 9000, torch.float32)
    collectives.all_reduce(y, group=group, policy=ALL)
    assert_bits(y, rank_order_sum([data(r, 9000, torch.float32) for r in range(size)]))
    return type(caught).__name__, caught.peer if caught else None, str(caught)


def test_a_damaged_payload_names_rank_and_peer_and_hangs_nobody(ranks: Ranks) -> None:
    results = ranks.run(3, damaged, "all_gather_into_tensor")
    assert [(kind, peer) for kind, peer, _ in results] == [
        ("CorruptPayload", 1),
        ("ZipcclError", 0),  # told with the next piece that rank 0 failed
        ("CorruptPayload", 1),
    ]
    assert results[2][2].startswith("rank 2: payload magic: expected b'ZCCL'")
    assert results[2][2].endswith("(peer: rank 1)")


def test_a_damaged_sum_raises_everywhere(ranks: Ranks) -> None:
    """Ranks 0 and 2 cannot form their part of the sum, so rank 1 must not get a result either."""
    results = ranks.run(3, damaged, "all_reduce")
    assert [kind for kind, _, _ in results] == ["CorruptPayload", "ZipcclError", "CorruptPayload"]
    assert "rank 0 failed" in results[1][2]


def other_version(group: dist.ProcessGroup) -> str:
    from zipccl_hooks import communicator as module

    own = fresh_pair()
    if group.rank() > 1:
        return ""
    before = module.VERSION
    module.VERSION = before + group.rank()
    try:
        collectives.all_reduce(torch.randn(9000), group=own, policy=ALL)
    except FormatMismatch as error:
        return str(error)
    finally:
        module.VERSION = before
    raise AssertionError("no error")


def test_ranks_of_another_format_version_are_refused(ranks: Ranks) -> None:
    assert ranks.run(LARGEST, other_version)[:2] == [
        "rank 0: wire format version: expected 1, got 2 (peer: rank 1)",
        "rank 1: wire format version: expected 2, got 1 (peer: rank 0)",
    ]


def missing_rank(group: dist.ProcessGroup) -> float:
    """Rank 1 raises before it takes part; the other must not wait for ever."""
    own = fresh_pair(seconds=3)
    if group.rank() > 1:
        return 0.0
    collectives.all_reduce(torch.randn(9000), group=own, policy=ALL)
    began = time.monotonic()
    if group.rank() == 0:
        with pytest.raises(RuntimeError, match=r"(?i)timed? ?out"):
            collectives.all_reduce(torch.randn(9000), group=own, policy=ALL)
    return time.monotonic() - began


def test_a_missing_rank_ends_in_the_groups_timeout(ranks: Ranks) -> None:
    assert ranks.run(LARGEST, missing_rank)[0] < 30


LEAVES = """
import sys, torch, torch.distributed as dist
from zipccl_hooks import Policy, collectives
dist.init_process_group("gloo", init_method="file://" + sys.argv[1], rank=int(sys.argv[2]), world_size=2)
xs = [torch.randn(300_000) for _ in range(4)]
works = [collectives.all_reduce(x, async_op=True, policy=Policy(min_bytes=0)) for x in xs]
if sys.argv[3] == "wait":
    works[-1].wait()
dist.destroy_process_group()
print("left")
"""


CONFIGURED = """
import sys, torch, torch.distributed as dist
from zipccl_hooks import Policy, collectives, stats
dist.init_process_group("cpu:gloo", init_method="file://" + sys.argv[1], rank=int(sys.argv[2]), world_size=2)
x = torch.full((9000,), 1.5)
collectives.all_reduce(x, policy=Policy(min_bytes=0))
assert x.eq(3).all() and stats().calls["all_reduce"].compressed_calls == 1
dist.destroy_process_group()
"""


@pytest.mark.parametrize("debug", ["OFF", "DETAIL"])
def test_backend_strings_and_debug_wrappers(tmp_path: Path, debug: str) -> None:
    command = [sys.executable, "-c", CONFIGURED, str(tmp_path / "store")]
    environment = os.environ | {"TORCH_DISTRIBUTED_DEBUG": debug}
    processes = [subprocess.Popen([*command, str(r)], env=environment) for r in range(2)]
    assert [process.wait(timeout=60) for process in processes] == [0, 0]


@pytest.mark.parametrize("how", ["wait", "work in flight"])
def test_leaves_cleanly(tmp_path: Path, how: str) -> None:
    """Destroying the group and leaving, with calls done or under way, neither hangs nor crashes."""
    command = [sys.executable, "-c", LEAVES, str(tmp_path / "store")]
    processes = [
        subprocess.Popen([*command, str(r), how], stdout=subprocess.PIPE, text=True) for r in range(2)
    ]
    for process in processes:
        output, _ = process.communicate(timeout=60)
        assert (process.returncode, output) == (0, "left\n")


# Arguments


def bad_arguments(group: dist.ProcessGroup) -> None:
    x = torch.randn(10)
    f, i = torch.empty, torch.int32
    cases: list[tuple[type[Exception], str, Callable[[], Any]]] = [
        (TypeError, "tensor: expected a torch.Tensor, got list",
         lambda: collectives.all_reduce([x], group=group)),
        (ValueError, "output_tensor: expected 2 times the input's 10 elements, got 21",
         lambda: collectives.all_gather_into_tensor(f(21), x, group)),
        (ValueError, "output_tensor: expected torch.float32 on cpu, got torch.int32 on cpu",
         lambda: collectives.all_gather_into_tensor(f(20, dtype=i), x, group)),
        (TypeError, "tensor_list: expected a list of tensors, got Tensor",
         lambda: collectives.all_gather(x, x, group)),
        (ValueError, "tensor_list: expected 2 tensors, one per rank, got 3",
         lambda: collectives.all_gather([x, x, x], x, group)),
        (ValueError, r"tensor_list\[1\]: expected torch.float32",
         lambda: collectives.all_gather([x, x.int()], x, group)),
        (ValueError, "input: expected 2 times the output's 10 elements, got 10",
         lambda: collectives.reduce_scatter_tensor(x, x, group=group)),
        (ValueError, r"input_split_sizes: expected 2 sizes that add up to 10 rows, got \[5, 6\]",
         lambda: collectives.all_to_all_single(f(10), x, None, [5, 6], group)),
        (ValueError, "output: expected a first dimension divisible by 2 ranks, got 5",
         lambda: collectives.all_to_all_single(f(5, 2), x, None, None, group)),
        (ValueError, "input_tensor_list: expected one tensor per rank, got none",
         lambda: collectives.all_to_all([], [], group)),
        (ValueError, "src: expected either src or group_src", lambda: collectives.broadcast(x, group=group)),
        (ValueError, r"scatter_list: expected 2 tensors, one per rank, got 1" if group.rank() == 0
         else "scatter_list: expected none but at the root, got 1 tensors",
         lambda: collectives.scatter(x, [x], group=group, group_src=0)),
        (ValueError, r"gather_list\[1\]: expected 10 elements, got 11" if group.rank() == 0
         else "gather_list: expected none but at the root, got 2 tensors",
         lambda: collectives.gather(x, [x, f(11)], group=group, group_dst=0)),
        (ValueError, "group_src: expected a rank below 2, got 2",
         lambda: collectives.broadcast(x, group=group, group_src=2)),
    ]  # fmt: skip
    for error, message, call in cases:
        with pytest.raises(error, match=message):
            call()


def test_bad_arguments_raise_before_anything_is_sent(ranks: Ranks) -> None:
    ranks.run(2, bad_arguments)


def test_corrupt_payload_is_a_zipccl_error() -> None:
    assert issubclass(CorruptPayload, ZipcclError) and issubclass(ZipcclError, RuntimeError)
