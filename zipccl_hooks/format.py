"""The wire format: the one home of the bitstream.

A *payload* is the coded form of a flat tensor of ``numel`` elements::

    +--------+------+-------+------------+----------------+------+ +---------+
    | header | meta | bases | code plane | residual planes| tail | | dynamic |
    +--------+------+-------+------------+----------------+------+ +---------+
     128 B    4 B    4 B     2 or 3       the bits that    the      escapes,
              per    per 8   bits per     are not coded    last     low mantissa
              tile   tiles   element                       numel    bits
                                                           % 1024
    '------------- static: size known from (dtype, mode, numel) --' '-- data --'

Every section starts on 128 bytes; all numbers are little-endian; gaps are zero. A payload is a pure
function of the input bits: the NumPy reference, the CPU codec and the CUDA codec write the same bytes.

**Tile.** 1024 consecutive elements, coded on their own. On a GPU one warp takes one tile: lane ``l``
owns elements ``256 g + 8 l + j`` for the groups ``g`` in 0..3 and ``j`` in 0..7. *Lane order* is the
order (l, g, j). The last ``numel % 1024`` elements are not coded; they stand in the tail as they are.

**Element.** Its bits are rotated left by one, so that the sign comes last. The exponent field is then
on top, and ``mantissa << 1 | sign`` below is the *residual*. fp32 is first cut into its upper half,
which is a bf16 number and coded as one, and its lower half, 16 *low bits* (see Dynamic)::

    dtype      exponent  residual  residual planes
    bfloat16   8 bits     8 bits   8
    float16    5 bits    11 bits   8 (low bits), 3
    float32    8 bits     8 bits   8                + 16 low bits
    e4m3fn     4 bits     4 bits   4
    e5m2       5 bits     3 bits   3

**Plane.** A plane of width b holds b bits of every element of a tile, in 128 b bytes. Width 8: bytes
in element order. Widths 1 to 4: let N[g] be the 32-bit word of a lane and group whose nibble j is the
value of element j; word w of lane l stands at 32-bit word ``32 w + l``, and is::

    width 1:  N0 | N1 << 1 | N2 << 2 | N3 << 3
    width 2:  N0 | N1 << 2,    N2 | N3 << 2
    width 3:  N0 | (N3 & 0x11111111) << 3,   N1 | (N3 & 0x22222222) << 2,   N2 | (N3 & 0x44444444) << 1
    width 4:  N0,  N1,  N2,  N3

so that one mask leaves nibbles ready to select four table bytes with one GPU ``prmt``. Wider fields
are split into planes of width 8, 4, 3, 2, 1, greedily, least significant bits first.

**Exponent code.** Each tile ranks the exponents by likelihood around its ``top``::

    fast   top, top-1, ..., top-6 | top-7, ..., top-19, top+1, top+2 | any other
    dense  top, top-1, top-2 | top-3, top+1, top-4 | top-5, top-6, top-7 | top+2, top-8, top-9 | any other

(modulo 256). With the ``ZERO`` flag, exponent 0 (zeros and subnormals) comes before all of them and the
others move one place down. The bars cut levels: ``fast`` has levels of 3 and 4 bits, ``dense`` four
levels of 2 bits. At each level the largest code says "further down", and beyond the last level the
exponent stands as a byte. Level 1 is the code plane. With n elements whose exponent field is not 0
and S the sum of those fields, ``top = floor(S / n + 2.6875)`` in fast and ``floor(S / n + 1.875)`` in
dense (0 if n is 0); theory.py derives the constants. ``ZERO`` is set when 1024 - n reaches 8 in fast,
35 in dense.

**Dynamic.** One chunk per tile. First, for fp32, w of the low bits: w planes' worth of ``low >> (16 - w)``,
then, with the ``LOW_ESCAPES`` flag, a 32-bit count and that many words ``position << 16 | low`` in
element order for the elements whose low bits do not fit in w bits. w minimises
``1024 w + 32 (count + (count > 0))``, the smaller w if equal. Then the exponents: the codes of the
levels from 2 on, level after level, each in lane order, packed from the least significant bit,
padded to a byte; then the exponent bytes in lane order. If those would take more bytes than the exponent's
bits beyond the code plane's do as planes, the ``RAW`` flag is set, the code plane holds the
exponent's lowest bits, and the others stand as planes. Chunks are padded to 4 bytes in fp32, and the
chunks of each *group* of 8 tiles to 4 bytes in all dtypes.

    meta of a tile, 32 bits     offset in the group's bytes (16) | top (8) | flags (8)
    flags                       RAW (bit 0) | ZERO (bit 1) | LOW_ESCAPES (bit 2) | w (bits 3-7)
    base of a group, 32 bits    start in the dynamic part, in units of 4 bytes

**Mode raw.** The header, then the tensor's bytes: for all other dtypes, and where coding does not pay.

**Checksum.** Optional; ``encode`` writes it, the collectives do not. Over the header and the tensor, not
the payload, so that it also watches the codec. For bytes as 32-bit words w[i], zero-padded, it is the sum
of ``mix(w[i], i)`` modulo 2**32, with all arithmetic modulo 2**32::

    v = w + i * 0x9E3779B1;  v = (v ^ v >> 16) * 0x7FEB352D;  mix = v ^ v >> 15

and the header holds the tensor's plus the header's own, with this field 0. Not a weighted sum: where one
damaged byte of meta moves every exponent of a tile, the weighted differences cancel.

Versions: 1, read and written since 0.1.0.
"""

