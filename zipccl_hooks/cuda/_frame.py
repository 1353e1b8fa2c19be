"""What of a payload is not a tile: header, gaps between sections, tail."""

from __future__ import annotations

from ..format import TILE, VERSION, DType, Mode
from . import MAGIC_WORD, MOVED
from ._jit import cuda, device, load_1, load_2, load_byte, store_1, store_byte, u32, u64


def kind_word(dtype: DType, mode: Mode) -> int:
    """The header's second word: version, dtype, mode."""
    return VERSION | dtype.code << 16 | int(mode) << 24


@device
def read_frame(payload, payload_bytes, dynamic, kind, numel, spill, spill_bytes):
    """(address of the dynamic part, of its end, 1 if this is another kind of payload or does not fit).

    It stands in the payload of payload_bytes, at offset ``dynamic``; if the header says that it was moved,
    in the spill area (rest.py), if there is one. Groups fill words, so the end is cut to whole ones: whoever
    stays below it may read words.
    """
    magic, found = load_2(payload)
    numel_low, numel_high = load_2(payload + u64(8))
    dynamic_low, dynamic_high = load_2(payload + u64(16))
    dynamic_bytes = u64(u64(dynamic_low) | u64(u64(dynamic_high) << u64(32)))
    start, room = u64(payload + dynamic), u64(payload_bytes - dynamic)
    if spill != u64(0) and load_1(payload + u64(MOVED)) != u32(0):
        start, room = spill, spill_bytes
    foreign = u32(0)
    if magic != u32(MAGIC_WORD) or found != u32(kind) or numel_low != u32(numel):
        foreign = u32(1)
    if numel_high != u32(numel >> u64(32)) or dynamic_bytes > room:
        foreign = u32(1)
    if foreign != u32(0):
        dynamic_bytes = room
    return start, start + (dynamic_bytes & u64(0xFFFFFFFFFFFFFFFC)), foreign


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
