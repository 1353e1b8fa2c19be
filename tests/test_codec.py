"""Public encode and decode: any tensor comes back bit for bit, and no damage goes unnoticed."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

import numpy as np
import pytest
import torch
from corpus import CODED, STORED, bits, corpus, from_bits, gaussian, known, name_of, random_bits, tensor

import zipccl_hooks
from zipccl_hooks import codec, ops, reference
from zipccl_hooks.codec import decode, encode
from zipccl_hooks.errors import CorruptPayload, FormatMismatch, ZipcclError
from zipccl_hooks.format import DTYPES, HEADER_BYTES, Header, Mode

BF16, FP32 = torch.bfloat16, torch.float32
SHAPES = [(), (0,), (7,), (2, 0, 3), (3, 5, 1031), (1, 2, 1, 2, 1, 2, 1, 300)]


def equal(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Same dtype, shape and bits."""
    return x.dtype == y.dtype and x.shape == y.shape and np.array_equal(bits(x), bits(y))


# Round trip


@pytest.mark.parametrize("dtype", (*CODED, *STORED), ids=name_of)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_round_trip(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    x = tensor(random_bits, dtype, torch.Size(shape).numel()).view(shape)
    for mode in codec.MODES:
        payload = encode(x, mode=mode)
        assert payload.dtype == torch.uint8 and payload.shape == (payload.numel(),)
        assert equal(decode(payload), x), mode
        assert payload.numel() <= x.nbytes + HEADER_BYTES


@pytest.mark.parametrize("dtype", CODED, ids=name_of)
@pytest.mark.parametrize("mode", codec.MODES)
def test_corpus_round_trip(dtype: torch.dtype, mode: str) -> None:
    for name, x in corpus(dtype, 5 * 1031).items():
        assert equal(decode(encode(x.view(5, 1031), mode=mode)), x.view(5, 1031)), name


@pytest.mark.parametrize("dtype", CODED, ids=name_of)
@pytest.mark.parametrize(("mode", "wire"), [("fast", Mode.FAST), ("dense", Mode.DENSE), ("auto", Mode.DENSE)])
def test_payload_is_that_of_the_reference(dtype: torch.dtype, mode: str, wire: Mode) -> None:
    x = tensor(gaussian, dtype, 3 * 5 * 1031).view(3, 5, 1031)
    payload = encode(x, mode=mode)
    assert payload.numpy().tobytes() == reference.encode(bits(x), known(dtype), wire, tuple(x.shape))


@pytest.mark.parametrize("dtype", CODED, ids=name_of)
@pytest.mark.parametrize("mode", list(Mode), ids=["raw", "fast", "dense"])
def test_payload_without_checksum_is_decoded(dtype: torch.dtype, mode: Mode) -> None:
    """What the operators write, cut to its size: flat."""
    x = tensor(gaussian, dtype, 5 * 1031)
    payload = ops.encode(x, mode)
    header = Header.read(payload)
    assert header.checksum is None
    assert equal(decode(payload[: header.payload_bytes]), x)


def test_bits_of_special_values_survive() -> None:
    """Quiet and signalling NaNs with payloads, infinities, zeros, subnormals: compared as integers."""
    patterns = [0x7F800001, 0xFFC12345, 0x7FFFFFFF, 0x7F800000, 0xFF800000, 0x80000000, 0x1, 0x807FFFFF]
    x = from_bits(torch.tensor(patterns * 400), FP32)
    for mode in codec.MODES:
        assert bits(decode(encode(x, mode=mode))).tolist() == patterns * 400


@pytest.mark.parametrize("dtype", STORED, ids=name_of)
@pytest.mark.parametrize("mode", codec.MODES)
def test_other_dtypes_are_stored(dtype: torch.dtype, mode: str) -> None:
    """In every mode: a tree of tensors may be encoded with one mode."""
    x = tensor(random_bits, dtype, 33)
    payload = encode(x, mode=mode)
    assert Header.read(payload).mode == Mode.RAW
    assert payload[HEADER_BYTES:].numpy().tobytes() == bits(x).tobytes()
    assert payload.numpy().tobytes() == reference.encode(bits(x), known(dtype), Mode.RAW, (33,))


# Views


VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "transposed": lambda x: x.view(60, 100).t(),
    "every third": lambda x: x[::3],
    "column": lambda x: x.view(60, 100)[:, 7],
    "expanded": lambda x: x[:3].view(3, 1).expand(3, 700),
    "off by one": lambda x: x[1:],
    "off by three": lambda x: x[3:4000],
}


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS.keys())
@pytest.mark.parametrize("dtype", [*CODED, torch.uint8, torch.int64], ids=name_of)
def test_views_of_x(dtype: torch.dtype, view: Callable[[torch.Tensor], torch.Tensor]) -> None:
    x = view(tensor(random_bits, dtype, 6000))
    payload = encode(x)
    assert equal(decode(payload), x)
    assert torch.equal(payload, encode(x.clone(memory_format=torch.contiguous_format)))


