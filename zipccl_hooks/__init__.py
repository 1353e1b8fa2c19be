"""Lossless compressed collectives for PyTorch: the same bits, fewer bytes on the wire."""

from __future__ import annotations

from . import collectives
from .codec import decode, encode
from .config import Policy
from .counters import reset_stats, stats
from .ddp import ZipState, zipccl_hook
from .switch import explain

__version__ = "0.1.0"

__all__ = [
    "Policy",
    "ZipState",
    "collectives",
    "decode",
    "encode",
    "explain",
    "reset_stats",
    "stats",
    "zipccl_hook",
]
