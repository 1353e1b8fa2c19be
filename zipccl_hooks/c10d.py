"""Underneath torch.distributed: Python kernels on the dispatcher's ``c10d::*`` collectives.

Every caller passes there: DDP's reducer, functional collectives in eager and compiled code, DTensor; and what
methods.py, above, leaves to it. Calls that scopes.py covers and that can be compressed are; all others go on
as they came. The kernels are at BackendSelect, a key that every call has, that nothing else uses for these
operators, and above which autograd, fake tensors and compilation are done with.

The transport's own messages are calls of bare backend objects, below the dispatcher, so nothing recurs.

A work that is made of a future, as torch takes them from Python kernels, ``is_completed`` on CUDA as soon as
it is enqueued.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from . import methods
from .dispatch import Request, decided, issued
from .eligible import MOVABLE_DTYPES, PLAIN_TYPES
from .interpose import done, policy_for, start
from .operators import OPERATORS, Operator
from .untraced import untraced

logger = logging.getLogger(__name__)

_core: Any = torch._C
_BELOW = _core._dispatch_keyset_full_after(_core.DispatchKey.BackendSelect)
Group = dist.ProcessGroup


def _kernel(operator: Operator) -> Callable[..., Any]:
    redispatch = operator.overload._handle.redispatch_boxed  # OpOverload.redispatch less two Python frames

    @untraced
    def kernel(keyset: Any, *arguments: Any) -> Any:
        x = operator.first(arguments)
        # What costs next to nothing first: calls on integers must not notice.
        if type(x) in PLAIN_TYPES and x.dtype in MOVABLE_DTYPES and not decided.native:
            result = _interpose(operator, keyset, arguments, x)
            if result is not None:
                return result
            if decided.watching is not None:
                result = redispatch(keyset & _BELOW, *arguments)
                issued(_work_of(operator, arguments, result))
                return result
        return redispatch(keyset & _BELOW, *arguments)

    return kernel


def _interpose(operator: Operator, keyset: Any, arguments: Sequence[Any], x: Tensor) -> Any:
    """What the operator returns if it is carried out here, else None. ``x``: what all ranks have alike."""
    group = Group.unbox(arguments[operator.group_at])
    policy = policy_for(operator, arguments, x, group)
    if policy is None:
        return None
    async_op = _is_async(operator, arguments)
    begun = start(operator, arguments, group, policy, async_op)
    if begun is None:
        return None
    if begun.rest:
        native = _redispatch_some(operator, keyset, arguments, begun.rest)
        issued(native)
        if async_op:
            begun.handles.append(native)
        else:
            native.wait()
    work = begun.join(arguments[0]).boxed() if async_op else _done()
    return (arguments[0], work) if operator.returns_outputs else work


def _is_async(operator: Operator, arguments: Sequence[Any]) -> bool:
    return arguments[operator.async_at] if len(arguments) > operator.async_at else True


def _work_of(operator: Operator, arguments: Sequence[Any], result: Any) -> dist.Work | None:
    """The work of a plain call, if it is asynchronous."""
    if not _is_async(operator, arguments):
        return None
    return dist.Work.unbox(result[-1] if operator.returns_outputs else result)


def _redispatch_some(
    operator: Operator, keyset: Any, arguments: Sequence[Any], rest: Sequence[Request]
) -> dist.Work:
    """Some tensors of a coalesced call; async, as NCCL's work of others is null, which Python cannot hold."""
    wanted = {id(tensor) for request in rest for tensor in request.outputs}
    places = [k for k, output in enumerate(arguments[0]) if id(output) in wanted]
    some = [[tensors[k] for k in places] for tensors in arguments[: operator.group_at]]
    others = arguments[operator.group_at : operator.async_at]
    return dist.Work.unbox(operator.overload.redispatch(keyset & _BELOW, *some, *others))


@cache
def _done() -> Any:
    return done().boxed()


class _Kernels:
    """The kernels in the dispatcher, and the methods above it, until ``remove``."""

    def __init__(self) -> None:
        self._library = torch.library.Library("c10d", "IMPL")
        known = {}
        for operator in OPERATORS:
            if operator.found_schema == operator.schema:
                known[operator.name] = operator
                self._library.impl(operator.name, _kernel(operator), "BackendSelect", with_keyset=True)
            else:
                _warn_of_schema(operator)
        self._restore = methods.install(known)

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
