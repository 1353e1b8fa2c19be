"""Lossless compressed collectives for PyTorch: the same bits, fewer bytes on the wire."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch  # noqa: F401  first: at its end it may call zipccl_autoload.py, which imports what follows

from . import backend, collectives
from .activation import compressed, compressed_redistribute, disable, enable
from .codec import decode, encode
from .compile import estimate_ms
from .config import Policy
from .counters import log_every, reset_stats, stats
from .ddp import ZipState, zipccl_hook
from .switch import explain

if TYPE_CHECKING:
    from .fsdp import ZipAllGather, ZipMixedPrecisionPolicy, ZipReduceScatter, apply

__version__ = "0.1.0"

__all__ = [
    "Policy",
    "ZipAllGather",
    "ZipMixedPrecisionPolicy",
    "ZipReduceScatter",
    "ZipState",
    "apply",
    "collectives",
    "compressed",
    "compressed_redistribute",
    "decode",
    "disable",
    "enable",
    "encode",
    "estimate_ms",
    "explain",
    "log_every",
    "reset_stats",
    "stats",
    "zipccl_hook",
]

backend.register()

_FSDP = ("ZipAllGather", "ZipMixedPrecisionPolicy", "ZipReduceScatter", "apply")


def __getattr__(name: str) -> Any:
    """FSDP2's names on first use: importing torch.distributed.fsdp takes half a second."""
    if name in _FSDP:
        from . import fsdp

        return getattr(fsdp, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
