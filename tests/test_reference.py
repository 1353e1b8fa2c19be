"""The specification against bytes worked out by hand, and against payloads of released versions."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from corpus import CODED, STORED, bits, corpus, golden, known, name_of, random_bits, tensor

from zipccl_hooks import codec, reference
from zipccl_hooks.errors import CorruptPayload, FormatMismatch, ZipcclError
from zipccl_hooks.format import DTYPES, MODE_SPECS, VERSION, Header, Mode

CODING = pytest.mark.parametrize("mode", [Mode.FAST, Mode.DENSE], ids=["fast", "dense"])
GOLDEN = Path(__file__).parent / "golden"


def words(numbers: dict[int, int], count: int) -> bytes:
    """``count`` little-endian 32-bit words, 0 where not named."""
    array = np.zeros(count, "<u4")
    for k, word in numbers.items():
        array[k] = word
    return array.tobytes()


# Planes. Element 256 g + 8 l + j: 0 is (g 0, l 0, j 0), 9 is (0, 1, 1), 258 is (1, 0, 2), 765 is (2, 31, 5),
# 1023 is (3, 31, 7), and j is the nibble of N[g] in lane l.

PLANES = {
    1: (
        {0: 1, 9: 1, 258: 1, 765: 1, 1023: 1},
        words({0: 0x1 | 0x100 << 1, 1: 0x10, 31: 0x100000 << 2 | 0x10000000 << 3}, 32),
    ),
    2: (
        {0: 3, 9: 2, 258: 1, 765: 3, 1023: 2},
        words({0: 0x3 | 0x100 << 2, 1: 0x20, 63: 0x300000 | 0x20000000 << 2}, 64),
    ),
    # The fourth group's 5 (101 in binary) goes to bit 3 of its nibble in the words of planes 0 and 2.
    3: (
        {0: 7, 9: 2, 258: 5, 765: 6, 1023: 5},
        words({0: 0x7, 1: 0x20, 31: 0x80000000, 32: 0x500, 95: 0x600000 | 0x80000000}, 96),
    ),
    4: (
        {0: 15, 9: 2, 258: 8, 765: 6, 1023: 5},
        words({0: 0xF, 1: 0x20, 32: 0x800, 95: 0x600000, 127: 0x50000000}, 128),
    ),
    8: ({0: 255, 9: 2, 1023: 77}, bytes([255]) + bytes(8) + bytes([2]) + bytes(1013) + bytes([77])),
}


@pytest.mark.parametrize("width", PLANES, ids="width {}".format)
def test_plane_by_hand(width: int) -> None:
    sparse, expected = PLANES[width]
    values = np.zeros(1024, np.uint32)
    for position, value in sparse.items():
        values[position] = value
    assert reference.pack_plane(values, width) == expected
    assert np.array_equal(reference.unpack_plane(expected, width), values)


@pytest.mark.parametrize("width", PLANES, ids="width {}".format)
def test_plane_holds_any_values(width: int) -> None:
    values = np.random.default_rng(width).integers(0, 2**width, 1024, dtype=np.uint32)
    packed = reference.pack_plane(values, width)
    assert len(packed) == 128 * width
    assert np.array_equal(reference.unpack_plane(packed, width), values)


def test_lane_order_by_hand() -> None:
    order = reference.LANE_ORDER.tolist()
    assert order[:10] == [0, 1, 2, 3, 4, 5, 6, 7, 256, 257] and order[32:34] == [8, 9]
    assert sorted(order) == list(range(1024))


# Tiles


def bf16_tile(exponents: dict[int, int]) -> np.ndarray:
    """bf16 ones (exponent 127), some of them with another exponent."""
    tile = np.full(1024, 127 << 7, np.uint16)
    for position, exponent in exponents.items():
        tile[position] = exponent << 7
    return tile


def sections(payload: bytes, code_bytes: int) -> tuple[bytes, bytes, bytes, bytes]:
    """(meta and base, codes, residual, dynamic) of a payload of one bf16 tile and no tail."""
    assert payload[132:256] == bytes(124) and payload[260:384] == bytes(124)
    residual = 384 + code_bytes
    head = payload[128:132] + payload[256:260]
    return head, payload[384:residual], payload[residual : residual + 1024], payload[residual + 1024 :]


def test_fast_tile_by_hand() -> None:
    """Elements 5 (lane 0) and 300 (lane 5) escape; 300 has rank 11, 5 has none.

    The mean exponent is (1022 * 127 + 107 + 118) / 1024 = 126.97, so top = floor(129.66) = 129; 127 has
    rank 2. 118 = top - 11 is symbol 11 - 7 = 4 of level 2, 107 = top - 22 is symbol 15 and a byte.
    """
    tile = bf16_tile({5: 107, 300: 118})
    payload = reference.encode(tile, DTYPES["bfloat16"], Mode.FAST)
    head, codes, residual, dynamic = sections(payload, 384)
    assert head == bytes([0, 0, 129, 0, 0, 0, 0, 0])
    # Codes 2 everywhere; in the middle words bit 3 is bit 1 of the fourth group's code. Code 7 in nibble 5
    # of N0 of lane 0, and in nibble 4 of N1 of lane 5.
    expected = {k: 0x22222222 for k in range(96)} | {k: 0xAAAAAAAA for k in range(32, 64)}
    assert codes == words(expected | {0: 0x22722222, 37: 0xAAAFAAAA}, 96)
    assert residual == bytes(1024)
    assert dynamic == bytes([0x4F, 107, 0, 0])
    assert np.array_equal(reference.decode(payload), tile)


def test_dense_tile_by_hand() -> None:
    """The same with 107 and 121: top = 128; 127 has rank 1, 121 = top - 7 has rank 8, 107 none.

    Symbols 3, 3 on level 2 (further down), 3, 2 on level 3 (ranks 6, 7, 8, further down), 3 on level 4.
    """
    tile = bf16_tile({5: 107, 300: 121})
    payload = reference.encode(tile, DTYPES["bfloat16"], Mode.DENSE)
    head, codes, residual, dynamic = sections(payload, 256)
    assert head == bytes([0, 0, 128, 0, 0, 0, 0, 0])
    expected = {k: 0x11111111 | 0x44444444 for k in range(64)}
    assert codes == words(expected | {0: 0x55755555, 5: 0x555D5555}, 64)
    assert residual == bytes(1024)
    assert dynamic == bytes([3 | 3 << 2 | 3 << 4 | 2 << 6, 3, 107, 0])
    assert np.array_equal(reference.decode(payload), tile)


def test_residual_is_mantissa_and_sign_by_hand() -> None:
    """-1.5 is sign 1, exponent 127, mantissa 1000000: residual 1000000 1."""
    tile = bf16_tile({})
    tile[3] = 0xBFC0
    payload = reference.encode(tile, DTYPES["bfloat16"], Mode.FAST)
    assert sections(payload, 384)[2] == bytes(3) + b"\x81" + bytes(1020)


@pytest.mark.parametrize(
    ("mode", "zeros", "flag"),
    [(Mode.FAST, 7, 0), (Mode.FAST, 8, 2), (Mode.DENSE, 34, 0), (Mode.DENSE, 35, 2)],
    ids=["fast-7", "fast-8", "dense-34", "dense-35"],
)
def test_zero_flag_by_hand(mode: Mode, zeros: int, flag: int) -> None:
    """With the flag zeros have code 0 and the ones (rank 2 or 1 without it) one more."""
    payload = reference.encode(bf16_tile(dict.fromkeys(range(zeros), 0)), DTYPES["bfloat16"], mode)
    assert payload[131] == flag and payload[130] == {Mode.FAST: 129, Mode.DENSE: 128}[mode]
    first_word = int.from_bytes(payload[384:388], "little")
    escape, ones = (7, 2) if mode == Mode.FAST else (3, 1)
    assert first_word & escape == (0 if flag else escape)
    word_of_ones = int.from_bytes(payload[384 + 4 * 31 :][:4], "little")
    assert word_of_ones & escape == ones + (flag == 2)


@CODING
def test_raw_tile_by_hand(mode: Mode) -> None:
    """Exponents 1 and 254 by turns: their low bits in the code plane, the rest behind, no bit saved."""
    exponents = np.arange(1024) % 2 * 253 + 1
    tile = (exponents << 7).astype(np.uint16)
    payload = reference.encode(tile, DTYPES["bfloat16"], mode)
    code_bits = MODE_SPECS[mode].code_bits
    assert payload[131] == 1
    codes, dynamic = payload[384:][: 128 * code_bits], payload[384 + 128 * code_bits + 1024 :]
    assert codes == reference.pack_plane(exponents % 2**code_bits, code_bits)
    high = exponents >> code_bits
    widths = {Mode.FAST: (4, 1), Mode.DENSE: (4, 2)}[mode]
    planes = [reference.pack_plane(high & 15, 4), reference.pack_plane(high >> 4, widths[1])]
    assert dynamic == b"".join(planes) and len(dynamic) == 128 * sum(widths)
    assert np.array_equal(reference.decode(payload), tile)


def test_low_bits_by_hand() -> None:
    """All low halves 0x8000 but one of 0x8001: w = 1 (1024 + 64 bits), one low escape."""
    tile = np.full(1024, 0x3F808000, np.uint32)
    tile[700] |= 1
    payload = reference.encode(tile, DTYPES["float32"], Mode.FAST)
    assert payload[128:132] == bytes([0, 0, 129, 1 << 3 | 4])
    dynamic = payload[384 + 384 + 1024 :]
    assert dynamic == b"\xff" * 128 + bytes([1, 0, 0, 0]) + bytes([0x01, 0x80, 700 & 255, 700 >> 8])
    assert np.array_equal(reference.decode(payload), tile)


def test_low_bits_choose_the_smaller_width_when_equal() -> None:
    """31 odd elements: w = 0 costs 32 * 32 bits, w = 1 costs 1024."""
    tile = np.full(1024, 0x3F800000, np.uint32)
    tile[:31] |= 0x8000
    assert reference.encode(tile, DTYPES["float32"], Mode.FAST)[131] == 4
    tile[31] |= 0x8000
    assert reference.encode(tile, DTYPES["float32"], Mode.FAST)[131] == 1 << 3


def test_rank_tables_by_hand() -> None:
    fast, dense = MODE_SPECS[Mode.FAST], MODE_SPECS[Mode.DENSE]
    assert reference.rank_table(100, 0, fast) == [*range(100, 80, -1), 101, 102]
    assert reference.rank_table(100, 2, fast) == [0, *range(100, 80, -1), 101]
    assert reference.rank_table(100, 0, dense) == [100, 99, 98, 97, 101, 96, 95, 94, 93, 102, 92, 91]
    assert reference.rank_table(1, 2, dense) == [0, 1, 0, 255, 254, 2, 253, 252, 251, 250, 3, 249]


def test_groups_by_hand() -> None:
    """Nine tiles with one byte of symbols and a byte each: offsets 0, 2, ... 14, then a new base."""
    tiles = np.concatenate([bf16_tile({k: 90}) for k in range(9)])
    payload = reference.encode(tiles, DTYPES["bfloat16"], Mode.FAST)
    meta = np.frombuffer(payload[128 : 128 + 36], "<u4")
    assert (meta & 0xFFFF).tolist() == [0, 2, 4, 6, 8, 10, 12, 14, 0]
    assert np.frombuffer(payload[256:264], "<u4").tolist() == [0, 4]
    assert payload[-20:] == bytes([15, 90]) * 9 + bytes(2)


def test_checksum_by_hand() -> None:
    def mix(word: int, i: int) -> int:
        v = (word + i * 0x9E3779B1) % 2**32
        v = (v ^ v >> 16) * 0x7FEB352D % 2**32
        return v ^ v >> 15

    assert reference.checksum(b"") == 0
    assert reference.checksum(b"\x01\x02\x03\x04\x05") == (mix(0x04030201, 0) + mix(5, 1)) % 2**32


# Whole payloads


@pytest.mark.parametrize("dtype", CODED, ids=name_of)
@CODING
@pytest.mark.parametrize("numel", [0, 1, 1023, 9 * 1024 + 77])
def test_round_trip(dtype: torch.dtype, mode: Mode, numel: int) -> None:
    for name, x in corpus(dtype, numel).items():
        payload = reference.encode(bits(x), known(dtype), mode)
        assert np.array_equal(reference.decode(payload), bits(x)), name


@pytest.mark.parametrize("dtype", STORED, ids=name_of)
def test_raw_round_trip(dtype: torch.dtype) -> None:
    data = bits(tensor(random_bits, dtype, 77))
    for shape in (None, (77,), (7, 11)):
        payload = reference.encode(data, known(dtype), Mode.RAW, shape)
        assert payload[128:] == data.tobytes() and reference.decode(payload).tobytes() == data.tobytes()


@CODING
@pytest.mark.parametrize("shape", [(3149,), (47, 67), (1, 3149, 1)], ids=str)
def test_shape_only_seals_the_header(mode: Mode, shape: tuple[int, ...]) -> None:
    data = bits(golden(torch.float32))
    flat = reference.encode(data, DTYPES["float32"], mode)
    sealed = reference.encode(data, DTYPES["float32"], mode, shape)
    assert sealed[128:] == flat[128:]
    plain, header = (Header.unpack(payload[:128], len(payload)) for payload in (flat, sealed))
    assert plain.checksum is None and plain.shape == (3149,)
    # The tensor's checksum and the header's own, computed with 0 in the place of the checksum.
    own = reference.checksum(sealed[:24] + bytes(4) + sealed[28:128])
    assert header.checksum == (reference.checksum(data.tobytes()) + own) % 2**32
    assert header == replace(plain, shape=shape, checksum=header.checksum)
    assert np.array_equal(reference.decode(sealed), data)


@CODING
def test_truncation_is_noticed(mode: Mode) -> None:
    for shape in (None, (47, 67)):  # without checksum, with it
        payload = reference.encode(bits(golden(torch.float32)), DTYPES["float32"], mode, shape)
        for size in range(0, len(payload), 97):
            with pytest.raises(CorruptPayload):
                reference.decode(payload[:size])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=name_of)
@CODING
def test_bit_flips_are_noticed(dtype: torch.dtype, mode: Mode) -> None:
    """A sample; test_codec flips every bit, through the kernels."""
    data = bits(golden(dtype))
    payload = reference.encode(data, known(dtype), mode, data.shape)
    noticed = 0
    for bit in range(0, 8 * len(payload), 139):
        flipped = bytearray(payload)
        flipped[bit // 8] ^= 1 << bit % 8
        try:
            assert np.array_equal(reference.decode(bytes(flipped)), data), f"bit {bit}"
        except (CorruptPayload, FormatMismatch):
            noticed += 1
    assert noticed > 8 * len(payload) / 139 * 0.8


@pytest.mark.parametrize("dtype", CODED, ids=name_of)
@CODING
def test_bit_flips_without_checksum(dtype: torch.dtype, mode: Mode) -> None:
    """Other values or an error of ours: no damage makes the reference stumble."""
    data = bits(golden(dtype))
    payload = reference.encode(data, known(dtype), mode)
    other = refused = 0
    for bit in [*range(8 * 128), *range(8 * 128, 8 * len(payload), 139)]:
        flipped = bytearray(payload)
        flipped[bit // 8] ^= 1 << bit % 8
        try:
            found = reference.decode(bytes(flipped))
        except ZipcclError:
            refused += 1
        else:
            # No header has room for another tensor in as many bytes.
            assert found.dtype == data.dtype and found.shape == data.shape, f"bit {bit}"
            other += not np.array_equal(found, data)
    assert other > 8 * len(payload) / 139 * 0.5 and refused > 600


@pytest.mark.parametrize("dtype", CODED, ids=name_of)
@pytest.mark.parametrize("mode", list(Mode), ids=["raw", "fast", "dense"])
def test_golden_payload(dtype: torch.dtype, mode: Mode) -> None:
    """What this version writes is what its first release wrote; ZIPCCL_WRITE_GOLDEN=1 for a new version."""
    path = GOLDEN / f"v{VERSION}-{name_of(dtype)}-{mode.name.lower()}.bin"
    payload = reference.encode(bits(golden(dtype)), known(dtype), mode)
    if os.environ.get("ZIPCCL_WRITE_GOLDEN") == "1" and not path.exists():
        path.write_bytes(payload)
    stored = path.read_bytes()
    assert stored == payload
    assert Header.unpack(stored[:128], len(stored)).checksum is None
    assert np.array_equal(reference.decode(stored), bits(golden(dtype)))


def test_golden_sealed_payload() -> None:
    """Those above are the operators'; this one is of ``codec.encode``, with shape and checksum."""
    path = GOLDEN / f"v{VERSION}-float32-dense-sealed.bin"
    x = golden(torch.float32).view(47, 67)
    payload = codec.encode(x, mode="dense").numpy().tobytes()
    if os.environ.get("ZIPCCL_WRITE_GOLDEN") == "1" and not path.exists():
        path.write_bytes(payload)
    stored = path.read_bytes()
    assert stored == payload == reference.encode(bits(x), DTYPES["float32"], Mode.DENSE, (47, 67))
    assert Header.unpack(stored[:128], len(stored)).checksum is not None
    assert np.array_equal(reference.decode(stored), bits(x))
    decoded = codec.decode(torch.frombuffer(bytearray(stored), dtype=torch.uint8))
    assert decoded.dtype == x.dtype and decoded.shape == x.shape and np.array_equal(bits(decoded), bits(x))
