"""Numba kernels of the CPU codec: tiles in, tiles out, the bytes that format.py defines.

Written as short loops over one tile (1 to 4 kB, in L1) that LLVM turns into vector code. Integers are
cast at every step, since Numba would widen them to 64 bits and a vector would hold fewer of them. Tiles
are sliced out before a loop: ``a[start + i]`` is checked for a negative index, ``t[i]`` is not.
Kernels run without the GIL, allocate only scratch, and report a corrupt payload by returning False.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from .format import (
    GROUP,
    LOW_BITS,
    LOW_ESCAPES_FLAG,
    RAW_FLAG,
    TILE,
    WIDTH_SHIFT,
    ZERO_FLAG,
)

jit = njit(nogil=True, cache=True, error_model="numpy")

u8, u16, u32, u64 = np.uint8, np.uint16, np.uint32, np.uint64
OCTETS = TILE // 8  # an octet: 8 consecutive elements of one lane, one byte each in a 64-bit word
FF_2 = u64(0x00FF00FF00FF00FF)
FFFF_2 = u64(0x0000FFFF0000FFFF)
NIBBLE_8 = u64(0x0F0F0F0F0F0F0F0F)
ONE_8 = u64(0x0101010101010101)
EIGHT_8 = u64(0x0808080808080808)
S4, S8, S16 = u64(4), u64(8), u64(16)


@jit
def _new_scratch():
    return (
        np.empty(OCTETS, np.uint64),  # octets: one byte an element
        np.empty(OCTETS, np.uint32),  # nibbles
        np.empty(OCTETS, np.uint32),  # words of one plane
        np.empty(TILE, np.uint16),  # values of a field
        np.empty(TILE, np.uint8),  # exponents
        np.empty(TILE + 8, np.uint8),  # exponents that are escapes, compacted
        np.empty(3 * TILE + 8, np.uint8),  # symbols of the levels beyond the first
        np.empty(32, np.uint8),  # exponent by rank
        np.empty(256, np.uint8),  # rank by exponent
        np.empty(4, np.int64),  # number of symbols by level
        np.empty(TILE, np.uint16),  # low bits of fp32
    )


# Planes


@jit
def _nibbles(octets, nibbles):
    """128 octets of values below 16 -> 128 words N of format.py."""
    for i in range(OCTETS):
        t = octets[i]
        t = (t | (t >> S4)) & FF_2
        t = (t | (t >> S8)) & FFFF_2
        nibbles[i] = u32(t | (t >> S16))


@jit
def _octets(nibbles, octets):
    for i in range(OCTETS):
        t = u64(nibbles[i])
        t = (t | (t << S16)) & FFFF_2
        t = (t | (t << S8)) & FF_2
        octets[i] = (t | (t << S4)) & NIBBLE_8


@jit
def _pack_plane(octets, width, nibbles, words):
    """Values below 2**width, width 1 to 4 -> the plane's ``32 * width`` words."""
    _nibbles(octets, nibbles)
    for i in range(32):
        n0, n1, n2, n3 = nibbles[i], nibbles[32 + i], nibbles[64 + i], nibbles[96 + i]
        if width == 1:
            words[i] = n0 | (n1 << u32(1)) | (n2 << u32(2)) | (n3 << u32(3))
        elif width == 2:
            words[i] = n0 | (n1 << u32(2))
            words[32 + i] = n2 | (n3 << u32(2))
        elif width == 3:
            words[i] = n0 | ((n3 & u32(0x11111111)) << u32(3))
            words[32 + i] = n1 | ((n3 & u32(0x22222222)) << u32(2))
            words[64 + i] = n2 | ((n3 & u32(0x44444444)) << u32(1))
        else:
            words[i], words[32 + i], words[64 + i], words[96 + i] = n0, n1, n2, n3


