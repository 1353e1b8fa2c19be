"""Device function of the decoders: a tile's exponents from its code plane and its escapes."""

from __future__ import annotations

from typing import Any

from ..format import MODE_SPECS, RAW_FLAG, TILE, ZERO_FLAG, DType, Mode, planes
from ._device import K01, inclusive_sum, nibble_flags, octets, subtract, unpack_words
from ._jit import (
    ballot,
    cuda,
    dp4a,
    load_byte,
    lowest,
    popc,
    prmt,
    select_bits,
    shared_load,
    shared_load_byte,
    shared_load_half,
    shared_store,
    shared_store_byte,
    shared_store_half,
    shuffle,
    u32,
    u64,
)  # fmt: skip
from ._planes import add_words, load_words

STRIDE = 9  # words between the exponents of two lanes in shared memory: odd, so that no banks collide
VALUES, PLACES = 32 * STRIDE, 32 * STRIDE + 257  # words of a warp's exponents, then of its resolved escapes
WARP_WORDS = PLACES + 514  # and of their places by level, 16 bits each


def make_decoder(dtype: DType, mode: Mode) -> Any:
    """``decode_exponents(base, lane, codes, top, flags, at, limit, quads)`` for a dtype and mode.

    A whole warp calls it, with ``WARP_WORDS`` words of shared memory of its own at ``base``. Leaves a lane's
    32 exponents in ``quads``; returns the dynamic bytes that the tile's exponents took, from ``at`` on.
    Never reads beyond ``limit``: what is missing there reads as 0.
    """
    spec, EXPONENT_BITS = MODE_SPECS[mode], dtype.exponent_bits
    CODE_BITS, LEVEL_BITS, LEVELS = spec.code_bits, spec.level_bits, spec.levels
    CODE_MASK, LEVEL_ESCAPE = (1 << CODE_BITS) - 1, (1 << LEVEL_BITS) - 1
    REST_BITS = EXPONENT_BITS - CODE_BITS
    REST_PLANES = planes(REST_BITS)
    REST_0, REST_1 = REST_PLANES[0], (REST_PLANES[1] if len(REST_PLANES) > 1 else 0)
    FAST = mode == Mode.FAST
    ORDER_LOW = sum((d % 16) << (4 * r) for r, d in enumerate(spec.order[:8]))
    ORDER_HIGH = sum((d % 16) << (4 * r) for r, d in enumerate(spec.order[8:16]))

    @cuda.jit(device=True, inline="always")
    def table_of_level(top, zero, rank_base, table):
        """Exponents by symbol of a level beyond the first, as bytes of four registers."""
        if FAST:
            last = u32(u32(top - u32(7)) + zero)
            for k in range(4):
                table[k] = subtract(u32(u32(last & u32(255)) * K01), u32(0x03020100 + 0x04040404 * k))
            upper = u32(
                u32(u32(top + u32(2)) << u32(8)) | u32(u32(top + u32(1)) & u32(255))
            )  # top + 1, top + 2
            if zero == u32(0):
                table[3] = u32(u32(table[3] & u32(0xFF)) | u32(u32(upper & u32(0xFFFF)) << u32(8)))
            else:
                table[3] = u32(u32(table[3] & u32(0xFFFF)) | u32(u32(upper & u32(0xFF)) << u32(16)))
        else:
            table[0] = u32(0)
            for k in range(3):
                r = u32(u32(rank_base + u32(k)) - zero)
                word = u32(ORDER_LOW)
                if r >= u32(8):
                    word = u32(ORDER_HIGH)
                d = u32(u32(word >> u32(u32(r & u32(7)) << u32(2))) & u32(15))
                if d > u32(13):
                    d = u32(d - u32(16))
                table[0] = u32(table[0] | u32(u32(u32(top - d) & u32(255)) << u32(8 * k)))

    @cuda.jit(device=True, inline="always")
    def four_exponents(table, symbols):
        """(exponents, 1 where the symbol is the level's escape) of four packed symbols, as quads."""
        if FAST:
            selectors = u32(symbols & u32(0x7777))
            low, high = prmt(table[0], table[1], selectors), prmt(table[2], table[3], selectors)
            spread, _ = octets(symbols)
            upper = u32(u32(spread >> u32(3)) & K01)
            return select_bits(u32(upper * u32(255)), high, low), u32(u32(spread + K01) >> u32(4))
        t = u32(u32(u32(symbols & u32(0x0F)) | u32(symbols << u32(4))) & u32(0x0F0F))
        t = u32(u32(t | u32(t << u32(2))) & u32(0x3333))
        spread, _ = octets(t)
        return prmt(table[0], u32(0), t), u32(u32(u32(spread + K01) >> u32(2)) & K01)

    @cuda.jit(device=True, inline="always")
    def symbols_at(at, limit, bit):
        """Four symbols from bit ``bit`` on, in the low bits; bytes behind ``limit`` read as 0."""
        start = at + u64(u32(bit >> u32(3)))
        pair = u32(0)
        if start < limit:
            pair = load_byte(start)
        if start + u64(1) < limit:
            pair = u32(pair | u32(load_byte(start + u64(1)) << u32(8)))
        return u32(pair >> u32(bit & u32(7)))

    @cuda.jit(device=True, inline="always")
    def resolve(base, lane, top, zero, number, at, limit):
        """Exponents of a tile's escapes, in lane order, as bytes in shared memory; the bytes they took."""
        values, places = u32(base + u32(4 * VALUES)), u32(base + u32(4 * PLACES))
        symbols, length, rank_base = u32(0), number, u32(CODE_MASK)
        table, where = cuda.local.array(4, u32), cuda.local.array(4, u32)
        for level in range(1, LEVELS):
            kept, start = u32(0), u32(0)
            table_of_level(top, zero, rank_base, table)
            while start < length:
                mine = u32(start + u32(lane << u32(2)))
                further = u32(0)
                for k in range(4):
                    where[k] = u32(mine + u32(k))
                if mine < length:
                    four = symbols_at(at, limit, u32(u32(symbols + mine) * u32(LEVEL_BITS)))
                    quad, flags = four_exponents(table, four)
                    valid = u32(0x01010101)
                    if u32(length - mine) < u32(4):
                        valid = u32(valid & u32(u32(u32(1) << u32(u32(length - mine) << u32(3))) - u32(1)))
                    further = dp4a(u32(flags & valid), u32(0x08040201), u32(0))
                    if level == 1:
                        shared_store(u32(values + mine), quad)
                    else:
                        for k in range(4):
                            if u32(u32(valid >> u32(8 * k)) & u32(1)) != u32(0):
                                where[k] = shared_load_half(u32(places + u32(where[k] << u32(1))))
                                shared_store_byte(
                                    u32(values + where[k]), u32(u32(quad >> u32(8 * k)) & u32(255))
                                )
                if ballot(further) != u32(0):
                    cuda.syncwarp()  # places are compacted in place: everyone has read before anyone writes
                    count = popc(further)
                    sums = inclusive_sum(count)
                    slot = u32(u32(kept + sums) - count)
                    for k in range(4):
                        if u32(u32(further >> u32(k)) & u32(1)) != u32(0):
                            shared_store_half(u32(places + u32(slot << u32(1))), where[k])
                            slot = u32(slot + u32(1))
                    kept = u32(kept + shuffle(sums, u32(31)))
                start = u32(start + u32(128))
                cuda.syncwarp()
            symbols = u32(symbols + length)
            rank_base = u32(rank_base + u32(LEVEL_ESCAPE))
            length = kept
        taken = u32(u32(u32(symbols * u32(LEVEL_BITS)) + u32(7)) >> u32(3))
        k = lane
        while k < length:
            byte = u32(0)
            if at + u64(u32(taken + k)) < limit:
                byte = load_byte(at + u64(u32(taken + k)))
            shared_store_byte(u32(values + shared_load_half(u32(places + u32(k << u32(1))))), byte)
            k = u32(k + u32(32))
        cuda.syncwarp()
        return u32(taken + length)

    @cuda.jit(device=True, inline="always")
    def load_words_anywhere(at, lane, width, words):
        raw = cuda.local.array(4, u32)
        for w in range(4):
            raw[w] = u32(0)
        for w in range(width):
            for k in range(4):
                byte = load_byte(at + u64(128 * w + k) + u64(lane) * u64(4))
                raw[w] = u32(raw[w] | u32(byte << u32(8 * k)))
        unpack_words(raw, width, words)

    @cuda.jit(device=True, inline="always")
    def decode_exponents(base, lane, codes, top, flags, at, limit, quads):
        """A lane's exponents; the number of dynamic bytes that a tile's exponents took."""
        words = cuda.local.array(4, u32)
        load_words(codes, lane, CODE_BITS, words)
        if u32(flags & u32(RAW_FLAG)) != u32(0):
            for q in range(8):
                quads[q] = u32(0)
            add_words(words, 0, quads)
            if at + u64(TILE // 8 * REST_BITS) <= limit:
                rest = cuda.local.array(4, u32)
                load_words_anywhere(at, lane, REST_0, rest)
                add_words(rest, CODE_BITS, quads)
                if REST_1:
                    load_words_anywhere(at + u64(128 * REST_0), lane, REST_1, rest)
                    add_words(rest, CODE_BITS + REST_0, quads)
            return u32(TILE // 8 * REST_BITS)
        zero = u32(0)
        tops = u32(top * K01)
        table_low, table_high = subtract(tops, u32(0x03020100)), subtract(tops, u32(0x07060504))
        if u32(flags & u32(ZERO_FLAG)) != u32(0):
            zero = u32(1)
            table_high = u32(u32(table_high << u32(8)) | u32(table_low >> u32(24)))
            table_low = u32(table_low << u32(8))
        escapes = u32(0)
        for g in range(4):
            quads[2 * g] = prmt(table_low, table_high, words[g])
            quads[2 * g + 1] = prmt(table_low, table_high, u32(words[g] >> u32(16)))
            escapes = u32(escapes | u32(nibble_flags(words[g], CODE_BITS) << u32(8 * g)))
        number = popc(escapes)
        sums = inclusive_sum(number)
        length = shuffle(sums, u32(31))
        if length == u32(0):
            return u32(0)
        taken = resolve(base, lane, top, zero, length, at, limit)
        mine = u32(base + u32(lane * u32(4 * STRIDE)))
        for q in range(8):
            shared_store(u32(mine + u32(4 * q)), quads[q])
        value = u32(u32(base + u32(4 * VALUES)) + u32(sums - number))
        while escapes != u32(0):
            k = lowest(escapes)
            escapes = u32(escapes & u32(escapes - u32(1)))
            shared_store_byte(u32(mine + k), shared_load_byte(value))
            value = u32(value + u32(1))
        for q in range(8):
            quads[q] = shared_load(u32(mine + u32(4 * q)))
        return taken

    return decode_exponents
