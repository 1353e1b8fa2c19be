"""Device functions of the decoders: everything of a tile but how its elements are written."""

from __future__ import annotations

from typing import Any

from ..format import LOW_BITS, LOW_ESCAPES_FLAG, MODE_SPECS, TILE, WIDTH_SHIFT, DType, Mode
from ._device import K7F
from ._exponents import make_decoder
from ._jit import copy_async, cuda, load_1, prmt, select_bits, shared_load, shared_load_2, u32, u64
from ._low_bits import load_low, patch_lows
from ._planes import add_words, load_words


def make_tile_decoder(dtype: DType, mode: Mode) -> Any:
    """The functions below, in their order, for a dtype and mode; whole warps call them.

    Fetches only start copies: whoever starts them first, and then asks ``locate`` for the tile's chunk, has
    all that the tile needs in flight at once but the chunk.
    """
    ITEM, EXPONENT_BITS, RESIDUAL_BITS = dtype.itemsize, dtype.exponent_bits, dtype.residual_bits
    LOW = dtype.low_bits
    CODE_BITS = MODE_SPECS[mode].code_bits
    CODE_BYTES = TILE // 8 * CODE_BITS
    decode_exponents, load_exponents = make_decoder(dtype, mode)

    @cuda.jit(device=True, inline="always")
    def fetch_codes(target, payload, codes, tile, lane):
        """Starts to copy a tile's code plane to shared memory."""
        if lane < u32(CODE_BYTES // 16):
            source = payload + codes + tile * u64(CODE_BYTES) + u64(lane) * u64(16)
            copy_async(u32(target + u32(lane << u32(4))), source)

    @cuda.jit(device=True, inline="always")
    def fetch_residuals(target, payload, residual, tile, lane):
        """Starts to copy a tile's residual plane of 8 bits, which fp8 has not, to shared memory."""
        if ITEM != 1:
            at = u32(target + u32(lane << u32(4)))
            source = payload + residual + tile * u64(TILE) + u64(lane) * u64(16)
            copy_async(at, source)
            copy_async(u32(at + u32(512)), source + u64(512))

    @cuda.jit(device=True, inline="always")
    def locate(payload, meta, bases, tile, start, limit):
        """(meta word, address of the chunk, 1 if it would lie outside start .. limit) of a tile."""
        word = load_1(payload + meta + tile * u64(4))
        group_start = u64(load_1(payload + bases + u64(tile >> u64(3)) * u64(4))) * u64(4)
        at = start + group_start + u64(u32(word & u32(0xFFFF)))
        bad = u32(at > limit)
        if LOW and u32(word & u32(3)) != u32(0):
            bad = u32(1)  # chunks of fp32 start on 4 bytes
        if bad != u32(0):
            at = limit
        return word, at, bad

    @cuda.jit(device=True, inline="always")
    def decode_tile(mine, plane, lane, word, at, limit, halves):
        """Leaves a lane's exponents in shared memory at mine and, of fp32, a warp's lows there at halves.

        Returns (1 if the tile's bytes would lie beyond limit or contradict each other, 1 if there are lows).
        """
        top, flags = u32(u32(word >> u32(16)) & u32(255)), u32(word >> u32(24))
        bad, escapes, width, low, entries = u32(0), u32(0), u32(0), at, at
        if LOW:
            width = u32(flags >> u32(WIDTH_SHIFT))
            if width > u32(LOW_BITS) or at + u64(u32(width << u32(7))) > limit:
                bad, width = u32(1), u32(0)
            at += u64(u32(width << u32(7)))
            if u32(flags & u32(LOW_ESCAPES_FLAG)) != u32(0) and bad == u32(0):
                if at + u64(4) <= limit:
                    escapes = load_1(at)
                else:
                    bad = u32(1)
                entries = at + u64(4)
                at = entries + u64(escapes) * u64(4)
                if at > limit:
                    bad, escapes, at = u32(1), u32(0), limit
            if bad != u32(0):
                at = limit
        raw = cuda.local.array(4, u32)
        for w in range(CODE_BITS):
            raw[w] = shared_load(u32(plane + u32(128 * w) + u32(lane << u32(2))))
        taken = decode_exponents(mine, raw, top, flags, at, limit, lane)
        if at + u64(taken) > limit:
            bad = u32(1)
        lows = u32(0)
        if LOW and u32(width | escapes) != u32(0):
            lows = u32(1)
            load_low(lane, width, low, u32(halves + u32(lane << u32(2))))
            if escapes != u32(0):
                bad = u32(bad | patch_lows(lane, escapes, entries, halves))
        return bad, lows

    @cuda.jit(device=True, inline="always")
    def load_rest(payload, residual, num_tiles, tile, lane, rest):
        """Leaves the residual bits above those of the plane of 8, as eight quads."""
        if EXPONENT_BITS != 8:
            plane = payload + residual + tile * u64(TILE // 8 * RESIDUAL_BITS)
            if ITEM == 2:
                plane = payload + residual + num_tiles * u64(TILE) + tile * u64(TILE // 8 * 3)
            for q in range(8):
                rest[q] = u32(0)
            words = cuda.local.array(4, u32)
            load_words(plane, lane, 3 if ITEM == 2 else RESIDUAL_BITS, words)
            add_words(words, 0, rest)

    @cuda.jit(device=True, inline="always")
    def join_octet(g, e0, e1, residuals, lane, rest):
        """Elements of an octet, of fp32 the upper halves: two a register; of fp8 two quads, then zeros."""
        if ITEM == 1:
            a = u32(u32(e0 << u32(RESIDUAL_BITS)) | rest[2 * g])
            b = u32(u32(e1 << u32(RESIDUAL_BITS)) | rest[2 * g + 1])
            a = select_bits(K7F, u32(a >> u32(1)), u32(a << u32(7)))
            b = select_bits(K7F, u32(b >> u32(1)), u32(b << u32(7)))
            return a, b, u32(0), u32(0)
        s0, s1 = shared_load_2(u32(residuals + u32(256 * g) + u32(lane << u32(3))))
        if EXPONENT_BITS != 8:
            e0 = u32(u32(e0 << u32(3)) | rest[2 * g])
            e1 = u32(u32(e1 << u32(3)) | rest[2 * g + 1])
        a, b = prmt(s0, e0, u32(0x5140)), prmt(s0, e0, u32(0x7362))
        c, d = prmt(s1, e1, u32(0x5140)), prmt(s1, e1, u32(0x7362))
        a = select_bits(u32(0x7FFF7FFF), u32(a >> u32(1)), u32(a << u32(15)))
        b = select_bits(u32(0x7FFF7FFF), u32(b >> u32(1)), u32(b << u32(15)))
        c = select_bits(u32(0x7FFF7FFF), u32(c >> u32(1)), u32(c << u32(15)))
        d = select_bits(u32(0x7FFF7FFF), u32(d >> u32(1)), u32(d << u32(15)))
        return a, b, c, d

    @cuda.jit(device=True, inline="always")
    def load_lows(halves, g, lane, present):
        """A lane's four registers of low halves of an octet."""
        l0, l1, l2, l3 = u32(0), u32(0), u32(0), u32(0)
        if LOW and present:
            at = u32(halves + u32(512 * g) + u32(lane << u32(2)))
            l0, l1 = shared_load(at), shared_load(u32(at + u32(128)))
            l2, l3 = shared_load(u32(at + u32(256))), shared_load(u32(at + u32(384)))
        return l0, l1, l2, l3

    return (
        fetch_codes, fetch_residuals, locate, decode_tile, load_rest, load_exponents, join_octet, load_lows,
    )  # fmt: skip
