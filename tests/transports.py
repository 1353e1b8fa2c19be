"""The fixture ``on_ranks``: the same test over gloo, and on CUDA tensors emulated, staged, and over NCCL."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import test_cuda_collectives as cuda
import torch
import torch.distributed as dist
from ranks import LARGEST, Ranks
from test_collectives import data, small_pieces
from torch import Tensor

POOLS = {"gloo": LARGEST, "emulated": 5, "staged": 4, "nccl": 4}  # transport: ranks
STREAMS = True  # whether calls are enqueued on streams

OnRanks = Callable[..., list[Any]]


@pytest.fixture
def on_ranks(request: pytest.FixtureRequest) -> OnRanks:
    """Runs a function on ranks: ``on_ranks(size, function, *args)``, on all of the pool without a size."""
    transport = request.param
    pool: Ranks = request.getfixturevalue("ranks" if transport == "gloo" else f"{transport}_ranks")

    def run(size: int | None, function: Callable[..., Any], *args: Any) -> list[Any]:
        where = (function.__name__, args, transport, function.__module__)
        return pool.run(size or POOLS[transport], on_cpu if transport == "gloo" else cuda.prepared, *where)

    return run


def over(*transports: str) -> pytest.MarkDecorator:
    """Runs a test that uses ``on_ranks`` over these."""
    marked = [pytest.param(t, marks=[pytest.mark.gpu] * (t in ("staged", "nccl"))) for t in transports]
    return pytest.mark.parametrize("on_ranks", marked, indirect=True)


def on_cpu(group: dist.ProcessGroup, name: str, args: tuple[Any, ...], transport: str, module: str) -> Any:
    global STREAMS
    cuda.DEVICE, STREAMS = "cpu", False
    with small_pieces():
        return getattr(importlib.import_module(module), name)(group, *args)


def put(rank: int, numel: int, dtype: torch.dtype = torch.bfloat16, hostile: bool = False) -> Tensor:
    """test_collectives.data, where calls take it."""
    return cuda.gpu(data(rank, numel, dtype, hostile))


def room(numel: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(numel, dtype=dtype, device=cuda.DEVICE)