@pytest.mark.parametrize(
    "view", [v for n, v in VIEWS.items() if n != "expanded"], ids=[*VIEWS][:3] + [*VIEWS][4:]
)
@pytest.mark.parametrize("dtype", [*CODED, torch.uint16], ids=name_of)
def test_views_of_out(dtype: torch.dtype, view: Callable[[torch.Tensor], torch.Tensor]) -> None:
    whole = tensor(random_bits, dtype, 6000)
    out, before = view(whole), whole.clone()
    x = tensor(gaussian, FP32, out.numel()).view(torch.uint8)[: out.nbytes].view(dtype).view(out.shape)
    assert decode(encode(x), out=out) is out
    assert equal(out, x)
    # Nothing beside the view was written.
    view(before).copy_(x)
    assert equal(whole, before)


def test_out_of_another_shape() -> None:
    x = tensor(gaussian, BF16, 6000).view(60, 100)
    out = torch.empty(2, 3000, dtype=BF16)
    assert decode(encode(x), out=out) is out and equal(out, x.view(2, 3000))


@pytest.mark.parametrize("offset", [1, 2, 3, 4])
@pytest.mark.parametrize("mode", codec.MODES)
def test_payload_anywhere_in_a_buffer(offset: int, mode: str) -> None:
    x = tensor(gaussian, BF16, 5001)
    payload = encode(x, mode=mode)
    buffer = torch.full((payload.numel() + offset,), 0x5A, dtype=torch.uint8)
    buffer[offset:] = payload
    assert equal(decode(buffer[offset:]), x)
    assert equal(decode(torch.stack([payload, payload], dim=1)[:, 1]), x)


@pytest.mark.parametrize("mode", codec.MODES)
def test_encode_leaves_x_alone(mode: str) -> None:
    x = tensor(gaussian, FP32, 3000).requires_grad_()
    payload, before = encode(x, mode=mode), x.detach().clone()
    assert not payload.requires_grad and not decode(payload).requires_grad
    with torch.no_grad():
        x.zero_()
    assert equal(decode(payload), before)


def test_negated_and_conjugated_views() -> None:
    """torch keeps both as a flag on the tensor: the values must be encoded, not the memory."""
    z = torch.randn(2000, dtype=torch.complex64, generator=torch.Generator().manual_seed(0))
    assert z.conj().is_conj() and z.conj().imag.is_neg()
    assert equal(decode(encode(z.conj())), z.conj().resolve_conj())
    assert equal(decode(encode(z.conj().imag)), z.conj().imag.resolve_neg())


# Errors


X = torch.ones(3, 4)
PAYLOAD = encode(X)

