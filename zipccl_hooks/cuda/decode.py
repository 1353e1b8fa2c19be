"""The decoding kernel: one warp a tile, one block a group of 8 tiles."""

from __future__ import annotations

from typing import Any

from ..format import GROUP, MODE_SPECS, TILE, DType, Mode, longest_chunk
from . import THREADS
from ._device import store_eight
from ._exponents import STRIDE, WARP_WORDS
from ._frame import kind_word, read_frame
from ._jit import (
    cuda,
    end_group,
    load_byte,
    prmt,
    shared_address,
    store_1,
    store_2,
    store_4,
    store_byte,
    u32,
    u64,
    wait_all,
)  # fmt: skip
from ._low_bits import LOWS_WORDS
from ._tile import make_tile_decoder

LOWER, UPPER = u32(0x5410), u32(0x7632)  # prmt: lower or upper halves of two registers


def places(dtype: DType, mode: Mode) -> tuple[int, int, int]:
    """Words of shared memory: of a warp for a tile's static part, for its low halves; of a block in all.

    Behind the exponents of eight warps.
    """
    stage = TILE // 32 * (MODE_SPECS[mode].code_bits + (8 if dtype.itemsize > 1 else 0))
    lows = LOWS_WORDS if dtype.low_bits else 0
    return stage, lows, (WARP_WORDS + stage + lows) * GROUP


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
    fetch_codes, fetch_residuals, locate, decode_tile, load_rest, load_exponents, join_octet, load_lows = (
        make_tile_decoder(dtype, mode)
    )
    CODE_BYTES = TILE // 8 * MODE_SPECS[mode].code_bits
    STAGE, LOWS, SHARED_WORDS = places(dtype, mode)

    @cuda.jit(device=True, inline="always")
    def store_octet(at, a, b, c, d, l0, l1, l2, l3):
        """Writes the eight elements whose upper halves are a to d; of fp8, the two quads a and b."""
        if ITEM == 1:
            store_2(at, a, b)
        elif LOW:
            w0, w1, w2, w3 = prmt(l0, a, LOWER), prmt(l0, a, UPPER), prmt(l1, b, LOWER), prmt(l1, b, UPPER)
            w4, w5, w6, w7 = prmt(l2, c, LOWER), prmt(l2, c, UPPER), prmt(l3, d, LOWER), prmt(l3, d, UPPER)
            store_eight(at, w0, w1, w2, w3, w4, w5, w6, w7)
        else:
            store_4(at, a, b, c, d)

    @cuda.jit(device=True, inline="always")
    def store_tile(target, mine, residuals, halves, lane, rest, lows):
        for half in range(2):
            e0, e1, e2, e3 = load_exponents(mine, half)
            a, b, c, d = join_octet(2 * half, e0, e1, residuals, lane, rest)
            l0, l1, l2, l3 = load_lows(halves, 2 * half, lane, lows)
            store_octet(target + u64(512 * ITEM * half), a, b, c, d, l0, l1, l2, l3)
            a, b, c, d = join_octet(2 * half + 1, e2, e3, residuals, lane, rest)
            l0, l1, l2, l3 = load_lows(halves, 2 * half + 1, lane, lows)
            store_octet(target + u64(512 * ITEM * half + 256 * ITEM), a, b, c, d, l0, l1, l2, l3)

    def kernel(
        payload, payload_bytes, meta, bases, codes, residual, tail, dynamic, out, numel, corrupt, spill
    ):
        lane = u32(cuda.threadIdx.x & 31)
        warp = u32(cuda.threadIdx.x >> 5)
        num_tiles = u64(numel >> u64(10))
        tile = u64(u64(cuda.blockIdx.x) * u64(GROUP) + u64(warp))
        shared = cuda.shared.array(SHARED_WORDS, u32)
        begin = shared_address(shared)
        mine = u32(begin + u32(u32(cuda.threadIdx.x) * u32(4 * STRIDE)))
        stage = u32(begin + u32(4 * WARP_WORDS * GROUP) + u32(warp * u32(4 * STAGE)))
        residuals = u32(stage + u32(CODE_BYTES))
        halves = u32(begin + u32(4 * (WARP_WORDS + STAGE) * GROUP) + u32(warp * u32(4 * LOWS)))
        rest = cuda.local.array(8, u32)
        if tile < num_tiles:
            fetch_codes(stage, payload, codes, tile, lane)
            fetch_residuals(residuals, payload, residual, tile, lane)
            end_group()
        start, limit, foreign = read_frame(
            payload, payload_bytes, dynamic, KIND, numel, spill, num_tiles * u64(LONGEST_CHUNK)
        )
        if foreign != u32(0):
            store_1(corrupt, u32(1))
        if tile < num_tiles:
            word, at, outside = locate(payload, meta, bases, tile, start, limit)
            wait_all()
            cuda.syncwarp()
            bad, lows = decode_tile(mine, stage, lane, word, at, limit, halves)
            bad = u32(bad | outside)
            load_rest(payload, residual, num_tiles, tile, lane, rest)
            target = out + tile * u64(TILE * ITEM) + u64(lane) * u64(8 * ITEM)
            if lows != u32(0):
                store_tile(target, mine, residuals, halves, lane, rest, True)
            else:
                store_tile(target, mine, residuals, halves, lane, rest, False)
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
