"""Frameworks that know nothing of compression, run compressed: at 2 ranks the bits of plain gloo."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import test_ddp
import test_fsdp
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.checkpoint as checkpoint
from ranks import Ranks
from test_collectives import assert_bits, data
from test_ddp import Net, assert_same, batch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel as DDP

from zipccl_hooks import Policy, compressed, reset_stats, stats

ALL = Policy(min_bytes=0)
BF16, FP32 = torch.bfloat16, torch.float32
NUMEL = 2 * 8192 + 77


@pytest.fixture(scope="module")
def quartet() -> Iterator[Ranks]:
    pool = Ranks(4)
    yield pool
    pool.stop()


def counts() -> dict[str, int]:
    """Compressed calls by name, of all groups; and none since."""
    found = {name: c.compressed_calls for name, c in stats().calls.items() if c.compressed_calls}
    reset_stats()
    return found


def plain_and_compressed(function: Callable[[], list[Any]]) -> dict[str, int]:
    """The same bits both ways; what was compressed."""
    expected = function()
    reset_stats()
    with compressed(ALL):
        got = function()
    assert_same(got, expected)
    return counts()


def ddp(group: dist.ProcessGroup, options: dict[str, Any]) -> dict[str, int]:
    torch.manual_seed(0)
    net = Net()

    def train() -> list[Any]:
        model = DDP(copy.deepcopy(net), process_group=group, bucket_cap_mb=0.02, **options)
        use_all = not options.get("find_unused_parameters")
        return test_ddp.train(model, lambda m, k: m(batch(group.rank(), k), use_all or k != 1).sum())

    return plain_and_compressed(train)


@pytest.mark.parametrize(
    "options",
    [{}, {"gradient_as_bucket_view": True}, {"find_unused_parameters": True}, {"static_graph": True}],
    ids=str,
)
def test_ddp_as_it_is(quartet: Ranks, options: dict[str, Any]) -> None:
    first, second = quartet.run(2, ddp, options)
    assert first == second and first["all_reduce"] > test_ddp.STEPS
    assert set(first) == {"all_reduce", "broadcast"}  # parameters and buffers at the start


def fsdp2(group: dist.ProcessGroup, case: str) -> dict[str, int]:
    options = copy.deepcopy(test_fsdp.CASES[case])
    mp, accumulate = MixedPrecisionPolicy(**options.pop("mp")), options.pop("accumulate", 1)
    mesh = test_fsdp.mesh_of(group)

    def train() -> list[Any]:
        losses, parameters = test_fsdp.train(test_fsdp.sharded(mesh, mp, **options), group.rank(), accumulate)
        return [torch.tensor(losses), parameters]

    return plain_and_compressed(train)


@pytest.mark.parametrize("case", ["bf16, reduce fp32", "accumulate"])
def test_fsdp2_as_it_is(quartet: Ranks, case: str) -> None:
    first, second = quartet.run(2, fsdp2, case)
    assert first == second and first["reduce_scatter_tensor"] == 3 * test_fsdp.STEPS
    assert first["all_gather_into_tensor"] > 3 * test_fsdp.STEPS


def hsdp(group: dist.ProcessGroup) -> dict[str, int]:
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    mp = MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=FP32)

    def train() -> list[Any]:
        losses, parameters = test_fsdp.train(test_fsdp.sharded(mesh, mp), group.rank())
        return [torch.tensor(losses), parameters]

    return plain_and_compressed(train)


def test_hsdp_with_its_all_reduce(quartet: Ranks) -> None:
    for found in quartet.run(4, hsdp):
        assert found["reduce_scatter_tensor"] == found["all_reduce"] == 3 * test_fsdp.STEPS


def zero(group: dist.ProcessGroup) -> dict[str, int]:
    torch.manual_seed(0)
    net = Net()

    def train() -> list[Any]:
        model = DDP(copy.deepcopy(net), process_group=group)
        options = {"process_group": group, "lr": 1e-2}
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, **options)
        for step in range(2):
            model(batch(group.rank(), step)).sum().backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        return list(model.state_dict().values())

    return plain_and_compressed(train)


def test_zero_redundancy_optimizer(quartet: Ranks) -> None:
    for found in quartet.run(2, zero):
        assert found["all_reduce"] >= 2 and found["broadcast"] >= 4


def functional_calls(group: dist.ProcessGroup) -> dict[str, int]:
    rank, size = group.rank(), group.size()

    def call() -> list[Any]:
        x = data(rank, size * NUMEL, BF16)
        tensors = [
            functional.all_reduce(x, "avg", group),
            functional.all_gather_tensor(x, 0, group),
            functional.reduce_scatter_tensor(x, "sum", 0, group),
            functional.all_to_all_single(x, [NUMEL - 5 + 10 * rank] * 2, [NUMEL - 5, NUMEL + 5], group),
            functional.broadcast(x, 1, group),
            *functional.all_reduce_coalesced([x, x * 2], "sum", group),
            *functional.all_gather_into_tensor_coalesced([x, x * 2], group),
        ]
        return [t.wait() if isinstance(t, functional.AsyncCollectiveTensor) else t for t in tensors]

    return plain_and_compressed(call)


def test_functional_collectives(quartet: Ranks) -> None:
    names = (
        "all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single", "broadcast",
        "all_reduce_coalesced", "all_gather_into_tensor_coalesced",
    )  # fmt: skip
    assert quartet.run(2, functional_calls) == [dict.fromkeys(names, 1)] * 2


def saved(group: dist.ProcessGroup, folder: str) -> dict[str, int]:
    """Distributed checkpoints, saved and loaded: the same files, the same state."""
    rank, mesh = group.rank(), test_fsdp.mesh_of(group)
    mp = MixedPrecisionPolicy()

    def round_trip(name: str) -> list[Any]:
        model = test_fsdp.sharded(mesh, mp)
        test_fsdp.train(model, rank)
        state = {"model": model.state_dict(), "step": 5}
        options = {"process_group": group, "no_dist": False}
        checkpoint.save(state, checkpoint_id=f"{folder}/{name}", **options)
        again = test_fsdp.sharded(mesh, mp)
        state = {"model": again.state_dict(), "step": 0}
        checkpoint.load(state, checkpoint_id=f"{folder}/{name}", **options)
        assert state["step"] == 5
        return [p.full_tensor() for p in again.state_dict().values()]

    names = iter(("plain", "compressed"))
    return plain_and_compressed(lambda: round_trip(next(names)))


def test_checkpoints(quartet: Ranks, tmp_path: Path) -> None:
    for found in quartet.run(2, saved, str(tmp_path)):
        assert found["all_gather_into_tensor"] > 0
    for path in (tmp_path / "plain").glob("*.distcp"):
        assert path.read_bytes() == (tmp_path / "compressed" / path.name).read_bytes()


def objects(group: dist.ProcessGroup) -> dict[str, int]:
    rank, size = group.rank(), group.size()
    reset_stats()
    with compressed(ALL):
        found: list[Any] = [None] * size
        thing = {"tensor": torch.full((5,), float(rank)), "name": "x" * rank}
        dist.all_gather_object(found, thing, group)
        assert [one["name"] for one in found] == ["x" * r for r in range(size)]
        assert all(one["tensor"].eq(r).all() for r, one in enumerate(found))
        one = [thing if rank == 1 else None]
        dist.broadcast_object_list(one, 1, group)
        assert one[0]["name"] == "x"
        gathered = [None] * size if rank == 0 else None
        dist.gather_object(thing, gathered, 0, group)
        scattered = [None]
        dist.scatter_object_list(scattered, list(range(size)) if rank == 0 else None, 0, group)
        assert scattered == [rank]
    return counts()


def test_object_collectives_stay_plain(quartet: Ranks) -> None:
    assert quartet.run(3, objects) == [{}] * 3


def in_flight(group: dist.ProcessGroup) -> None:
    own = dist.new_group([0, 1])
    if group.rank() < 2:
        with compressed(ALL):
            tensors = [data(group.rank() + k, 300_000, FP32) for k in range(4)]
            works = [dist.all_reduce(x, group=own, async_op=True) for x in tensors]
            dist.destroy_process_group(own)
            for k, (x, work) in enumerate(zip(tensors, works, strict=True)):
                work.wait()
                assert_bits(x, data(k, 300_000, FP32) + data(1 + k, 300_000, FP32))


def test_destroying_a_group_with_work_in_flight(quartet: Ranks) -> None:
    quartet.run(4, in_flight)
