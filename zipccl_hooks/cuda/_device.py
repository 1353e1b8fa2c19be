"""Device functions shared by the kernels: four bytes at a time in a 32-bit register, and warp scans.

A *quad* is a register of four bytes, one per element. A lane holds 8 quads: quad ``2 g + h`` are the
elements 4 h to 4 h + 3 of its octet in group g.
"""

from __future__ import annotations

from ._jit import (
    cuda,
    device,
    dp4a,
    prmt,
    scan_1,
    scan_2,
    scan_4,
    scan_8,
    scan_16,
    shuffle_pair,
    store_4,
    u32,
    u64,
)  # fmt: skip

K01, K0F, K1F = u32(0x01010101), u32(0x0F0F0F0F), u32(0x1F1F1F1F)
K7F, K80, KFE = u32(0x7F7F7F7F), u32(0x80808080), u32(0xFEFEFEFE)
EVEN, ODD = u32(0x6420), u32(0x7531)  # prmt: bytes 0 and 2, or 1 and 3, of two registers


@device
def eight_bits(low, high):
    """0 or 1 in each byte of two quads -> bits 0 to 7."""
    return dp4a(high, u32(0x80402010), dp4a(low, u32(0x08040201), u32(0)))


@device
def subtract(a, b):
    """a - b in each byte, modulo 256.

    >>> 0x05050505 - 0x01050607 = 0x0400FFFE
    """
    return u32(u32(u32(a | K80) - u32(b & K7F)) ^ u32(u32(a ^ u32(~b)) & K80))


@device
def below(quad, bound):
    """1 in the bytes less than ``bound``, a number up to 128, else 0."""
    reached = u32(u32(u32(quad & K7F) + u32(u32(u32(0x80) - bound) * K01)) | quad)
    return u32(u32(u32(~reached) >> u32(7)) & K01)


@device
def nonzero_flags(quad):
    """0x80 in the bytes that are not 0."""
    return u32(u32(u32(u32(quad & K7F) + K7F) | quad) & K80)


@device
def nibbles(low, high):
    """Two quads of values below 16 -> word N of format.py, element j in nibble j."""
    return prmt(u32(low | u32(low >> u32(4))), u32(high | u32(high >> u32(4))), EVEN)


@device
def inclusive_sum(value):
    """Sum of the values of this and the lower lanes."""
    return scan_16(scan_8(scan_4(scan_2(scan_1(value)))))


@device
def plane_word(words, width, w):
    """Word ``w`` of a lane in a plane of ``width`` bits, from its four words N."""
    if width == 1:
        return u32(
            u32(words[0] | u32(words[1] << u32(1))) | u32(u32(words[2] << u32(2)) | u32(words[3] << u32(3)))
        )
    if width == 2:
        return u32(words[2 * w] | u32(words[2 * w + 1] << u32(2)))
    if width == 3:
        return u32(words[w] | u32(u32(words[3] & u32(u32(0x11111111) << u32(w))) << u32(3 - w)))
    return words[w]


@device
def unpack_words(raw, width, words):
    """Inverse of plane_word: a lane's words of a plane -> its four words N."""
    if width == 1:
        for g in range(4):
            words[g] = u32(u32(raw[0] >> u32(g)) & u32(0x11111111))
    elif width == 2:
        for g in range(4):
            words[g] = u32(u32(raw[g // 2] >> u32(2 * (g % 2))) & u32(0x33333333))
    elif width == 3:
        last = u32(0)
        for g in range(3):
            words[g] = u32(raw[g] & u32(0x77777777))
            last = u32(last | u32(u32(raw[g] >> u32(3 - g)) & u32(u32(0x11111111) << u32(g))))
        words[3] = last
    else:
        for g in range(4):
            words[g] = raw[g]


@device
def octets(word):
    """A word N -> its two quads."""
    low, high = u32(word & K0F), u32(u32(word >> u32(4)) & K0F)
    return prmt(low, high, u32(0x5140)), prmt(low, high, u32(0x7362))


@device
def nibble_flags(word, width, others):
    """Bit j is set where nibble j of a word N has its lowest ``width`` bits set; added to ``others``."""
    full = u32(word & u32(word >> u32(1)))
    if width == 3:
        full = u32(full & u32(word >> u32(2)))
    pairs = u32(u32(full | u32(full >> u32(3))) & u32(0x03030303))  # of nibbles 2 k and 2 k + 1, in byte k
    return dp4a(pairs, u32(0x40100401), others)


@device
def store_eight(at, w0, w1, w2, w3, w4, w5, w6, w7):
    """Stores 32 bytes of each lane; a whole warp calls it, lane l with the address of those of lane 0 + 32 l.

    Lanes 2 i and 2 i + 1 first write the bytes of the one together, then those of the other: sectors of 32
    bytes as a whole, not 16 bytes of each by two instructions (H200, fp32 holding bf16 values, decode: 2155
    GB/s, so 2961).
    """
    odd = u32(u32(cuda.threadIdx.x) & u32(1))
    r0, r1, r2, r3 = w4, w5, w6, w7
    if odd != u32(0):
        r0, r1, r2, r3 = w0, w1, w2, w3
    r0, r1, r2, r3 = shuffle_pair(r0), shuffle_pair(r1), shuffle_pair(r2), shuffle_pair(r3)
    if odd != u32(0):
        w0, w1, w2, w3 = r0, r1, r2, r3
    else:
        w4, w5, w6, w7 = r0, r1, r2, r3
    first = at - u64(u32(odd << u32(4)))
    store_4(first, w0, w1, w2, w3)
    store_4(first + u64(32), w4, w5, w6, w7)