from __future__ import annotations

import enum
import struct
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING

from .errors import CorruptPayload, FormatMismatch

if TYPE_CHECKING:
    from torch import Tensor

VERSION = 1
MAGIC = b"ZCCL"
SECTION = 128  # alignment of sections, bytes: one cache line of a GPU
TILE = 1024  # elements
GROUP = 8  # tiles that share one base
MAX_DIMS = 8

RAW_FLAG = 1
ZERO_FLAG = 2
LOW_ESCAPES_FLAG = 4
WIDTH_SHIFT = 3
LOW_BITS = 16


class Mode(enum.IntEnum):
    """How a payload is coded; the value is the header's mode byte."""

    RAW = 0
    FAST = 1
    DENSE = 2


@dataclass(frozen=True)
class ModeSpec:
    """The exponent code of a mode."""

    code_bits: int  # level 1, in the code plane
    level_bits: int  # every later level
    levels: int
    order: tuple[int, ...]  # top - exponent, by rank
    top_16ths: int  # top = floor(mean exponent + top_16ths / 16)
    zero_min: int  # exponents equal to 0 from which they get the first rank


MODE_SPECS = {
    Mode.FAST: ModeSpec(3, 4, 2, (*range(20), -1, -2), 43, 8),
    Mode.DENSE: ModeSpec(2, 2, 4, (0, 1, 2, 3, -1, 4, 5, 6, 7, -2, 8, 9), 30, 35),
}


@dataclass(frozen=True, eq=False)
class DType:
    """What the format knows of a torch dtype; ``exponent_bits`` is 0 where only mode raw applies.

    One object a dtype, compared by identity: layouts are looked up by it at every call.
    """

    code: int  # the header's dtype byte
    name: str  # torch.<name>
    itemsize: int
    exponent_bits: int = 0
    residual_bits: int = 0
    low_bits: int = 0


DTYPES = {
    d.name: d
    for d in (
        DType(1, "bfloat16", 2, 8, 8),
        DType(2, "float16", 2, 5, 11),
        DType(3, "float32", 4, 8, 8, LOW_BITS),
        DType(4, "float8_e4m3fn", 1, 4, 4),
        DType(5, "float8_e5m2", 1, 5, 3),
        DType(16, "float64", 8),
        DType(17, "complex64", 8),
        DType(18, "complex128", 16),
        DType(19, "bool", 1),
        DType(20, "uint8", 1),
        DType(21, "int8", 1),
        DType(22, "int16", 2),
        DType(23, "int32", 4),
        DType(24, "int64", 8),
        DType(25, "uint16", 2),
        DType(26, "uint32", 4),
        DType(27, "uint64", 8),
        DType(28, "float8_e4m3fnuz", 1),
        DType(29, "float8_e5m2fnuz", 1),
    )
}
DTYPES_BY_CODE = {d.code: d for d in DTYPES.values()}


def planes(width: int) -> tuple[int, ...]:
    """Widths of the planes that hold a field of ``width`` bits, least significant bits first.

    >>> planes(11), planes(5), planes(0)
    ((8, 3), (4, 1), ())
    """
    split: list[int] = []
    for plane in (8, 4, 3, 2, 1):
        while width >= plane:
            split.append(plane)
            width -= plane
    return tuple(split)


