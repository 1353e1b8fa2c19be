"""Header, layout and size bounds, against numbers worked out by hand."""

from __future__ import annotations

import doctest
import struct
from dataclasses import replace

import pytest
import torch
from corpus import CODED, STORED, bits, corpus, known, name_of, random_bits, tensor

from zipccl_hooks import codec, errors, format, ops
from zipccl_hooks.format import DTYPES, HEADER_BYTES, MODE_SPECS, SECTION, Header, Mode, layout

CODING = pytest.mark.parametrize("mode", [Mode.FAST, Mode.DENSE], ids=["fast", "dense"])
HEADER = Header(DTYPES["float32"], Mode.DENSE, 6000, 4096, (2, 3, 1000), 0xDEADBEEF)


def test_doctests() -> None:
    results = doctest.testmod(format)
    assert results.attempted and not results.failed


@pytest.mark.parametrize("width", range(17))
def test_planes_are_greedy(width: int) -> None:
    split = format.planes(width)
    assert sum(split) == width and set(split) <= {8, 4, 3, 2, 1}
    assert list(split) == sorted(split, reverse=True)
    small = [p for p in split if p < 8]
    assert len(small) <= 2 and small[:1] in ([], [min(4, width % 8)])


# Header


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES.keys())
@pytest.mark.parametrize("shape", [(), (0,), (7,), (1, 2, 3, 4, 5, 6, 7, 8)], ids=str)
def test_header_round_trip(dtype: format.DType, shape: tuple[int, ...]) -> None:
    numel = int(torch.Size(shape).numel())
    for checksum in (0xFFFFFFFF, 0, None):  # a checksum that happens to be 0 is one
        header = Header(dtype, Mode.RAW, numel, 0, shape, checksum)
        packed = header.pack()
        assert len(packed) == HEADER_BYTES == SECTION == 128
        assert Header.unpack(packed, header.payload_bytes) == header


def test_header_bytes_by_hand() -> None:
    dims = b"".join(d.to_bytes(8, "little") for d in (2, 3, 1000, 0, 0, 0, 0, 0))
    expected = (
        b"ZCCL" + b"\x01\x00" + b"\x03" + b"\x02"
        + b"\x70\x17" + bytes(6) + b"\x00\x10" + bytes(6) + b"\xef\xbe\xad\xde" + b"\x01\x00\x03\x00"
        + dims + bytes(32)
    )  # fmt: skip
    assert HEADER.pack() == expected
    # Without a checksum its field and "whether there is one" are 0; the dimensions stay where they are.
    assert replace(HEADER, checksum=None).pack() == expected[:24] + bytes(4) + b"\0\0\3\0" + expected[32:]


def mix(word: int, i: int) -> int:
    v = (word + i * 0x9E3779B1) % 2**32
    v = (v ^ v >> 16) * 0x7FEB352D % 2**32
    return v ^ v >> 15


def test_checksum_by_hand() -> None:
    assert format.checksum(b"") == 0
    assert format.checksum(b"\x01\x02\x03\x04\x05") == (mix(0x04030201, 0) + mix(5, 1)) % 2**32


@pytest.mark.parametrize("before", [None, 0, 0xDEADBEEF], ids=str)
def test_sealed_header_by_hand(before: int | None) -> None:
    """The header's words, the checksum itself as 0: what stood there before does not matter."""
    by_hand = [0x4C43435A, 0x02030001, 6000, 0, 4096, 0, 0, 0x00030001, 2, 0, 3, 0, 1000, *[0] * 19]
    own = sum(mix(word, i) for i, word in enumerate(by_hand))
    for tensor_checksum in (0, 5, 0xFFFFFFFF):
        sealed = replace(HEADER, checksum=before).sealed(tensor_checksum)
        assert sealed == replace(HEADER, checksum=(tensor_checksum + own) % 2**32)
        assert sealed.sealed(tensor_checksum) == sealed


def test_codes_on_the_wire_are_fixed() -> None:
    """A renumbered dtype or mode would be another format version."""
    assert {d.name: d.code for d in DTYPES.values()} == {
        "bfloat16": 1, "float16": 2, "float32": 3, "float8_e4m3fn": 4, "float8_e5m2": 5,
        "float64": 16, "complex64": 17, "complex128": 18, "bool": 19, "uint8": 20, "int8": 21, "int16": 22,
        "int32": 23, "int64": 24, "uint16": 25, "uint32": 26, "uint64": 27,
        "float8_e4m3fnuz": 28, "float8_e5m2fnuz": 29,
    }  # fmt: skip
    assert [(m.name, m.value) for m in Mode] == [("RAW", 0), ("FAST", 1), ("DENSE", 2)]


@pytest.mark.parametrize("name", DTYPES, ids=str)
def test_itemsizes_are_those_of_torch(name: str) -> None:
    dtype, known = getattr(torch, name), DTYPES[name]
    assert known.itemsize == dtype.itemsize
    if known.exponent_bits:
        assert known.exponent_bits + known.residual_bits + known.low_bits == 8 * dtype.itemsize
        # One of the residual's bits is the sign.
        assert torch.finfo(dtype).eps == 2.0 ** -(known.residual_bits - 1 + known.low_bits)