BAD_CALLS: dict[str, tuple[Callable[[], object], type[Exception], str]] = {
    "encode list": (lambda: encode([1.0]), TypeError, "x: expected a torch.Tensor, got list"),  # type: ignore[arg-type]
    "encode mode": (lambda: encode(X, mode="zip"), ValueError, "mode: expected one of ('auto',"),
    "encode mode got": (lambda: encode(X, mode="FAST"), ValueError, "got 'FAST'"),
    "encode 9 dims": (
        lambda: encode(X.view(1, 1, 1, 1, 1, 1, 1, 3, 4)),
        ValueError,
        "x: expected at most 8 dimensions, got 9",
    ),
    "encode complex32": (
        lambda: encode(torch.view_as_complex(torch.ones(3, 2, dtype=torch.float16))),
        TypeError,
        "dtype: expected one of bfloat16, float16,",
    ),
    "encode complex32 got": (
        lambda: encode(torch.view_as_complex(torch.ones(3, 2, dtype=torch.float16)), mode="raw"),
        TypeError,
        "got torch.complex32",
    ),
    "decode bytes": (lambda: decode(b"ZCCL"), TypeError, "payload: expected a torch.uint8 tensor, got bytes"),  # type: ignore[arg-type]
    "decode int8": (
        lambda: decode(PAYLOAD.view(torch.int8)),
        TypeError,
        "payload: expected a torch.uint8 tensor, got torch.int8",
    ),
    "decode 2 dims": (
        lambda: decode(PAYLOAD.view(1, -1)),
        ValueError,
        f"payload: expected 1 dimension, got shape (1, {PAYLOAD.numel()})",
    ),
    "decode out dtype": (
        lambda: decode(PAYLOAD, out=X.double()),
        ValueError,
        "out: expected 12 elements of torch.float32, got 12 of torch.float64",
    ),
    "decode out numel": (
        lambda: decode(PAYLOAD, out=X[0]),
        ValueError,
        "out: expected 12 elements of torch.float32, got 4 of torch.float32",
    ),
    "decode out list": (
        lambda: decode(PAYLOAD, out=[X]),
        TypeError,
        "out: expected a torch.Tensor, got list",
    ),  # type: ignore[arg-type]
    "decode noise": (
        lambda: decode(torch.arange(200, dtype=torch.uint8)),
        CorruptPayload,
        r"payload magic: expected b'ZCCL', got b'\x00\x01\x02\x03'",
    ),
    "decode nothing": (
        lambda: decode(PAYLOAD[:0]),
        CorruptPayload,
        "payload: expected at least 128 bytes, got 0",
    ),
    "decode more": (
        lambda: decode(torch.cat([PAYLOAD, PAYLOAD])),
        CorruptPayload,
        f"payload size: expected {PAYLOAD.numel()} bytes, got {2 * PAYLOAD.numel()}",
    ),
}


@pytest.mark.parametrize(("call", "error", "message"), BAD_CALLS.values(), ids=BAD_CALLS.keys())
def test_errors_name_argument_expected_and_got(
    call: Callable[[], object], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=re.escape(message)) as caught:
        call()
    assert type(caught.value) is error


def test_meta_tensors_are_refused() -> None:
    """They have a fake implementation under torch.compile, but there is nothing to encode."""
    with pytest.raises(NotImplementedError):
        encode(torch.empty(5, device="meta"))


def test_foreign_version_names_both() -> None:
    payload = PAYLOAD.clone()
    payload[4] = 2
    with pytest.raises(FormatMismatch, match="version: expected 1, got 2"):
        decode(payload)
    assert issubclass(FormatMismatch, ZipcclError) and issubclass(CorruptPayload, ZipcclError)


@pytest.mark.parametrize("dtype", CODED, ids=name_of)
@pytest.mark.parametrize("mode", ["fast", "dense"])
def test_swapped_dtype_is_noticed(dtype: torch.dtype, mode: str) -> None:
    payload = encode(tensor(gaussian, dtype, 9 * 1024 + 5), mode=mode)
    assert Header.read(payload).mode != Mode.RAW
    for other in DTYPES.values():
        if other != known(dtype):
            payload[6] = other.code
            with pytest.raises(CorruptPayload):
                decode(payload)


# Damage


