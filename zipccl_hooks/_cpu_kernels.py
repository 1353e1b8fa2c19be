"""Numba kernels of the CPU codec: tiles in, tiles out, the bytes that format.py defines.

Written as short loops over one tile (1 to 4 kB, in L1) that LLVM turns into vector code. Integers are
cast at every step, since Numba would widen them to 64 bits and a vector would hold fewer of them. Shifts
and masks come as arguments of their final type: of those computed beside the loop LLVM keeps 64 bits. Tiles
are sliced out before a loop: ``a[start + i]`` is checked for a negative index, ``t[i]`` is not.
Kernels run without the GIL, allocate only scratch, and report a corrupt payload by returning False.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from .format import GROUP, LOW_BITS, LOW_ESCAPES_FLAG, RAW_FLAG, TILE, WIDTH_SHIFT, ZERO_FLAG

# Only an entry allocates. The others do without Numba's reference counts, atomic at every slice and call;
# those that take the whole scratch are inlined, since each call copies its 110 words to the stack.
entry = njit(nogil=True, cache=True, error_model="numpy")
jit = njit(nogil=True, cache=True, error_model="numpy", _nrt=False)
inlined = njit(nogil=True, cache=True, error_model="numpy", _nrt=False, forceinline=True)

u8, u16, u32, u64 = np.uint8, np.uint16, np.uint32, np.uint64
OCTETS = TILE // 8  # an octet: 8 consecutive elements of one lane, one byte each in a 64-bit word
FF_2 = u64(0x00FF00FF00FF00FF)
FFFF_2 = u64(0x0000FFFF0000FFFF)
NIBBLE_8 = u64(0x0F0F0F0F0F0F0F0F)
ONE_8 = u64(0x0101010101010101)
BLOCK = 64  # bytes of a list handled at a time: whole vectors, no remainder loop
BLOCKS = TILE // BLOCK
SYMBOLS = np.arange(16, dtype=np.uint8)
S1, S2, S4, S8, S16, S32, S56 = (u64(k) for k in (1, 2, 4, 8, 16, 32, 56))


@entry
def _new_scratch():
    return (
        np.empty(OCTETS, np.uint64),  # octets: one byte an element
        np.empty(OCTETS, np.uint32),  # nibbles
        np.empty(OCTETS, np.uint32),  # words of one plane
        np.empty(TILE, np.uint16),  # rotated elements, of fp32 their upper halves
        np.empty(TILE, np.uint16),  # low bits of fp32
        np.empty(TILE + 1, np.uint32),  # number and words of low bits that are escapes
        np.empty(OCTETS, np.uint64),  # exponents
        np.empty((4, OCTETS + 8), np.uint64),  # codes by level
        np.empty((4, OCTETS), np.uint64),  # number of escapes by level and octet
        np.empty(OCTETS, np.uint64),  # octets on the move
        np.empty(3 * TILE + 8, np.uint8),  # symbols: the codes of all levels beyond the first
        np.empty(32, np.uint8),  # exponent by rank
        np.empty(OCTETS + 8, np.uint64),  # exponents that are escapes, compacted
        np.empty(OCTETS + 8, np.uint64),  # those of the next level
        np.empty(4, np.int64),  # number of symbols by level
    )


@jit
def _copy(target, source):
    for i in range(len(target)):
        target[i] = source[i]


# Fields


@jit
def _rotate(bits, low_bits, sign, rotated):
    """The upper halves of fp32, or the bits as they are, with the sign moved from bit ``sign`` to bit 0."""
    for i in range(TILE):
        v = u16(bits[i] >> u32(16)) if low_bits else u16(bits[i])
        rotated[i] = u16(v << u16(1)) | u16(v >> (sign & u16(15)))


@jit
def _join(exponents, mantissa, sign, rotated):
    """Inverse of _rotate, in place: ``rotated`` holds the residuals."""
    for i in range(TILE):
        r = rotated[i]
        value = u16(r >> u16(1)) | u16(u16(r & u16(1)) << (sign & u16(15)))
        rotated[i] = value | u16(u16(exponents[i]) << (mantissa & u16(15)))


@jit
def _take(values, shift, mask, bytes_):
    """Bits of uint16 values from bit ``shift`` on. LLVM keeps to 16 bits where it sees shift < 16."""
    for i in range(TILE):
        bytes_[i] = u8(u8(values[i] >> (shift & u16(15))) & mask)


@jit
def _put(bytes_, shift, values):
    """Inverse of _take, over zeros."""
    for i in range(TILE):
        values[i] = values[i] | u16(u16(bytes_[i]) << (shift & u16(15)))


# Planes


@jit
def _pack_plane(octets, width, nibbles, words):
    """Values below 2**width, width 1 to 4 -> the plane's ``32 * width`` words."""
    for i in range(OCTETS):  # the words N of format.py
        t = octets[i]
        t = (t | (t >> S4)) & FF_2
        t = (t | (t >> S8)) & FFFF_2
        nibbles[i] = u32(t | (t >> S16))
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
    for i in range(OCTETS):
        t = u64(nibbles[i])
        t = (t | (t << S16)) & FFFF_2
        t = (t | (t << S8)) & FF_2
        octets[i] = (t | (t << S4)) & NIBBLE_8