def align(num_bytes: int, unit: int = SECTION) -> int:
    """``num_bytes`` rounded up to a multiple of ``unit``; also for torch.SymInt."""
    return (num_bytes + unit - 1) // unit * unit


@dataclass(frozen=True)
class Layout:
    """Where the sections of a payload start, in bytes from its start. Sizes follow from the next start."""

    dtype: DType
    mode: Mode
    numel: int
    num_tiles: int
    meta: int
    bases: int
    codes: int
    residual: int
    tail: int
    static_bytes: int
    max_dynamic_bytes: int

    @property
    def chunk_unit(self) -> int:
        """Alignment of a tile's chunk in the dynamic part, bytes."""
        return 4 if self.dtype.low_bits else 1

    @property
    def max_bytes(self) -> int:
        """Size of the largest payload of this layout: what a buffer for it must hold."""
        return self.static_bytes + self.max_dynamic_bytes


def longest_chunk(dtype: DType, mode: Mode) -> int:
    """Bytes of the largest dynamic part of a tile."""
    return TILE // 8 * (dtype.exponent_bits - MODE_SPECS[mode].code_bits + dtype.low_bits)


def layout(numel: int, dtype: DType, mode: Mode) -> Layout:
    """Section table of a payload of ``numel`` elements of ``dtype`` coded in ``mode``.

    ``numel`` may be a torch.SymInt. Raises ValueError where the mode does not apply to the dtype or
    the tensor is too large for the 32-bit bases (25 GB of fp32).
    """
    if mode == Mode.RAW:
        end = HEADER_BYTES + numel * dtype.itemsize
        start = HEADER_BYTES
        return Layout(dtype, mode, numel, 0, start, start, start, start, start, end, 0)
    if not dtype.exponent_bits:
        raise ValueError(f"mode: expected 'raw' for {dtype.name}, got {mode.name.lower()!r}")
    spec = MODE_SPECS[mode]
    num_tiles = numel // TILE
    num_groups = (num_tiles + GROUP - 1) // GROUP
    bases = HEADER_BYTES + align(4 * num_tiles)
    codes = bases + align(4 * num_groups)
    residual = codes + num_tiles * TILE // 8 * spec.code_bits
    tail = residual + num_tiles * TILE // 8 * dtype.residual_bits
    static_bytes = tail + align((numel - num_tiles * TILE) * dtype.itemsize)
    chunk = longest_chunk(dtype, mode)
    # Not a SymInt's business: comparing one would specialise the compiled program.
    if isinstance(numel, int) and num_tiles * chunk > 4 * 0xFFFFFFFF:
        raise ValueError(f"numel: at most {4 * 0xFFFFFFFF // chunk * TILE} elements, got {numel}")
    return Layout(
        dtype, mode, numel, num_tiles, HEADER_BYTES, bases, codes, residual, tail,
        static_bytes, num_tiles * chunk,
    )  # fmt: skip


# For sizes known as numbers: a training step asks for the same few over and over.
cached_layout = lru_cache(maxsize=4096)(layout)


def checksum(data: bytes) -> int:
    """The checksum's sum over ``data``. For headers: a tensor's is the codec's to compute."""
    total = 0
    for i in range(0, len(data), 4):
        v = int.from_bytes(data[i : i + 4], "little") + i // 4 * 0x9E3779B1 & 0xFFFFFFFF
        v = (v ^ v >> 16) * 0x7FEB352D & 0xFFFFFFFF
        total += v ^ v >> 15
    return total & 0xFFFFFFFF


def max_encoded_bytes(numel: int, dtype: DType) -> int:
    """Largest payload that ``encode`` returns: it falls back to mode raw, so the raw size plus the header."""
    return HEADER_BYTES + numel * dtype.itemsize