DAMAGED = pytest.mark.parametrize(
    ("dtype", "mode"), [(BF16, "fast"), (BF16, "dense"), (FP32, "fast"), (FP32, "dense")], ids=name_of
)


def small_payload(dtype: torch.dtype, mode: str) -> tuple[torch.Tensor, torch.Tensor]:
    """(tensor, payload) of one tile and a tail, 2 to 5 kB, with escapes on every level."""
    x = tensor(gaussian, dtype, 1024 + 5)
    x[100:104] *= torch.tensor([2.0**-18, 2.0**-40, 2.0**30, 0.0], dtype=dtype)
    if dtype == FP32:  # odd low bits in a few elements only: a width below 16, and low escapes
        x[:1000] = x[:1000].to(BF16).to(FP32)
    return x, encode(x, mode=mode)


def padding(payload: torch.Tensor) -> set[int]:
    """Bytes that the format leaves unused in a payload of one tile; within the dynamic part, its end.

    Of the header only what follows the dimensions: unused ones, and an unused checksum, are checked to be 0.
    """
    header = Header.read(payload)
    lay, end = header.layout, payload.numel()
    tail = (lay.numel - 1024) * lay.dtype.itemsize
    return {
        *range(96, HEADER_BYTES),
        *range(lay.meta + 4, lay.bases),
        *range(lay.bases + 4, lay.codes),
        *range(lay.tail + tail, lay.static_bytes),
        *range(end - 4, end),
    }


