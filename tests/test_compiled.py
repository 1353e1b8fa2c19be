"""torch.compile: compiled code has plain gloo's bits, is not compiled anew, and its calls are compressed."""

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
from ranks import Ranks
from test_collectives import data
from test_ddp import Net, assert_same, batch
from test_underneath import counts
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP

from zipccl_hooks import Policy, compressed, disable, enable, reset_stats

ALL = Policy(min_bytes=0)
BF16 = torch.bfloat16
NUMEL = 8192 + 78


@pytest.fixture(scope="module")
def pair() -> Iterator[Ranks]:
    pool = Ranks(2)
    yield pool
    pool.stop()


def dynamo() -> dict[str, dict[str, int]]:
    """What Dynamo counts: graphs, breaks, recompilations."""
    return {kind: dict(found) for kind, found in torch._dynamo.utils.counters.items() if kind != "frames"}


def compiled_once(function: Callable[[], list[Any]]) -> dict[str, int]:
    """Runs it plain, then compressed: same bits, and Dynamo has nothing to do the second time."""
    function()  # compiles
    expected = function()
    before = dynamo()
    reset_stats()
    with compressed(ALL):
        got = function()
    assert_same(got, expected)
    after = dynamo()
    assert after["stats"]["unique_graphs"] == before["stats"]["unique_graphs"] > 0
    assert after.get("graph_break") == before.get("graph_break")
    return counts()


def compiled_ddp(group: dist.ProcessGroup) -> dict[str, int]:
    torch.manual_seed(0)
    net = Net()
    model = DDP(copy.deepcopy(net), process_group=group)
    step = torch.compile(model, backend="aot_eager")

    def train() -> list[Any]:
        model.module.load_state_dict(net.state_dict())
        return test_ddp.train(model, lambda _, k: step(batch(group.rank(), k)).sum())

    return compiled_once(train)


def test_ddp_compiled(pair: Ranks) -> None:
    for found in pair.run(2, compiled_ddp):
        assert found["all_reduce"] >= test_ddp.STEPS


def compiled_fsdp2(group: dist.ProcessGroup) -> dict[str, int]:
    mesh = test_fsdp.mesh_of(group)
    mp = MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=torch.float32)
    torch.manual_seed(0)
    model = nn.Sequential(*(test_fsdp.Block(61) for _ in range(2)))
    for block in model:
        block.compile(backend="aot_eager")
        fully_shard(block, mesh=mesh, mp_policy=mp)
    fully_shard(model, mesh=mesh, mp_policy=mp)
    begun = copy.deepcopy(model.state_dict())

    def train() -> list[Any]:
        model.load_state_dict(begun)
        losses, parameters = test_fsdp.train(model, group.rank())
        return [torch.tensor(losses), parameters]

    return compiled_once(train)


def test_fsdp2_compiled(pair: Ranks) -> None:
    for found in pair.run(2, compiled_fsdp2):
        assert found["reduce_scatter_tensor"] == 2 * test_fsdp.STEPS
        assert found["all_gather_into_tensor"] > 2 * test_fsdp.STEPS


def compiled_collectives(group: dist.ProcessGroup, backend: str) -> dict[str, int]:
    """Functional collectives, some independent of each other, and those of torch.distributed remapped."""
    rank, size = group.rank(), group.size()
    torch._dynamo.reset()

    @torch.compile(fullgraph=True, backend=backend)
    def step(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        gathered = [functional.all_gather_tensor(t * 2, 0, group) for t in (x, y, x + y)]
        scattered = [functional.reduce_scatter_tensor(t, "sum", 0, group) for t in gathered]
        total = functional.all_reduce(scattered[0] + scattered[1], "avg", group)
        exchanged = functional.all_to_all_single(total, None, None, group)
        legacy = exchanged + 1
        dist.all_reduce(legacy, group=group)
        return (*gathered, *scattered, total, exchanged, legacy)

    x, y = (data(rank + k, size * NUMEL, BF16) for k in (0, 10))
    return compiled_once(lambda: list(step(x, y)))


def test_collectives_in_a_full_graph(pair: Ranks) -> None:
    expected = {
        "all_gather_into_tensor": 3, "reduce_scatter_tensor": 3, "all_reduce": 2, "all_to_all_single": 1
    }  # fmt: skip
    assert pair.run(2, compiled_collectives, "aot_eager") == [expected] * 2


def inductor_buckets(group: dist.ProcessGroup) -> dict[str, int]:
    """Inductor puts gathers, and scatters, into one call each: also through all_gather_into_tensor_out."""
    from torch._inductor import config

    # A cache that ranks of a host share hands one the code of the other (torch 2.13, without us).
    with config.patch(
        force_disable_caches=True, bucket_all_gathers_fx="all", bucket_reduce_scatters_fx="all"
    ):
        return compiled_collectives(group, "inductor")


def test_inductor_with_bucketing(pair: Ranks) -> None:
    for found in pair.run(2, inductor_buckets):
        assert found == {
            "all_gather_into_tensor": 1, "reduce_scatter_tensor": 1, "all_reduce": 2, "all_to_all_single": 1
        }  # fmt: skip


def cached(group: dist.ProcessGroup, folder: str) -> tuple[list[int], dict[str, int]]:
    """Compiles the same without us and, Dynamo having forgotten it, with: hits of both caches; our counts."""
    from torch._functorch import config as functorch_config
    from torch._inductor import config

    def step(x: Tensor) -> Tensor:
        return functional.reduce_scatter_tensor(
            functional.all_gather_tensor(x * 2, 0, group), "sum", 0, group
        )

    def compiled() -> Tensor:
        torch._dynamo.reset()
        return torch.compile(step, fullgraph=True)(data(group.rank(), NUMEL, BF16))

    counters = torch._dynamo.utils.counters
    with (
        pytest.MonkeyPatch.context() as patch,
        config.patch({"force_disable_caches": False, "fx_graph_cache": True, "cpp.vec_isa_ok": True}),
        functorch_config.patch(enable_autograd_cache=True),
    ):
        # One folder for each rank: see inductor_buckets.
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", f"{folder}/{group.rank()}")
        expected = compiled()
        counters.clear()
        reset_stats()
        enable(ALL)
        try:
            assert_same([compiled()], [expected])
        finally:
            disable()
    hits = [counters["inductor"]["fxgraph_cache_hit"], counters["aot_autograd"]["autograd_cache_hit"]]
    misses = counters["inductor"]["fxgraph_cache_miss"] + counters["aot_autograd"]["autograd_cache_miss"]
    return [*hits, misses], counts()


def test_caches_hit_with_compression_on(pair: Ranks, tmp_path: Path) -> None:
    for hits, found in pair.run(2, cached, str(tmp_path)):
        assert hits == [1, 1, 0]
        assert found == {"all_gather_into_tensor": 1, "reduce_scatter_tensor": 1}
