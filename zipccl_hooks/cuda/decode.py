"""The decoding kernel: one warp a tile, one block a group of 8 tiles."""

from __future__ import annotations

from typing import Any

from ..format import (
    GROUP,
    LOW_BITS,
    LOW_ESCAPES_FLAG,
    MODE_SPECS,
    RAW_FLAG,
    TILE,
    VERSION,
    WIDTH_SHIFT,
    ZERO_FLAG,
    DType,
    Mode,
    planes,
)
from . import MAGIC_WORD, THREADS
from ._device import K01, K7F, inclusive_sum, nibble_flags, octets, subtract, unpack_words
from ._jit import (
    ballot,
    cuda,
    dp4a,
    load_1,
    load_2,
    load_byte,
    lowest,
    popc,
    prmt,
    select_bits,
    shared_address,
    shared_load,
    shared_load_byte,
    shared_load_half,
    shared_store,
    shared_store_byte,
    shared_store_half,
    shuffle,
    store_1,
    store_2,
    store_4,
    store_byte,
    store_half,
    u32,
    u64,
)  # fmt: skip
from ._low_bits import load_low
from ._planes import add_words, load_words

STRIDE = 9  # words between the exponents of two lanes in shared memory: odd, so that no banks collide
VALUES, PLACES = 32 * STRIDE, 32 * STRIDE + 257  # words of a warp's exponents, then of its resolved escapes
SHARED = PLACES + 514  # and of their places by level, 16 bits each
SHARED_WORDS = SHARED * GROUP


