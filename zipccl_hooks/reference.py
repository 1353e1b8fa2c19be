"""The wire format in NumPy: short, slow, tile by tile. Read it beside the docstring of format.py.

The CPU and CUDA codecs must produce the same bytes; in the package only the command `check` calls this file.
Arrays hold bits, never floats: uint8, uint16 or uint32 by the dtype's itemsize.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from .errors import CorruptPayload
from .format import (
    GROUP,
    HEADER_BYTES,
    LOW_BITS,
    LOW_ESCAPES_FLAG,
    MODE_SPECS,
    RAW_FLAG,
    TILE,
    WIDTH_SHIFT,
    ZERO_FLAG,
    DType,
    Header,
    Layout,
    Mode,
    ModeSpec,
    align,
    layout,
    planes,
)

# Element 256 g + 8 l + j at [l, g, j]: reshaping it flat gives the elements in lane order.
LANE_ORDER = np.arange(TILE).reshape(4, 32, 8).transpose(1, 0, 2).reshape(-1)
NIBBLES = (4 * np.arange(8)).astype(np.uint32)


def checksum(data: bytes) -> int:
    words = np.frombuffer(data + bytes(-len(data) % 4), "<u4")
    mixed = words + np.arange(len(words)).astype(np.uint32) * np.uint32(0x9E3779B1)
    mixed = (mixed ^ mixed >> 16) * np.uint32(0x7FEB352D)
    return int((mixed ^ mixed >> 15).sum(dtype=np.uint32))


def pack_plane(values: np.ndarray, width: int) -> bytes:
    """One plane of ``values``, 1024 numbers below ``2**width``."""
    if width == 8:
        return values.astype(np.uint8).tobytes()
    nibbles = (values.astype(np.uint32).reshape(4, 32, 8) << NIBBLES).sum(axis=2, dtype=np.uint32)
    if width == 1:
        words = nibbles[0:1] | nibbles[1:2] << 1 | nibbles[2:3] << 2 | nibbles[3:4] << 3
    elif width == 2:
        words = nibbles[0::2] | nibbles[1::2] << 2
    elif width == 3:
        bits = [(nibbles[3] & np.uint32(0x11111111 << k)) << np.uint32(3 - k) for k in range(3)]
        words = nibbles[:3] | np.stack(bits)
    else:
        words = nibbles
    return words.astype("<u4").tobytes()


def unpack_plane(data: bytes, width: int) -> np.ndarray:
    if width == 8:
        return np.frombuffer(data, np.uint8).astype(np.uint32)
    words = np.frombuffer(data, "<u4").reshape(width, 32)
    if width == 1:
        nibbles = np.stack([words[0] >> g for g in range(4)])
    elif width == 2:
        nibbles = np.stack([words[0], words[0] >> 2, words[1], words[1] >> 2])
    elif width == 3:
        last = sum((words[k] >> np.uint32(3 - k)) & np.uint32(0x11111111 << k) for k in range(3))
        nibbles = np.stack([*words, last])
    else:
        nibbles = words
    return (nibbles[:, :, None] >> NIBBLES & np.uint32(2**width - 1)).reshape(TILE)


def pack_field(values: np.ndarray, width: int) -> list[bytes]:
    """The planes of a field of ``width`` bits."""
    packed = []
    for plane in planes(width):
        packed.append(pack_plane(values & (2**plane - 1), plane))
        values = values >> plane
    return packed


def rank_table(top: int, flags: int, spec: ModeSpec) -> list[int]:
    """Exponents by rank."""
    table = [(top - d) % 256 for d in spec.order]
    return [0, *table][: len(table)] if flags & ZERO_FLAG else table


def pack_symbols(symbols: list[int], bits: int) -> bytes:
    whole = 0
    for k, symbol in enumerate(symbols):
        whole |= symbol << (k * bits)
    return whole.to_bytes((len(symbols) * bits + 7) // 8, "little")


def encode_exponents(exponents: np.ndarray, dtype: DType, spec: ModeSpec) -> tuple[int, int, bytes, bytes]:
    """(top, flags, code plane, dynamic bytes) of one tile."""
    nonzero = int(np.count_nonzero(exponents))
    top = (16 * int(exponents.sum()) + spec.top_16ths * nonzero) // (16 * nonzero) % 256 if nonzero else 0
    flags = ZERO_FLAG if TILE - nonzero >= spec.zero_min else 0
    ranks = {e: r for r, e in reversed(list(enumerate(rank_table(top, flags, spec))))}
    escape = 2**spec.code_bits - 1
    codes = np.array([min(ranks.get(int(e), 255), escape) for e in exponents])
    further = [int(e) for e in exponents[LANE_ORDER] if ranks.get(int(e), 255) >= escape]
    symbols, base = [], escape
    for _ in range(1, spec.levels):
        escape = 2**spec.level_bits - 1
        symbols += [min(ranks.get(e, 255) - base, escape) for e in further]
        base += escape
        further = [e for e in further if ranks.get(e, 255) >= base]
    dynamic = pack_symbols(symbols, spec.level_bits) + bytes(further)
    rest_bits = dtype.exponent_bits - spec.code_bits
    if len(dynamic) > TILE // 8 * rest_bits:
        flags = RAW_FLAG
        codes = exponents & (2**spec.code_bits - 1)
        dynamic = b"".join(pack_field(exponents >> spec.code_bits, rest_bits))
    return top, flags, pack_plane(codes, spec.code_bits), dynamic


def encode_low(low: np.ndarray) -> tuple[int, bytes]:
    """(flags, dynamic bytes) of the low bits of one fp32 tile."""
    outside = [np.flatnonzero(low << w & 0xFFFF) for w in range(LOW_BITS + 1)]
    costs = [TILE * w + 32 * (len(o) + bool(len(o))) for w, o in enumerate(outside)]
    width = int(np.argmin(costs))
    dynamic = b"".join(pack_field(low >> (LOW_BITS - width), width))
    escapes = outside[width]
    if not len(escapes):
        return width << WIDTH_SHIFT, dynamic
    entries = [len(escapes), *(int(p) << 16 | int(low[p]) for p in escapes)]
    return width << WIDTH_SHIFT | LOW_ESCAPES_FLAG, dynamic + np.array(entries, "<u4").tobytes()


def encode(bits: np.ndarray, dtype: DType, mode: Mode, shape: tuple[int, ...] | None = None) -> bytes:
    """The payload of a flat array of bit patterns, in exactly this mode.

    Without ``shape`` it is an operator's, flat and without checksum; with it that of ``codec.encode``.
    """
    payload = _encode_flat(bits, dtype, mode)
    if shape is None:
        return payload
    header = replace(Header.unpack(payload, len(payload)), shape=shape)
    data = np.ascontiguousarray(bits).tobytes()
    return header.sealed(checksum(data)).pack() + payload[HEADER_BYTES:]


def _encode_flat(bits: np.ndarray, dtype: DType, mode: Mode) -> bytes:
    data = np.ascontiguousarray(bits).tobytes()
    if mode == Mode.RAW:
        numel = len(data) // dtype.itemsize
        return Header(dtype, mode, numel, 0, (numel,)).pack() + data
    lay, spec = layout(len(bits), dtype, mode), MODE_SPECS[mode]
    meta: list[int] = []
    bases: list[int] = []
    codes: list[bytes] = []
    dynamic, group = b"", b""
    residuals: list[list[bytes]] = [[] for _ in planes(dtype.residual_bits)]
    for tile in bits[: lay.num_tiles * TILE].astype(np.uint32).reshape(-1, TILE):
        if len(meta) % GROUP == 0:
            dynamic, group = dynamic + group, b""
            bases.append(len(dynamic) // 4)
        low_flags, chunk = 0, b""
        if dtype.low_bits:
            low_flags, chunk = encode_low(tile & 0xFFFF)
            tile = tile >> np.uint32(LOW_BITS)
        width = dtype.exponent_bits + dtype.residual_bits
        rotated = (tile << 1 | tile >> (width - 1)) & (2**width - 1)
        for section, plane in zip(residuals, pack_field(rotated, dtype.residual_bits), strict=True):
            section.append(plane)
        top, flags, code_plane, exponent_chunk = encode_exponents(rotated >> dtype.residual_bits, dtype, spec)
        codes.append(code_plane)
        chunk += exponent_chunk
        meta.append(len(group) | top << 16 | (flags | low_flags) << 24)
        group += chunk + bytes(-len(chunk) % lay.chunk_unit)
        if len(meta) % GROUP == 0 or len(meta) == lay.num_tiles:
            group += bytes(-len(group) % 4)
    dynamic += group
    tail = data[lay.num_tiles * TILE * dtype.itemsize :]
    sections = [
        Header(dtype, mode, len(bits), len(dynamic), (len(bits),)).pack(),
        np.array(meta, "<u4").tobytes(),
        np.array(bases, "<u4").tobytes(),
        b"".join(codes),
        *(b"".join(section) for section in residuals),
        tail,
    ]
    return b"".join(s + bytes(align(len(s)) - len(s)) for s in sections) + dynamic


class _Reader:
    """Takes bytes off the dynamic part; running past its end is a corrupt payload."""

    def __init__(self, data: bytes, position: int) -> None:
        self.data, self.position = data, position

    def take(self, num_bytes: int) -> bytes:
        taken = self.data[self.position : self.position + num_bytes]
        if len(taken) < num_bytes:
            raise CorruptPayload(f"payload dynamic part: expected {num_bytes} bytes at {self.position}")
        self.position += num_bytes
        return taken

    def field(self, width: int) -> np.ndarray:
        values, shift = np.zeros(TILE, np.uint32), 0
        for plane in planes(width):
            values |= unpack_plane(self.take(TILE // 8 * plane), plane) << np.uint32(shift)
            shift += plane
        return values

    def low(self, flags: int) -> np.ndarray:
        width = flags >> WIDTH_SHIFT
        if width > LOW_BITS:
            raise CorruptPayload(f"payload low bits: expected at most {LOW_BITS}, got {width}")
        low = self.field(width) << np.uint32(LOW_BITS - width)
        if flags & LOW_ESCAPES_FLAG:
            count = int.from_bytes(self.take(4), "little")
            entries = np.frombuffer(self.take(4 * count), "<u4")
            if np.any(entries >> 16 >= TILE):
                raise CorruptPayload("payload low bits: position outside the tile")
            low[entries >> 16] = entries & 0xFFFF
        return low

    def exponents(self, codes: np.ndarray, top: int, flags: int, dtype: DType, spec: ModeSpec) -> np.ndarray:
        if flags & RAW_FLAG:
            return codes | self.field(dtype.exponent_bits - spec.code_bits) << np.uint32(spec.code_bits)
        table = rank_table(top, flags, spec)
        escape, level = 2**spec.code_bits - 1, 2**spec.level_bits - 1
        count = int(np.count_nonzero(codes == escape))
        start, bit, ranks, counts = self.position, 0, [], []
        for _ in range(1, spec.levels):
            self.position = start
            whole = int.from_bytes(self.take((bit + count * spec.level_bits + 7) // 8), "little")
            symbols = [whole >> (bit + k * spec.level_bits) & level for k in range(count)]
            bit += count * spec.level_bits
            ranks.append(symbols)
            counts.append(count)
            count = symbols.count(level)
        deeper = list(self.take(count))
        for k in reversed(range(len(ranks))):
            source, base = iter(deeper), escape + k * level
            deeper = [next(source) if s == level else table[base + s] for s in ranks[k]]
        exponents = np.array([table[c] if c < escape else 0 for c in codes], np.uint32)
        exponents[LANE_ORDER[codes[LANE_ORDER] == escape]] = deeper
        return exponents


def decode(payload: bytes) -> np.ndarray:
    """The flat array of bit patterns in a payload; raises CorruptPayload or FormatMismatch."""
    header = Header.unpack(payload, len(payload))
    if header.payload_bytes != len(payload):
        raise CorruptPayload(f"payload size: expected {header.payload_bytes} bytes, got {len(payload)}")
    dtype, numel = header.dtype, header.numel
    if header.mode == Mode.RAW:
        data = payload[HEADER_BYTES:]
    else:
        lay = header.layout
        tail = payload[lay.tail :][: (numel - lay.num_tiles * TILE) * dtype.itemsize]
        tiles = [_decode_tile(payload, lay, t) for t in range(lay.num_tiles)]
        data = b"".join(t.astype(f"<u{dtype.itemsize}").tobytes() for t in tiles) + tail
    if header.checksum is not None and header.sealed(checksum(data)) != header:
        raise CorruptPayload("payload checksum: the tensor or the header is damaged")
    if not dtype.exponent_bits:
        return np.frombuffer(data, np.uint8)
    return np.frombuffer(data, f"<u{dtype.itemsize}")


def _decode_tile(payload: bytes, lay: Layout, tile: int) -> np.ndarray:
    dtype, spec = lay.dtype, MODE_SPECS[lay.mode]
    meta = int.from_bytes(payload[lay.meta + 4 * tile :][:4], "little")
    base = int.from_bytes(payload[lay.bases + 4 * (tile // GROUP) :][:4], "little")
    top, flags = meta >> 16 & 255, meta >> 24
    reader = _Reader(payload[lay.static_bytes :], 4 * base + (meta & 0xFFFF))
    residual, shift, start = np.zeros(TILE, np.uint32), 0, lay.residual
    for plane in planes(dtype.residual_bits):
        size = TILE // 8 * plane
        values = unpack_plane(payload[start + tile * size :][:size], plane)
        residual |= values << np.uint32(shift)
        start, shift = start + lay.num_tiles * size, shift + plane
    low = reader.low(flags) if dtype.low_bits else None
    size = TILE // 8 * spec.code_bits
    codes = unpack_plane(payload[lay.codes + tile * size :][:size], spec.code_bits)
    rotated = reader.exponents(codes, top, flags, dtype, spec) << np.uint32(dtype.residual_bits) | residual
    width = dtype.exponent_bits + dtype.residual_bits
    bits = (rotated >> 1 | rotated << np.uint32(width - 1)) & np.uint32(2**width - 1)
    return bits if low is None else bits << np.uint32(LOW_BITS) | low
