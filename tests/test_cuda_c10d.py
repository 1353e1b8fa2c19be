"""Underneath torch.distributed on two GPUs over NCCL: the bits of plain NCCL, what is compressed, streams."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import test_ddp
import test_fsdp
import torch
import torch.distributed as dist
from ranks import Ranks
from test_c10d import CALLS, NUMEL, counts, reduce_scatter_single
from test_collectives import assert_bits, data, rank_order_sum
from test_ddp import assert_same
from test_methods import dispatched
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.nn.parallel import DistributedDataParallel as DDP

from zipccl_hooks import Policy, compressed, reset_stats
from zipccl_hooks.methods import HAS_HOOKS

ALL = Policy(min_bytes=0, adaptive=False)
BF16, FP32 = torch.bfloat16, torch.float32

pytestmark = pytest.mark.gpu


def every_collective(group: dist.ProcessGroup, async_op: bool) -> dict[str, int]:
    def call_all() -> list[Any]:
        found = []
        for name, call in CALLS.items():
            work, outputs = call(group, data(group.rank(), NUMEL, BF16).cuda(), async_op)
            if async_op:
                work.wait()
            if name == "all_reduce_coalesced":
                torch.cuda.synchronize()  # its future's value is of another stream
            found += [x.clone() for x in outputs]  # on the current stream, which waits
        return found

    expected = call_all()
    reset_stats(group)
    with compressed(ALL):
        for _ in range(4):  # rooms are learned
            assert_same(call_all(), expected)
    return counts(group)


@pytest.mark.parametrize("async_op", [False, True], ids=["sync", "async"])
def test_every_collective_is_compressed(nccl_ranks: Ranks, async_op: bool) -> None:
    assert nccl_ranks.run(2, every_collective, async_op) == [dict.fromkeys(CALLS, 4)] * 2


def passed_on(group: dist.ProcessGroup) -> None:
    rank = group.rank()
    with compressed(ALL):
        x = torch.full((900,), rank + 1, device="cuda")
        assert dispatched(lambda: dist.all_reduce(x, group=group)) == HAS_HOOKS
        dist.barrier(group)
        assert x.eq(3).all()
        one = dist.P2POp(dist.isend, torch.ones(900, device="cuda"), 1 - rank, group)
        other = dist.P2POp(dist.irecv, torch.zeros(900, device="cuda"), 1 - rank, group)
        for work in dist.batch_isend_irecv([one, other]):
            work.wait()
        assert other.tensor.eq(1).all()
        # Tensors of both kinds in a coalesced call.
        tensors = [torch.full((900,), 1.5, device="cuda"), torch.full((900,), 2, device="cuda")]
        dist.all_reduce(tensors[1], group=group)
        with dist.distributed_c10d._coalescing_manager(group, async_ops=True) as manager:
            dist.all_reduce(tensors[0], group=group)
            dist.all_reduce(tensors[0].double(), group=group)
        manager.wait()
        assert tensors[0].eq(3).all()
        factor = dist._make_nccl_premul_sum(0.3)
        inputs = [data(r, NUMEL, FP32) for r in (0, 1)]
        out = torch.empty(NUMEL, device="cuda")
        reduce_scatter_single(out, torch.cat([inputs[rank]] * 2).cuda(), factor, group)
        assert_bits(out.cpu(), rank_order_sum(inputs, torch.tensor(0.3).item()))


def test_what_is_not_compressed_passes(nccl_ranks: Ranks) -> None:
    nccl_ranks.run(2, passed_on)


def captured(group: dist.ProcessGroup) -> None:
    """A graph's collectives stay plain."""
    x = torch.ones(9000, device="cuda")
    with compressed(ALL):
        dist.all_reduce(x, group=group)
        torch.cuda.synchronize()
        reset_stats(group)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            dist.all_reduce(x, group=group)
        graph.replay()
        torch.cuda.synchronize()
    assert x.eq(4).all() and counts(group) == {}


def test_capture_stays_plain(nccl_ranks: Ranks) -> None:
    nccl_ranks.run(2, captured)


def trained(group: dist.ProcessGroup, how: str) -> dict[str, int]:
    mesh = DeviceMesh.from_group(group, "cuda")
    torch.manual_seed(0)
    net = test_ddp.Net().cuda()

    def ddp() -> list[Any]:
        model = DDP(copy.deepcopy(net), process_group=group, bucket_cap_mb=0.02)
        step = lambda m, k: m(test_ddp.batch(group.rank(), k).cuda()).sum()  # noqa: E731
        return test_ddp.train(model, step)

    def fsdp2() -> list[Any]:
        model: nn.Module = test_fsdp.sharded(mesh, MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=FP32))
        optimizer, generator = torch.optim.AdamW(model.parameters(), 1e-2), torch.Generator()
        losses = []
        for _ in range(4):
            x = torch.randn(16, 61, generator=generator.manual_seed(group.rank())).cuda()
            loss = (model(x).float() - x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        return [*losses, *(p.full_tensor() for p in model.parameters())]  # type: ignore[attr-defined]

    train = ddp if how == "ddp" else fsdp2
    expected = train()
    reset_stats()
    with compressed(ALL):
        assert_same(train(), expected)
    return counts(group)


@pytest.mark.parametrize("how", ["ddp", "fsdp2"])
def test_two_ranks_train_alike(nccl_ranks: Ranks, how: str) -> None:
    for found in nccl_ranks.run(2, trained, how):
        assert found["all_reduce" if how == "ddp" else "reduce_scatter_tensor"] >= 3


def by_name(group: dist.ProcessGroup) -> None:
    """Groups of backend "zipccl" over NCCL, their options kept."""
    options = dist.ProcessGroupNCCL.Options()
    options.is_high_priority_stream = True
    own = dist.new_group([0, 1], backend="zipccl", pg_options=options)
    native = own._get_backend(torch.device("cuda"))
    assert isinstance(native, dist.ProcessGroupNCCL) and native.options.is_high_priority_stream
    with compressed(ALL, groups=[own]):
        x = torch.full((9000,), 1.5, device="cuda")
        dist.all_reduce(x, group=own)
        assert x.eq(3).all() and counts(own) == {"all_reduce": 1}
    with pytest.raises(TypeError, match=r"pg_options: expected ProcessGroupNCCL\.Options, got int"):
        dist.new_group([0, 1], backend="zipccl", pg_options=5)


def test_backend_name(nccl_ranks: Ranks) -> None:
    nccl_ranks.run(2, by_name)
