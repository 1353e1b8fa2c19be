"""The factor of ReduceOp.PREMUL_SUM, which the dispatcher hides from Python kernels.

They see an object that tells the kind of operation only. So the methods through which Python issues
reductions (methods.py) keep their options where this thread's kernel finds them. Reductions with that
operation from C++ stay plain; none is known.
"""

from __future__ import annotations

import threading
from typing import Any

import torch.distributed as dist

_KINDS: Any = dist.ReduceOp.RedOpType


class _Issued(threading.local):
    options: Any = None


issued = _Issued()


def reduce_op(given: Any) -> Any:
    """``given`` by a method; or what Python calls the dispatcher's boxed one, less a factor not seen."""
    if isinstance(given, dist.ReduceOp):
        return given
    kept = getattr(issued.options, "reduceOp", None)
    # First: asking the object calls TorchScript, which takes longer than all else here.
    return _KINDS(given.op()) if kept is None else kept
