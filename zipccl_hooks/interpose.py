"""What becomes of a call of torch.distributed that methods.py or c10d.py intercepts.

``async_op=False`` returns with the outputs complete (on CUDA: on the current stream) and raises what went
wrong. Where torch takes a future for the work of an asynchronous call (c10d.py), what goes wrong is in it,
where DDP looks; but ``wait`` of such a work does not tell. So it is logged at once, and the group's next
call raises it.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .config import Policy
from .counters import recorder
from .cuda_work import CudaWork
from .dispatch import Request, prepare, stays_plain
from .eligible import BELOW_MIN_BYTES, DISABLED, unfit_reason
from .errors import ZipcclError
from .handshake import agree_on, agreed_on
from .operators import Operator
from .scopes import policy_of

logger = logging.getLogger(__name__)

_core: Any = torch._C
_work_from_future = _core._distributed_c10d._create_work_from_future
Group = dist.ProcessGroup


def policy_for(operator: Operator, tensors: Sequence[Any], x: Tensor, group: Group) -> Policy | None:
    """How a call may be compressed; None, and counted, if it goes on as it came.

    ``tensors`` are its first arguments, ``x`` is what all ranks have alike.
    """
    policy = policy_of(group)
    if policy is None or x.layout is not torch.strided:
        return None
    if not agreed_on(policy, group):
        if unfit_reason(x, group) is not None:
            return None
        agree_on(policy, group)
    if not policy.enabled:
        recorder(group).native(operator.counted_as, DISABLED, x.nbytes)
        return None
    num_bytes = operator.num_bytes(tensors, x)
    if num_bytes is not None:
        if num_bytes < policy.min_bytes:
            recorder(group).native(operator.counted_as, BELOW_MIN_BYTES, num_bytes)
            return None
        if stays_plain(operator.counted_as, num_bytes, x, group, policy):
            return None
    _raise_earlier(group)
    return policy


@dataclass
class Started:
    """A call that is carried out compressed, all of it or but for ``rest``."""

    name: str
    group: Group
    handles: list[Any]  # works, of calls that are not async None
    rest: list[Request]

    def join(self, coalesced: Sequence[Tensor]) -> Any:
        """One work for all; its future has the list of outputs, of several calls ``coalesced``."""
        name, group_name, alive, handles = (
            self.name,
            self.group.group_name,
            weakref.ref(self.group),
            self.handles,
        )

        def outputs(future: torch.futures.Future[Any]) -> list[Tensor]:
            try:
                found = future.value()
                if len(handles) == 1:
                    return found
                for one in found:
                    one.value()  # raises what went wrong
                return list(coalesced)
            except Exception as error:
                logger.error("%s in group %s failed: %s", name, group_name, error)
                if (failed := alive()) is not None:
                    _earlier[failed] = ZipcclError(f"an earlier asynchronous {name} failed: {error}")
                raise

        futures = [handle.get_future() for handle in handles]
        if len(futures) > 1:
            future = torch.futures.collect_all(futures).then(outputs)
        elif isinstance(handles[0], CudaWork):
            (future,) = futures  # has no errors: the channel tells them in the next call
        else:
            future = futures[0].then(outputs)
        return _work_from_future(future)


def start(
    operator: Operator, arguments: Sequence[Any], group: Group, policy: Policy, async_op: bool
) -> Started | None:
    """Carries out the operator's call, given ``policy_for`` it; None if all of it is to go on as it came."""
    try:
        made = operator.requests(arguments, group)
    except (TypeError, ValueError):
        return None  # torch.distributed has its own words for it
    starts = [prepare(request, group, policy) for request in made]
    if not any(starts):
        return None
    handles = [begin(async_op) for begin in starts if begin is not None]
    rest = [request for request, begin in zip(made, starts, strict=True) if begin is None]
    return Started(made[0].name, group, handles, rest)


@cache
def done() -> Any:
    """The work of calls that are complete."""
    future: torch.futures.Future[list[Tensor]] = torch.futures.Future()
    future.set_result([])
    return _work_from_future(future)


_earlier: weakref.WeakKeyDictionary[Group, ZipcclError] = weakref.WeakKeyDictionary()


def _raise_earlier(group: Group) -> None:
    if _earlier and (error := _earlier.pop(group, None)) is not None:
        raise error
