"""Device functions for the low bits of fp32: format.py's section Dynamic.

A lane's low halves are 16 registers, ``lows[4 g + k]`` those of elements 2 k and 2 k + 1 of its octet in
group g. Chunks of fp32 start on 4 bytes, so planes are read and written as words.
"""

from __future__ import annotations

from ..format import LOW_BITS, TILE
from ._device import EVEN, inclusive_sum, plane_word
from ._jit import (
    cuda,
    device,
    load_1,
    load_4_cached,
    popc,
    prmt,
    shared_store,
    shared_store_half,
    shuffle,
    store_1,
    u32,
    u64,
    warp_sum,
)  # fmt: skip
from ._planes import add_words, load_words, quads_of_field

LOWS_WORDS = TILE // 2  # of shared memory, for a warp's lows


@device
def load_lows(at, g, lows):
    """Loads an octet of fp32, leaves its low halves; returns its high halves."""
    w0, w1, w2, w3 = load_4_cached(at)
    w4, w5, w6, w7 = load_4_cached(at + u64(16))
    lows[4 * g] = prmt(w0, w1, u32(0x5410))
    lows[4 * g + 1] = prmt(w2, w3, u32(0x5410))
    lows[4 * g + 2] = prmt(w4, w5, u32(0x5410))
    lows[4 * g + 3] = prmt(w6, w7, u32(0x5410))
    high = u32(0x7632)
    return prmt(w0, w1, high), prmt(w2, w3, high), prmt(w4, w5, high), prmt(w6, w7, high)


@device
def choose_width(lows):
    """(width, number of escapes) of the low bits, as format.py defines them."""
    best, width, escapes = u32(TILE * LOW_BITS), u32(LOW_BITS), u32(0)
    w = u32(0)
    while w < u32(LOW_BITS) and u32(w << u32(10)) < best:
        mask = u32(u32(u32(0xFFFF) >> w) * u32(0x10001))
        outside = u32(0)
        for k in range(16):
            v = u32(lows[k] & mask)
            outside = u32(
                outside
                + popc(u32(u32(u32(u32(v & u32(0x7FFF7FFF)) + u32(0x7FFF7FFF)) | v) & u32(0x80008000)))
            )
        outside = warp_sum(outside)
        cost = u32(u32(w << u32(10)) + u32(outside << u32(5)))
        if outside != u32(0):
            cost = u32(cost + u32(32))
        if cost < best or (cost == best and w < width):
            best, width, escapes = cost, w, outside
        w = u32(w + u32(1))
    return width, escapes


