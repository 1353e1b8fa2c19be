"""DistributedDataParallel: gradients reduced through compressed collectives.

    model = DDP(model)
    model.register_comm_hook(None, zipccl_hook)                               # default group and policy
    model.register_comm_hook(ZipState(process_group, Policy(...)), zipccl_hook)

PyTorch's wrappers compose with it as with its own hooks: ``bf16_compress_wrapper(zipccl_hook)``.

A hook replaces DDP's averaging, so this one averages: each rank's gradient is multiplied by one over
the group's size, then added up, which is DDP's own arithmetic. With two ranks the gradients are those
of plain DDP bit for bit. In ``model.join(divide_by_initial_world_size=False)`` the division stays by
the whole group, as with PyTorch's hooks.
"""

# No "from __future__ import annotations" here: DDP checks the hook's annotations by identity.
from dataclasses import dataclass

import torch
import torch.distributed as dist

from . import collectives
from .config import Policy


@dataclass(frozen=True)
class ZipState:
    """State of ``zipccl_hook``: the group to reduce over (None for the default one) and the policy."""

    process_group: dist.ProcessGroup | None = None
    policy: Policy | None = None


def zipccl_hook(state: ZipState | None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """DDP communication hook: the bucket's average over the group, losslessly compressed on the wire.

    Args:
        state: a ZipState, or None for the default group and ``Policy()``.
        bucket: DDP's bucket; reduced in place.

    Raises:
        TypeError: ``state`` is something else, or DDP runs with the Python reducer of compiled
            autograd, which has no buckets.
    """
    if state is None:
        state = ZipState()
    if not isinstance(state, ZipState):
        raise TypeError(f"state: expected a ZipState or None, got {type(state).__name__}")
    if not isinstance(bucket, dist.GradBucket):
        raise TypeError(
            "bucket: expected a GradBucket, got "
            f"{type(bucket).__name__}; set torch._dynamo.config.optimize_ddp to a mode with the C++ reducer"
        )
    return collectives.average_(bucket.buffer(), state.process_group, state.policy)
