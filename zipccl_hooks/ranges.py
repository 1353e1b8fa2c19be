"""Ranges of the profiler: ``zipccl::encode``, ``zipccl::exchange``, ``zipccl::decode``.

Each has the bytes that it is about, which profiles with ``record_shapes=True`` show as its concrete input:
those of tensors that are encoded, of payloads that are exchanged or decoded.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch


@contextmanager
def profiled(name: str, num_bytes: int) -> Iterator[None]:
    # torch.profiler.record_function takes a text only, which profiles leave out.
    handle = torch.autograd._record_function_with_args_enter(f"zipccl::{name}", num_bytes)
    try:
        yield
    finally:
        torch.autograd._record_function_with_args_exit(handle)


_NOTHING = nullcontext()


def profiled_if_any(name: str, num_bytes: int) -> AbstractContextManager[object]:
    """``profiled``, which costs ten microseconds, only where a profiler runs."""
    return profiled(name, num_bytes) if torch.autograd._profiler_enabled() else _NOTHING
