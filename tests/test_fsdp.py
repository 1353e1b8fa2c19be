"""FSDP2 on real ranks: the same losses, gradients and parameters as without, bit for bit, fewer bytes."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import Ranks
from test_collectives import assert_bits
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

import zipccl_hooks
from zipccl_hooks import Policy, apply, reset_stats, stats
from zipccl_hooks.fsdp import ZipAllGather, ZipMixedPrecisionPolicy, ZipReduceScatter

ALL = Policy(min_bytes=0)
BF16, FP32 = torch.bfloat16, torch.float32
STEPS = 4


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 3 * width + 1), nn.Linear(3 * width + 1, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


def sharded(mesh: DeviceMesh, mp_policy: MixedPrecisionPolicy, **options: Any) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(61) for _ in range(3)))
    for block in model:
        fully_shard(block, mesh=mesh, mp_policy=mp_policy, **options)
    return fully_shard(model, mesh=mesh, mp_policy=mp_policy, **options)


def train(model: nn.Module, rank: int, accumulate: int = 1) -> tuple[list[float], Tensor]:
    """(losses, all parameters)."""
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    generator, losses = torch.Generator().manual_seed(rank), []
    for step in range(STEPS * accumulate):
        model.set_requires_gradient_sync((step + 1) % accumulate == 0)  # type: ignore[operator]
        x = torch.randn(16, 61, generator=generator)
        loss = (model(x).float() - x).square().mean()
        loss.backward()
        if (step + 1) % accumulate == 0:
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    whole = [p.full_tensor() for p in model.parameters()]  # type: ignore[attr-defined]
    return losses, torch.cat([p.detach().reshape(-1) for p in whole])


def mesh_of(group: dist.ProcessGroup) -> DeviceMesh:
    return DeviceMesh.from_group(group, "cpu")


CASES: dict[str, dict[str, Any]] = {
    "fp32": {"mp": {}},
    "bf16": {"mp": {"param_dtype": BF16}},
    "bf16, reduce fp32": {"mp": {"param_dtype": BF16, "reduce_dtype": FP32}},
    "no reshard": {"mp": {"param_dtype": BF16, "reduce_dtype": FP32}, "reshard_after_forward": False},
    "accumulate": {"mp": {"param_dtype": BF16, "reduce_dtype": FP32}, "accumulate": 3},
}


def same_training(group: dist.ProcessGroup, case: str, how: str) -> dict[str, float]:
    options = copy.deepcopy(CASES[case])
    mp, accumulate, rank = options.pop("mp"), options.pop("accumulate", 1), group.rank()
    mesh = mesh_of(group)
    plain = train(sharded(mesh, MixedPrecisionPolicy(**mp), **options), rank, accumulate)
    reset_stats(group)
    if how == "policy":
        model = sharded(mesh, ZipMixedPrecisionPolicy(**mp, policy=ALL), **options)
    else:
        model = apply(sharded(mesh, MixedPrecisionPolicy(**mp), **options), ALL)
    losses, parameters = train(model, rank, accumulate)
    assert losses == plain[0]
    assert_bits(parameters, plain[1])
    counted = stats(group).calls
    assert (
        counted["reduce_scatter_tensor"].compressed_calls == 4 * STEPS - STEPS
    )  # the root has no parameters
    return {name: call.ratio for name, call in counted.items()}


@pytest.mark.parametrize("how", ["policy", "apply"])
@pytest.mark.parametrize("case", CASES)
def test_two_ranks_train_alike(ranks: Ranks, case: str, how: str) -> None:
    for ratios in ranks.run(2, same_training, case, how):
        bf16, fp32 = "bf16" in case or case in ("no reshard", "accumulate"), case == "fp32"
        assert ratios["all_gather_into_tensor"] > (1.4 if bf16 else 1.1)
        floor = 1.1 if fp32 else 1.4 if case == "bf16" else 1.6 if case == "accumulate" else 2.5
        assert ratios["reduce_scatter_tensor"] > floor, ratios


def divided(group: dist.ProcessGroup) -> None:
    """A divide factor of its own, as TorchTitan sets 1.0: the sum, then, for all ranks alike."""
    model = sharded(mesh_of(group), ZipMixedPrecisionPolicy(policy=ALL))
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
    x = torch.randn(16, 61, generator=torch.Generator().manual_seed(group.rank()))
    model(x).square().mean().backward()
    found = torch.cat([p.grad.full_tensor().reshape(-1) for p in model.parameters()])
    torch.manual_seed(0)
    alone = nn.Sequential(*(Block(61) for _ in range(3)))
    for rank in range(group.size()):
        alone(torch.randn(16, 61, generator=torch.Generator().manual_seed(rank))).square().mean().backward()
    expected = torch.cat([p.grad.reshape(-1) for p in alone.parameters()])
    torch.testing.assert_close(found, expected)
    assert stats(group).calls["reduce_scatter_tensor"].compressed_calls == 3


def test_divide_factor(ranks: Ranks) -> None:
    ranks.run(3, divided)


def only_gradients(group: dist.ProcessGroup) -> None:
    mp = ZipMixedPrecisionPolicy(policy=ALL, compress_params=False)
    reset_stats(group)
    train(sharded(mesh_of(group), mp), group.rank())
    assert set(stats(group).calls) == {"reduce_scatter_tensor"}


def test_only_gradients(ranks: Ranks) -> None:
    ranks.run(2, only_gradients)


def hybrid(group: dist.ProcessGroup) -> None:
    """HSDP: sharded in pairs, replicated between them."""
    rank = group.rank()
    mesh = dist.init_device_mesh("cpu", (4, 2), mesh_dim_names=("replicate", "shard"))
    mp = {"param_dtype": BF16, "reduce_dtype": FP32}
    plain = train(sharded(mesh, MixedPrecisionPolicy(**mp)), rank)
    reset_stats()
    losses, parameters = train(sharded(mesh, ZipMixedPrecisionPolicy(**mp, policy=ALL)), rank)
    assert losses == plain[0]
    assert_bits(parameters, plain[1])
    assert stats().calls["reduce_scatter_tensor"].compressed_calls == 3 * STEPS


def test_hybrid(ranks: Ranks) -> None:
    ranks.run(8, hybrid)


def test_policy_is_a_mixed_precision_policy() -> None:
    policy = ZipMixedPrecisionPolicy(param_dtype=BF16, policy=ALL)
    assert isinstance(policy, MixedPrecisionPolicy) and policy.param_dtype == BF16
    assert pickle.loads(pickle.dumps(policy)) == policy and hash(policy) == hash(copy.copy(policy))


def test_apply_needs_a_sharded_model() -> None:
    with pytest.raises(ValueError, match="model: expected one that fully_shard was called on, got Linear"):
        apply(nn.Linear(3, 3))


def test_allocates_ordinary_memory() -> None:
    for comm in (ZipAllGather(), ZipReduceScatter()):
        x = comm.allocate((3, 4), dtype=BF16, device=torch.device("cpu"))
        assert x.shape == (3, 4) and x.dtype == BF16


def test_fsdp_is_imported_when_it_is_used() -> None:
    program = """
import sys, zipccl_hooks
assert "torch.distributed.fsdp" not in sys.modules
zipccl_hooks.ZipMixedPrecisionPolicy()
assert "torch.distributed.fsdp" in sys.modules
"""
    subprocess.run([sys.executable, "-c", program], check=True)
    assert set(zipccl_hooks._FSDP) <= set(zipccl_hooks.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        zipccl_hooks.nothing  # noqa: B018
