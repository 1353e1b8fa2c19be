"""What ``bench`` runs: each collective, plain and compressed, on the same data. In a default group."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from .. import collectives
from ..config import Policy
from ..dispatch import torch_collective
from .ranks import DEVICE


@dataclass
class Case:
    """One row: ``plain`` and ``zipped`` fill ``plain_out`` and ``zipped_out`` from the same inputs."""

    plain: Callable[[], object]
    zipped: Callable[[], object]
    plain_out: Tensor
    zipped_out: Tensor
    bus_factor: float  # bus bandwidth over size / time, as nccl-tests defines it


def whole_parts(mib: float, dtype: torch.dtype) -> int:
    """Elements of about ``mib`` MiB, as many for every rank."""
    size = dist.get_world_size()
    return max(1, int(mib * 2**20) // (dtype.itemsize * size)) * size


def gaussian(numel: int, dtype: torch.dtype) -> Tensor:
    return (torch.randn(numel, device=DEVICE) * 0.02).to(dtype)


def autocast_gradients(numel: int, dtype: torch.dtype) -> Tensor:
    """fp32 that holds bf16 values, as autocast leaves gradients."""
    return gaussian(numel, torch.bfloat16).to(dtype)


def all_gather(x: Tensor, policy: Policy) -> Case:
    size = dist.get_world_size()
    mine = x[: len(x) // size].clone()
    outs = torch.empty_like(x), torch.empty_like(x)
    plain = torch_collective("all_gather_single", "all_gather_into_tensor")
    return Case(
        lambda: plain(outs[0], mine),
        lambda: collectives.all_gather_into_tensor(outs[1], mine, policy=policy),
        *outs, (size - 1) / size,
    )  # fmt: skip


def reduce_scatter(x: Tensor, policy: Policy) -> Case:
    size = dist.get_world_size()
    outs = x.new_empty(len(x) // size), x.new_empty(len(x) // size)
    plain = torch_collective("reduce_scatter_single", "reduce_scatter_tensor")
    return Case(
        lambda: plain(outs[0], x),
        lambda: collectives.reduce_scatter_tensor(outs[1], x, policy=policy),
        *outs, (size - 1) / size,
    )  # fmt: skip


def all_reduce(x: Tensor, policy: Policy) -> Case:
    outs = x.clone(), x.clone()

    def restored(out: Tensor, call: Callable[[], object]) -> None:
        out.copy_(x)
        call()

    return Case(
        lambda: restored(outs[0], lambda: dist.all_reduce(outs[0])),
        lambda: restored(outs[1], lambda: collectives.all_reduce(outs[1], policy=policy)),
        *outs, 2 * (dist.get_world_size() - 1) / dist.get_world_size(),
    )  # fmt: skip


def all_to_all(x: Tensor, policy: Policy) -> Case:
    outs = torch.empty_like(x), torch.empty_like(x)
    return Case(
        lambda: dist.all_to_all_single(outs[0], x),
        lambda: collectives.all_to_all_single(outs[1], x, policy=policy),
        *outs, (dist.get_world_size() - 1) / dist.get_world_size(),
    )  # fmt: skip


def broadcast(x: Tensor, policy: Policy) -> Case:
    outs = x.clone(), x.clone()
    return Case(
        lambda: dist.broadcast(outs[0], 0),
        lambda: collectives.broadcast(outs[1], 0, policy=policy),
        *outs, 1.0,
    )  # fmt: skip


def send_recv(x: Tensor, policy: Policy) -> Case:
    """To the next rank and from the one before, as nccl-tests' sendrecv."""
    outs = torch.empty_like(x), torch.empty_like(x)
    rank, size = dist.get_rank(), dist.get_world_size()

    def ring(batch: Callable[..., list[dist.Work]], out: Tensor) -> None:
        ops = [dist.P2POp(dist.isend, x, (rank + 1) % size), dist.P2POp(dist.irecv, out, (rank - 1) % size)]
        for work in batch(ops):
            work.wait()

    return Case(
        lambda: ring(dist.batch_isend_irecv, outs[0]),
        lambda: ring(partial(collectives.batch_isend_irecv, policy=policy), outs[1]),
        *outs, 1.0,
    )  # fmt: skip


SUMS = ("reduce_scatter", "all_reduce")
Row = tuple[Callable[[Tensor, Policy], Case], torch.dtype, Callable[[int, torch.dtype], Tensor], str]
ROWS: Sequence[Row] = (
    (all_gather, torch.bfloat16, gaussian, "bf16"),
    (all_to_all, torch.bfloat16, gaussian, "bf16"),
    (broadcast, torch.bfloat16, gaussian, "bf16"),
    (send_recv, torch.bfloat16, gaussian, "bf16"),
    (reduce_scatter, torch.bfloat16, gaussian, "bf16"),
    (reduce_scatter, torch.float32, autocast_gradients, "fp32 of bf16"),
    (all_reduce, torch.bfloat16, gaussian, "bf16"),
    (all_reduce, torch.float32, autocast_gradients, "fp32 of bf16"),
    (all_reduce, torch.float32, gaussian, "fp32"),
)