@device
def write_low(lane, source, width, num_bytes, at):
    """Planes of the low bits, then the elements that do not fit; read again, since few tiles have any."""
    if num_bytes == u32(0):
        return
    escapes = u32(0)
    if num_bytes > u32(width << u32(7)):
        escapes = u32(u32(u32(num_bytes - u32(width << u32(7))) >> u32(2)) - u32(1))
    lows = cuda.local.array(16, u32)
    for g in range(4):
        load_lows(source + u64(1024 * g) + u64(lane) * u64(32), g, lows)
    quads, words = cuda.local.array(8, u32), cuda.local.array(4, u32)
    shift = u32(u32(LOW_BITS) - width)
    left = width
    position = at
    while left != u32(0):
        # Bits shift .. of every half, as bytes.
        for q in range(8):
            quads[q] = prmt(u32(lows[2 * q] >> shift), u32(lows[2 * q + 1] >> shift), EVEN)
        if left >= u32(8):
            for g in range(4):
                store_1(position + u64(256 * g) + u64(lane) * u64(8), quads[2 * g])
                store_1(position + u64(256 * g + 4) + u64(lane) * u64(8), quads[2 * g + 1])
            plane = u32(8)
        elif left >= u32(4):
            quads_of_field(quads, 0, 4, words)
            for w in range(4):
                store_1(position + u64(128 * w) + u64(lane) * u64(4), words[w])
            plane = u32(4)
        elif left == u32(3):
            quads_of_field(quads, 0, 3, words)
            for w in range(3):
                store_1(position + u64(128 * w) + u64(lane) * u64(4), plane_word(words, 3, w))
            plane = u32(3)
        elif left == u32(2):
            quads_of_field(quads, 0, 2, words)
            for w in range(2):
                store_1(position + u64(128 * w) + u64(lane) * u64(4), plane_word(words, 2, w))
            plane = u32(2)
        else:
            quads_of_field(quads, 0, 1, words)
            store_1(position + u64(lane) * u64(4), plane_word(words, 1, 0))
            plane = u32(1)
        position += u64(u32(plane << u32(7)))
        shift = u32(shift + plane)
        left = u32(left - plane)
    if escapes != u32(0):
        if lane == u32(0):
            store_1(position, escapes)
        position += u64(4)
        mask = u32(u32(0xFFFF) >> width)
        for g in range(4):
            number = u32(0)
            for k in range(8):
                half = u32(u32(lows[4 * g + k // 2] >> u32(16 * (k % 2))) & u32(0xFFFF))
                if u32(half & mask) != u32(0):
                    number = u32(number + u32(1))
            sums = inclusive_sum(number)
            entry = position + u64(u32(u32(sums - number) << u32(2)))
            for k in range(8):
                half = u32(u32(lows[4 * g + k // 2] >> u32(16 * (k % 2))) & u32(0xFFFF))
                if u32(half & mask) != u32(0):
                    place = u32(u32(u32(256 * g + k) + u32(lane << u32(3))) << u32(16))
                    store_1(entry, u32(place | half))
                    entry += u64(4)
            position += u64(u32(shuffle(sums, u32(31)) << u32(2)))


@device
def load_low(lane, width, at, halves):
    """Puts a lane's lows, from their planes, into its words of shared memory: number k at halves + 128 k."""
    lows = cuda.local.array(16, u32)
    quads, words = cuda.local.array(8, u32), cuda.local.array(4, u32)
    for k in range(16):
        lows[k] = u32(0)
    shift, left, position = u32(u32(LOW_BITS) - width), width, at
    while left != u32(0):
        for q in range(8):
            quads[q] = u32(0)
        plane = u32(8)
        if left >= u32(8):
            for g in range(4):
                quads[2 * g] = load_1(position + u64(256 * g) + u64(lane) * u64(8))
                quads[2 * g + 1] = load_1(position + u64(256 * g + 4) + u64(lane) * u64(8))
        elif left >= u32(4):
            load_words(position, lane, 4, words)
            add_words(words, 0, quads)
            plane = u32(4)
        elif left == u32(3):
            load_words(position, lane, 3, words)
            add_words(words, 0, quads)
            plane = u32(3)
        elif left == u32(2):
            load_words(position, lane, 2, words)
            add_words(words, 0, quads)
            plane = u32(2)
        else:
            load_words(position, lane, 1, words)
            add_words(words, 0, quads)
            plane = u32(1)
        for q in range(8):
            lows[2 * q] = u32(lows[2 * q] | u32(prmt(quads[q], u32(0), u32(0x4140)) << shift))
            lows[2 * q + 1] = u32(lows[2 * q + 1] | u32(prmt(quads[q], u32(0), u32(0x4342)) << shift))
        position += u64(u32(plane << u32(7)))
        shift = u32(shift + plane)
        left = u32(left - plane)
    for k in range(16):
        shared_store(u32(halves + u32(128 * k)), lows[k])


@device
def patch_lows(lane, escapes, entries, start):
    """Puts low bits that are escapes in their places in a warp's lows, at start; 1 if one has no place."""
    bad, e = u32(0), lane
    cuda.syncwarp()
    while e < escapes:
        entry = load_1(entries + u64(e) * u64(4))
        place = u32(entry >> u32(16))
        if place < u32(TILE):
            word = u32(u32(u32(place >> u32(8)) << u32(2)) | u32(u32(place >> u32(1)) & u32(3)))
            at = u32(start + u32(word << u32(7)) + u32(u32(u32(place >> u32(3)) & u32(31)) << u32(2)))
            shared_store_half(u32(at + u32(u32(place & u32(1)) << u32(1))), u32(entry & u32(0xFFFF)))
        else:
            bad = u32(1)
        e = u32(e + u32(32))
    cuda.syncwarp()
    return bad
