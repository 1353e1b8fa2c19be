"""FSDP2: ``fully_shard`` with compressed all-gathers and reduce-scatters.

Either way, all the rest of FSDP2 stays as it is::

    fully_shard(layer, mp_policy=ZipMixedPrecisionPolicy(param_dtype=torch.bfloat16))
    apply(model)   # after fully_shard, whatever the policy

FSDP2 calls its communication through two objects of each parameter group; these are ours. Mixed frozen
parameters, which it gathers as bytes, and the all-reduce of HSDP, for which it has no such object, go plain.

Parameters are encoded for each gather, although those of the forward and the backward pass are equal. To keep
the payload would save the second gather its encoding, beside which it decodes W - 1 times as much. By the
model (choose.py, README's speeds), second gather of 128 MiB on each rank, encoded anew over kept: two H200
through host memory 1.03x, over NVLink 1.19x (72 us); eight ranks 1.00x and 1.01x; CPUs over 1 Gbit/s 1.00x.
FSDP2 hides most of that behind compute. Against it: two thirds of the shard's memory through the whole step,
and the question whether the parameters are still the same. ``_version`` misses writes through ``.data``,
and a wrong answer would be silent; comparing the bytes reads as much as encoding them.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, Comm, ReduceScatter
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

from . import collectives
from .config import Policy


class _Zip(Comm):
    """What both have in common: how to compress, and ordinary memory for what is sent and received."""

    def __init__(self, policy: Policy | None = None) -> None:
        self.policy = policy

    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class ZipAllGather(_Zip, AllGather):
    """Gathers parameters compressed; for ``FSDPModule.set_custom_all_gather``, or through ``apply``."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        return collectives.all_gather_into_tensor(
            output_tensor, input_tensor, group, async_op, policy=self.policy
        )


class ZipReduceScatter(_Zip, ReduceScatter):
    """Reduces gradients compressed; for ``FSDPModule.set_custom_reduce_scatter``, or through ``apply``.

    With the usual policy (parameters in bf16, reduction in fp32) the gradients are fp32 that holds bf16
    values: a third of the bytes travels.
    """

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        return collectives.reduce_scatter_tensor(
            output_tensor, input_tensor, op, group, async_op, policy=self.policy
        )


@dataclass(frozen=True)
class ZipMixedPrecisionPolicy(MixedPrecisionPolicy):
    """MixedPrecisionPolicy for ``fully_shard(model, mp_policy=...)`` that compresses as well.

    ``policy`` says how (None: ``Policy()``); ``compress_params`` and ``compress_grads`` whether the
    gathers of parameters and the scatters of gradients are.
    """

    policy: Policy | None = None
    compress_params: bool = True
    compress_grads: bool = True


def _use(group: FSDPParamGroup, policy: Policy | None, params: bool, grads: bool) -> None:
    if params:
        group._all_gather_comm = ZipAllGather(policy)
    if grads:
        group._reduce_scatter_comm = ZipReduceScatter(policy)


_init = FSDPParamGroup.__init__


@functools.wraps(_init)
def _init_with_policy(self: FSDPParamGroup, *args: Any, **kwargs: Any) -> None:
    _init(self, *args, **kwargs)
    found = self.mp_policy
    if isinstance(found, ZipMixedPrecisionPolicy):
        _use(self, found.policy, found.compress_params, found.compress_grads)


# So that stock fully_shard, and what calls it, takes the policy for what it is.
FSDPParamGroup.__init__ = _init_with_policy  # type: ignore[method-assign]


def _param_groups(model: nn.Module) -> Iterator[FSDPParamGroup]:
    for module in model.modules():
        if isinstance(module, FSDPModule):
            state: Any = module._get_fsdp_state()
            # A list since torch 2.13.
            groups = getattr(state, "_fsdp_param_groups", None)
            if groups is None:
                groups = [state._fsdp_param_group]
            yield from (group for group in groups if group is not None)


def apply(
    model: nn.Module,
    policy: Policy | None = None,
    *,
    compress_params: bool = True,
    compress_grads: bool = True,
) -> nn.Module:
    """Compresses the communication of a model that ``fully_shard`` was called on; returns it.

    Args:
        model: itself, or modules in it, sharded by ``fully_shard``.
        policy: how; None: ``Policy()``.
        compress_params: whether all-gathers of parameters are compressed.
        compress_grads: whether reduce-scatters of gradients are.

    Raises:
        ValueError: no module of ``model`` is sharded.
    """
    groups = list(_param_groups(model))
    if not groups:
        raise ValueError(f"model: expected one that fully_shard was called on, got {type(model).__name__}")
    for group in groups:
        _use(group, policy, compress_params, compress_grads)
    return model
