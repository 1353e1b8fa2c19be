"""GPU memory that other processes of a node write into; peers.py says what it is for."""

from __future__ import annotations

import ctypes

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
