"""The factor of ReduceOp.PREMUL_SUM, which the dispatcher hides from Python kernels.

They see an object that tells the kind of operation only. So while c10d.py is installed, the methods through
which Python issues reductions keep their options where this thread's kernel finds them. Reductions with
that operation from C++ stay plain; none is known.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from .untraced import untraced

_METHODS = (
    "allreduce",
    "allreduce_coalesced",
    "reduce_scatter",
    "_reduce_scatter_base",
    "reduce_scatter_single",
    "reduce_scatter_single_coalesced",
    "reduce_scatter_tensor_coalesced",
)
_KINDS: Any = dist.ReduceOp.RedOpType


class _Issued(threading.local):
    options: Any = None


_issued = _Issued()


def reduce_op(boxed: Any) -> Any:
    """What Python would call the dispatcher's ``boxed`` operation; without a factor where none was seen."""
    given = getattr(_issued.options, "reduceOp", None)
    # First: asking the object calls TorchScript, which takes longer than all else here.
    return _KINDS(boxed.op()) if given is None else given


def install() -> Callable[[], None]:
    """Returns what undoes it."""
    # As they are in the class: what getattr gives would no longer bind when put back.
    originals = {name: method for name, method in vars(dist.ProcessGroup).items() if name in _METHODS}
    for name in originals:
        setattr(dist.ProcessGroup, name, _keeping_options(getattr(dist.ProcessGroup, name)))

    def uninstall() -> None:
        for name, original in originals.items():
            setattr(dist.ProcessGroup, name, original)

    return uninstall


def _keeping_options(method: Callable[..., Any]) -> Callable[..., Any]:
    @untraced
    @functools.wraps(method)
    def with_options(*args: Any, **kwargs: Any) -> Any:
        _issued.options = args[-1]
        try:
            return method(*args, **kwargs)
        finally:
            _issued.options = None

    return with_options
