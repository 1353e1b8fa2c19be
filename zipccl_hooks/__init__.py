"""Lossless compressed collectives for PyTorch."""

__version__ = "0.1.0"