@jit
def _unpack_plane(words, width, nibbles, octets):
    for i in range(32):
        w = words[i]
        if width == 1:
            m = u32(0x11111111)
            nibbles[i], nibbles[32 + i] = w & m, (w >> u32(1)) & m
            nibbles[64 + i], nibbles[96 + i] = (w >> u32(2)) & m, (w >> u32(3)) & m
        elif width == 2:
            m = u32(0x33333333)
            nibbles[i], nibbles[32 + i] = w & m, (w >> u32(2)) & m
            nibbles[64 + i], nibbles[96 + i] = words[32 + i] & m, (words[32 + i] >> u32(2)) & m
        elif width == 3:
            m, w1, w2 = u32(0x77777777), words[32 + i], words[64 + i]
            nibbles[i], nibbles[32 + i], nibbles[64 + i] = w & m, w1 & m, w2 & m
            nibbles[96 + i] = (
                ((w >> u32(3)) & u32(0x11111111))
                | ((w1 >> u32(2)) & u32(0x22222222))
                | ((w2 >> u32(1)) & u32(0x44444444))
            )
        else:
            nibbles[i], nibbles[32 + i] = w, words[32 + i]
            nibbles[64 + i], nibbles[96 + i] = words[64 + i], words[96 + i]
    _octets(nibbles, octets)


@jit
def _next_plane(width):
    """Width of the first plane of a field (format.planes)."""
    return 8 if width >= 8 else min(width, 4)


@jit
def _pack_field(values, width, scratch, dynamic, position):
    """Planes of a field of ``width`` bits, ``values`` uint16[1024], into the dynamic part at ``position``."""
    octets, nibbles, words = scratch[0], scratch[1], scratch[2]
    bytes_, packed = octets.view(np.uint8), words.view(np.uint8)
    shift = u16(0)
    while width > 0:
        plane = _next_plane(width)
        mask = u16((1 << plane) - 1)
        for i in range(TILE):
            bytes_[i] = u8((values[i] >> shift) & mask)
        if plane == 8:
            dynamic[position : position + TILE] = bytes_
        else:
            _pack_plane(octets, plane, nibbles, words)
            dynamic[position : position + OCTETS * plane] = packed[: OCTETS * plane]
        position += OCTETS * plane
        width -= plane
        shift = u16(shift + u16(plane))
    return position


@jit
def _unpack_field(dynamic, position, width, scratch, values):
    """Inverse of _pack_field; the caller has checked that the bytes are there."""
    octets, nibbles, words = scratch[0], scratch[1], scratch[2]
    bytes_, packed = octets.view(np.uint8), words.view(np.uint8)
    shift = u16(0)
    values[:] = 0
    while width > 0:
        plane = _next_plane(width)
        if plane == 8:
            bytes_[:] = dynamic[position : position + TILE]
        else:
            packed[: OCTETS * plane] = dynamic[position : position + OCTETS * plane]
            _unpack_plane(words, plane, nibbles, octets)
        for i in range(TILE):
            values[i] = u16(values[i] | u16(u16(bytes_[i]) << shift))
        position += OCTETS * plane
        width -= plane
        shift = u16(shift + u16(plane))
    return position


# Exponents


@jit
def _rank_table(top, zero, order, table):
    """Exponent by rank."""
    shift = 1 if zero else 0
    for k in range(len(order) - shift):
        table[k + shift] = u8((top - order[k]) & 255)
    if zero:
        table[0] = 0


