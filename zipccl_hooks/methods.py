"""Where Python issues collectives: the methods of ProcessGroup.

torch.distributed's functions, and with them FSDP, Megatron-LM and most else, call one of these methods, which
calls the dispatcher. There c10d.py would see the call, at the price of its arguments' way into Python and
back: 7 us in a loop (benchmarks/bench_pass_through.py, the functional rows), more in a training step, whose
caches hold other things. So the same is decided here already, and a plain call goes to the group's backend at
once, as the dispatcher would send it: 1 us for integers, 3 us for what is looked at.

Calls in which the dispatcher has more to do are left to it: under a dispatch mode (fake tensors, tracing,
CommDebugMode), on subclasses, where autograd would look, and where a work is to be registered.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from . import premul
from .dispatch import decided, issued
from .eligible import MOVABLE_DTYPES, PLAIN_TYPES
from .interpose import done, policy_for, start
from .operators import Operator
from .untraced import untraced

_core: Any = torch._C
_c10d = _core._distributed_c10d
_modes = _core._len_torch_dispatch_stack
_registers_works = _c10d._allow_inflight_collective_as_graph_input
Group = dist.ProcessGroup
# From torch 2.14 on groups can have hooks, which fire below the dispatcher only.
_HAS_HOOKS = hasattr(Group, "register_pre_hook")


@dataclass(frozen=True)
class Method:
    """One, by its names in torch 2.11 to 2.14; the first is that of backends, too.

    Its last argument, of ``number``, are ``options``, the first are ``tensors`` of them or of lists of them.
    ``arguments(group, args, options)`` are the operator's.
    """

    names: tuple[str, ...]
    operator: str
    options: Any
    arguments: Callable[[Group, Any, Any], tuple[Any, ...]]
    number: int = 3
    tensors: int = 2


def _two(g: Group, a: Any, o: Any) -> tuple[Any, ...]:
    return (a[0], a[1], g, o.asyncOp)


def _reduced(g: Group, a: Any, o: Any) -> tuple[Any, ...]:
    return (a[0], a[1], g, o.reduceOp, o.asyncOp)


def _rooted(g: Group, a: Any, o: Any) -> tuple[Any, ...]:
    return (a[0], a[1], g, o.rootRank, o.asyncOp)


METHODS = (
    Method(("allreduce",), "allreduce_", _c10d.AllreduceOptions,
           lambda g, a, o: (a[0], g, o.reduceOp, None, o.asyncOp), number=2, tensors=1),
    Method(("allgather",), "allgather_", _c10d.AllgatherOptions, _two),
    Method(("_allgather_base", "all_gather_single"), "_allgather_base_", _c10d.AllgatherOptions, _two),
    Method(("reduce_scatter",), "reduce_scatter_", _c10d.ReduceScatterOptions, _reduced),
    Method(("_reduce_scatter_base", "reduce_scatter_single"), "_reduce_scatter_base_",
           _c10d.ReduceScatterOptions, _reduced),
    Method(("alltoall",), "alltoall_", _c10d.AllToAllOptions, _two),
    Method(("alltoall_base", "all_to_all_single"), "alltoall_base_", _c10d.AllToAllOptions,
           lambda g, a, o: (a[0], a[1], g, a[2], a[3], o.asyncOp), number=5),
    Method(("broadcast",), "broadcast_", _c10d.BroadcastOptions,
           lambda g, a, o: (a[0], g, o.rootRank, o.rootTensor, o.asyncOp), number=2, tensors=1),
    Method(("gather",), "gather_", _c10d.GatherOptions, _rooted),
    Method(("scatter",), "scatter_", _c10d.ScatterOptions, _rooted),
)  # fmt: skip
# c10d.py sees the calls of these, and needs their options.
_COALESCED = ("allreduce_coalesced", "reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced")


def install(operators: Mapping[str, Operator]) -> Callable[[], None]:
    """Interposes the methods of these operators, which go by their names; returns what undoes it."""
    # As they are in the class: what getattr gives would no longer bind when put back.
    originals, ours = dict(vars(Group)), {}
    for name in _COALESCED:
        if name in originals:
            ours[name] = _keeping_options(getattr(Group, name))
    for method in METHODS:
        for name in method.names:
            if name in originals and method.operator in operators:
                ours[name] = _interposed(method, operators[method.operator], getattr(Group, name))
    for name, function in ours.items():
        setattr(Group, name, function)

    def uninstall() -> None:
        for name, function in ours.items():
            if vars(Group)[name] is function:  # else somebody has wrapped it, and it passes calls on
                setattr(Group, name, originals[name])

    return uninstall


def _keeping_options(original: Callable[..., Any]) -> Callable[..., Any]:
    @untraced
    @functools.wraps(original)
    def with_options(*args: Any, **kwargs: Any) -> Any:
        premul.issued.options = args[-1]
        try:
            return original(*args, **kwargs)
        finally:
            premul.issued.options = None

    return with_options


def _interposed(method: Method, operator: Operator, original: Callable[..., Any]) -> Callable[..., Any]:
    number, options, tensors = method.number, method.options, method.tensors
    probe, native = operator.probe, method.names[0]
    dispatched = _keeping_options(original)

    @untraced
    @functools.wraps(original)
    def interposed(group: Group, *args: Any, **kwargs: Any) -> Any:
        opts: Any = args[-1] if len(args) == number else None
        if type(opts) is not options or kwargs:
            return dispatched(group, *args, **kwargs)
        x = args[probe]
        while type(x) is list:
            x = x[0] if x else None
        if (
            type(group) is not Group
            or not _are_plain(args[:tensors], torch.is_grad_enabled())
            or not _is_free(x)
        ):
            return dispatched(group, *args)
        if x.dtype in MOVABLE_DTYPES and not decided.native:
            policy = policy_for(operator, args, x, group)
            if policy is not None:
                begun = start(operator, method.arguments(group, args, opts), group, policy, opts.asyncOp)
                if begun is not None:
                    return begun.handles[0] if opts.asyncOp else done()
        if _HAS_HOOKS:
            work = _decided(original, group, args)
        else:
            work = getattr(group._get_backend(x.device), native)(*args)
        if decided.watching is not None:
            issued(work if opts.asyncOp else None)
        return work

    return interposed


def _are_plain(values: Sequence[Any], grad: bool) -> bool:
    """Whether these are tensors, or lists of them, that neither a subclass nor autograd wants to see."""
    for value in values:
        if type(value) in PLAIN_TYPES:
            if grad and value.requires_grad:
                return False
        elif type(value) is not list or not _are_plain(value, grad):
            return False
    return True


def _is_free(x: Any) -> bool:
    """Whether the dispatcher has nothing to do for plain tensors such as this but to find their backend."""
    return (
        x is not None
        and x.layout is torch.strided
        and (x.is_cpu or x.is_cuda)
        and _modes() == 0
        and not _registers_works()
    )


def _decided(original: Callable[..., Any], group: Group, args: Any) -> Any:
    """Calls a method so that c10d.py lets the call pass, on which is decided."""
    before, decided.native = decided.native, True
    try:
        return original(group, *args)
    finally:
        decided.native = before
