"""send, recv and their kin, over gloo."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transports
from corpus import CODED, name_of
from test_collectives import assert_bits, compressed_calls, data
from transports import OnRanks, over, put, room

from zipccl_hooks import Policy, collectives, reset_stats, stats
from zipccl_hooks.communicator import Work
from zipccl_hooks.errors import PeerMismatch

ALL = Policy(min_bytes=0, adaptive=False)
Run = Callable[..., list[Any]]


def fresh(size: int, seconds: float = 60) -> dist.ProcessGroup:
    """A group of the first ranks, in which no direction is connected. All of the pool must call it."""
    return dist.new_group(list(range(size)), timedelta(seconds=seconds))


# The bits, in whatever order


def both_ways(group: dist.ProcessGroup, dtype: torch.dtype, numel: int, hostile: bool) -> None:
    rank = group.rank()
    other = 1 - rank
    before = compressed_calls(group, "send"), compressed_calls(group, "recv")
    inputs = [put(r, numel, dtype, hostile) for r in range(2)]
    outs = [room(numel, dtype) for _ in range(3)]
    works = [collectives.isend(inputs[rank], other, group, policy=ALL)]  # both ranks send first
    works += [collectives.irecv(outs[0], other, group, policy=ALL)]
    works += [collectives.irecv(outs[1], group=group, group_src=other, policy=ALL)]  # both receive first
    works += [collectives.isend(inputs[rank], group=group, group_dst=other, policy=ALL)]
    for work in reversed(works):
        assert isinstance(work, Work) and work.wait()
    if rank == 0:
        assert collectives.send(inputs[0], 1, group, policy=ALL) is None
        assert collectives.recv(outs[2], 1, group, policy=ALL) == 1
    else:
        assert collectives.recv(outs[2], 0, group, policy=ALL) == 0
        assert collectives.send(inputs[1], 0, group, policy=ALL) is None
    for out in outs:
        assert_bits(out.cpu(), inputs[other].cpu())
    after = compressed_calls(group, "send"), compressed_calls(group, "recv")
    assert [b - a for a, b in zip(before, after, strict=True)] == [3, 3]


@over("gloo")
@pytest.mark.parametrize("hostile", [False, True], ids=["gaussian", "hostile"])
@pytest.mark.parametrize("dtype", CODED, ids=name_of)
@pytest.mark.parametrize("numel", [1, 3 * 16384 + 77])
def test_moves_the_very_bits_both_ways(
    on_ranks: OnRanks, dtype: torch.dtype, numel: int, hostile: bool
) -> None:
    on_ranks(2, both_ways, dtype, numel, hostile)


@over("gloo")
def test_moves_nothing(on_ranks: OnRanks) -> None:
    on_ranks(2, both_ways, torch.float32, 0, False)


def shift(group: dist.ProcessGroup, size: int) -> None:
    """Rings in both directions, in groups whose directions are new, as single calls and as batches."""
    rank = group.rank()
    for turn in range(4):
        own = fresh(size)
        if rank >= size:
            continue
        step = 1 if turn < 2 else -1
        to, source = (rank + step) % size, (rank - step) % size
        x, out = put(rank + 10 * turn, 20_001), room(20_001)
        if turn % 2:
            ops = [dist.P2POp(dist.irecv, out, source, own), dist.P2POp(dist.isend, x, to, own)]
            works = collectives.batch_isend_irecv(ops if rank else ops[::-1], policy=ALL)
            assert len(works) == 2
        else:
            works = [
                collectives.isend(x, to, own, policy=ALL),
                collectives.irecv(out, source, own, policy=ALL),
            ]
        for work in works:
            work.wait()
        assert_bits(out.cpu(), data(source + 10 * turn, 20_001, torch.bfloat16))
        assert compressed_calls(own, "send") == compressed_calls(own, "recv") == 1


@over("gloo")
def test_two_ranks_shift(on_ranks: OnRanks) -> None:
    on_ranks(None, shift, 2)


@over("gloo")
def test_three_ranks_shift(on_ranks: OnRanks) -> None:
    on_ranks(None, shift, 3)


def pipeline(group: dist.ProcessGroup) -> None:
    """Activations go up and gradients down, all in flight at once, in one batch a micro-batch."""
    rank, size, numels = group.rank(), group.size(), [30_001, 7, 50_000, 30_001, 16_384]
    received, works = [], []
    for k, numel in enumerate(numels):
        ops = []
        for peer in (rank + 1, rank - 1):
            if 0 <= peer < size:
                out = room(numel)
                ops.append(dist.P2POp(dist.isend, put(rank + 10 * k, numel), peer, group))
                ops.append(dist.P2POp(dist.irecv, out, peer, group))
                received.append((out, peer + 10 * k))
        works += collectives.batch_isend_irecv(ops, policy=ALL)
    for work in works:
        work.wait()
    for out, seed in received:
        assert_bits(out.cpu(), data(seed, out.numel(), torch.bfloat16))


@over("gloo")
def test_pipeline_in_both_directions(on_ranks: OnRanks) -> None:
    on_ranks(3, pipeline)


def in_a_sub_group(group: dist.ProcessGroup) -> str:
    """Ranks 1 and 2: global ranks, ranks of the group, and the names in errors are those."""
    own = dist.new_group([1, 2])
    if group.rank() not in (1, 2):
        return ""
    rank = own.rank()

    def swap() -> None:
        out = room(9001)
        work = collectives.isend(put(rank, 9001), 2 - rank, own, policy=ALL)
        assert collectives.recv(out, group=own, group_src=1 - rank, policy=ALL) == 2 - rank
        assert work is not None and work.wait()
        assert_bits(out.cpu(), data(1 - rank, 9001, torch.bfloat16))

    swap()
    assert compressed_calls(own, "send") == 1
    # Rank 0 of the group receives another number of elements than rank 1 sends.
    tensor = put(0, 9001 + rank) if rank else room(9001)
    message = ""
    try:
        if rank:
            collectives.send(tensor, group=own, group_dst=0, policy=ALL)
        else:
            collectives.recv(tensor, group=own, group_src=1, policy=ALL)
    except PeerMismatch as error:
        assert (error.rank, error.peer) == (rank, 1)
        message = error.message
    swap()  # the direction goes on
    return message


@over("gloo")
def test_sub_groups_and_mismatches(on_ranks: OnRanks) -> None:
    results = on_ranks(None, in_a_sub_group)
    assert results[1] == "recv: rank 0 expects 9001 elements of rank 1, got 9002"
    assert results[2] == "send: rank 0 expects 9001 elements of rank 1, got 9002"


# What goes natively, and mixtures


def mixture(group: dist.ProcessGroup) -> dict[str, int]:
    """Plain and compressed messages of one direction keep their order among themselves."""
    rank, other = group.rank(), 1 - group.rank()
    reset_stats(group)
    policy = Policy(min_bytes=10_000, adaptive=False)
    numels, dtype = [9001, 40, 9002, 41, 9003, 42], torch.bfloat16
    if rank == 0:
        ops = [dist.P2POp(dist.isend, put(k, n), other, group) for k, n in enumerate(numels)]
        ops += [dist.P2POp(dist.isend, torch.arange(9001, device=transports.cuda.DEVICE), other, group)]
    else:
        outs = [torch.empty(n, dtype=dtype, device=transports.cuda.DEVICE) for n in numels]
        outs += [torch.empty(9001, dtype=torch.int64, device=transports.cuda.DEVICE)]
        ops = [dist.P2POp(dist.irecv, out, other, group) for out in outs]
    for work in collectives.batch_isend_irecv(ops, policy=policy):
        work.wait()
    if rank == 1:
        for k, (out, n) in enumerate(zip(outs, numels, strict=False)):
            assert_bits(out.cpu(), data(k, n, dtype))
        assert outs[-1].tolist() == list(range(9001))
    counted = stats(group).calls["recv" if rank else "send"]
    assert counted.compressed_calls == 3
    return dict(counted.native_calls)


@over("gloo")
def test_a_batch_of_plain_and_compressed_messages(on_ranks: OnRanks) -> None:
    assert on_ranks(2, mixture) == [{"below min_bytes": 3, "dtype torch.int64": 1}] * 2


def native(group: dist.ProcessGroup) -> dict[str, int]:
    """What only gloo has: tags, and receives from anyone."""
    rank = group.rank()
    reset_stats(group)
    x, outs = data(0, 9001, torch.float32), [torch.empty(9001) for _ in range(4)]
    if rank == 0:
        works = [collectives.isend(x + tag, 1, group, tag, policy=ALL) for tag in (5, 3)]
        collectives.send(x, 1, group, policy=Policy(enabled=False))
        collectives.send(x, 1, group, 7, policy=ALL)
    else:
        works = [
            collectives.irecv(outs[0], 0, group, 3, policy=ALL),
            collectives.irecv(outs[1], 0, group, 5, policy=ALL),
        ]
        assert collectives.recv(outs[2], 0, group, policy=Policy(enabled=False)) == 0
        assert collectives.recv(outs[3], group=group, tag=7, policy=ALL) == 0
    for work in works:
        work.wait()
    if rank:
        for out, more in zip(outs, (3, 5, 0, 0), strict=True):
            assert_bits(out, x + more)
    (counted,) = stats(group).calls.values()
    assert counted.compressed_calls == 0
    return dict(counted.native_calls)


@over("gloo")
def test_tags_and_any_source_go_natively(on_ranks: OnRanks) -> None:
    sent, received = on_ranks(2, native)
    assert sent == {"tag": 3, "disabled by policy": 1}
    assert received == {"tag": 2, "disabled by policy": 1, "any source": 1}


def strides(group: dist.ProcessGroup) -> None:
    rank = group.rank()
    x = put(0, 100 * 90, torch.float32).view(100, 90).t()
    if rank == 0:
        collectives.send(x, 1, group, policy=ALL)
    else:
        out = torch.empty(100, 90, device=transports.cuda.DEVICE).t()
        collectives.recv(out, 0, group, policy=ALL)
        assert not out.is_contiguous()
        assert_bits(out.cpu().reshape(-1), x.cpu().reshape(-1))


@over("gloo")
def test_strides(on_ranks: OnRanks) -> None:
    on_ranks(2, strides)


def wire(group: dist.ProcessGroup) -> tuple[int, int]:
    rank, x = group.rank(), put(0, 100_000)
    reset_stats(group)
    if rank == 0:
        collectives.send(x, 1, group, policy=ALL)
    else:
        collectives.recv(room(100_000), 0, group, policy=ALL)
    counted = stats(group).calls["recv" if rank else "send"]
    return counted.raw_bytes, counted.sent_bytes


@over("gloo")
def test_counts_the_bytes_it_sends(on_ranks: OnRanks) -> None:
    (raw, sent), received = on_ranks(2, wire)
    assert raw == 200_000 and raw / sent > 1.4
    assert received == (0, 8 * (3 + 2 * 2))  # its description


# Ends that differ


def differing_ends(group: dist.ProcessGroup) -> str:
    own = fresh(2, seconds=3)
    if group.rank() > 1:
        return ""
    x, policy = data(0, 9001, torch.float32), Policy(enabled=group.rank() == 0, min_bytes=0)
    try:
        if group.rank() == 0:
            collectives.send(x, 1, own, policy=policy)
        else:
            collectives.recv(x, 0, own, policy=policy)
    except RuntimeError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


@over("gloo")
def test_ends_that_differ_in_policy_end_in_the_timeout(on_ranks: OnRanks) -> None:
    compressed, plain = on_ranks(None, differing_ends)[:2]
    assert compressed.startswith("ZipcclError: rank 0: send: ")
    assert compressed.endswith("the same dtype, size, tag and policy? (peer: rank 1)")
    assert "imed out" in plain


LEAVES = """
import sys, torch, torch.distributed as dist
from zipccl_hooks import Policy, collectives
rank, policy = int(sys.argv[2]), Policy(min_bytes=0)
dist.init_process_group("gloo", init_method="file://" + sys.argv[1], rank=rank, world_size=2)
xs = [torch.randn(300_000) for _ in range(6)]
works = [collectives.isend(x, 1 - rank, policy=policy) for x in xs[:3]]
works += [collectives.irecv(x, 1 - rank, policy=policy) for x in xs[3:]]
dist.destroy_process_group()
print("left")
"""


def test_leaves_cleanly_with_messages_in_flight(tmp_path: Path) -> None:
    command = [sys.executable, "-c", LEAVES, str(tmp_path / "store")]
    processes = [subprocess.Popen([*command, str(r)], stdout=subprocess.PIPE, text=True) for r in range(2)]
    for process in processes:
        output, _ = process.communicate(timeout=60)
        assert (process.returncode, output) == (0, "left\n")


def contradiction(group: dist.ProcessGroup, what: str) -> str:
    """Both ends compress, but not alike; then they do."""
    rank = group.rank()
    dtype = torch.float16 if what == "dtype" and rank else torch.bfloat16
    policy = Policy(min_bytes=0, adaptive=False, mode="fast" if what == "mode" and rank else "dense")
    with pytest.raises(PeerMismatch) as caught:
        if rank == 0:
            collectives.send(put(0, 5000, dtype), 1, group, policy=policy)
        else:
            collectives.recv(room(5000, dtype), 0, group, policy=policy)
    shared = Policy(min_bytes=0, adaptive=False)
    if rank == 0:
        collectives.send(put(0, 5000), 1, group, policy=shared)
    else:
        out = room(5000)
        collectives.recv(out, 0, group, policy=shared)
        assert_bits(out.cpu(), data(0, 5000, torch.bfloat16))
    return caught.value.message


@over("gloo")
@pytest.mark.parametrize(("what", "named"), [("dtype", "dtype"), ("mode", "operation, sizes or policy")])
def test_ends_that_contradict_each_other_raise(on_ranks: OnRanks, what: str, named: str) -> None:
    message = f"ranks 0 and 1 call it with different {named}"
    assert on_ranks(2, contradiction, what) == [f"send: {message}", f"recv: {message}"]


# Arguments


def bad_arguments(group: dist.ProcessGroup) -> None:
    x: Any = torch.randn(10)
    cases: list[tuple[type[Exception], str, Callable[[], Any]]] = [
        (TypeError, "tensor: expected a torch.Tensor, got list", lambda: collectives.send([x], 1, group)),
        (ValueError, "dst: expected either dst or group_dst", lambda: collectives.isend(x, group=group)),
        (ValueError, "src: expected either src or group_src", lambda: collectives.irecv(x, 1, group, 0, 1)),
        (ValueError, "group_dst: expected a rank below 2, got 2",
         lambda: collectives.send(x, group=group, group_dst=2)),
        (ValueError, r"p2p_op_list: expected a list of P2POps, got \[\]",
         lambda: collectives.batch_isend_irecv([])),
        (TypeError, r"p2p_op_list\[0\]: expected a P2POp, got Tensor",
         lambda: collectives.batch_isend_irecv([x])),
        (ValueError, "should not be the same as the rank",
         lambda: collectives.send(x, group.rank(), group, policy=ALL)),
    ]  # fmt: skip
    for error, message, call in cases:
        with pytest.raises(error, match=message):
            call()


@over("gloo")
def test_bad_arguments_raise_before_anything_is_sent(on_ranks: OnRanks) -> None:
    on_ranks(2, bad_arguments)


SET_UP_TOGETHER = """
import threading, time
from datetime import timedelta
import torch.distributed as dist
from zipccl_hooks.communicator import make_communicator

dist.init_process_group("gloo", store=dist.TCPStore("127.0.0.1", 0, 1, True), rank=0, world_size=1)
one, other = (make_communicator(dist.group.WORLD, name, [0]) for name in ("0 to 1", "1 to 0"))
thread = threading.Thread(target=lambda: one.store.wait(["never set"], timedelta(seconds=3)))
threading.excepthook = lambda failed: None
thread.start()
time.sleep(0.3)  # until it waits
other.store.set("key", "value")
assert thread.is_alive(), "other waited until one was done"
thread.join()
one.close()
other.close()
dist.destroy_process_group()
"""


def test_communicators_are_set_up_independently_over_a_tcp_store() -> None:
    """With one client of the store for both, two ranks that connect them in turn wait for each other."""
    done = subprocess.run([sys.executable, "-c", SET_UP_TOGETHER], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
