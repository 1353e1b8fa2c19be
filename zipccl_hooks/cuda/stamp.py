"""The kernel that tells every peer how much room this rank's payloads needed, before they are exchanged."""

from __future__ import annotations

from typing import Any

from ..format import DType, Mode
from . import ENTRY_BYTES, STAMP
from ._jit import (
    cuda,
    device,
    divide,
    load_2,
    load_system,
    shared_address,
    shared_load,
    shared_max,
    shared_store,
    store_1,
    u32,
    u64,
)  # fmt: skip


@device
def rate_of(payload, tiles):
    """(dynamic bytes, 16ths of a dynamic byte per tile) of a payload."""
    low, high = load_2(payload + u64(16))
    size = u64(u64(low) | u64(u64(high) << u64(32)))
    rate = u32(0)
    if tiles != u64(0) and size < u64(1 << 28):
        rate = divide(u32(u32(low << u32(4)) + u32(tiles) - u32(1)), u32(tiles))
    return size, rate


def make(dtype: DType, mode: Mode) -> Any:
    """The kernel, the same for every dtype and mode.

    Launch: one block of THREADS. Arguments, all 64 bits: address of a table of exchange (channel.py), in
    pinned memory; its number of entries. Reads the headers of the payloads that are sent and writes the
    largest of their rates (16ths of a dynamic byte per tile) into each, at byte STAMP.

    Invariant: after the exchange every rank has every rank's largest rate, though it got one payload of
    each only: what all ranks make room for next time is the maximum of the same numbers.

    Example: payloads of 64 tiles with 3200 and 3300 dynamic bytes: both are stamped 825.
    """

    def kernel(table, entries):
        thread = u64(cuda.threadIdx.x)
        shared = cuda.shared.array(1, u32)
        largest = shared_address(shared)
        if thread == u64(0):
            shared_store(largest, u32(0))
        cuda.syncthreads()
        k = thread
        while k < entries:
            entry = table + k * u64(ENTRY_BYTES)
            payload = load_system(entry)
            if payload != u64(0):
                _, rate = rate_of(payload, load_system(entry + u64(24)))
                shared_max(largest, rate)
            k += u64(cuda.blockDim.x)
        cuda.syncthreads()
        k = thread
        while k < entries:
            payload = load_system(table + k * u64(ENTRY_BYTES))
            if payload != u64(0):
                store_1(payload + u64(STAMP), shared_load(largest))
            k += u64(cuda.blockDim.x)

    return kernel
