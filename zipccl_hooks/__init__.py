"""Lossless compressed collectives for PyTorch: the same bits, fewer bytes on the wire."""

from __future__ import annotations

from .codec import decode, encode

__version__ = "0.1.0"

__all__ = ["decode", "encode"]