@jit
def _encode_exponents(spec, order, scratch, codes, dynamic, position):
    """Code plane and dynamic bytes of one tile's exponents -> (position behind them, top, flags)."""
    exponent_bits, code_bits, level_bits, levels, top_16ths, zero_min = spec
    octets, nibbles, _, values, exponents, further, symbols, table, ranks, _, _ = scratch
    total, nonzero = u32(0), u32(0)
    for i in range(TILE):
        total = u32(total + u32(exponents[i]))
        nonzero = u32(nonzero + u32(exponents[i] != 0))
    top, zero = 0, TILE - np.int64(nonzero) >= zero_min
    if nonzero:
        n = np.int64(nonzero)
        top = (16 * np.int64(total) + top_16ths * n) // (16 * n) & 255
    _rank_table(top, zero, order, table)
    ranks[:] = 255
    for k in range(len(order) - 1, -1, -1):
        ranks[table[k]] = u8(k)

    # Level 1. The ranks below the escape code are consecutive exponents, so arithmetic finds them.
    escape = (1 << code_bits) - 1
    codes8, t, last = octets.view(np.uint8), u8(top), u8(escape)
    if zero:
        for i in range(TILE):
            d = u8(min(u8(t - exponents[i]), u8(last - u8(1))) + u8(1))
            codes8[i] = u8(0) if exponents[i] == 0 else d
    else:
        for i in range(TILE):
            codes8[i] = min(u8(t - exponents[i]), last)

    n = 0
    if code_bits == 3:  # few escapes: look at eight elements at once
        for lane in range(32):
            for g in range(4):
                octet = g * 32 + lane
                if (octets[octet] + ONE_8) & EIGHT_8:
                    for i in range(8 * octet, 8 * octet + 8):
                        if codes8[i] == last:
                            further[n] = exponents[i]
                            n += 1
    else:  # a quarter escapes, at random: a branch would mispredict
        k = u64(0)
        for lane in range(32):
            for g in range(4):
                start = u64(g * 256 + lane * 8)
                for j in range(8):
                    i = u64(start + u64(j))
                    further[k] = exponents[i]
                    k = u64(k + u64(codes8[i] == last))
        n = np.int64(k)

    # Later levels, each over the escapes of the one before.
    level_escape, base, num_symbols = (1 << level_bits) - 1, escape, 0
    for _ in range(1, levels):
        kept, level_symbols = u64(0), symbols[num_symbols:]
        for k in range(n):
            e = further[k]
            r = np.int64(ranks[e])
            level_symbols[k] = u8(min(r - base, level_escape))
            further[kept] = e
            kept = u64(kept + u64(r >= base + level_escape))
        num_symbols += n
        base += level_escape
        n = np.int64(kept)

    chunk = dynamic[position:]
    symbol_bytes = (num_symbols * level_bits + 7) // 8
    rest_bits = exponent_bits - code_bits
    if symbol_bytes + n > OCTETS * rest_bits:
        for i in range(TILE):
            values[i] = u16(exponents[i] >> code_bits)
        position = _pack_field(values, rest_bits, scratch, dynamic, position)
        for i in range(TILE):
            codes8[i] = exponents[i] & last
        _pack_plane(octets, code_bits, nibbles, codes)
        return position, top, RAW_FLAG

    _pack_plane(octets, code_bits, nibbles, codes)
    for k in range(num_symbols, num_symbols + 3):
        symbols[k] = 0
    if level_bits == 4:
        for k in range(symbol_bytes):
            chunk[k] = symbols[2 * k] | u8(symbols[2 * k + 1] << 4)
    else:
        for k in range(symbol_bytes):
            low = symbols[4 * k] | u8(symbols[4 * k + 1] << 2)
            chunk[k] = low | u8(symbols[4 * k + 2] << 4) | u8(symbols[4 * k + 3] << 6)
    chunk[symbol_bytes : symbol_bytes + n] = further[:n]
    return position + symbol_bytes + n, top, (ZERO_FLAG if zero else 0)


@jit
def _unpack_symbols(packed, level_bits, symbols):
    """Bytes of 2 or 4 bit symbols -> one symbol a byte, up to three more than asked for."""
    if level_bits == 4:
        pairs = symbols[: 2 * len(packed)].view(np.uint16)
        for k in range(len(packed)):
            b = u16(packed[k])
            pairs[k] = (b & u16(15)) | u16(u16(b >> u16(4)) << u16(8))
    else:
        quads = symbols[: 4 * len(packed)].view(np.uint32)
        for k in range(len(packed)):
            b = u32(packed[k])
            low = (b & u32(3)) | ((b & u32(12)) << u32(6))
            quads[k] = low | ((b & u32(48)) << u32(12)) | ((b & u32(192)) << u32(18))


