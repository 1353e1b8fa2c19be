"""Device function of the decoders: a tile's exponents from its code plane and its escapes."""

from __future__ import annotations

from typing import Any

from ..format import MODE_SPECS, RAW_FLAG, TILE, ZERO_FLAG, DType, Mode, planes
from ._device import K01, inclusive_sum, nibble_flags, subtract, unpack_words
from ._jit import (
    ballot,
    cuda,
    leading_zeros,
    load_1,
    load_byte,
    popc,
    prmt,
    reverse,
    shared_load_4,
    shared_store_4,
    shared_store_byte,
    shift_pair,
    shuffle,
    u32,
    u64,
)  # fmt: skip
from ._planes import add_words

# Words between the exponents of two lanes in shared memory: on 16 bytes, and no bank twice in eight lanes.
STRIDE = 12
WARP_WORDS = 32 * STRIDE


def make_decoder(dtype: DType, mode: Mode) -> Any:
    """(decode_exponents, load_exponents) for a dtype and mode; whole warps call the first.

    ``decode_exponents(mine, raw, top, flags, at, limit, lane)`` leaves a lane's 32 exponents, in lane order,
    in STRIDE words of shared memory of its own at ``mine``, where ``load_exponents`` finds them; returns the
    dynamic bytes that those of the tile took, from ``at`` on. ``raw`` are the lane's words of the code plane.
    A lane reads the symbols of its own escapes; lanes tell each other nothing but how many they are. Never
    reads beyond ``limit``, a multiple of 4: where a tile's bytes would, its exponents are others.
    """
    spec, EXPONENT_BITS = MODE_SPECS[mode], dtype.exponent_bits
    CODE_BITS, LEVEL_BITS, LEVELS = spec.code_bits, spec.level_bits, spec.levels
    CODE_MASK, LEVEL_ESCAPE = (1 << CODE_BITS) - 1, (1 << LEVEL_BITS) - 1
    SYMBOLS_A_WORD = 32 // LEVEL_BITS
    REST_BITS = EXPONENT_BITS - CODE_BITS
    REST_PLANES = planes(REST_BITS)
    REST_0, REST_1 = REST_PLANES[0], (REST_PLANES[1] if len(REST_PLANES) > 1 else 0)
    FAST = mode == Mode.FAST
    ORDER_LOW = sum((d % 16) << (4 * r) for r, d in enumerate(spec.order[:8]))
    ORDER_HIGH = sum((d % 16) << (4 * r) for r, d in enumerate(spec.order[8:16]))

    @cuda.jit(device=True, inline="always")
    def table_of_level(top, zero, rank_base):
        """Exponents by symbol of a level beyond the first of dense, as bytes."""
        table = u32(0)
        for k in range(LEVEL_ESCAPE):
            r = u32(u32(rank_base + u32(k)) - zero)
            word = u32(ORDER_LOW)
            if r >= u32(8):
                word = u32(ORDER_HIGH)
            d = u32(u32(word >> u32(u32(r & u32(7)) << u32(2))) & u32(15))
            if d > u32(13):
                d = u32(d - u32(16))
            table = u32(table | u32(u32(u32(top - d) & u32(255)) << u32(8 * k)))
        return table

    @cuda.jit(device=True, inline="always")
    def exponent_of(symbol, top, zero, table):
        """In the lowest byte."""
        if FAST:
            # Symbols 0 to 12 are top - 7 and below, then top + 1, top + 2; with zero, 0 to 13, then top + 1.
            last = u32(u32(12) + zero)
            if symbol <= last:
                return u32(u32(u32(top + zero) - u32(7)) - symbol)
            return u32(u32(top + symbol) - last)
        return u32(table >> u32(symbol << u32(3)))

    @cuda.jit(device=True, inline="always")
    def replace_escapes(mine, escapes, top, zero, at, limit):
        """Overwrites a lane's exponents that are escapes, level by level; the bytes that the tile's took."""
        pending, symbols, rank_base = reverse(escapes), u32(0), u32(CODE_MASK)
        number = popc(pending)
        sums = inclusive_sum(number)
        length = shuffle(sums, u32(31))
        level = u32(1)
        while level < u32(LEVELS) and length != u32(0):
            bit = u32(u32(symbols + u32(sums - number)) * u32(LEVEL_BITS))
            symbols = u32(symbols + length)
            if at + u64(u32(u32(u32(symbols * u32(LEVEL_BITS)) + u32(7)) >> u32(3))) > limit:
                pending = u32(0)
            table = u32(0)
            if not FAST:
                table = table_of_level(top, zero, rank_base)
            further = u32(0)
            while pending != u32(0):
                start = at + u64(u32(bit >> u32(3)))
                word = start & u64(0xFFFFFFFFFFFFFFFC)
                shift = u32(u32(u32(u32(start) & u32(3)) << u32(3)) | u32(bit & u32(7)))
                low, high = load_1(word), u32(0)
                if word + u64(4) < limit:
                    high = load_1(word + u64(4))
                window = shift_pair(low, high, shift)
                left = u32(SYMBOLS_A_WORD)
                while pending != u32(0) and left != u32(0):
                    k = leading_zeros(pending)
                    flag = u32(u32(0x80000000) >> k)
                    pending = u32(pending ^ flag)
                    symbol = u32(window & u32(LEVEL_ESCAPE))
                    window = u32(window >> u32(LEVEL_BITS))
                    if symbol == u32(LEVEL_ESCAPE):
                        further = u32(further | flag)
                    shared_store_byte(u32(mine + k), exponent_of(symbol, top, zero, table))
                    left = u32(left - u32(1))
                bit = u32(bit + u32(32))
            pending, length = further, u32(0)
            if ballot(pending) != u32(0):
                number = popc(pending)
                sums = inclusive_sum(number)
                length = shuffle(sums, u32(31))
            rank_base = u32(rank_base + u32(LEVEL_ESCAPE))
            level = u32(level + u32(1))
        taken = u32(u32(u32(symbols * u32(LEVEL_BITS)) + u32(7)) >> u32(3))
        if length != u32(0):
            byte = at + u64(u32(taken + u32(sums - number)))
            taken = u32(taken + length)
            if at + u64(taken) > limit:
                pending = u32(0)
            while pending != u32(0):
                k = leading_zeros(pending)
                pending = u32(pending ^ u32(u32(0x80000000) >> k))
                shared_store_byte(u32(mine + k), load_byte(byte))
                byte += u64(1)
        return taken

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
    def store_exponents(mine, quads):
        shared_store_4(mine, quads[0], quads[1], quads[2], quads[3])
        shared_store_4(u32(mine + u32(16)), quads[4], quads[5], quads[6], quads[7])

    @cuda.jit(device=True, inline="always")
    def load_exponents(mine, half):
        """The exponents of octets 2 half and 2 half + 1, as four quads."""
        return shared_load_4(u32(mine + u32(16 * half)))

    @cuda.jit(device=True, inline="always")
    def decode_exponents(mine, raw, top, flags, at, limit, lane):
        words, quads = cuda.local.array(4, u32), cuda.local.array(8, u32)
        unpack_words(raw, CODE_BITS, words)
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
            store_exponents(mine, quads)
            return u32(TILE // 8 * REST_BITS)
        zero = u32(0)
        tops = u32(top * K01)
        table_low, table_high = subtract(tops, u32(0x03020100)), subtract(tops, u32(0x07060504))
        if u32(flags & u32(ZERO_FLAG)) != u32(0):
            zero = u32(1)
            table_high = u32(u32(table_high << u32(8)) | u32(table_low >> u32(24)))
            table_low = u32(table_low << u32(8))
        escapes = u32(0)
        for g in range(3, -1, -1):
            quads[2 * g] = prmt(table_low, table_high, words[g])
            quads[2 * g + 1] = prmt(table_low, table_high, u32(words[g] >> u32(16)))
            escapes = nibble_flags(words[g], CODE_BITS, u32(escapes << u32(8)))
        store_exponents(mine, quads)
        return replace_escapes(mine, escapes, top, zero, at, limit)

    return decode_exponents, load_exponents
