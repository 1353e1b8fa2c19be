"""Messages between GPUs: over NCCL, staged through the host, and emulated."""

from __future__ import annotations

from typing import Any

import pytest
import test_cuda_collectives as cuda
import torch
import torch.distributed as dist
from corpus import CODED, name_of
from test_collectives import assert_bits, compressed_calls, data
from test_stats import ranges_in
from transports import OnRanks, over, put, room

from zipccl_hooks import Policy, collectives, message_kind, reset_stats, stats
from zipccl_hooks.channel import LAG
from zipccl_hooks.choose import CodecSpeed, Cost
from zipccl_hooks.format import Mode

ALL = Policy(min_bytes=0, adaptive=False)
BF16 = torch.bfloat16
EVERYWHERE = ("emulated", "staged", "nccl")


def ring(group: dist.ProcessGroup, tensors: list[torch.Tensor], policy: Policy, by: int = 1) -> list[Any]:
    """Tensors to the rank ``by`` above, in one batch; what comes from the one below."""
    rank, size = group.rank(), group.size()
    outs = [room(x.numel(), x.dtype).view(x.shape) for x in tensors]
    sends = [dist.P2POp(dist.isend, x, group=group, group_peer=(rank + by) % size) for x in tensors]
    receives = [dist.P2POp(dist.irecv, x, group=group, group_peer=(rank - by) % size) for x in outs]
    for work in collectives.batch_isend_irecv([*sends, *receives], policy=policy):
        work.wait()
    return [out.cpu() for out in outs]


def prepared(group: dist.ProcessGroup) -> None:
    """NCCL's communicator is made by the group's first collective."""
    x = torch.ones(1, device=cuda.DEVICE)
    dist.all_reduce(x, group=group)
    reset_stats(group)


def moves(group: dist.ProcessGroup, dtype: torch.dtype, numel: int, hostile: bool) -> None:
    prepared(group)
    rank, size = group.rank(), group.size()
    for turn in range(3):
        inputs = [data(r + turn, numel, dtype, hostile) for r in range(size)]
        (out,) = ring(group, [put(rank + turn, numel, dtype, hostile)], ALL)
        assert_bits(out, inputs[(rank - 1) % size])
    assert (compressed_calls(group, "send"), compressed_calls(group, "recv")) == (3, 3)


@over(*EVERYWHERE)
@pytest.mark.parametrize("hostile", [False, True], ids=["gaussian", "hostile"])
@pytest.mark.parametrize("dtype", CODED, ids=name_of)
@pytest.mark.parametrize("numel", [0, 1, 3 * 16384 + 77])
def test_moves_the_very_bits(on_ranks: OnRanks, dtype: torch.dtype, numel: int, hostile: bool) -> None:
    on_ranks(2, moves, dtype, numel, hostile)


def ranges(group: dist.ProcessGroup) -> None:
    prepared(group)
    x = put(group.rank(), 50_000, BF16, False)
    ring(group, [x], ALL)
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True
    ) as profiler:
        ring(group, [x], ALL)
    found = ranges_in(profiler)
    # A batch is a message to a rank and one from there: of each one side has bytes.
    assert sorted(found["encode"]) == [0, x.nbytes]
    assert sorted(found["exchange"])[0] == 0 and found["exchange"] != [0, 0]
    assert sorted(found["decode"]) == sorted(found["exchange"])


@over("emulated", "nccl")
def test_profiler_sees_what_a_message_is_made_of(on_ranks: OnRanks) -> None:
    on_ranks(2, ranges)


@over(*EVERYWHERE)
def test_rings_of_three(on_ranks: OnRanks) -> None:
    on_ranks(3, moves, BF16, 70_001, False)