@DAMAGED
def test_every_flipped_bit_is_noticed(dtype: torch.dtype, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of them: an error of ours, or the very same tensor, dtype and shape where the bit is padding.

    No damaged field makes decode allocate more than an intact payload of that size could need.
    """
    x, payload = small_payload(dtype, mode)
    header = Header.read(payload)
    assert header.mode == Mode[mode.upper()] and header.dynamic_bytes > 8
    spare, largest, allocate = padding(payload), 0, torch.empty

    def recorded(*args, **kwargs):
        nonlocal largest
        tensor = allocate(*args, **kwargs)
        largest = max(largest, tensor.nbytes)
        return tensor

    monkeypatch.setattr(torch, "empty", recorded)
    data, unnoticed = payload.numpy(), []
    for byte in range(len(data)):
        for bit in range(8):
            data[byte] ^= 1 << bit
            try:
                result = decode(payload)
            except ZipcclError:
                pass
            else:
                assert equal(result, x), (byte, bit)
                if byte not in spare:
                    unnoticed.append((byte, bit))
            data[byte] ^= 1 << bit
    assert largest <= 4 * payload.numel()
    # Beside the padding: the flags that only fp32 uses, and bits behind the last symbol in its byte.
    flags = header.layout.meta + 3
    unused = [(byte, bit) for byte, bit in unnoticed if byte != flags or dtype != BF16 or bit < 2]
    assert len({byte for byte, _ in unused}) <= 1 and len(unused) < 8
    assert all(byte >= header.layout.static_bytes for byte, _ in unused)


@DAMAGED
def test_every_flipped_bit_without_checksum(dtype: torch.dtype, mode: str) -> None:
    """A payload of the operators: the header is still checked, other damage stays where it is.

    In a residual it changes an element, in the tail one of the tail's; elsewhere it may garble the tile.
    """
    x, _ = small_payload(dtype, mode)
    payload = ops.encode(x, Mode[mode.upper()])
    header = Header.read(payload)
    assert header.checksum is None
    payload, lay = payload[: header.payload_bytes].clone(), header.layout
    expected, data, other, refused = bits(x), payload.numpy(), 0, 0
    for byte in range(len(data)):
        for bit in range(8):
            data[byte] ^= 1 << bit
            try:
                found = bits(ops.decode(payload, x.numel(), dtype))
            except ZipcclError:
                refused += 1
                assert not lay.residual <= byte < lay.static_bytes, (byte, bit)
            else:
                changed = np.flatnonzero(found != expected)
                other += len(changed) > 0
                if byte < HEADER_BYTES:
                    assert not len(changed), (byte, bit)
                elif lay.residual <= byte < lay.tail:
                    assert len(changed) == 1 and changed[0] < 1024, (byte, bit)
                elif lay.tail <= byte < lay.static_bytes:
                    in_tail = byte - lay.tail < 5 * dtype.itemsize
                    assert changed.tolist() == [1024 + (byte - lay.tail) // dtype.itemsize] * in_tail, (
                        byte,
                        bit,
                    )
                else:
                    assert np.all(changed < 1024), (byte, bit)
            data[byte] ^= 1 << bit
    assert other > 4 * len(data) and refused > 600


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e4m3fn, torch.int16], ids=name_of)
def test_damaged_dtype_and_shape_are_noticed(dtype: torch.dtype) -> None:
    """Also where another dtype or shape would have fitted the same bytes."""
    payload = encode(torch.ones(4, 6).to(dtype))
    for bit in [*range(48, 56), *range(8 * 32, 8 * 96)]:
        damaged = payload.clone()
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(CorruptPayload):
            decode(damaged)
    swapped = payload.clone()
    swapped[32:40], swapped[40:48] = payload[40:48], payload[32:40]
    with pytest.raises(CorruptPayload, match="checksum"):
        decode(swapped)


@DAMAGED
def test_every_truncation_is_noticed(dtype: torch.dtype, mode: str) -> None:
    _, payload = small_payload(dtype, mode)
    for size in range(payload.numel()):
        with pytest.raises(CorruptPayload):
            decode(payload[:size])


@pytest.mark.parametrize("dtype", CODED, ids=name_of)
@pytest.mark.parametrize("value", [1.0, -1.5, 2.0**-5], ids=str)
@pytest.mark.parametrize("mode", ["fast", "dense"])
def test_damaged_top_is_noticed(dtype: torch.dtype, value: float, mode: str) -> None:
    """All exponents of a tile change alike, so that in a linear checksum the differences can cancel."""
    x = torch.full((8192,), value).to(dtype)
    payload = encode(x, mode=mode)
    assert Header.read(payload).mode != Mode.RAW
    for tile in range(4):
        for bit in range(known(dtype).exponent_bits):  # the field's other bits are shifted out
            damaged = payload.clone()
            damaged[HEADER_BYTES + 4 * tile + 2] ^= 1 << bit
            with pytest.raises(CorruptPayload, match="checksum"):
                decode(damaged)


@pytest.mark.parametrize("shape", [(0, 5), (3, 0)], ids=str)
def test_flipped_dims_of_an_empty_tensor(shape: tuple[int, ...]) -> None:
    """An error of ours; without checksum, or a shape of another kind, but no overflow in torch."""
    payload = encode(torch.empty(shape))
    plain = payload.clone()
    plain[24:30] = 0
    assert Header.read(plain) == replace(Header.read(payload), checksum=None)
    for bit in range(8 * 30, 8 * 96):
        for damaged in (payload.clone(), plain.clone()):
            damaged[bit // 8] ^= 1 << bit % 8
            with suppress(CorruptPayload):
                assert decode(damaged).numel() == 0 and Header.read(damaged).checksum is None


def test_claims_beyond_the_payload_are_refused_before_allocating(monkeypatch: pytest.MonkeyPatch) -> None:
    """A header alone that promises 16 EiB, 1 TiB, or twice what there is."""

    def empty(*args, **kwargs):
        raise AssertionError("allocated")

    monkeypatch.setattr(torch, "empty", empty)
    for numel in (2**62, 2**40, 300):
        for name in ("float32", "float8_e5m2", "int64"):
            mode = Mode.RAW if name == "int64" else Mode.DENSE
            header = Header(DTYPES[name], mode, numel, 0, (numel,))
            payload = torch.frombuffer(bytearray(header.pack()), dtype=torch.uint8)
            with pytest.raises(CorruptPayload, match="payload size"):
                decode(payload)


def test_public_names() -> None:
    assert zipccl_hooks.encode is encode and zipccl_hooks.decode is decode