def damaged(offset: int, value: bytes) -> bytes:
    packed = HEADER.pack()
    return packed[:offset] + value + packed[offset + len(value) :]


HEADER_ERRORS = {
    "short": (HEADER.pack()[:127], "CorruptPayload", "expected at least 128 bytes, got 127"),
    "magic": (damaged(0, b"ZIPP"), "CorruptPayload", "magic: expected b'ZCCL', got b'ZIPP'"),
    "version": (damaged(4, b"\x02"), "FormatMismatch", "version: expected 1, got 2"),
    "dtype": (damaged(6, b"\x09"), "CorruptPayload", r"dtype code: .*got 9$"),
    "mode": (damaged(7, b"\x03"), "CorruptPayload", "mode: got 3 for float32"),
    "mode of the dtype": (damaged(6, b"\x13"), "CorruptPayload", "mode: got 2 for bool"),
    "numel": (damaged(8, b"\x71"), "CorruptPayload", "shape: expected 6001 elements"),
    "has_checksum": (damaged(28, b"\x02"), "CorruptPayload", "payload shape"),
    "has_checksum, upper byte": (damaged(29, b"\x01"), "CorruptPayload", "payload shape"),
    "checksum without has_checksum": (damaged(28, b"\x00"), "CorruptPayload", "payload shape"),
    "num_dims": (damaged(30, b"\x02"), "CorruptPayload", r"got 2 dimensions \(2, 3\)"),
    "too many dims": (damaged(30, b"\x09"), "CorruptPayload", "got 9 dimensions"),
    "dim": (damaged(32, b"\x03"), "CorruptPayload", r"\(3, 3, 1000\)"),
    "unused dim": (damaged(56, b"\x01"), "CorruptPayload", r"got 3 dimensions \(2, 3, 1000\)"),
    "last unused dim": (damaged(95, b"\x80"), "CorruptPayload", r"got 3 dimensions \(2, 3, 1000\)"),
    "dynamic bytes": (damaged(16, b"\x01"), "CorruptPayload", "4097 dynamic bytes"),
    "huge dynamic": (damaged(23, b"\x80"), "CorruptPayload", "dynamic bytes expected"),
}


@pytest.mark.parametrize(("packed", "error", "message"), HEADER_ERRORS.values(), ids=HEADER_ERRORS.keys())
def test_header_errors(packed: bytes, error: str, message: str) -> None:
    with pytest.raises(getattr(errors, error), match=message):
        Header.unpack(packed, HEADER.payload_bytes)


def test_header_refuses_more_than_there_is() -> None:
    """Before anything of that size is allocated."""
    assert Header.unpack(HEADER.pack(), HEADER.payload_bytes + 1) == HEADER
    with pytest.raises(errors.CorruptPayload, match=f"got {HEADER.payload_bytes - 1} bytes in all"):
        Header.unpack(HEADER.pack(), HEADER.payload_bytes - 1)
    huge = replace(HEADER, numel=2**62, shape=(2**62,))
    with pytest.raises(errors.CorruptPayload, match="payload size"):
        Header.unpack(huge.pack(), HEADER.payload_bytes)


@pytest.mark.parametrize("shape", [(0, 2**63), (0, 2**40, 2**40), (2**64 - 1, 0)], ids=str)
def test_header_refuses_an_empty_shape_that_torch_cannot_count(shape: tuple[int, ...]) -> None:
    header = Header(DTYPES["float32"], Mode.RAW, 0, 0, shape)
    with pytest.raises(errors.CorruptPayload, match="payload shape"):
        Header.unpack(header.pack(), HEADER_BYTES)


# Layout


@pytest.mark.parametrize(
    ("dtype", "mode", "numel", "starts"),
    [
        # 9 tiles: meta 36 B, 2 bases 8 B, 9 * 384 B of codes, 9 * 1024 B of residual, 784 * 2 B of tail
        pytest.param("bfloat16", Mode.FAST, 10_000, (256, 384, 3840, 13056, 14720, 5760), id="bfloat16-fast"),
        # 33 tiles: meta 132 B, 5 bases 20 B, 33 * 256 B of codes, 33 * 1024 B, 1 * 4 B of tail
        pytest.param(
            "float32", Mode.DENSE, 33_793, (384, 512, 8960, 42752, 42880, 33 * 2816), id="float32-dense"
        ),
        # 1 tile, residual in planes of 8 and 3 bits
        pytest.param("float16", Mode.DENSE, 1024, (256, 384, 640, 2048, 2048, 384), id="float16-dense"),
        pytest.param("float8_e4m3fn", Mode.FAST, 1025, (256, 384, 768, 1280, 1408, 128), id="e4m3fn-fast"),
        pytest.param("float8_e5m2", Mode.FAST, 2048, (256, 384, 1152, 1920, 1920, 512), id="e5m2-fast"),
        # No tile at all: the tail follows the header.
        pytest.param("bfloat16", Mode.DENSE, 1023, (128, 128, 128, 128, 2176, 0), id="tail only"),
        pytest.param("float32", Mode.FAST, 0, (128, 128, 128, 128, 128, 0), id="empty"),
    ],
)
def test_layout_by_hand(dtype: str, mode: Mode, numel: int, starts: tuple[int, ...]) -> None:
    lay = layout(numel, DTYPES[dtype], mode)
    found = (lay.bases, lay.codes, lay.residual, lay.tail, lay.static_bytes, lay.max_dynamic_bytes)
    assert found == starts
    assert lay.meta == HEADER_BYTES and lay.max_bytes == lay.static_bytes + lay.max_dynamic_bytes


