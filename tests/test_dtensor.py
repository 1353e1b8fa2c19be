"""DTensor's redistributions, eager and compiled: forward and backward have plain gloo's bits, compressed."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import Ranks
from test_collectives import compressed_calls, data
from test_ddp import assert_same
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from zipccl_hooks import Policy, compressed_redistribute, reset_stats, stats

ALL = Policy(min_bytes=0)
BF16 = torch.bfloat16


@pytest.fixture(scope="module")
def trio() -> Iterator[Ranks]:
    pool = Ranks(3)
    yield pool
    pool.stop()


def compiled_graphs() -> int:
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def both_ways(mesh: DeviceMesh, function: Callable[[], list[Any]]) -> dict[str, int]:
    """The same bits both ways; compressed calls by name, none plain for another reason than its dtype."""
    group = mesh.get_group()
    torch._dynamo.reset()
    expected, graphs = function(), compiled_graphs()
    reset_stats(group)
    with compressed_redistribute(ALL, mesh=mesh):
        got = function()
    assert_same(got, expected)
    assert compiled_graphs() == graphs  # those of the plain run are run again
    counted = stats(group).calls
    assert not [call.native_calls for call in counted.values() if call.native_calls]
    return {name: call.compressed_calls for name, call in counted.items()}


KINDS: dict[str, tuple[Placement, Placement]] = {
    "S0 to R": (Shard(0), Replicate()),
    "S1 to R": (Shard(1), Replicate()),
    "P to S": (Partial(), Shard(0)),
    "P to R": (Partial(), Replicate()),
    "S0 to S1": (Shard(0), Shard(1)),
}


def redistribution(group: dist.ProcessGroup, kind: str, even: bool, compile: bool) -> dict[str, int]:
    source, target = KINDS[kind]
    mesh = DeviceMesh.from_group(group, "cpu")
    rows, columns = (96, 64) if even else (97, 61)

    shape = {"shape": (rows, columns), "stride": (columns, 1)}

    def forward(local: Tensor) -> Tensor:
        x = DTensor.from_local(local, mesh, [source], run_check=False, **shape)
        return x.redistribute(placements=[target]).to_local() * 2

    step = torch.compile(forward, fullgraph=True, backend="aot_eager") if compile else forward

    def run() -> list[Any]:
        whole = data(group.rank() if source.is_partial() else 0, rows * columns, BF16).view(rows, columns)
        local = whole if source.is_partial() else distribute_tensor(whole, mesh, [source]).to_local()
        local = local.detach().requires_grad_()
        out = step(local)
        out.float().square().sum().backward()
        return [out, local.grad]

    return both_ways(mesh, run)


# Compressed calls of forward and backward, with distribute_tensor's scatter. Backward of S to R: a gradient
# that is replicated is cut, not communicated; of P to S: gathered.
EXPECTED = {
    "S0 to R": {"scatter": 1, "all_gather_into_tensor": 1},
    "S1 to R": {"scatter": 1, "all_gather_into_tensor": 1},
    "P to S": {"reduce_scatter_tensor": 1, "all_gather_into_tensor": 1},
    "P to R": {"all_reduce": 1},
    "S0 to S1": {"scatter": 1, "all_gather_into_tensor": 2},  # all-to-all only on GPUs
}


@pytest.mark.parametrize("compile", [False, True], ids=["eager", "fullgraph"])
@pytest.mark.parametrize("even", [True, False], ids=["even", "uneven"])
@pytest.mark.parametrize("kind", KINDS)
def test_redistribute(trio: Ranks, kind: str, even: bool, compile: bool) -> None:
    assert trio.run(2, redistribution, kind, even, compile) == [EXPECTED[kind]] * 2


def full_tensor(group: dist.ProcessGroup) -> dict[str, int]:
    mesh = DeviceMesh.from_group(group, "cpu")
    whole = data(0, 97 * 61, BF16).view(97, 61)
    return both_ways(mesh, lambda: [distribute_tensor(whole, mesh, [Shard(0)]).full_tensor()])


def test_full_tensor(trio: Ranks) -> None:
    assert trio.run(3, full_tensor) == [{"scatter": 1, "all_gather_into_tensor": 1}] * 3


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(32)
        self.up, self.down = nn.Linear(32, 66), nn.Linear(66, 32)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(self.norm(x))))


def tensor_parallel(group: dist.ProcessGroup, compile: bool) -> dict[str, int]:
    """A plan with sequence parallelism: gather before, reduce-scatter after the pair of linear layers."""
    mesh = DeviceMesh.from_group(group, "cpu")
    torch.manual_seed(0)
    net = Mlp()
    plan = {
        "norm": SequenceParallel(sequence_dim=0),
        "up": ColwiseParallel(input_layouts=Shard(0)),
        "down": RowwiseParallel(output_layouts=Shard(0)),
    }

    def train() -> list[Any]:
        model: Any = parallelize_module(copy.deepcopy(net), mesh, dict(plan))
        model = parallelize_module(
            model, mesh, PrepareModuleInput(input_layouts=Shard(0), desired_input_layouts=Shard(0))
        )
        step = torch.compile(model, fullgraph=True, backend="aot_eager") if compile else model
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        losses = []
        for k in range(2):
            x = data(10 * k + group.rank(), 50 * 32, torch.float32).view(50, 32)
            loss = step(x).square().sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        return [*losses, *(p.full_tensor() for p in model.parameters())]

    return both_ways(mesh, train)


@pytest.mark.parametrize("compile", [False, True], ids=["eager", "fullgraph"])
def test_tensor_parallel_plan(trio: Ranks, compile: bool) -> None:
    for found in trio.run(2, tensor_parallel, compile):
        assert found["all_gather_into_tensor"] >= 4 and found["reduce_scatter_tensor"] >= 4


def only_the_mesh(group: dist.ProcessGroup) -> None:
    mesh = DeviceMesh.from_group(group, "cpu")
    other = dist.new_group([0, 1, 2])
    with compressed_redistribute(ALL, mesh=mesh):
        dist.all_reduce(torch.ones(9000), group=other)
        assert compressed_calls(other, "all_reduce") == 0
        with compressed_redistribute(ALL):
            dist.all_reduce(torch.ones(9000), group=other)
            assert compressed_calls(other, "all_reduce") == 1


def test_only_the_mesh_is_compressed(trio: Ranks) -> None:
    trio.run(3, only_the_mesh)
