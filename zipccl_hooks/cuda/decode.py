"""The decoding kernel: one warp a tile, one block a group of 8 tiles."""

from __future__ import annotations

from typing import Any

from ..format import GROUP, TILE, DType, Mode, longest_chunk
from . import THREADS
from ._exponents import STRIDE, WARP_WORDS
from ._frame import kind_word, read_frame
from ._jit import (
    cuda,
    load_1,
    load_byte,
    prmt,
    shared_address,
    store_1,
    store_2,
    store_4,
    store_byte,
    store_half,
    u32,
    u64,
)  # fmt: skip
from ._tile import make_tile_decoder

SHARED_WORDS = WARP_WORDS * GROUP


def make(dtype: DType, mode: Mode) -> Any:
    """The kernel for a dtype and mode.

    Launch: max(1, groups of tiles) blocks of THREADS. Arguments, all 64 bits: address (on 16 bytes) and
    size of a buffer that starts with a payload, offsets of its sections in bytes (meta, bases, codes,
    residual, tail, dynamic), address of out (on 16 bytes), numel, address of a u32 that is set to 1
    where the header is another or a tile's bytes would lie outside the dynamic part, address of the
    payload's spill area (rest.py) or 0. Reads the payload
    once, writes out once; blocks do not depend on each other.

    Example, fast: code 7 at element 300 and the byte 0x02 in the tile's chunk: symbol 2 is rank
    7 + 2 = 9, exponent top - 9.
    """
    ITEM, LOW, KIND = dtype.itemsize, dtype.low_bits, kind_word(dtype, mode)
    LONGEST_CHUNK = longest_chunk(dtype, mode)
    load_static, locate, decode_tile, load_rest, load_exponents, join_octet = make_tile_decoder(dtype, mode)

    @cuda.jit(device=True, inline="always")
    def store_octet(at, g, a, b, c, d, lows):
        """Writes the eight elements whose upper halves are a to d; of fp8, the two quads a and b."""
        if ITEM == 1:
            store_2(at, a, b)
        elif LOW:
            l0, l1, l2, l3 = lows[4 * g], lows[4 * g + 1], lows[4 * g + 2], lows[4 * g + 3]
            store_4(at, prmt(l0, a, u32(0x5410)), prmt(l0, a, u32(0x7632)),
                    prmt(l1, b, u32(0x5410)), prmt(l1, b, u32(0x7632)))  # fmt: skip
            store_4(at + u64(16), prmt(l2, c, u32(0x5410)), prmt(l2, c, u32(0x7632)),
                    prmt(l3, d, u32(0x5410)), prmt(l3, d, u32(0x7632)))  # fmt: skip
        else:
            store_4(at, a, b, c, d)

    def kernel(
        payload, payload_bytes, meta, bases, codes, residual, tail, dynamic, out, numel, corrupt, spill
    ):
        lane = u32(cuda.threadIdx.x & 31)
        warp = u32(cuda.threadIdx.x >> 5)
        num_tiles = u64(numel >> u64(10))
        tile = u64(u64(cuda.blockIdx.x) * u64(GROUP) + u64(warp))
        shared = cuda.shared.array(SHARED_WORDS, u32)
        mine = u32(shared_address(shared) + u32(u32(cuda.threadIdx.x) * u32(4 * STRIDE)))
        raw, bytes_of = cuda.local.array(4, u32), cuda.local.array(8, u32)
        lows, rest = cuda.local.array(16, u32), cuda.local.array(8, u32)
        if tile < num_tiles:
            load_static(payload, codes, residual, tile, lane, raw, bytes_of)
        start, limit, foreign = read_frame(
            payload, payload_bytes, dynamic, KIND, numel, spill, num_tiles * u64(LONGEST_CHUNK)
        )
        if foreign != u32(0):
            store_1(corrupt, u32(1))
        if tile < num_tiles:
            word, at, outside = locate(payload, meta, bases, tile, start, limit)
            bad, escapes, entries = decode_tile(mine, lane, word, at, limit, raw, lows)
            bad = u32(bad | outside)
            load_rest(payload, residual, num_tiles, tile, lane, rest)
            target = out + tile * u64(TILE * ITEM)
            for half in range(2):
                e0, e1, e2, e3 = load_exponents(mine, half)
                at = target + u64(512 * ITEM * half) + u64(lane) * u64(8 * ITEM)
                a, b, c, d = join_octet(2 * half, e0, e1, bytes_of, rest)
                store_octet(at, 2 * half, a, b, c, d, lows)
                a, b, c, d = join_octet(2 * half + 1, e2, e3, bytes_of, rest)
                store_octet(at + u64(256 * ITEM), 2 * half + 1, a, b, c, d, lows)
            if LOW:
                cuda.syncwarp()
                k = lane
                while k < escapes:
                    entry = load_1(entries + u64(k) * u64(4))
                    place = u32(entry >> u32(16))
                    if place < u32(TILE):
                        store_half(target + u64(place) * u64(4), u32(entry & u32(0xFFFF)))
                    else:
                        bad = u32(1)
                    k = u32(k + u32(32))
            if bad != u32(0):
                store_1(corrupt, u32(1))
        if cuda.blockIdx.x == cuda.gridDim.x - 1:
            target = out + num_tiles * u64(TILE * ITEM)
            left = u64(numel * u64(ITEM)) - num_tiles * u64(TILE * ITEM)
            byte = u64(cuda.threadIdx.x)
            while byte < left:
                store_byte(target + byte, load_byte(payload + tail + byte))
                byte += u64(THREADS)

    return kernel