@jit
def _pack_field(values, shift, width, scratch, dynamic, position):
    """Planes of ``width`` bits from bit ``shift`` on of uint16 values, into the dynamic part."""
    octets, nibbles, words = scratch[0], scratch[1], scratch[2]
    bytes_, packed = octets.view(np.uint8), words.view(np.uint8)
    while width > 0:
        plane = 8 if width >= 8 else min(width, 4)  # format.planes
        _take(values, u16(shift), u8((1 << plane) - 1), bytes_)
        if plane == 8:
            _copy(dynamic[position : position + TILE], bytes_)
        else:
            _pack_plane(octets, plane, nibbles, words)
            _copy(dynamic[position : position + OCTETS * plane], packed)
        position += OCTETS * plane
        width -= plane
        shift += plane
    return position


@jit
def _unpack_field(dynamic, position, shift, width, scratch, values):
    """Inverse of _pack_field, the other bits 0; the caller has checked that the bytes are there."""
    octets, nibbles, words = scratch[0], scratch[1], scratch[2]
    bytes_, packed = octets.view(np.uint8), words.view(np.uint8)
    values[:] = 0
    while width > 0:
        plane = 8 if width >= 8 else min(width, 4)  # format.planes
        if plane == 8:
            _copy(bytes_, dynamic[position : position + TILE])
        else:
            _copy(packed[: OCTETS * plane], dynamic[position : position + OCTETS * plane])
            _unpack_plane(words, plane, nibbles, octets)
        _put(bytes_, u16(shift), values)
        position += OCTETS * plane
        width -= plane
        shift += plane
    return position


# Escapes, bytes whose code is all ones, leave octets and return to them without branches. All eight bytes
# move at once: the number of bytes below that do not move along is how far one goes, by 1, 2 and 4 in turn.


@jit
def _bytes(bits):
    """Bytes of ones where the lowest bit of a byte is set."""
    bits &= ONE_8
    return (bits << S8) - bits


@jit
def _moves(codes, bits):
    """Masks of the escapes of an octet, and of those that move by 1, then by 2, then by 4."""
    keep = ((codes + ONE_8) >> bits) & ONE_8
    mask = _bytes(keep)
    away = ((keep ^ ONE_8) * ONE_8) & mask
    m1 = _bytes(away)
    away = (away & ~m1) | ((away & m1) >> S8)
    m2 = _bytes(away >> S1)
    away = (away & ~m2) | ((away & m2) >> S16)
    return mask, m1, m2, _bytes(away >> S2)


@jit
def _count_escapes(codes, bits, blocks, counts):
    """Escapes of each of ``8 * blocks`` octets, and of all."""
    total = u64(0)
    for i in range(8 * blocks):
        counts[i] = ((((codes[i] + ONE_8) >> u64(bits)) & ONE_8) * ONE_8) >> S56
        total += counts[i]
    return np.int64(total)