def learns(group: dist.ProcessGroup) -> list[tuple[int, int]]:
    """Bytes and overflows: with room for anything; with what was needed; of data that need more; after."""
    prepared(group)
    rank, numel, found = group.rank(), 100_000, []
    for kind in ("gaussian", "gaussian", "random", "random"):
        reset_stats(group)
        for turn in range(LAG + 1):
            seeds = (rank + turn, 1 - rank + turn)
            mine, expected = (
                data(s, numel, BF16) if kind == "gaussian" or s % 2 else bits(s, numel) for s in seeds
            )
            (out,) = ring(group, [mine.to(cuda.DEVICE)], ALL)
            assert_bits(out, expected)
        calls = stats(group).calls
        found.append(
            (calls["send"].sent_bytes // (LAG + 1), calls["send"].overflows + calls["recv"].overflows)
        )
    return found


def bits(seed: int, numel: int) -> torch.Tensor:
    """bf16 of random bits, which no mode shrinks."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-(2**15), 2**15, (numel,), dtype=torch.int16, generator=generator).view(BF16)


@over(*EVERYWHERE)
def test_gets_the_room_that_earlier_ones_needed(on_ranks: OnRanks) -> None:
    raw = 200_000
    for (first, none), (second, still_none), (_, some), (last, _) in on_ranks(2, learns):
        assert first > 0.9 * raw  # room for anything, but in the last of LAG + 1
        assert raw / second > 1.35 and (none, still_none) == (0, 0)
        assert some > 0
        assert last > second


def chooses(group: dist.ProcessGroup, gain: bool) -> dict[str, int]:
    """How messages go on a link that takes long or not: Event.elapsed_time says a millisecond, emulated."""
    speed = Cost(0.0, 1e12 if gain else 1e8)
    message_kind.codec_speeds = lambda index: dict.fromkeys(Mode, CodecSpeed(speed, speed, speed))
    message_kind.RETRY = 10
    prepared(group)
    numel = 100_000 + gain  # a kind of its own
    for turn in range(3 * LAG + 10 + 3):
        (out,) = ring(group, [data(turn + group.rank(), numel, BF16).to(cuda.DEVICE)], Policy(min_bytes=0))
        assert_bits(out, data(turn + 1 - group.rank(), numel, BF16))
    call = stats(group).calls["recv"]
    return {**call.native_calls, "compressed": call.compressed_calls}


@over("emulated")
@pytest.mark.parametrize("gain", [True, False])
def test_goes_plain_first_then_the_faster_way(on_ranks: OnRanks, gain: bool) -> None:
    # LAG are timed, LAG wait for what was seen; then all, or none until RETRY further ones.
    if gain:
        expected = {"not timed yet": 2 * LAG, "compressed": LAG + 13}
    else:
        expected = {"not timed yet": 2 * LAG + LAG + 2, "faster so": 11, "compressed": 0}
    assert on_ranks(2, chooses, gain) == [expected] * 2


def comes_back(group: dist.ProcessGroup) -> list[str]:
    """Whether messages are compressed, whose data stop to shrink and shrink again."""
    speed = Cost(0.0, 1e12)
    message_kind.codec_speeds = lambda index: dict.fromkeys(Mode, CodecSpeed(speed, speed, speed))
    message_kind.RETRY = 5
    prepared(group)
    numel, found = 100_002, []
    for make, count in ((data_of, 40), (bits, 60), (data_of, 80)):
        for turn in range(count):
            before = compressed_calls(group, "recv")
            (out,) = ring(group, [make(turn + group.rank(), numel).to(cuda.DEVICE)], Policy(min_bytes=0))
            assert_bits(out, make(turn + 1 - group.rank(), numel))
        found.append("compressed" if compressed_calls(group, "recv") > before else "plain")
    return found


def data_of(seed: int, numel: int) -> torch.Tensor:
    return data(seed, numel, BF16)


@over("emulated")
def test_data_that_stop_to_shrink_go_plain_until_they_do_again(on_ranks: OnRanks) -> None:
    first, _, last = on_ranks(2, comes_back)[0]
    assert (first, last) == ("compressed", "compressed")


def mixture(group: dist.ProcessGroup) -> dict[str, int]:
    """A batch of what is compressed in several sizes and dtypes, too small, and no float."""
    prepared(group)
    rank = group.rank()

    def tensors(r: int) -> list[torch.Tensor]:
        return [
            data(r, 60_000, BF16).view(300, 200).t(),
            torch.arange(9000) + r,
            data(r + 7, 60_000, BF16)[3:50_003],
            data(r, 9, torch.float32),
            data(r, 80_001, torch.float32),
            data(r + 9, 80_001, torch.float32),
        ]

    for _ in range(3):
        mine = [x.to(cuda.DEVICE) for x in tensors(rank)]
        mine[0], mine[2] = mine[0].t().contiguous().t(), put(rank + 7, 60_000)[3:50_003]
        outs = ring(group, mine, Policy(min_bytes=1000, adaptive=False))
        for out, expected in zip(outs, tensors(1 - rank), strict=True):
            assert torch.equal(out.contiguous().view(torch.uint8), expected.contiguous().view(torch.uint8))
    call = stats(group).calls["send"]
    return {**call.native_calls, "compressed": call.compressed_calls}


@over("emulated", "nccl")
def test_a_batch_of_plain_and_compressed_messages(on_ranks: OnRanks) -> None:
    found = on_ranks(2, mixture)
    assert found == [{"dtype torch.int64": 3, "below min_bytes": 3, "compressed": 12}] * 2


def cut_otherwise(group: dist.ProcessGroup) -> None:
    """What one end sends in one batch, plain and compressed ones, the other receives in several."""
    prepared(group)
    policy = Policy(min_bytes=1000, adaptive=False)
    for turn in range(LAG + 2):
        sent = [
            data(turn + k, numel, BF16) for k, numel in enumerate((9, 70_001, 11, 70_001, 70_001, 50_001))
        ]
        if group.rank() == 0:
            ops = [dist.P2POp(dist.isend, x.to(cuda.DEVICE), group=group, group_peer=1) for x in sent]
            for work in collectives.batch_isend_irecv(ops, policy=policy):
                work.wait()
            continue
        outs = [room(x.numel()) for x in sent]
        ops = [dist.P2POp(dist.irecv, out, group=group, group_peer=0) for out in outs]
        for some in (ops[:1], ops[1:3], ops[3:]):
            for work in collectives.batch_isend_irecv(some, policy=policy):
                work.wait()
        for out, x in zip(outs, sent, strict=True):
            assert_bits(out.cpu(), x)


@over("emulated", "nccl")
def test_batches_that_the_ends_cut_otherwise(on_ranks: OnRanks) -> None:
    on_ranks(2, cut_otherwise)


def many_at_once(group: dist.ProcessGroup) -> None:
    """More of a kind in a batch than are timed before the first may be compressed."""
    message_kind.codec_speeds = lambda index: dict.fromkeys(Mode, CodecSpeed(*[Cost(0.0, 1e12)] * 3))
    prepared(group)
    for turn in range(2):
        sent = [data(50 * turn + k + group.rank(), 20_003, BF16) for k in range(3 * LAG)]
        outs = ring(group, [x.to(cuda.DEVICE) for x in sent], Policy(min_bytes=0))
        for k, out in enumerate(outs):
            assert_bits(out, data(50 * turn + k + 1 - group.rank(), 20_003, BF16))


@over("emulated", "nccl")
def test_many_of_a_kind_at_once(on_ranks: OnRanks) -> None:
    on_ranks(2, many_at_once)


def one_by_one(group: dist.ProcessGroup) -> None:
    prepared(group)
    x, out = put(group.rank(), 90_001), room(90_001)
    side, before = torch.cuda.Stream(), torch.cuda.current_stream()
    for _ in range(LAG + 2):
        with torch.cuda.stream(side):
            side.wait_stream(before)
            if group.rank() == 0:
                collectives.send(x, group=group, group_dst=1, policy=ALL)
                work = collectives.irecv(out, group=group, group_src=1, policy=ALL)
                work.wait()
            else:
                assert collectives.recv(out, group=group, group_src=0, policy=ALL) == 0
                work = collectives.isend(x, group=group, group_dst=0, policy=ALL)
                work.wait()
            assert_bits(out.cpu(), data(1 - group.rank(), 90_001, BF16))
            out.zero_()
    assert (compressed_calls(group, "send"), compressed_calls(group, "recv")) == (LAG + 2,) * 2


@over("emulated", "staged", "nccl")
def test_messages_by_themselves_on_any_stream(on_ranks: OnRanks) -> None:
    on_ranks(2, one_by_one)
