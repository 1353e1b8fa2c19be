"""Device functions for planes: a lane's part of a field of up to four bits, packed and unpacked."""

from __future__ import annotations

from ._device import K01, nibbles, octets, unpack_words
from ._jit import cuda, device, load_1, u32, u64


@device
def quads_of_field(source, shift, width, words):
    """The words N of bits shift .. shift + width - 1 of eight quads."""
    mask = u32(u32((1 << width) - 1) * K01)
    for g in range(4):
        words[g] = nibbles(
            u32(u32(source[2 * g] >> u32(shift)) & mask), u32(u32(source[2 * g + 1] >> u32(shift)) & mask)
        )


@device
def load_words(at, lane, width, words):
    """The words N of a plane of ``width`` bits that starts on 4 bytes."""
    raw = cuda.local.array(4, u32)
    for w in range(4):
        raw[w] = u32(0)
    for w in range(width):
        raw[w] = load_1(at + u64(128 * w) + u64(lane) * u64(4))
    unpack_words(raw, width, words)


@device
def add_words(words, shift, quads):
    """Adds a plane's nibbles, as bytes shifted by ``shift``, to eight quads."""
    for g in range(4):
        low, high = octets(words[g])
        quads[2 * g] = u32(quads[2 * g] | u32(low << u32(shift)))
        quads[2 * g + 1] = u32(quads[2 * g + 1] | u32(high << u32(shift)))