@jit
def _compact(octets, codes, bits, blocks, lanes, counts, moving, out):
    """Escapes -> ``out``, with 8 bytes to spare, in lane order or as they stand. May work in place."""
    for i in range(8 * blocks):
        mask, m1, m2, m4 = _moves(codes[i], u64(bits))
        t = octets[i] & mask
        t = (t & ~m1) | ((t & m1) >> S8)
        t = (t & ~m2) | ((t & m2) >> S16)
        moving[i] = (t & ~m4) | ((t & m4) >> S32)
    n, step, stride = u64(0), u64(1 if lanes else 4), u64(32 if lanes else 1)
    for a in range(2 * blocks):
        for b in range(4):
            i = step * u64(a) + stride * u64(b)
            t = moving[i]
            for j in range(8):
                out[n + u64(j)] = u8(t >> u64(8 * j))
            n += counts[i]


@jit
def _spread(source, codes, bits, blocks, lanes, counts, moving, octets):
    """Inverse of _compact: replaces the escapes in ``octets``."""
    n, step, stride = u64(0), u64(1 if lanes else 4), u64(32 if lanes else 1)
    for a in range(2 * blocks):
        for b in range(4):
            i = step * u64(a) + stride * u64(b)
            t = u64(0)
            for j in range(8):
                t |= u64(source[n + u64(j)]) << u64(8 * j)
            moving[i] = t
            n += counts[i]
    for i in range(8 * blocks):
        mask, m1, m2, m4 = _moves(codes[i], u64(bits))
        t = moving[i]
        t = (t & ~m4) | ((t << S32) & m4)
        t = (t & ~m2) | ((t << S16) & m2)
        t = (t & ~m1) | ((t << S8) & m1)
        octets[i] = (octets[i] & ~mask) | (t & mask)


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
def _translate(source, keys, values, count, blocks, target):
    """``values[j]`` where ``source`` is ``keys[j]``, j < ``count``, a multiple of 3; elsewhere ``count``."""
    for start in range(0, blocks * BLOCK, BLOCK):
        part, out = source[start : start + BLOCK], target[start : start + BLOCK]
        for k in range(BLOCK):
            out[k] = u8(count)
        for j in range(0, count, 3):
            k0, k1, k2 = keys[j], keys[j + 1], keys[j + 2]
            v0, v1, v2 = values[j], values[j + 1], values[j + 2]
            for k in range(BLOCK):
                key, v = part[k], out[k]
                v = v0 if key == k0 else v
                v = v1 if key == k1 else v
                out[k] = v2 if key == k2 else v


