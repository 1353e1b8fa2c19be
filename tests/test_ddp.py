"""The DDP hook in training: with two ranks the bits of plain DDP, with more rank-order sums."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import Ranks
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook, fp16_compress_wrapper
from torch.nn.parallel import DistributedDataParallel as DDP

from zipccl_hooks import Policy, ZipState, reset_stats, stats, zipccl_hook

ALL = Policy(min_bytes=0)
STEPS = 3


class Net(nn.Module):
    """Odd sizes, a buffer (BatchNorm's statistics), a part that some steps do not use."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(33, 129), nn.BatchNorm1d(129)
        self.sometimes, self.last = nn.Linear(129, 129), nn.Linear(129, 7)

    def forward(self, x: Tensor, use_all: bool = True) -> Tensor:
        x = torch.relu(self.norm(self.first(x)))
        if use_all:
            x = x + self.sometimes(x)
        return self.last(x)


def batch(rank: int, step: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(16, 33, generator=torch.Generator().manual_seed(100 * rank + step)).to(dtype)


def gradients(model: nn.Module) -> list[Tensor | None]:
    return [None if p.grad is None else p.grad.detach().clone() for p in model.parameters()]


def assert_same(a: list[Any], b: list[Any]) -> None:
    assert len(a) == len(b)
    for x, y in zip(a, b, strict=True):
        if x is None or y is None:
            assert x is None and y is None
        else:
            assert x.dtype == y.dtype
            assert torch.equal(x.reshape(-1).view(torch.uint8), y.reshape(-1).view(torch.uint8))


def train(model: DDP, step: Callable[[DDP, int], Tensor]) -> list[Tensor | None]:
    """Gradients of every step, and the parameters and buffers in the end."""
    seen: list[Tensor | None] = []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for k in range(STEPS):
        step(model, k).backward()
        seen += gradients(model)
        optimizer.step()
        optimizer.zero_grad()
    return seen + [t.detach().clone() for t in model.state_dict().values()]


def plain_and_zipped(
    group: dist.ProcessGroup, step: Callable[[DDP, int], Tensor], net: nn.Module | None = None, **options: Any
) -> None:
    """With two ranks the hook changes no bit, and it was the hook that reduced."""
    torch.manual_seed(0)
    net = Net() if net is None else net
    plain = DDP(copy.deepcopy(net), process_group=group, bucket_cap_mb=0.02, **options)
    zipped = DDP(copy.deepcopy(net), process_group=group, bucket_cap_mb=0.02, **options)
    zipped.register_comm_hook(ZipState(group, ALL), zipccl_hook)
    expected = train(plain, step)
    reset_stats(group)
    got = train(zipped, step)
    assert_same(got, expected)
    counted = stats(group).calls["all_reduce"]
    assert counted.compressed_calls >= STEPS and counted.modes.total() > 0


def usual(model: DDP, k: int) -> Tensor:
    return model(batch(dist.get_rank(), k)).square().mean()


def autocast(model: DDP, k: int) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return model(batch(dist.get_rank(), k)).float().square().mean()


def accumulating(model: DDP, k: int) -> Tensor:
    with model.no_sync():
        usual(model, 10 + k).backward()
    return usual(model, k)


def partly_unused(model: DDP, k: int) -> Tensor:
    return model(batch(dist.get_rank(), k), use_all=k % 2 == 0).square().mean()


OPTIONS = {
    "default": {},
    "bucket views": {"gradient_as_bucket_view": True},
    "static graph": {"static_graph": True},
    "unused": {"find_unused_parameters": True},
    "no buffers": {"broadcast_buffers": False},
}
LOSSES = {"usual": usual, "autocast": autocast, "no_sync": accumulating, "partly unused": partly_unused}


def training(group: dist.ProcessGroup, loss: str, options: str) -> None:
    plain_and_zipped(group, LOSSES[loss], **OPTIONS[options])


@pytest.mark.parametrize(
    ("loss", "options"),
    [
        *(("usual", o) for o in OPTIONS),
        *(("autocast", o) for o in ("default", "bucket views")),
        *(("no_sync", o) for o in ("default", "bucket views")),
        ("partly unused", "unused"),
    ],
)
def test_two_ranks_train_bit_for_bit_as_plain_ddp(ranks: Ranks, loss: str, options: str) -> None:
    ranks.run(2, training, loss, options)


def low_precision(group: dist.ProcessGroup, dtype: torch.dtype) -> None:
    net = nn.Sequential(nn.Linear(33, 129), nn.ReLU(), nn.Linear(129, 7)).to(dtype)

    def step(model: DDP, k: int) -> Tensor:
        return model(batch(dist.get_rank(), k, dtype)).float().square().mean()

    plain_and_zipped(group, step, net)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
def test_low_precision_parameters(ranks: Ranks, dtype: torch.dtype) -> None:
    ranks.run(2, low_precision, dtype)


def mixed_dtypes(group: dist.ProcessGroup) -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(33, 65), nn.Linear(65, 65).bfloat16()
            self.c = nn.Linear(65, 5).double()

        def forward(self, x: Tensor) -> Tensor:
            return self.c(self.b(self.a(x).bfloat16()).double())

    torch.manual_seed(0)
    plain_and_zipped(group, usual, Mixed())
    assert stats(group).calls["all_reduce"].native_calls["dtype torch.float64"] >= STEPS


def test_mixed_dtypes(ranks: Ranks) -> None:
    ranks.run(2, mixed_dtypes)


def rank_order(group: dist.ProcessGroup) -> list[list[float]]:
    """Each gradient is the sum, in rank order, of the ranks' gradients times 1 / size."""
    rank, size = group.rank(), group.size()
    torch.manual_seed(0)
    net = nn.Linear(33, 65)
    model = DDP(copy.deepcopy(net), process_group=group)
    model.register_comm_hook(ZipState(group, ALL), zipccl_hook)
    model(batch(rank, 0)).square().mean().backward()
    expected: list[Tensor] = []
    for r in range(size):
        local = copy.deepcopy(net)
        local(batch(r, 0)).square().mean().backward()
        terms = [p.grad * (1.0 / size) for p in local.parameters() if p.grad is not None]
        expected = terms if r == 0 else [a + b for a, b in zip(expected, terms, strict=True)]
    assert_same(gradients(model), expected)
    return [p.grad.flatten().tolist() for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("size", [1, 3, 5])
def test_any_number_of_ranks_sums_in_rank_order(ranks: Ranks, size: int) -> None:
    results = ranks.run(size, rank_order)
    assert all(result == results[0] for result in results)


def joining(group: dist.ProcessGroup) -> None:
    """Rank 1 has fewer batches; it goes on taking part with zeros."""
    rank = group.rank()
    torch.manual_seed(0)
    net = nn.Linear(33, 129)
    models = [DDP(copy.deepcopy(net), process_group=group) for _ in range(2)]
    models[1].register_comm_hook(ZipState(group, ALL), zipccl_hook)
    results = []
    for model in models:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with model.join():
            for k in range(4 - 2 * rank):
                model(batch(rank, k)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        results.append([p.detach() for p in model.parameters()])
    assert_same(results[1], results[0])


def test_uneven_inputs_with_join(ranks: Ranks) -> None:
    ranks.run(2, joining)


def wrapped(group: dist.ProcessGroup) -> None:
    """PyTorch's wrapper round our hook gives what it gives round PyTorch's own."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(33, 129), nn.Linear(129, 7))
    plain, zipped = (DDP(copy.deepcopy(net), process_group=group) for _ in range(2))
    plain.register_comm_hook(group, fp16_compress_wrapper(allreduce_hook))
    zipped.register_comm_hook(ZipState(group, ALL), fp16_compress_wrapper(zipccl_hook))
    expected = train(plain, usual)
    reset_stats(group)
    assert_same(train(zipped, usual), expected)
    assert stats(group).calls["all_reduce"].compressed_calls >= STEPS


def test_composes_with_pytorchs_wrappers(ranks: Ranks) -> None:
    ranks.run(2, wrapped)  # bf16_compress_wrapper, its twin, is refused by DDP without CUDA


def compiled(group: dist.ProcessGroup) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(33, 129), nn.ReLU(), nn.Linear(129, 7))
    models = [DDP(copy.deepcopy(net), process_group=group) for _ in range(2)]
    models[1].register_comm_hook(ZipState(group, ALL), zipccl_hook)
    plain, zipped = (torch.compile(model, backend="aot_eager") for model in models)
    assert_same(train(zipped, usual), train(plain, usual))


def test_compiled_model(ranks: Ranks) -> None:
    ranks.run(2, compiled)


def no_state(group: dist.ProcessGroup) -> None:
    """State None reduces over the default group, with the default policy: these small buckets go native."""
    model = DDP(nn.Linear(33, 65))
    model.register_comm_hook(None, zipccl_hook)
    reset_stats()
    model(batch(dist.get_rank(), 0)).square().mean().backward()
    counted = stats(dist.group.WORLD).calls["all_reduce"]
    assert counted.native_calls == {"below min_bytes": 1} and not counted.compressed_calls


def test_without_state(ranks: Ranks) -> None:
    ranks.run(8, no_state)


def wrong_use(group: dist.ProcessGroup) -> None:
    model = DDP(nn.Linear(33, 65), process_group=group)
    model.register_comm_hook(group, zipccl_hook)
    with pytest.raises(TypeError, match="state: expected a ZipState or None, got ProcessGroup"):
        model(batch(0, 0)).sum().backward()
    with pytest.raises(TypeError, match="bucket: expected a GradBucket, got tuple"):
        zipccl_hook(None, (torch.ones(1), torch.ones(1)))  # type: ignore[arg-type]


def test_wrong_state_or_bucket(ranks: Ranks) -> None:
    ranks.run(2, wrong_use)


def failing(group: dist.ProcessGroup) -> str:
    """A corrupt payload ends backward() with the reason, not with wrong gradients."""
    from zipccl_hooks import exchange

    original = exchange.Call.encode

    def spoiled(self: exchange.Call, part: Tensor, buffer: Tensor) -> int:
        used = original(self, part, buffer)
        buffer[0] ^= 1
        return used

    model = DDP(nn.Linear(33, 65), process_group=group)
    model.register_comm_hook(ZipState(group, ALL), zipccl_hook)
    exchange.Call.encode = spoiled  # type: ignore[method-assign]
    try:
        model(batch(0, 0)).sum().backward()
    except RuntimeError as error:
        return str(error)
    finally:
        exchange.Call.encode = original  # type: ignore[method-assign]
    raise AssertionError("no error")


def test_an_error_reaches_backward(ranks: Ranks) -> None:
    for rank, message in enumerate(ranks.run(2, failing)):
        assert f"rank {rank}: payload magic: expected b'ZCCL'" in message