@pytest.mark.parametrize("dtype", CODED, ids=name_of)
@CODING
@pytest.mark.parametrize("numel", [0, 1, 1023, 1024, 8191, 8193, 33 * 1024 + 5, 10**9 + 7])
def test_sections_are_aligned_and_in_order(dtype: torch.dtype, mode: Mode, numel: int) -> None:
    lay = layout(numel, known(dtype), mode)
    starts = [lay.meta, lay.bases, lay.codes, lay.residual, lay.tail, lay.static_bytes]
    assert starts == sorted(starts) and all(s % SECTION == 0 for s in starts)
    assert lay.bases - lay.meta >= 4 * (numel // 1024)
    assert lay.codes - lay.bases >= 4 * -(-(numel // 1024) // 8)
    assert lay.static_bytes - lay.tail >= numel % 1024 * dtype.itemsize


@pytest.mark.parametrize("dtype", CODED, ids=name_of)
@CODING
def test_static_size_does_not_depend_on_data(dtype: torch.dtype, mode: Mode) -> None:
    lay = layout(9 * 1024 + 77, known(dtype), mode)
    seen = set()
    for x in corpus(dtype, lay.numel).values():
        payload = ops.encode(x, mode)
        header = Header.read(payload)
        assert header.layout == lay
        assert header.payload_bytes == lay.static_bytes + header.dynamic_bytes <= lay.max_bytes
        assert not payload[header.payload_bytes :].any()
        seen.add(header.dynamic_bytes)
    assert len(seen) > 5


# Bounds


@pytest.mark.parametrize("dtype", CODED, ids=name_of)
@CODING
@pytest.mark.parametrize("numel", [8 * 1024, 11 * 1024 + 3])
def test_largest_payload_is_reached(dtype: torch.dtype, mode: Mode, numel: int) -> None:
    """Random bits: every tile RAW, and in fp32 all 16 low bits as planes."""
    x = tensor(random_bits, dtype, numel)
    lay = layout(numel, known(dtype), mode)
    assert Header.read(ops.encode(x, mode)).payload_bytes == lay.max_bytes


@pytest.mark.parametrize("dtype", CODED, ids=name_of)
@pytest.mark.parametrize("mode", ["fast", "dense", "auto", "raw"])
@pytest.mark.parametrize("numel", [0, 5, 1024, 5 * 1024 + 100])
def test_encode_never_exceeds_the_bound(dtype: torch.dtype, mode: str, numel: int) -> None:
    bound = format.max_encoded_bytes(numel, known(dtype))
    assert bound == numel * dtype.itemsize + 128
    sizes = {name: codec.encode(x, mode=mode).numel() for name, x in corpus(dtype, numel).items()}
    assert max(sizes.values()) <= bound
    assert sizes["random_bits"] == bound


@CODING
def test_limit_of_the_32_bit_bases(mode: Mode) -> None:
    fp32 = DTYPES["float32"]
    with pytest.raises(ValueError, match=r"numel: at most (\d+) elements, got") as caught:
        layout(10**12, fp32, mode)
    limit = int(str(caught.value).split("at most ")[1].split()[0])
    lay = layout(limit, fp32, mode)
    assert lay.max_dynamic_bytes // 4 <= 0xFFFFFFFF
    chunk = 128 * (8 - MODE_SPECS[mode].code_bits + 16)
    assert lay.max_dynamic_bytes + chunk > 4 * 0xFFFFFFFF
    with pytest.raises(ValueError, match=f"numel: at most {limit} elements, got {limit + 1024}"):
        layout(limit + 1024, fp32, mode)
    assert layout(10**12, fp32, Mode.RAW).static_bytes == 4 * 10**12 + 128


@pytest.mark.parametrize("dtype", STORED, ids=name_of)
@CODING
def test_layout_of_a_dtype_without_code(dtype: torch.dtype, mode: Mode) -> None:
    with pytest.raises(
        ValueError, match=f"mode: expected 'raw' for {name_of(dtype)}, got '{mode.name.lower()}'"
    ):
        layout(5, known(dtype), mode)


@CODING
def test_offsets_of_a_group_fit_their_16_bits(mode: Mode) -> None:
    """Seven RAW tiles of fp32 before the eighth: the largest offset that meta can hold."""
    x = tensor(random_bits, torch.float32, 8 * 1024)
    payload = bits(ops.encode(x, mode)).tobytes()
    meta = struct.unpack_from("<8I", payload, HEADER_BYTES)
    chunk = layout(x.numel(), DTYPES["float32"], mode).max_dynamic_bytes // 8
    assert [m & 0xFFFF for m in meta] == [k * chunk for k in range(8)]