@jit
def _decode_exponents(spec, order, scratch, codes, top, flags, dynamic, position):
    """Inverse of _encode_exponents; False where the dynamic part is too short."""
    exponent_bits, code_bits, level_bits, levels, _, _ = spec
    octets, nibbles, _, values, exponents, further, symbols, table, _, lengths, _ = scratch
    codes8, last = octets.view(np.uint8), u8((1 << code_bits) - 1)
    available = len(dynamic) - position
    if flags & RAW_FLAG:
        rest_bits = exponent_bits - code_bits
        if OCTETS * rest_bits > available:
            return False
        _unpack_field(dynamic, position, rest_bits, scratch, values)
        _unpack_plane(codes, code_bits, nibbles, octets)
        for i in range(TILE):
            exponents[i] = u8(values[i] << code_bits) | codes8[i]
        return True

    _unpack_plane(codes, code_bits, nibbles, octets)
    t = u8(top)
    if flags & ZERO_FLAG:
        for i in range(TILE):
            exponents[i] = u8(0) if codes8[i] == 0 else u8(u8(t + u8(1)) - codes8[i])
    else:
        for i in range(TILE):
            exponents[i] = u8(t - codes8[i])
    escapes = u32(0)
    for i in range(TILE):
        escapes = u32(escapes + u32(codes8[i] == last))

    # The symbols of level k + 1 belong to the escapes of level k, so lengths follow level by level.
    level_escape, num_symbols, n = u8((1 << level_bits) - 1), 0, np.int64(escapes)
    per_byte = 8 // level_bits
    for level in range(1, levels):
        lengths[level] = n
        end = num_symbols + n
        if (end + per_byte - 1) // per_byte > available:
            return False
        first_byte = num_symbols // per_byte
        packed = dynamic[position + first_byte : position + (end + per_byte - 1) // per_byte]
        _unpack_symbols(packed, level_bits, symbols[first_byte * per_byte :])
        deeper, level_symbols = u32(0), symbols[num_symbols:end]
        for k in range(len(level_symbols)):
            deeper = u32(deeper + u32(level_symbols[k] == level_escape))
        n, num_symbols = np.int64(deeper), end
    position += (num_symbols + per_byte - 1) // per_byte
    available -= (num_symbols + per_byte - 1) // per_byte
    if n > available:
        return False
    for k in range(n):
        further[k] = dynamic[position + k]

    # Resolve from the last level up. A level's exponents replace the deeper ones in place, backwards.
    _rank_table(top, flags & ZERO_FLAG, order, table)
    base, end = np.int64(last) + (levels - 1) * np.int64(level_escape), num_symbols
    for level in range(levels - 1, 0, -1):
        base -= np.int64(level_escape)
        length = lengths[level]
        start = end - length
        deeper = u64(n)  # one past the last unused, so that it never goes below 0
        for back in range(length):
            k = u64(length - 1 - back)
            symbol = symbols[u64(start + k)]
            escaped = symbol == level_escape
            deeper = u64(deeper - u64(escaped))
            further[k] = further[deeper] if escaped else table[u64(base + symbol)]
        n, end = length, start
    k = u64(0)
    if code_bits == 3:
        for lane in range(32):
            for g in range(4):
                octet = g * 32 + lane
                if (octets[octet] + ONE_8) & EIGHT_8:
                    for i in range(8 * octet, 8 * octet + 8):
                        if codes8[i] == last:
                            exponents[i] = further[k]
                            k = u64(k + u64(1))
    else:
        for lane in range(32):
            for g in range(4):
                start = u64(g * 256 + lane * 8)
                for j in range(8):
                    i = u64(start + u64(j))
                    escaped = codes8[i] == last
                    exponents[i] = further[k] if escaped else exponents[i]
                    k = u64(k + u64(escaped))
    return True


# Low bits of fp32


@jit
def _encode_low(scratch, dynamic, position):
    """Low bits of one tile -> (position behind them, flags)."""
    low = scratch[10]
    best, width, escapes = np.int64(TILE * LOW_BITS), LOW_BITS, 0
    for w in range(LOW_BITS):
        if TILE * w >= best:
            break
        shift, outside = u16(w), u32(0)
        for i in range(TILE):
            outside = u32(outside + u32(u16(low[i] << shift) != 0))
        count = np.int64(outside)
        cost = TILE * w + 32 * (count + (1 if count else 0))
        if cost < best or (cost == best and w < width):
            best, width, escapes = cost, w, count
    values, shift = scratch[3], u16(LOW_BITS - width)
    for i in range(TILE):
        values[i] = u16(low[i] >> shift) if width else u16(0)
    position = _pack_field(values, width, scratch, dynamic, position)
    if not escapes:
        return position, width << WIDTH_SHIFT
    position = _put_word(dynamic, position, u32(escapes))
    for i in range(TILE):
        if u16(low[i] << u16(width)):
            position = _put_word(dynamic, position, u32(u32(i << 16) | u32(low[i])))
    return position, width << WIDTH_SHIFT | LOW_ESCAPES_FLAG


@jit
def _put_word(dynamic, position, word):
    for k in range(4):
        dynamic[position + k] = u8(word >> u32(8 * k))
    return position + 4


@jit
def _get_word(dynamic, position):
    word = u32(0)
    for k in range(4):
        word = u32(word | u32(u32(dynamic[position + k]) << u32(8 * k)))
    return word


@jit
def _decode_low(flags, scratch, dynamic, position):
    """Inverse of _encode_low -> the position behind the low bits, or -1 for what no encoder writes."""
    low, width = scratch[10], flags >> WIDTH_SHIFT
    if width > LOW_BITS or position + OCTETS * width > len(dynamic):
        return -1
    position = _unpack_field(dynamic, position, width, scratch, low)
    if width:
        shift = u16(LOW_BITS - width)
        for i in range(TILE):
            low[i] = u16(low[i] << shift)
    if flags & LOW_ESCAPES_FLAG:
        if position + 4 > len(dynamic):
            return -1
        escapes = np.int64(_get_word(dynamic, position))
        position += 4
        if position + 4 * escapes > len(dynamic):
            return -1
        for _ in range(escapes):
            word = _get_word(dynamic, position)
            if word >> u32(16) >= TILE:
                return -1
            low[word >> u32(16)] = u16(word)
            position += 4
    return position


# Tiles


@jit
def encode_tiles(
    x, first, last, num_tiles, low_bits, residual_bits, spec, order, meta, bases, codes, residual, dynamic
):
    """Encodes tiles ``first`` to ``last - 1``, whole groups, of the bit patterns ``x``.

    Writes their parts of the static sections, with bases counted from the start of ``dynamic``, and
    their chunks to ``dynamic``. Returns the number of bytes written there, a multiple of 4.
    """
    scratch = _new_scratch()
    octets, nibbles, exponents, low = scratch[0], scratch[1], scratch[4], scratch[10]
    bytes_, residual_words = octets.view(np.uint8), residual.view(np.uint32)
    exponent_bits, code_bits = spec[0], spec[1]
    width = exponent_bits + residual_bits
    mantissa, sign = u16(residual_bits - 1), u16(width - 1)
    exponent_mask = u16((1 << exponent_bits) - 1)
    rest_bits, rest_shift, rest_start = residual_bits, u16(0), 0
    if residual_bits >= 8:
        rest_bits, rest_shift, rest_start = residual_bits - 8, u16(8), num_tiles * OCTETS * 8 // 4
    rest_mask = u16((1 << rest_bits) - 1)
    high_shift, chunk_unit = low_bits, (4 if low_bits else 1)
    position, group_start = 0, 0
    for tile in range(first, last):
        start = tile * TILE
        if tile % GROUP == 0:
            group_start = position
            bases[tile // GROUP] = u32(position // 4)
        chunk_start = position
        bits, low_plane = x[start : start + TILE], residual[start : start + TILE]
        for i in range(TILE):
            exponents[i] = u8(u16(u16(bits[i] >> high_shift) >> mantissa) & exponent_mask)
        if residual_bits >= 8:
            for i in range(TILE):
                v = u16(bits[i] >> high_shift)
                low_plane[i] = u8(u16(v << u16(1)) | u16(v >> sign))
        if rest_bits:
            for i in range(TILE):
                v = u16(bits[i] >> high_shift)
                rotated = u16(v << u16(1)) | u16(v >> sign)
                bytes_[i] = u8(u16(rotated >> rest_shift) & rest_mask)
            word = rest_start + tile * 32 * rest_bits
            _pack_plane(octets, rest_bits, nibbles, residual_words[word : word + 32 * rest_bits])
        flags = 0
        if low_bits:
            for i in range(TILE):
                low[i] = u16(bits[i])
            position, flags = _encode_low(scratch, dynamic, position)
        word = tile * 32 * code_bits
        position, top, exponent_flags = _encode_exponents(
            spec, order, scratch, codes[word : word + 32 * code_bits], dynamic, position
        )
        flags |= exponent_flags
        meta[tile] = u32((chunk_start - group_start) | (top << 16) | (flags << 24))
        unit = 4 if tile % GROUP == GROUP - 1 or tile == num_tiles - 1 else chunk_unit
        while position % unit:
            dynamic[position] = 0
            position += 1
    return position


@jit
def decode_tiles(
    out, first, last, num_tiles, low_bits, residual_bits, spec, order, meta, bases, codes, residual, dynamic
):
    """Decodes tiles ``first`` to ``last - 1`` into ``out[: (last - first) * 1024]``; False if corrupt."""
    scratch = _new_scratch()
    octets, nibbles, exponents, low = scratch[0], scratch[1], scratch[4], scratch[10]
    bytes_, residual_words = octets.view(np.uint8), residual.view(np.uint32)
    exponent_bits, code_bits = spec[0], spec[1]
    width = exponent_bits + residual_bits
    mantissa, sign = u16(residual_bits - 1), u16(width - 1)
    rest_bits, rest_shift, rest_start = residual_bits, u16(0), 0
    if residual_bits >= 8:
        rest_bits, rest_shift, rest_start = residual_bits - 8, u16(8), num_tiles * OCTETS * 8 // 4
    rotated = np.empty(TILE, np.uint16)
    for tile in range(first, last):
        position = np.int64(bases[tile // GROUP]) * 4 + np.int64(meta[tile] & u32(0xFFFF))
        top, flags = np.int64(meta[tile] >> u32(16)) & 255, np.int64(meta[tile] >> u32(24))
        if position > len(dynamic):
            return False
        if low_bits:
            position = _decode_low(flags, scratch, dynamic, position)
            if position < 0:
                return False
        word = tile * 32 * code_bits
        tile_codes = codes[word : word + 32 * code_bits]
        if not _decode_exponents(spec, order, scratch, tile_codes, top, flags, dynamic, position):
            return False
        low_plane = residual[tile * TILE : (tile + 1) * TILE]
        if residual_bits >= 8:
            for i in range(TILE):
                rotated[i] = u16(low_plane[i])
        else:
            rotated[:] = 0
        if rest_bits:
            word = rest_start + tile * 32 * rest_bits
            _unpack_plane(residual_words[word : word + 32 * rest_bits], rest_bits, nibbles, octets)
            for i in range(TILE):
                rotated[i] = rotated[i] | u16(u16(bytes_[i]) << rest_shift)
        for i in range(TILE):
            r = rotated[i]
            rotated[i] = u16(u16(exponents[i]) << mantissa) | u16(r >> u16(1)) | u16(u16(r & u16(1)) << sign)
        bits = out[(tile - first) * TILE : (tile - first + 1) * TILE]
        if low_bits:
            for i in range(TILE):
                bits[i] = u32(u32(rotated[i]) << u32(16)) | u32(low[i])
        else:
            for i in range(TILE):
                bits[i] = rotated[i]
    return True


@jit
def checksum_words(words, first):
    """The checksum's sum over ``words``, which start at the tensor's word ``first``."""
    total, key = u32(0), u32(u32(first) * u32(0x9E3779B1))
    for i in range(len(words)):
        v = u32(words[i] + u32(key + u32(u32(i) * u32(0x9E3779B1))))
        v = u32(u32(v ^ (v >> u32(16))) * u32(0x7FEB352D))
        total = u32(total + u32(v ^ (v >> u32(15))))
    return total
