"""Checks of the collectives' arguments: TypeError and ValueError name the argument, expected, got."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor


def check_tensor(name: str, value: Any) -> None:
    if not isinstance(value, Tensor):
        raise TypeError(f"{name}: expected a torch.Tensor, got {type(value).__name__}")


def check_tensors(
    name: str, value: Any, like: Sequence[Tensor] | None = None, times: int | None = None
) -> None:
    """A list of tensors, at least one; each like that of ``like``, with ``times`` as many elements."""
    if not isinstance(value, (list, tuple)):
        raise TypeError(f"{name}: expected a list of tensors, got {type(value).__name__}")
    if not value or (like is not None and len(value) != len(like)):
        expected = "at least one tensor" if like is None else f"{len(like)} tensors"
        raise ValueError(f"{name}: expected {expected}, got {len(value)}")
    for k, tensor in enumerate(value):
        check_tensor(f"{name}[{k}]", tensor)
        if like is not None:
            check_like(f"{name}[{k}]", tensor, like[k])
            if times is not None and tensor.numel() != times * like[k].numel():
                raise ValueError(
                    f"{name}[{k}]: expected {times * like[k].numel()} elements, got {tensor.numel()}"
                )


def check_list(name: str, value: Any, like: Tensor, group: dist.ProcessGroup | None) -> None:
    """A list of one tensor per rank of ``group``, where that is given, of dtype and device of ``like``."""
    if not isinstance(value, (list, tuple)):
        raise TypeError(f"{name}: expected a list of tensors, got {type(value).__name__}")
    if group is not None and len(value) != group.size():
        raise ValueError(f"{name}: expected {group.size()} tensors, one per rank, got {len(value)}")
    for k, tensor in enumerate(value):
        check_tensor(f"{name}[{k}]", tensor)
        check_like(f"{name}[{k}]", tensor, like)


def rank_in_group(
    name: str, rank: int | None, group_rank: int | None, group: dist.ProcessGroup | None
) -> int:
    """A rank of the group, from a global one or itself; 0 where there is no group."""
    if group is None:
        return 0
    if (rank is None) == (group_rank is None):
        raise ValueError(
            f"{name}: expected either {name} or group_{name}, got {name}={rank}, group_{name}={group_rank}"
        )
    found = dist.get_group_rank(group, rank) if rank is not None else int(group_rank or 0)
    if not 0 <= found < group.size():
        raise ValueError(f"group_{name}: expected a rank below {group.size()}, got {found}")
    return found


def check_like(name: str, tensor: Tensor, like: Tensor) -> None:
    if tensor.dtype != like.dtype or tensor.device != like.device:
        raise ValueError(
            f"{name}: expected {like.dtype} on {like.device}, got {tensor.dtype} on {tensor.device}"
        )


def check_times(name: str, tensor: Tensor, times: int, of: str, other: Tensor) -> None:
    """``tensor`` has ``times`` as many elements as ``other``, the argument called ``of``."""
    if tensor.numel() != times * other.numel():
        raise ValueError(
            f"{name}: expected {times} times the {of}'s {other.numel()} elements, got {tensor.numel()}"
        )


def split_numels(name: str, tensor: Tensor, splits: Sequence[int] | None, size: int) -> list[int]:
    """Elements for each rank."""
    rows = tensor.shape[0] if tensor.dim() else 1
    row = tensor.numel() // rows if rows else math.prod(tensor.shape[1:])
    if splits is None or len(splits) == 0:
        if rows % size:
            raise ValueError(f"{name}: expected a first dimension divisible by {size} ranks, got {rows}")
        return [rows // size * row] * size
    if len(splits) != size or sum(splits) != rows or min(splits) < 0:
        raise ValueError(
            f"{name}_split_sizes: expected {size} sizes that add up to {rows} rows, got {list(splits)}"
        )
    return [split * row for split in splits]
