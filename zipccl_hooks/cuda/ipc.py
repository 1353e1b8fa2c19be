"""GPU memory that other processes of a node write into, and words in it that streams wait for.

A thin layer over the CUDA driver; peers.py says what it is for.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .launch import checked

HANDLE_BYTES = 64
_LAZY_ENABLE_PEER_ACCESS = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS


class _Memory:
    """What torch needs to make a tensor of memory that is not its own."""

    def __init__(self, address: int, num_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,), "typestr": "|u1", "data": (address, False), "version": 3
        }  # fmt: skip


def allocate(num_bytes: int, device: torch.device) -> Tensor:
    """uint8[num_bytes], zeros, that can be exported. Never freed: a peer may still have it mapped."""
    from cuda.bindings import driver

    with torch.cuda.device(device):
        torch.zeros(1, device=device)  # the current context is the one that torch has made
        address = int(checked(driver.cuMemAlloc(num_bytes)))
        return torch.as_tensor(_Memory(address, num_bytes), device=device).zero_()


def export(memory: Tensor) -> bytes:
    """The handle, HANDLE_BYTES, by which another process of the node maps memory from ``allocate``."""
    from cuda.bindings import driver

    handle = checked(driver.cuIpcGetMemHandle(memory.data_ptr()))
    return ctypes.string_at(handle.getPtr(), HANDLE_BYTES)


def attach(handle: bytes, device: torch.device) -> int:
    """The address, for ``device``, of memory that another process exported."""
    from cuda.bindings import driver

    opened = driver.CUipcMemHandle()
    ctypes.memmove(opened.getPtr(), handle, HANDLE_BYTES)
    with torch.cuda.device(device):
        return int(checked(driver.cuIpcOpenMemHandle(opened, _LAZY_ENABLE_PEER_ACCESS)))


def copy(target: int, source: int, num_bytes: int, stream: int) -> None:
    """Enqueues a copy between addresses of any GPUs; a copy engine carries it out."""
    from cuda.bindings import driver

    checked(driver.cuMemcpyDtoDAsync(target, source, num_bytes, stream))


class WordOperations:
    """Writes of a number to some 32-bit words, then waits until others have reached it, in one driver call.

    A write comes after all memory traffic of the stream before it. Waits compare modulo 2**32.
    """

    def __init__(self, writes: Sequence[int], waits: Sequence[int]) -> None:
        from cuda.bindings import driver

        kinds = driver.CUstreamBatchMemOpType
        self._values: list[Any] = []
        self._operations = []
        for kind, member, addresses in (
            (kinds.CU_STREAM_MEM_OP_WRITE_VALUE_32, "writeValue", writes),
            (kinds.CU_STREAM_MEM_OP_WAIT_VALUE_32, "waitValue", waits),
        ):
            for address in addresses:
                operation = driver.CUstreamBatchMemOpParams()
                operation.operation = kind
                value = getattr(operation, member)
                value.operation, value.address = kind, address
                value.flags = 0  # CU_STREAM_WRITE_VALUE_DEFAULT, CU_STREAM_WAIT_VALUE_GEQ
                self._operations.append(operation)
                self._values.append(value)

    def enqueue(self, number: int, stream: int) -> None:
        from cuda.bindings import driver

        for value in self._values:
            value.value = number & 0xFFFFFFFF
        if self._operations:
            checked(driver.cuStreamBatchMemOp(stream, len(self._operations), self._operations, 0))
