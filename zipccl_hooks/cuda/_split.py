"""Device function of the encoder: a tile's elements, split into residuals, exponents and low halves."""

from __future__ import annotations

from typing import Any

from ..format import DType
from ._device import EVEN, K01, K1F, KFE, ODD, plane_word
from ._jit import cuda, load_2, load_4_ordered, prmt, select_bits, store_1, store_2, u32, u64
from ._low_bits import load_lows
from ._planes import quads_of_field

SIGNS = u32(0xFDB9)  # prmt: the sign bits of the four halves of two registers, as bytes 0 or 255


def make_loader(dtype: DType) -> Any:
    """``load_tile(at, lane, residual_0, residual_1, exponents, lows)`` for a dtype."""
    ITEM, EXPONENT_BITS, RESIDUAL_BITS, LOW = (
        dtype.itemsize,
        dtype.exponent_bits,
        dtype.residual_bits,
        dtype.low_bits,
    )

    @cuda.jit(device=True, inline="always")
    def load_tile(at, lane, residual_0, residual_1, exponents, lows):
        """Loads a lane's elements, stores their residual planes, leaves exponents and low halves."""
        rest = cuda.local.array(8, u32)
        loaded = cuda.local.array(16, u32)
        if ITEM == 2:
            # All loads first: left to itself the compiler waits for two of them before it issues the other
            # two (H200, bf16 fast, 1 GiB: 1922 GB/s, so 1979).
            for g in range(4):
                a, b, c, d = load_4_ordered(at + u64(512 * g) + u64(lane) * u64(16))
                loaded[4 * g], loaded[4 * g + 1], loaded[4 * g + 2], loaded[4 * g + 3] = a, b, c, d
        for g in range(4):
            if ITEM == 1:
                a, b = load_2(at + u64(256 * g) + u64(lane) * u64(8))
                a = select_bits(KFE, u32(a << u32(1)), u32(a >> u32(7)))
                b = select_bits(KFE, u32(b << u32(1)), u32(b >> u32(7)))
                mask = u32(u32((1 << EXPONENT_BITS) - 1) * K01)
                exponents[2 * g] = u32(u32(a >> u32(RESIDUAL_BITS)) & mask)
                exponents[2 * g + 1] = u32(u32(b >> u32(RESIDUAL_BITS)) & mask)
                rest[2 * g] = a
                rest[2 * g + 1] = b
            else:
                if LOW:
                    a, b, c, d = load_lows(at + u64(1024 * g) + u64(lane) * u64(32), g, lows)
                else:
                    a, b, c, d = loaded[4 * g], loaded[4 * g + 1], loaded[4 * g + 2], loaded[4 * g + 3]
                a1, b1, c1, d1 = u32(a << u32(1)), u32(b << u32(1)), u32(c << u32(1)), u32(d << u32(1))
                store_2(
                    residual_0 + u64(256 * g) + u64(lane) * u64(8),
                    select_bits(KFE, prmt(a1, b1, EVEN), prmt(a, b, SIGNS)),
                    select_bits(KFE, prmt(c1, d1, EVEN), prmt(c, d, SIGNS)),
                )
                high_0, high_1 = prmt(a1, b1, ODD), prmt(c1, d1, ODD)
                if EXPONENT_BITS == 8:
                    exponents[2 * g] = high_0
                    exponents[2 * g + 1] = high_1
                else:
                    exponents[2 * g] = u32(u32(high_0 >> u32(3)) & K1F)
                    exponents[2 * g + 1] = u32(u32(high_1 >> u32(3)) & K1F)
                    rest[2 * g] = high_0
                    rest[2 * g + 1] = high_1
        if EXPONENT_BITS != 8:
            width = 3 if ITEM == 2 else RESIDUAL_BITS
            words = cuda.local.array(4, u32)
            quads_of_field(rest, 0, width, words)
            for w in range(width):
                store_1(residual_1 + u64(128 * w) + u64(lane) * u64(4), plane_word(words, width, w))

    return load_tile
