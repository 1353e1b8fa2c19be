"""Where Python issues collectives: the methods of ProcessGroup.

torch.distributed's functions, and with them FSDP, Megatron-LM and most else, call one of these methods, which
calls the dispatcher. There c10d.py would see the call, at the price of its arguments' way into Python and
back: 7 us in a loop (benchmarks/bench_pass_through.py, the functional rows), more in a training step, whose
caches hold other things. So the same is decided here already, and a plain call goes to the group's backend at
once, as the dispatcher would send it: 1 us for integers, 4 us for what is looked at.

Calls in which the dispatcher, or somebody else, has more to do are left to it: under a dispatch mode (fake
tensors, tracing, CommDebugMode), on tensors that are no plain ones, where autograd would look, where a work
is to be registered, where others have wrapped a method. From torch 2.14 on a group can have hooks, which fire
below the dispatcher and which nobody can ask for: there c10d.py sees all calls.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping
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
_keys = _core._dispatch_keys
Group = dist.ProcessGroup
HAS_HOOKS = hasattr(Group, "register_pre_hook")
_PLAIN_KEYS = ("CPU", "CUDA", "ADInplaceOrView", "AutogradCPU", "AutogradCUDA", "AutocastCPU", "AutocastCUDA")
# A tensor with another key (functorch's, of a pending negation, sparse, nested, zeros without memory, ...) is
# not what lies at its address.
_OTHER_KEYS = ~functools.reduce(
    operator.or_, (_core.DispatchKeySet(getattr(_core.DispatchKey, name)).raw_repr() for name in _PLAIN_KEYS)
)


@dataclass(frozen=True)
class Method:
    """One of ProcessGroup, called as that of its backend is; ``newer``: what torch 2.13 calls it, too.

    Its last argument are ``options``, the first are tensors: ``levels`` tells of each in how many lists it
    is. ``arguments(group, args, options)`` are the operator's.
    """

    name: str
    operator: str
    levels: tuple[int, ...]
    options: Any
    arguments: Callable[[Group, Any, Any], tuple[Any, ...]]
    newer: str | None = None
    splits: bool = False  # two lists of sizes are between tensors and options

    @property
    def number(self) -> int:
        """Of arguments."""
        return len(self.levels) + 2 * self.splits + 1


def _moved(g: Group, a: Any, o: Any) -> tuple[Any, ...]:
    return (a[0], a[1], g, o.asyncOp)


def _reduced(g: Group, a: Any, o: Any) -> tuple[Any, ...]:
    return (a[0], a[1], g, o.reduceOp, o.asyncOp)


def _rooted(g: Group, a: Any, o: Any) -> tuple[Any, ...]:
    return (a[0], a[1], g, o.rootRank, o.asyncOp)


METHODS = (
    Method("allreduce", "allreduce_", (1,), _c10d.AllreduceOptions,
           lambda g, a, o: (a[0], g, o.reduceOp, None, o.asyncOp)),
    Method("allgather", "allgather_", (2, 1), _c10d.AllgatherOptions, _moved),
    Method("_allgather_base", "_allgather_base_", (0, 0), _c10d.AllgatherOptions, _moved,
           "all_gather_single"),
    Method("reduce_scatter", "reduce_scatter_", (1, 2), _c10d.ReduceScatterOptions, _reduced),
    Method("_reduce_scatter_base", "_reduce_scatter_base_", (0, 0), _c10d.ReduceScatterOptions, _reduced,
           "reduce_scatter_single"),
    Method("alltoall", "alltoall_", (1, 1), _c10d.AllToAllOptions, _moved),
    Method("alltoall_base", "alltoall_base_", (0, 0), _c10d.AllToAllOptions,
           lambda g, a, o: (a[0], a[1], g, a[2], a[3], o.asyncOp), "all_to_all_single", splits=True),
    Method("broadcast", "broadcast_", (1,), _c10d.BroadcastOptions,
           lambda g, a, o: (a[0], g, o.rootRank, o.rootTensor, o.asyncOp)),
    Method("gather", "gather_", (2, 1), _c10d.GatherOptions, _rooted),
    Method("scatter", "scatter_", (1, 2), _c10d.ScatterOptions, _rooted),
)  # fmt: skip
# c10d.py sees the calls of these, and needs their options.
_COALESCED = ("allreduce_coalesced", "reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced")


def install(operators: Mapping[str, Operator]) -> Callable[[], None]:
    """Interposes the methods of these operators, which go by their names; returns what undoes it."""
    # As they are in the class: what getattr gives would no longer bind when put back.
    originals, ours = dict(vars(Group)), {}
    for name in _COALESCED:
        if name in originals:
            ours[name] = _keeping_factor(getattr(Group, name))
    for method in METHODS:
        for name in filter(None, (method.name, method.newer)):
            if name in originals and method.operator in operators:
                original = getattr(Group, name)
                if HAS_HOOKS or type(originals[name]).__name__ != "instancemethod":  # torch's own is one
                    ours[name] = _keeping_factor(original)
                else:
                    ours[name] = _interposed(method, operators[method.operator], original)
    for name, function in ours.items():
        setattr(Group, name, function)

    def uninstall() -> None:
        for name, function in ours.items():
            if vars(Group)[name] is function:  # else somebody has wrapped it, and it passes calls on
                setattr(Group, name, originals[name])

    return uninstall


def _keeping_factor(original: Callable[..., Any]) -> Callable[..., Any]:
    @untraced
    @functools.wraps(original)
    def dispatched(*args: Any, **kwargs: Any) -> Any:
        before = premul.keep(args[-1])
        try:
            return original(*args, **kwargs)
        finally:
            premul.kept.op = before

    return dispatched


def _interposed(method: Method, entry: Operator, original: Callable[..., Any]) -> Callable[..., Any]:
    name, number, options, is_usual = method.name, method.number, method.options, _usual_form(method)
    dispatched = _keeping_factor(original)

    @untraced
    @functools.wraps(original)
    def interposed(group: Group, *args: Any, **kwargs: Any) -> Any:
        opts: Any = args[-1] if len(args) == number else None
        if type(opts) is not options or kwargs or type(group) is not Group or not is_usual(args):
            return dispatched(group, *args, **kwargs)
        x = entry.first(args)
        if x is None or _modes() or _registers_works():
            return dispatched(group, *args)
        if x.dtype in MOVABLE_DTYPES and not decided.native:
            policy = policy_for(entry, args, x, group)
            if policy is not None:
                begun = start(entry, method.arguments(group, args, opts), group, policy, opts.asyncOp)
                if begun is not None:
                    return begun.handles[0] if opts.asyncOp else done()
        work = getattr(group._get_backend(x.device), name)(*args)
        if decided.watching is not None:
            issued(work if opts.asyncOp else None)
        return work

    return interposed


def _usual_form(method: Method) -> Callable[[Any], bool]:
    """Tells of arguments whether they have the usual form, and none above backends looks at the tensors."""
    checks = [(_is_plain, _is_list, _is_list_of_lists)[level] for level in method.levels]
    first, last = checks[0], checks[-1]
    if len(checks) == 1:
        return lambda a: first(a[0])
    if method.splits:
        return lambda a: first(a[0]) and last(a[1]) and type(a[2]) is type(a[3]) is list
    return lambda a: first(a[0]) and last(a[1])


def _is_plain(x: Any) -> bool:
    return (
        type(x) in PLAIN_TYPES
        and not _keys(x).raw_repr() & _OTHER_KEYS
        and not (x.requires_grad and torch.is_grad_enabled())
    )


def _is_list(value: Any) -> bool:
    return type(value) is list and all(map(_is_plain, value))


def _is_list_of_lists(value: Any) -> bool:
    return type(value) is list and all(map(_is_list, value))