@inlined
def _encode_exponents(spec, order, scratch, plane, dynamic, position):
    """Code plane and dynamic bytes of one tile's exponents -> (position behind them, top, flags)."""
    exponent_bits, code_bits, level_bits, levels, top_16ths, zero_min = spec
    nibbles, values = scratch[1], scratch[3]
    exponent_octets, codes, counts, moving, symbols, table, further = scratch[6:13]
    exponents, further8 = exponent_octets.view(np.uint8), further.view(np.uint8)
    total, nonzero = np.int64(0), u16(0)
    for quarter in range(4):  # whose sum fits in 16 bits
        part, part_total = exponents[256 * quarter : 256 * (quarter + 1)], u16(0)
        for i in range(256):
            part_total = u16(part_total + u16(part[i]))
            nonzero = u16(nonzero + u16(part[i] != 0))
        total += np.int64(part_total)
    n = np.int64(nonzero)
    zero, top = TILE - n >= zero_min, (16 * total + top_16ths * n) // (16 * max(n, 1)) & 255
    _rank_table(top, zero, order, table)

    # Level 1. The ranks below the escape code are consecutive exponents, so arithmetic finds them.
    base = (1 << code_bits) - 1
    codes8, t, last, z = codes[0].view(np.uint8), u8(top), u8(base), u8(zero)
    for i in range(TILE):
        d = u8(min(u8(t - exponents[i]), u8(last - z)) + z)
        codes8[i] = u8(0) if zero and exponents[i] == 0 else d
    n = _count_escapes(codes[0], code_bits, BLOCKS, counts[0])
    _compact(exponent_octets, codes[0], code_bits, BLOCKS, True, counts[0], moving, further8)

    # Later levels, each over the escapes of the one before.
    level_escape, num_symbols = (1 << level_bits) - 1, 0
    for level in range(1, levels):
        level8, blocks = codes[level].view(np.uint8), -(-n // BLOCK)
        _translate(further8, table[base:], SYMBOLS, level_escape, blocks, level8)
        level8[n : n + BLOCK] = 0
        _copy(symbols[num_symbols : num_symbols + n], level8)
        num_symbols += n
        base += level_escape
        n = _count_escapes(codes[level], level_bits, blocks, counts[level])
        _compact(further, codes[level], level_bits, blocks, False, counts[level], moving, further8)

    chunk = dynamic[position:]
    symbol_bytes = (num_symbols * level_bits + 7) // 8
    rest_bits = exponent_bits - code_bits
    if symbol_bytes + n > OCTETS * rest_bits:
        for i in range(TILE):
            values[i], codes8[i] = u16(exponents[i]), exponents[i] & last
        position = _pack_field(values, code_bits, rest_bits, scratch, dynamic, position)
        _pack_plane(codes[0], code_bits, nibbles, plane)
        return position, top, RAW_FLAG

    _pack_plane(codes[0], code_bits, nibbles, plane)
    symbols[num_symbols : num_symbols + 3] = 0
    if level_bits == 4:
        for k in range(symbol_bytes):
            chunk[k] = symbols[2 * k] | u8(symbols[2 * k + 1] << 4)
    else:
        for k in range(symbol_bytes):
            low = symbols[4 * k] | u8(symbols[4 * k + 1] << 2)
            chunk[k] = low | u8(symbols[4 * k + 2] << 4) | u8(symbols[4 * k + 3] << 6)
    _copy(chunk[symbol_bytes : symbol_bytes + n], further8)
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


@inlined
def _decode_exponents(spec, order, scratch, plane, top, flags, dynamic, position):
    """Inverse of _encode_exponents; False where the dynamic part is too short."""
    exponent_bits, code_bits, level_bits, levels, _, _ = spec
    nibbles, values = scratch[1], scratch[3]
    exponent_octets, codes, counts, moving, symbols, table, further, deeper, lengths = scratch[6:]
    exponents, codes8 = exponent_octets.view(np.uint8), codes[0].view(np.uint8)
    available = len(dynamic) - position
    _unpack_plane(plane, code_bits, nibbles, codes[0])
    if flags & RAW_FLAG:
        rest_bits = exponent_bits - code_bits
        if OCTETS * rest_bits > available:
            return False
        _unpack_field(dynamic, position, code_bits, rest_bits, scratch, values)
        for i in range(TILE):
            exponents[i] = u8(values[i]) | codes8[i]
        return True
    zero = (flags & ZERO_FLAG) != 0
    t = u8(top + 1) if zero else u8(top)
    for i in range(TILE):
        exponents[i] = u8(0) if zero and codes8[i] == 0 else u8(t - codes8[i])

    # The symbols of level k + 1 belong to the escapes of level k, so lengths follow level by level.
    level_escape, num_symbols, per_byte = (1 << level_bits) - 1, 0, 8 // level_bits
    n = _count_escapes(codes[0], code_bits, BLOCKS, counts[0])
    for level in range(1, levels):
        lengths[level] = n
        first_byte, end = num_symbols // per_byte, num_symbols + n
        end_byte, level8 = (end + per_byte - 1) // per_byte, codes[level].view(np.uint8)
        if end_byte > available:
            return False
        packed = dynamic[position + first_byte : position + end_byte]
        _unpack_symbols(packed, level_bits, symbols[first_byte * per_byte :])
        _copy(level8[:n], symbols[num_symbols:end])
        level8[n : n + BLOCK] = 0
        num_symbols = end
        n = _count_escapes(codes[level], level_bits, -(-n // BLOCK), counts[level])
    position += (num_symbols + per_byte - 1) // per_byte
    if position + n > len(dynamic):
        return False
    _copy(deeper.view(np.uint8)[:n], dynamic[position : position + n])

    # Resolve from the last level up: exponents by symbol, then the deeper ones in their places.
    _rank_table(top, zero, order, table)
    base = (1 << code_bits) - 1 + (levels - 1) * level_escape
    for level in range(levels - 1, 0, -1):
        base -= level_escape
        level8, blocks = codes[level].view(np.uint8), -(-lengths[level] // BLOCK)
        _translate(level8, SYMBOLS, table[base:], level_escape, blocks, further.view(np.uint8))
        deeper8, level_counts = deeper.view(np.uint8), counts[level]
        _spread(deeper8, codes[level], level_bits, blocks, False, level_counts, moving, further)
        deeper, further = further, deeper
    _spread(deeper.view(np.uint8), codes[0], code_bits, BLOCKS, True, counts[0], moving, exponent_octets)
    return True


# Low bits of fp32


@jit
def _count(values, mask):
    """Number of uint16 values with a bit of ``mask``."""
    n = u16(0)
    for i in range(TILE):
        n = u16(n + u16((values[i] & mask) != 0))
    return np.int64(n)


@inlined
def _encode_low(scratch, dynamic, position):
    """Low bits of one tile -> (position behind them, flags)."""
    low, escape_words = scratch[4], scratch[5]
    # From the full width down: a smaller one has more escapes, of 32 bits each.
    w = LOW_BITS if _count(low, u16(0xFFFF)) else 0
    width, escapes, count, best = w, 0, 0, TILE * LOW_BITS
    while w and 32 * (count + (count > 0)) <= best:
        w -= 1
        count = _count(low, u16(0xFFFF >> w))
        cost = TILE * w + 32 * (count + (count > 0))
        if cost <= best:
            best, width, escapes = cost, w, count
    position = _pack_field(low, LOW_BITS - width, width, scratch, dynamic, position)
    if not escapes:
        return position, width << WIDTH_SHIFT
    escape_words[0] = escapes
    k, mask = u64(1), u16(0xFFFF >> width)
    for i in range(TILE):
        escape_words[k] = u32(i << 16) | u32(low[i])
        k += u64((low[i] & mask) != 0)
    size = 4 * (1 + escapes)
    _copy(dynamic[position : position + size], escape_words.view(np.uint8))
    return position + size, width << WIDTH_SHIFT | LOW_ESCAPES_FLAG


@inlined
def _decode_low(flags, scratch, dynamic, position):
    """Inverse of _encode_low -> the position behind the low bits, or -1 for what no encoder writes."""
    low, width = scratch[4], flags >> WIDTH_SHIFT
    if width > LOW_BITS or position + OCTETS * width > len(dynamic):
        return -1
    position = _unpack_field(dynamic, position, LOW_BITS - width, width, scratch, low)
    if flags & LOW_ESCAPES_FLAG:
        if position + 4 > len(dynamic):
            return -1
        end = position + 4 + 4 * np.int64(dynamic[position : position + 4].view(np.uint32)[0])
        if end > len(dynamic):
            return -1
        for word in dynamic[position + 4 : end].view(np.uint32):
            if word >> u32(16) >= TILE:
                return -1
            low[word >> u32(16)] = u16(word)
        position = end
    return position


# Tiles


@entry
def encode_tiles(*args):
    """Encodes tiles ``first`` to ``last - 1``, whole groups, of the bit patterns ``x``.

    Writes their parts of the static sections, with bases counted from the start of ``dynamic``, and
    their chunks to ``dynamic``. Returns the number of bytes written there, a multiple of 4.
    """
    return _encode_tiles(_new_scratch(), *args)


@jit
def _encode_tiles(
    scratch, x, first, last, num_tiles, low_bits, residual_bits, spec, order, meta, bases, codes, residual,
    dynamic,
):  # fmt: skip
    octets, nibbles, _, rotated, low, _, exponent_octets = scratch[:7]
    bytes_, exponents = octets.view(np.uint8), exponent_octets.view(np.uint8)
    residual_words = residual.view(np.uint32)
    exponent_bits, code_bits = spec[0], spec[1]
    sign, exponent_shift = u16(exponent_bits + residual_bits - 1), u16(residual_bits)
    whole = residual_bits // 8 * 8  # bits in a plane of width 8
    rest_bits, rest_start = residual_bits - whole, num_tiles * OCTETS * whole // 4
    exponent_mask, rest_mask = u8((1 << exponent_bits) - 1), u8((1 << rest_bits) - 1)
    position, group_start, chunk_unit = 0, 0, 4 if low_bits else 1
    for tile in range(first, last):
        start, chunk_start = tile * TILE, position
        if tile % GROUP == 0:
            group_start = position
            bases[tile // GROUP] = u32(position // 4)
        bits, low_plane = x[start : start + TILE], residual[start : start + TILE]
        _rotate(bits, low_bits, sign, rotated)
        _take(rotated, exponent_shift, exponent_mask, exponents)
        if whole:
            _take(rotated, u16(0), u8(255), low_plane)
        if rest_bits:
            _take(rotated, u16(whole), rest_mask, bytes_)
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
        meta[tile] = u32((chunk_start - group_start) | (top << 16) | ((flags | exponent_flags) << 24))
        unit = 4 if tile % GROUP == GROUP - 1 or tile == num_tiles - 1 else chunk_unit
        while position % unit:
            dynamic[position] = 0
            position += 1
    return position


@entry
def decode_tiles(*args):
    """Decodes tiles ``first`` to ``last - 1`` into ``out[: (last - first) * 1024]``; False if corrupt."""
    return _decode_tiles(_new_scratch(), *args)


@jit
def _decode_tiles(
    scratch, out, first, last, num_tiles, low_bits, residual_bits, spec, order, meta, bases, codes, residual,
    dynamic,
):  # fmt: skip
    octets, nibbles, _, rotated, low, _, exponent_octets = scratch[:7]
    bytes_, exponents = octets.view(np.uint8), exponent_octets.view(np.uint8)
    residual_words = residual.view(np.uint32)
    exponent_bits, code_bits = spec[0], spec[1]
    mantissa, sign = u16(residual_bits - 1), u16(exponent_bits + residual_bits - 1)
    whole = residual_bits // 8 * 8  # bits in a plane of width 8
    rest_bits, rest_start = residual_bits - whole, num_tiles * OCTETS * whole // 4
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
        rotated[:] = 0
        if whole:
            low_plane = residual[tile * TILE : (tile + 1) * TILE]
            _put(low_plane, u16(0), rotated)
        if rest_bits:
            word = rest_start + tile * 32 * rest_bits
            _unpack_plane(residual_words[word : word + 32 * rest_bits], rest_bits, nibbles, octets)
            _put(bytes_, u16(whole), rotated)
        bits = out[(tile - first) * TILE : (tile - first + 1) * TILE]
        _join(exponents, mantissa, sign, rotated)
        for i in range(TILE):
            bits[i] = u32(u32(rotated[i]) << u32(16)) | u32(low[i]) if low_bits else u32(rotated[i])
    return True


@entry
def checksum_words(words, first):
    """The checksum's sum over ``words``, which start at the tensor's word ``first``."""
    total, key = u32(0), u32(u32(first) * u32(0x9E3779B1))
    for i in range(len(words)):
        v = u32(words[i] + u32(key + u32(u32(i) * u32(0x9E3779B1))))
        v = u32(u32(v ^ (v >> u32(16))) * u32(0x7FEB352D))
        total = u32(total + u32(v ^ (v >> u32(15))))
    return total