def make(dtype: DType, mode: Mode) -> Any:
    """The kernel for a dtype and mode.

    Launch: max(1, groups of tiles) blocks of THREADS. Arguments, all 64 bits: address (on 16 bytes) and
    size of a buffer that starts with a payload, offsets of its sections in bytes (meta, bases, codes,
    residual, tail, dynamic), address of out (on 16 bytes), numel, address of a u32 that is set to 1
    where the header is another or a tile's bytes would lie outside the dynamic part. Reads the payload
    once, writes out once; blocks do not depend on each other.

    Example, fast: code 7 at element 300 and the byte 0x02 in the tile's chunk: symbol 2 is rank
    7 + 2 = 9, exponent top - 9.
    """
    spec = MODE_SPECS[mode]
    ITEM, EXPONENT_BITS, RESIDUAL_BITS, LOW = (
        dtype.itemsize,
        dtype.exponent_bits,
        dtype.residual_bits,
        dtype.low_bits,
    )
    CODE_BITS, LEVEL_BITS, LEVELS = spec.code_bits, spec.level_bits, spec.levels
    CODE_MASK, LEVEL_ESCAPE = (1 << CODE_BITS) - 1, (1 << LEVEL_BITS) - 1
    REST_BITS = EXPONENT_BITS - CODE_BITS
    REST_PLANES = planes(REST_BITS)
    REST_0, REST_1 = REST_PLANES[0], (REST_PLANES[1] if len(REST_PLANES) > 1 else 0)
    FAST = mode == Mode.FAST
    KIND = VERSION | dtype.code << 16 | int(mode) << 24
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

    @cuda.jit(device=True, inline="always")
    def store_tile(at, lane, first_plane, second_plane, quads, lows):
        """Joins exponents, residuals and low bits, and writes the elements."""
        rest = cuda.local.array(8, u32)
        for q in range(8):
            rest[q] = u32(0)
        if EXPONENT_BITS != 8:
            words = cuda.local.array(4, u32)
            load_words(second_plane, lane, 3 if ITEM == 2 else RESIDUAL_BITS, words)
            add_words(words, 0, rest)
        for g in range(4):
            if ITEM == 1:
                a = u32(u32(quads[2 * g] << u32(RESIDUAL_BITS)) | rest[2 * g])
                b = u32(u32(quads[2 * g + 1] << u32(RESIDUAL_BITS)) | rest[2 * g + 1])
                a = select_bits(K7F, u32(a >> u32(1)), u32(a << u32(7)))
                b = select_bits(K7F, u32(b >> u32(1)), u32(b << u32(7)))
                store_2(at + u64(256 * g) + u64(lane) * u64(8), a, b)
            else:
                s0, s1 = load_2(first_plane + u64(256 * g) + u64(lane) * u64(8))
                e0, e1 = quads[2 * g], quads[2 * g + 1]
                if EXPONENT_BITS != 8:
                    e0 = u32(u32(e0 << u32(3)) | rest[2 * g])
                    e1 = u32(u32(e1 << u32(3)) | rest[2 * g + 1])
                a, b = prmt(s0, e0, u32(0x5140)), prmt(s0, e0, u32(0x7362))
                c, d = prmt(s1, e1, u32(0x5140)), prmt(s1, e1, u32(0x7362))
                a = select_bits(u32(0x7FFF7FFF), u32(a >> u32(1)), u32(a << u32(15)))
                b = select_bits(u32(0x7FFF7FFF), u32(b >> u32(1)), u32(b << u32(15)))
                c = select_bits(u32(0x7FFF7FFF), u32(c >> u32(1)), u32(c << u32(15)))
                d = select_bits(u32(0x7FFF7FFF), u32(d >> u32(1)), u32(d << u32(15)))
                if LOW:
                    there = at + u64(1024 * g) + u64(lane) * u64(32)
                    l0, l1, l2, l3 = lows[4 * g], lows[4 * g + 1], lows[4 * g + 2], lows[4 * g + 3]
                    store_4(there, prmt(l0, a, u32(0x5410)), prmt(l0, a, u32(0x7632)),
                            prmt(l1, b, u32(0x5410)), prmt(l1, b, u32(0x7632)))  # fmt: skip
                    store_4(there + u64(16), prmt(l2, c, u32(0x5410)), prmt(l2, c, u32(0x7632)),
                            prmt(l3, d, u32(0x5410)), prmt(l3, d, u32(0x7632)))  # fmt: skip
                else:
                    store_4(at + u64(512 * g) + u64(lane) * u64(16), a, b, c, d)

    def kernel(payload, payload_bytes, meta, bases, codes, residual, tail, dynamic, out, numel, corrupt):
        lane = u32(cuda.threadIdx.x & 31)
        warp = u32(cuda.threadIdx.x >> 5)
        num_tiles = u64(numel >> u64(10))
        tile = u64(u64(cuda.blockIdx.x) * u64(GROUP) + u64(warp))
        shared = cuda.shared.array(SHARED_WORDS, u32)
        base = u32(shared_address(shared) + u32(warp * u32(4 * SHARED)))
        quads, lows = cuda.local.array(8, u32), cuda.local.array(16, u32)
        magic, kind = load_2(payload)
        numel_low, numel_high = load_2(payload + u64(8))
        dynamic_low, dynamic_high = load_2(payload + u64(16))
        dynamic_bytes = u64(u64(dynamic_low) | u64(u64(dynamic_high) << u64(32)))
        room = u64(payload_bytes - dynamic)
        foreign = magic != u32(MAGIC_WORD) or kind != u32(KIND) or numel_low != u32(numel)
        if foreign or numel_high != u32(numel >> u64(32)) or dynamic_bytes > room:
            dynamic_bytes = room
            store_1(corrupt, u32(1))
        if tile < num_tiles:
            word = load_1(payload + meta + tile * u64(4))
            group_start = u64(load_1(payload + bases + u64(cuda.blockIdx.x) * u64(4))) * u64(4)
            top, flags = u32(u32(word >> u32(16)) & u32(255)), u32(word >> u32(24))
            limit = payload + dynamic + dynamic_bytes
            at = payload + dynamic + group_start + u64(u32(word & u32(0xFFFF)))
            bad = u32(at > limit)
            escapes, entries = u32(0), at
            if LOW:
                width = u32(flags >> u32(WIDTH_SHIFT))
                if width > u32(LOW_BITS) or at + u64(u32(width << u32(7))) > limit:
                    bad, width = u32(1), u32(0)
                load_low(lane, width, at, lows)
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
            start = payload + codes + tile * u64(TILE // 8 * CODE_BITS)
            taken = decode_exponents(base, lane, start, top, flags, at, limit, quads)
            if at + u64(taken) > limit:
                bad = u32(1)
            first_plane = payload + residual + tile * u64(TILE)
            second_plane = payload + residual + tile * u64(TILE // 8 * RESIDUAL_BITS)
            if ITEM == 2:
                second_plane = payload + residual + num_tiles * u64(TILE) + tile * u64(TILE // 8 * 3)
            target = out + tile * u64(TILE * ITEM)
            store_tile(target, lane, first_plane, second_plane, quads, lows)
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
