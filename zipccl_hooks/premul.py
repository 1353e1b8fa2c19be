"""The factor of ReduceOp.PREMUL_SUM, which the dispatcher hides from Python kernels.

They see an object that tells the kind of operation only. So the methods through which Python issues
reductions (methods.py) keep an operation with a factor where this thread's kernel finds it. Reductions with
that operation from C++ stay plain; none is known.
"""

from __future__ import annotations

import threading
from typing import Any

import torch.distributed as dist

_KINDS: Any = dist.ReduceOp.RedOpType


class _Kept(threading.local):
    op: Any = None


kept = _Kept()


def keep(options: Any) -> Any:
    """Keeps the operation of a method's options while it is called; returns what was kept before."""
    before, op = kept.op, getattr(options, "reduceOp", None)
    kept.op = op if op is not None and op == _KINDS.PREMUL_SUM else None
    return before


def reduce_op(given: Any) -> Any:
    """``given`` by a method; or what Python calls the dispatcher's boxed one, less a factor not seen."""
    if isinstance(given, dist.ReduceOp):
        return given
    kind = _KINDS(given.op())
    return kept.op if kind == _KINDS.PREMUL_SUM and kept.op is not None else kind
