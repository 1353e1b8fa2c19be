"""Underneath torch.distributed: Python kernels on the dispatcher's ``c10d::*`` collectives.

Every caller passes there: ``dist.*``, DDP's reducer, FSDP, functional collectives in eager and compiled
code, DTensor, checkpoints. Calls that scopes.py covers and that can be compressed are; all others go on
as they came. The kernels are at BackendSelect, a key that every call has, that nothing else uses for these
operators, and above which autograd, fake tensors and compilation are done with.

The transport's own messages are calls of bare backend objects, below the dispatcher, so nothing recurs.

``async_op=False`` returns with the outputs complete (on CUDA: on the current stream) and raises what went
wrong. What goes wrong in an asynchronous call is in its future, where DDP looks; but ``wait`` of a work made
of a future does not tell. So it is logged at once, and the group's next call raises it. On CUDA such a work
``is_completed`` as soon as it is enqueued.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from . import premul
from .counters import recorder
from .cuda_work import CudaWork
from .dispatch import Request, decided, issued, prepare, stays_plain
from .eligible import BELOW_MIN_BYTES, MOVABLE_DTYPES, PLAIN_TYPES, unfit_reason
from .errors import ZipcclError
from .handshake import agree_on, agreed_on
from .operators import OPERATORS, Operator
from .scopes import policy_of
from .untraced import untraced

logger = logging.getLogger(__name__)

_core: Any = torch._C
_BELOW = _core._dispatch_keyset_full_after(_core.DispatchKey.BackendSelect)
Group = dist.ProcessGroup


def _kernel(operator: Operator) -> Callable[..., Any]:
    redispatch = operator.overload._handle.redispatch_boxed  # OpOverload.redispatch less two Python frames
    probe = operator.probe

    @untraced
    def kernel(keyset: Any, *arguments: Any) -> Any:
        x = arguments[probe]
        while type(x) is list:
            x = x[0] if x else None
        # What costs next to nothing first: calls on integers must not notice.
        if type(x) in PLAIN_TYPES and x.dtype in MOVABLE_DTYPES and not decided.native:
            done = _interpose(operator, keyset, arguments, x)
            if done is not None:
                return done
            if decided.watching is not None:
                done = redispatch(keyset & _BELOW, *arguments)
                issued(_work_of(operator, arguments, done))
                return done
        return redispatch(keyset & _BELOW, *arguments)

    return kernel


def _interpose(operator: Operator, keyset: Any, arguments: Sequence[Any], x: Tensor) -> Any:
    """What the operator returns if it is carried out here, else None. ``x``: what all ranks have alike."""
    group = Group.unbox(arguments[operator.group_at])
    policy = policy_of(group)
    if policy is None or x.layout is not torch.strided:
        return None
    if not agreed_on(policy, group):
        if unfit_reason(x, group) is not None:
            return None
        agree_on(policy, group)
    num_bytes = operator.num_bytes(arguments, x)
    if num_bytes is not None:
        if num_bytes < policy.min_bytes:
            recorder(group).native(operator.counted_as, BELOW_MIN_BYTES, num_bytes)
            return None
        if stays_plain(operator.counted_as, num_bytes, x, group, policy):
            return None
    _raise_earlier(group)
    try:
        made = operator.requests(arguments, group)
    except (TypeError, ValueError):
        return None  # torch.distributed has its own words for it
    starts = [prepare(request, group, policy) for request in made]
    if not any(starts):
        return None
    async_op = _is_async(operator, arguments)
    handles: list[Any] = [start(async_op) for start in starts if start is not None]
    if None in starts:
        rest = [request for request, start in zip(made, starts, strict=True) if start is None]
        native = _redispatch_some(operator, keyset, arguments, rest)
        issued(native)
        if async_op:
            handles.append(native)
        else:
            native.wait()
    work = _join(group, made[0].name, handles, arguments[0]) if async_op else _done()
    return (arguments[0], work) if operator.returns_outputs else work


def _is_async(operator: Operator, arguments: Sequence[Any]) -> bool:
    return arguments[operator.async_at] if len(arguments) > operator.async_at else True


def _work_of(operator: Operator, arguments: Sequence[Any], done: Any) -> dist.Work | None:
    """The work of a plain call, if it is asynchronous."""
    if not _is_async(operator, arguments):
        return None
    return dist.Work.unbox(done[-1] if operator.returns_outputs else done)


def _redispatch_some(
    operator: Operator, keyset: Any, arguments: Sequence[Any], rest: Sequence[Request]
) -> dist.Work:
    """Some tensors of a coalesced call; async, as NCCL's work of others is null, which Python cannot hold."""
    wanted = {id(tensor) for request in rest for tensor in request.outputs}
    places = [k for k, output in enumerate(arguments[0]) if id(output) in wanted]
    some = [[tensors[k] for k in places] for tensors in arguments[: operator.group_at]]
    others = arguments[operator.group_at : operator.async_at]
    return dist.Work.unbox(operator.overload.redispatch(keyset & _BELOW, *some, *others))


def _join(group: Group, name: str, handles: Sequence[Any], coalesced: Sequence[Tensor]) -> Any:
    """One work for all, boxed; its future has the list of outputs, of several calls ``coalesced``."""
    group_name, alive = group.group_name, weakref.ref(group)

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
    return _core._distributed_c10d._create_work_from_future(future).boxed()


_earlier: weakref.WeakKeyDictionary[Group, ZipcclError] = weakref.WeakKeyDictionary()


def _raise_earlier(group: Group) -> None:
    if _earlier and (error := _earlier.pop(group, None)) is not None:
        raise error


@cache
def _done() -> Any:
    """The work, boxed, of calls that are complete."""
    future: torch.futures.Future[list[Tensor]] = torch.futures.Future()
    future.set_result([])
    return _core._distributed_c10d._create_work_from_future(future).boxed()


class _Kernels:
    """The kernels in the dispatcher, until ``remove``."""

    def __init__(self) -> None:
        self._library = torch.library.Library("c10d", "IMPL")
        for operator in OPERATORS:
            if operator.found_schema == operator.schema:
                self._library.impl(operator.name, _kernel(operator), "BackendSelect", with_keyset=True)
            else:
                _warn_of_schema(operator)
        self._restore = premul.install()

    def remove(self) -> None:
        self._restore()
        self._library._destroy()


@cache
def _warn_of_schema(operator: Operator) -> None:
    logger.warning(
        "c10d::%s stays plain: expected schema %s, got %s",
        operator.name, operator.schema, operator.found_schema,
    )  # fmt: skip


_kernels: _Kernels | None = None
_users = 0


def install() -> None:
    """Puts the kernels in place for one more user of them."""
    global _kernels, _users
    _users += 1
    if _kernels is None:
        _kernels = _Kernels()


def uninstall() -> None:
    """One user less; with the last one the kernels go."""
    global _kernels, _users
    _users -= 1
    if _users == 0 and _kernels is not None:
        _kernels.remove()
        _kernels = None
