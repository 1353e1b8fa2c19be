"""Which calls are compressed. A decision rests only on what all ranks of the group know alike."""

from __future__ import annotations

import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .config import Policy
from .cuda import launch
from .format import DTYPES
from .ops import SUM_DTYPES

BACKENDS = {"cpu": "gloo", "cuda": "nccl"}  # those whose groups compress, by device
BACKEND_NAME = "zipccl"  # of groups over the same backends that compress without being asked: backend.py
BELOW_MIN_BYTES, DISABLED = "below min_bytes", "disabled by policy"
# Of what the switch leaves plain: for good, or to see whether the host is the bound.
FASTER_SO, WATCHED = "faster so", "watched"
PLAIN_TYPES = frozenset({Tensor, torch.nn.Parameter})
MOVABLE_DTYPES = frozenset(getattr(torch, d.name) for d in DTYPES.values() if d.exponent_bits)


def resolve_group(group: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    """The process group of a call; None where this rank is not in it, which torch.distributed reports."""
    if group is None:
        default = dist.distributed_c10d._world.default_pg
        return dist.distributed_c10d._get_default_group() if default is None else default
    return group if isinstance(group, dist.ProcessGroup) else None


def scale_of(op: Any, size: int, dtype: torch.dtype) -> float | None:
    """What each rank's term is multiplied by before the sum; None for an op that is no sum.

    NCCL rounds the factor of PREMUL_SUM to the tensor's dtype.
    """
    if op == dist.ReduceOp.SUM:
        return 1.0
    if op == dist.ReduceOp.AVG:
        return 1.0 / size
    if op == dist.ReduceOp.PREMUL_SUM:
        # (kind, factor) when pickled; torch before 2.13 shows the factor nowhere else.
        state = op.__getstate__()
        factor = state[1] if isinstance(state, tuple) else None
        return torch.tensor(factor, dtype=dtype).item() if isinstance(factor, (int, float)) else None
    return None


_backend_reasons: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[str, str | None]] = (
    weakref.WeakKeyDictionary()
)


def _backend_reason(group: dist.ProcessGroup, device: str) -> str | None:
    """Why a group compresses nothing on a kind of device; found out once."""
    known = _backend_reasons.setdefault(group, {})
    if device not in known:
        # Not get_backend, which knows one name only: a group may have gloo for CPUs and NCCL for GPUs.
        # Nor is every group torch.distributed's own.
        backends = dist.distributed_c10d._world.pg_backend_config.get(group, "unknown")
        if not {f"{device}:{BACKENDS[device]}", f"{device}:{BACKEND_NAME}"} & set(backends.split(",")):
            known[device] = f"backend {backends}"
        else:
            known[device] = launch.missing() if device == "cuda" else None
    return known[device]


def passing_reason(tensor: Tensor, group: dist.ProcessGroup) -> str | None:
    """Why a call of the group on such a tensor is not compressed now, though others are."""
    if tensor.is_cuda and torch.cuda.is_current_stream_capturing():
        return "CUDA graph capture"  # its replays could not change the room they exchange
    if group in dist.distributed_c10d._world.pg_coalesce_state:
        return "coalescing"
    return None


def unfit_reason(tensor: Tensor, group: dist.ProcessGroup) -> str | None:
    """Why no call of the group on such a tensor is compressed, whatever the policy; None if one may be."""
    if group.size() == 1:
        return "one rank"
    if type(tensor) not in PLAIN_TYPES:
        return f"tensor subclass {type(tensor).__name__}"
    device = tensor.device.type
    if device not in BACKENDS:
        return f"device {device}"
    if (why := _backend_reason(group, device)) is not None:
        return why
    if (why := passing_reason(tensor, group)) is not None:
        return why
    if tensor.dtype not in MOVABLE_DTYPES:
        return f"dtype {tensor.dtype}"
    return None


def decline_reason(
    tensor: Tensor, num_bytes: int | None, group: dist.ProcessGroup, policy: Policy, op: Any = None
) -> str | None:
    """Why a call goes native, or None if it is compressed.

    ``num_bytes`` is compared with ``policy.min_bytes``, None where ranks do not know it alike; ``op`` is
    the reduce operation of a reduction.
    """
    if not policy.enabled:
        return DISABLED
    if num_bytes is not None and num_bytes < policy.min_bytes:
        return BELOW_MIN_BYTES  # first: small calls must not notice
    return unfit_reason(tensor, group) or policy_reason(tensor.dtype, group, policy, op)


def policy_reason(dtype: torch.dtype, group: dist.ProcessGroup, policy: Policy, op: Any = None) -> str | None:
    """Why calls of any size on tensors that are fit go native by the policy; arguments as above."""
    if op is not None:
        if policy.reduce == "native":
            return "reduce=native"
        if dtype not in SUM_DTYPES:
            return f"sum of {dtype}"
        if scale_of(op, group.size(), dtype) is None:
            return "reduce op"
    if policy.mode == "raw":
        return "mode raw"
    return None
