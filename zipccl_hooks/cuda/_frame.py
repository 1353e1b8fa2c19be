"""Device function that writes what of a payload is not a tile."""

from __future__ import annotations

from ..format import TILE
from . import MAGIC_WORD
from ._jit import cuda, device, load_byte, store_1, store_byte, u32, u64


@device
def write_frame(x, payload, meta, bases, codes, tail, dynamic, num_tiles, numel, dynamic_bytes, kind, item):
    """Header, gaps between sections and tail; the block that ends the last group calls it."""
    thread = u32(cuda.threadIdx.x)
    if thread < u32(32):
        word = u32(0)
        if thread == u32(0):
            word = u32(MAGIC_WORD)
        elif thread == u32(1):
            word = u32(kind)
        elif thread == u32(2) or thread == u32(8):
            word = u32(numel)
        elif thread == u32(3) or thread == u32(9):
            word = u32(numel >> u64(32))
        elif thread == u32(4):
            word = u32(dynamic_bytes)
        elif thread == u32(5):
            word = u32(dynamic_bytes >> u64(32))
        elif thread == u32(7):
            word = u32(1 << 16)
        store_1(payload + u64(thread) * u64(4), word)
    end = payload + meta + num_tiles * u64(4) + u64(thread) * u64(4)
    if end < payload + bases:
        store_1(end, u32(0))
    end = payload + bases + u64((num_tiles + u64(7)) >> u64(3)) * u64(4) + u64(thread) * u64(4)
    if end < payload + codes:
        store_1(end, u32(0))
    source = x + num_tiles * u64(TILE * item)
    left = u64(numel * u64(item)) - num_tiles * u64(TILE * item)
    k = u64(thread)
    while k < u64(dynamic - tail):
        byte = u32(0)
        if k < left:
            byte = load_byte(source + k)
        store_byte(payload + tail + k, byte)
        k += u64(cuda.blockDim.x)