@dataclass(frozen=True)
class Header:
    """The first 128 bytes of a payload.

    Fields, in order: magic (4 bytes), version (2), dtype code (1), mode (1), numel (8), dynamic_bytes
    (8), checksum (4), whether there is one (2), number of dimensions (2), eight dimensions (8 each,
    unused ones 0), zeros (32).
    """

    dtype: DType
    mode: Mode
    numel: int
    dynamic_bytes: int
    shape: tuple[int, ...]
    checksum: int | None = None

    @property
    def layout(self) -> Layout:
        return cached_layout(self.numel, self.dtype, self.mode)

    @property
    def payload_bytes(self) -> int:
        """Size of the whole payload."""
        return self.layout.static_bytes + self.dynamic_bytes

    def expect(self, dtype: DType, numel: int) -> None:
        """Raises CorruptPayload unless the payload holds ``numel`` elements of ``dtype``."""
        if self.dtype != dtype or self.numel != numel:
            raise CorruptPayload(
                f"payload: expected {numel} elements of torch.{dtype.name}, "
                f"got {self.numel} of torch.{self.dtype.name}"
            )

    def sealed(self, tensor_checksum: int) -> Header:
        """This header with the checksum of itself and of a tensor, whose own is given."""
        own = checksum(replace(self, checksum=0).pack())
        return replace(self, checksum=(tensor_checksum + own) & 0xFFFFFFFF)

    def pack(self) -> bytes:
        dims = (*self.shape, *[0] * (MAX_DIMS - len(self.shape)))
        return _HEADER.pack(
            MAGIC, VERSION, self.dtype.code, self.mode, self.numel, self.dynamic_bytes,
            self.checksum or 0, self.checksum is not None, len(self.shape), *dims,
        )  # fmt: skip

    @classmethod
    def read(cls, payload: Tensor) -> Header:
        """The header of a payload, or of a longer flat buffer that starts with one; waits for its device."""
        return cls.unpack(payload[:HEADER_BYTES].cpu().numpy().tobytes(), payload.numel())

    @classmethod
    def unpack(cls, payload: bytes, available_bytes: int) -> Header:
        """Reads and checks a header; ``payload`` starts with it, the whole fits in ``available_bytes``.

        Raises FormatMismatch for another version, CorruptPayload for what no encoder writes.
        """
        if len(payload) < HEADER_BYTES:
            raise CorruptPayload(f"payload: expected at least {HEADER_BYTES} bytes, got {len(payload)}")
        magic, version, dtype_code, mode, numel, dynamic_bytes, found, has_checksum, num_dims, *dims = (
            _HEADER.unpack(payload[:HEADER_BYTES])
        )
        if magic != MAGIC:
            raise CorruptPayload(f"payload magic: expected {MAGIC!r}, got {magic!r}")
        if version != VERSION:
            raise FormatMismatch(f"payload format version: expected {VERSION}, got {version}")
        dtype = DTYPES_BY_CODE.get(dtype_code)
        if dtype is None:
            raise CorruptPayload(
                f"payload dtype code: expected one of {sorted(DTYPES_BY_CODE)}, got {dtype_code}"
            )
        if mode > Mode.DENSE or (mode != Mode.RAW and not dtype.exponent_bits):
            raise CorruptPayload(f"payload mode: got {mode} for {dtype.name}")
        shape = tuple(dims[:num_dims])
        # torch multiplies the dimensions of an empty tensor as well, without the zeros, in 63 bits.
        countable = _product(tuple(dim or 1 for dim in shape)) < 2**63
        unused = any(dims[num_dims:]) or has_checksum > 1 or (found and not has_checksum)
        if num_dims > MAX_DIMS or _product(shape) != numel or not countable or unused:
            raise CorruptPayload(
                f"payload shape: expected {numel} elements, got {num_dims} dimensions {shape}"
            )
        # An element takes at least a byte, or half of one where fp8 is coded, so a damaged numel or size is
        # noticed here, before anything of that size is allocated.
        header = cls(dtype, Mode(mode), numel, dynamic_bytes, shape, found if has_checksum else None)
        if numel > 2 * available_bytes or header.payload_bytes > available_bytes:
            raise CorruptPayload(
                f"payload size: {numel} elements of {dtype.name} and {dynamic_bytes} dynamic bytes "
                f"expected, got {available_bytes} bytes in all"
            )
        return header


def _product(shape: tuple[int, ...]) -> int:
    total = 1
    for dim in shape:
        total *= dim
    return total


_HEADER = struct.Struct("<4sHBBQQIHH8Q32x")
HEADER_BYTES = _HEADER.size
assert HEADER_BYTES == SECTION
