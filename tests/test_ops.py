"""torch.ops.zipccl: what opcheck demands, under torch.compile, and sums against a sum in rank order."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from corpus import CODED, bits, corpus, gaussian, known, name_of, random_bits, sum_of_8, tensor
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.library import opcheck

from zipccl_hooks import ops, reference
from zipccl_hooks.errors import CorruptPayload, FormatMismatch
from zipccl_hooks.format import Header, Mode, layout

# torch.compile of a test triggers torch's own warning about torch.jit.
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")

BF16, FP32 = torch.bfloat16, torch.float32
MODES = pytest.mark.parametrize("mode", list(Mode), ids=["raw", "fast", "dense"])
SIZES = [0, 2 * 1031]
OPS = torch.ops.zipccl
# Writes to its inputs are looked for by comparing them before and after, which fp8 has no kernel for.
WITHOUT_SCHEMA = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")


def check(op: Any, dtype: torch.dtype, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> None:
    if dtype.itemsize == 1:
        opcheck(op, args, kwargs, test_utils=WITHOUT_SCHEMA)
    else:
        opcheck(op, args, kwargs)


@pytest.mark.parametrize("dtype", CODED, ids=name_of)
@pytest.mark.parametrize("numel", SIZES)
@MODES
def test_opcheck_encode_decode(dtype: torch.dtype, numel: int, mode: Mode) -> None:
    x = tensor(gaussian, dtype, numel)
    payload = ops.encode(x, mode)
    check(OPS.encode.default, dtype, (x, mode))
    check(OPS.encode.out, dtype, (x, mode), {"payload": torch.zeros_like(payload)})
    check(OPS.decode.default, dtype, (payload, numel, dtype))
    check(OPS.decode.out, dtype, (payload,), {"out": torch.zeros(numel, dtype=dtype)})
    check(OPS.checksum.default, dtype, (x,))


@pytest.mark.parametrize("dtype", ops.SUM_DTYPES, ids=name_of)
@pytest.mark.parametrize("numel", SIZES)
def test_opcheck_decode_sum(dtype: torch.dtype, numel: int) -> None:
    x = tensor(gaussian, dtype, numel)
    sources = [x, ops.encode(x, Mode.FAST)]
    check(OPS.decode_sum.default, dtype, (sources, numel, dtype, 0.5))
    check(OPS.decode_sum.out, dtype, (sources, 0.5), {"out": torch.zeros(numel, dtype=dtype)})


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.complex64], ids=name_of)
def test_opcheck_of_stored_dtypes(dtype: torch.dtype) -> None:
    x = (torch.arange(77) - 5).to(dtype)
    opcheck(OPS.encode.default, (x, Mode.RAW))
    opcheck(OPS.decode.default, (ops.encode(x, Mode.RAW), 77, dtype))


@pytest.mark.parametrize("dtype", CODED, ids=name_of)
@MODES
def test_encode_writes_the_payload_and_nothing_else(dtype: torch.dtype, mode: Mode) -> None:
    """A buffer may be longer than the capacity; behind the payload it keeps what it had."""
    for name, x in corpus(dtype, 9 * 1024 + 77).items():
        expected = reference.encode(bits(x), known(dtype), mode)
        buffer = torch.full((ops.payload_capacity(x.numel(), dtype, mode) + 40,), 0x5A, dtype=torch.uint8)
        ops.encode_out(x.view(-1, 1), mode, payload=buffer)
        assert buffer[: len(expected)].numpy().tobytes() == expected, name
        assert (buffer[len(expected) :] == 0x5A).all(), name
        # Decoding takes such a buffer, and the exact payload.
        for payload in (buffer, buffer[: len(expected)], buffer.view(1, -1)):
            assert np.array_equal(bits(ops.decode(payload, x.numel(), dtype)), bits(x)), name
        assert int(ops.checksum(x)) == reference.checksum(bits(x).tobytes())
        assert Header.read(buffer).checksum is None


def test_calls_from_many_threads() -> None:
    tensors = [*corpus(FP32, 4 * 8192 + 5).values()]

    def round_trip(x: Tensor) -> bool:
        return np.array_equal(bits(ops.decode(ops.encode(x, Mode.DENSE), x.numel(), x.dtype)), bits(x))

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(round_trip, tensors * 3))


# torch.compile


def program(x: Tensor, mode: int, payload: Tensor, out: Tensor) -> tuple[Tensor, ...]:
    """Every operator, between computations that the compiler fuses, with outputs that it must not drop."""
    y = x * 2
    encoded = ops.encode(y, mode)
    decoded = ops.decode(encoded, y.numel(), y.dtype)
    ops.encode_out(y, mode, payload=payload)
    ops.decode_out(payload, out=out)
    total = torch.ops.zipccl.decode_sum.default([encoded, y.view(-1)], y.numel(), y.dtype, 0.5)
    ops.decode_sum_out([payload, out, encoded], out=out)
    return encoded, decoded.view_as(x) + 1, ops.checksum(y), total - 1, out * 1


def arguments(numel: int, dtype: torch.dtype, mode: Mode) -> tuple[Tensor, int, Tensor, Tensor]:
    buffer = torch.zeros(ops.payload_capacity(numel, dtype, mode), dtype=torch.uint8)
    return tensor(gaussian, dtype, numel), int(mode), buffer, torch.zeros(numel, dtype=dtype)


def assert_equal_to_eager(compiled: Callable[..., Any], numel: int, dtype: torch.dtype, mode: Mode) -> None:
    expected, found = arguments(numel, dtype, mode), arguments(numel, dtype, mode)
    for a, b in zip(program(*expected), compiled(*found), strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape and np.array_equal(bits(a), bits(b))
    assert torch.equal(expected[2], found[2]) and torch.equal(expected[3], found[3])


@pytest.fixture
def counter() -> CompileCounterWithBackend:
    torch._dynamo.reset()
    return CompileCounterWithBackend("aot_eager")


@pytest.mark.parametrize("dtype", ops.SUM_DTYPES, ids=name_of)
@MODES
def test_compiled_without_graph_break(
    dtype: torch.dtype, mode: Mode, counter: CompileCounterWithBackend
) -> None:
    compiled = torch.compile(program, backend=counter, fullgraph=True, dynamic=False)
    assert_equal_to_eager(compiled, 5 * 1031, dtype, mode)
    assert counter.frame_count == 1


@MODES
def test_compiled_once_for_all_sizes(mode: Mode, counter: CompileCounterWithBackend) -> None:
    compiled = torch.compile(program, backend=counter, fullgraph=True, dynamic=True)
    assert_equal_to_eager(compiled, 5 * 1031, BF16, mode)
    at_first = counter.frame_count
    for numel in (2, 1023, 1024, 3 * 8192 + 77):
        assert_equal_to_eager(compiled, numel, BF16, mode)
    assert counter.frame_count == at_first


def test_compiled_by_inductor() -> None:
    torch._dynamo.reset()
    assert_equal_to_eager(torch.compile(program, fullgraph=True, dynamic=True), 5 * 1031, FP32, Mode.DENSE)


# Sums


def sum_in_rank_order(terms: Sequence[Tensor], scale: float) -> Tensor:
    """Products rounded to the dtype, then added and rounded in fp32; the sum is rounded to the dtype."""
    total = None
    with np.errstate(all="ignore"):
        for term in terms:
            product = torch.from_numpy(term.to(FP32).numpy().reshape(-1) * np.float32(scale))
            scaled = product.to(term.dtype).to(FP32).numpy()
            total = scaled if total is None else total + scaled
    assert total is not None and total.dtype == np.float32
    return torch.from_numpy(total).to(terms[0].dtype)


def assert_same_sum(found: Tensor, expected: Tensor) -> None:
    """Bit for bit, but for what a NaN carries: IEEE 754 leaves that open."""
    nan = expected.isnan()
    assert torch.equal(found.isnan(), nan)
    assert np.array_equal(bits(found[~nan]), bits(expected[~nan]))


def sources_of(terms: Sequence[Tensor]) -> list[Tensor]:
    """Every third as it is, the others encoded in every mode."""
    modes = (None, Mode.FAST, Mode.DENSE, None, Mode.RAW, Mode.FAST, None, Mode.DENSE, Mode.FAST)
    return [t if m is None else ops.encode(t, m) for t, m in zip(terms, modes, strict=False)]


def terms_of(dtype: torch.dtype, count: int, numel: int) -> list[Tensor]:
    """Tensors of unlike sizes of values, so that the order of the sum matters."""
    whole = tensor(gaussian, FP32, count * numel).view(count, numel)
    return [(row * 7.0 ** (k % 4 - 1)).to(dtype) for k, row in enumerate(whole)]


@pytest.mark.parametrize("dtype", ops.SUM_DTYPES, ids=name_of)
@pytest.mark.parametrize("world", range(1, 10), ids="W {}".format)
@pytest.mark.parametrize("scale", [1.0, 0.5, 1 / 3], ids="scale {:.2f}".format)
def test_decode_sum(dtype: torch.dtype, world: int, scale: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops, "SUM_BLOCK", 8192)  # several blocks a thread
    numel = 5 * 8192 + 1024 + 77
    terms = terms_of(dtype, world, numel)
    expected = sum_in_rank_order(terms, scale)
    out = torch.full((numel,), 7.0, dtype=dtype)
    ops.decode_sum_out(sources_of(terms), scale=scale, out=out)
    assert_same_sum(out, expected)
    assert_same_sum(OPS.decode_sum.default(sources_of(terms), numel, dtype, scale), expected)
    if world > 2 and dtype == FP32:  # else the test could not tell the order
        assert not torch.equal(sum_in_rank_order(terms[::-1], scale), expected)


def test_scale_is_not_fused_into_the_addition() -> None:
    """A fused multiply-add leaves the second product unrounded; here it would show in many sums."""
    scale = 1 / 3
    a, b = torch.randn(2, 4096, generator=torch.Generator().manual_seed(0))
    fused = ((a * scale).double() + b.double() * float(np.float32(scale))).float()
    expected = sum_in_rank_order([a, b], scale)
    assert (expected != fused).sum() > 100
    out = torch.empty(4096)
    ops.decode_sum_out([a, ops.encode(b, Mode.FAST)], scale=scale, out=out)
    assert torch.equal(out, expected)


@pytest.mark.parametrize("dtype", ops.SUM_DTYPES, ids=name_of)
@pytest.mark.parametrize("place", [0, 1, 2], ids="source {}".format)
def test_decode_sum_into_a_source(dtype: torch.dtype, place: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops, "SUM_BLOCK", 8192)
    terms = terms_of(dtype, 3, 40_000)
    expected = sum_in_rank_order(terms, 0.5)
    sources = [ops.encode(t, Mode.DENSE) for t in terms]
    out = sources[place] = terms[place]
    ops.decode_sum_out(sources, scale=0.5, out=out)
    assert_same_sum(out, expected)


@pytest.mark.parametrize("dtype", ops.SUM_DTYPES, ids=name_of)
def test_decode_sum_accumulates(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is there comes first, unscaled, and is not rounded again in between."""
    monkeypatch.setattr(ops, "SUM_BLOCK", 8192)
    there, *terms = terms_of(dtype, 4, 40_000)
    expected = sum_in_rank_order([there, *(t * (1 / 3) for t in terms)], 1.0)
    out = there.clone()
    ops.decode_sum_out(sources_of(terms), scale=1 / 3, accumulate=True, out=out)
    assert_same_sum(out, expected)


@pytest.mark.parametrize("dtype", ops.SUM_DTYPES, ids=name_of)
def test_decode_sum_of_special_values(dtype: torch.dtype) -> None:
    hostile = [*corpus(dtype, 3 * 1024 + 5).values()]
    for terms in ([tensor(random_bits, dtype, 3 * 1024 + 5)] * 2, hostile[:4], hostile[4:9]):
        out = torch.empty_like(terms[0])
        ops.decode_sum_out(sources_of(terms), out=out)
        assert_same_sum(out, sum_in_rank_order(terms, 1.0))
    inf, nan = torch.tensor([float("inf")], dtype=dtype), torch.tensor([float("nan")], dtype=dtype)
    for terms in ([inf, -inf], [nan, inf]):
        assert OPS.decode_sum.default(sources_of(terms), 1, dtype).isnan().all()


@pytest.mark.parametrize("dtype", ops.SUM_DTYPES, ids=name_of)
@pytest.mark.parametrize("world", [1, 2, 3])
def test_sum_of_negative_zeros_is_negative(dtype: torch.dtype, world: int) -> None:
    terms = [torch.full((2000,), -0.0, dtype=dtype)] * world
    assert torch.signbit(OPS.decode_sum.default(sources_of(terms), 2000, dtype)).all()


def test_decode_sum_of_views() -> None:
    """A plain source and a payload wherever they lie, an out of any shape."""
    wide = tensor(sum_of_8, FP32, 12_000).view(6000, 2)
    payload = ops.encode(wide[:, 0], Mode.FAST)
    shifted = torch.cat([payload[:1], payload])[1:]
    out = torch.empty(60, 100)
    ops.decode_sum_out([wide[:, 1], shifted], out=out)
    assert torch.equal(out.view(-1), wide[:, 1] + wide[:, 0])


# Errors


X = torch.ones(3000)
PAYLOAD = ops.encode(X, Mode.FAST)
NEEDED = layout(3000, known(FP32), Mode.FAST).max_bytes

BAD_CALLS: dict[str, tuple[Callable[[], object], type[Exception], str]] = {
    "encode mode": (lambda: ops.encode(X, 7), ValueError, "7 is not a valid Mode"),
    "encode int": (
        lambda: ops.encode(X.long(), Mode.DENSE),
        ValueError,
        "mode: expected 'raw' for int64, got 'dense'",
    ),
    "encode short buffer": (
        lambda: ops.encode_out(X, Mode.FAST, payload=PAYLOAD[: NEEDED - 1].clone()),
        ValueError,
        f"payload: expected torch.uint8 of at least {NEEDED} elements starting on 4 bytes, "
        f"got torch.uint8 of {NEEDED - 1} at 0",
    ),
    "encode int8 buffer": (
        lambda: ops.encode_out(X, Mode.FAST, payload=PAYLOAD.view(torch.int8)),
        ValueError,
        f"got torch.int8 of {NEEDED}",
    ),
    "encode unaligned buffer": (
        lambda: ops.encode_out(X, Mode.FAST, payload=torch.zeros(NEEDED + 9, dtype=torch.uint8)[3:]),
        ValueError,
        f"got torch.uint8 of {NEEDED + 6} at 3",
    ),
    "encode strided buffer": (
        lambda: ops.encode_out(X, Mode.FAST, payload=torch.zeros(2 * NEEDED, dtype=torch.uint8)[::2]),
        ValueError,
        "payload: expected a contiguous tensor, got strides (2,)",
    ),
    "decode float": (
        lambda: ops.decode(X, 3000, FP32),
        TypeError,
        "payload: expected torch.uint8, got torch.float32",
    ),
    "decode dtype": (
        lambda: ops.decode(PAYLOAD, 3000, BF16),
        CorruptPayload,
        "payload: expected 3000 elements of torch.bfloat16, got 3000 of torch.float32",
    ),
    "decode numel": (
        lambda: ops.decode(PAYLOAD, 2999, FP32),
        CorruptPayload,
        "payload: expected 2999 elements of torch.float32, got 3000 of torch.float32",
    ),
    "decode truncated": (
        lambda: ops.decode(PAYLOAD[:5000], 3000, FP32),
        CorruptPayload,
        "payload size: 3000 elements of float32",
    ),
    "decode strided out": (
        lambda: ops.decode_out(PAYLOAD, out=torch.zeros(6000)[::2]),
        ValueError,
        "out: expected a contiguous tensor, got strides (2,)",
    ),
    "checksum strided": (
        lambda: ops.checksum(X[::2]),
        ValueError,
        "x: expected a contiguous tensor, got strides (2,)",
    ),
    "sum of nothing": (
        lambda: ops.decode_sum_out([], out=X),
        ValueError,
        "sources: expected at least one tensor, got none",
    ),
    "sum of int": (
        lambda: ops.decode_sum_out([X.int()], out=X.int()),
        TypeError,
        "out: expected one of (torch.float32, torch.bfloat16, torch.float16), got torch.int32",
    ),
    "sum of another dtype": (
        lambda: ops.decode_sum_out([PAYLOAD, X.half()], out=X),
        ValueError,
        "sources: expected payloads or 3000 elements of torch.float32, got 3000 of torch.float16",
    ),
    "sum of another numel": (
        lambda: ops.decode_sum_out([X[1:]], out=X),
        ValueError,
        "sources: expected payloads or 3000 elements of torch.float32, got 2999 of torch.float32",
    ),
    "sum of another payload": (
        lambda: ops.decode_sum_out([PAYLOAD], out=X.half()),
        CorruptPayload,
        "payload: expected 3000 elements of torch.float16, got 3000 of torch.float32",
    ),
    "sum into strided": (
        lambda: ops.decode_sum_out([PAYLOAD], out=torch.zeros(6000)[::2]),
        ValueError,
        "out: expected a contiguous tensor, got strides (2,)",
    ),
}


@pytest.mark.parametrize(("call", "error", "message"), BAD_CALLS.values(), ids=BAD_CALLS.keys())
def test_errors_name_argument_expected_and_got(
    call: Callable[[], object], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=re.escape(message)) as caught:
        call()
    assert type(caught.value) is error


@pytest.mark.parametrize(
    ("offset", "error"), [(4, FormatMismatch), (128 + 3, CorruptPayload)], ids=["version", "flags of a tile"]
)
def test_decode_sum_names_the_source_at_fault(offset: int, error: type[Exception]) -> None:
    """In its header, or where only decoding it shows: 16 planes of low bits where there are none."""
    damaged = PAYLOAD.clone()
    damaged[offset] = 0x80
    with pytest.raises(error) as caught:
        ops.decode_sum_out([PAYLOAD, X, damaged, PAYLOAD], out=torch.empty(3000))
    assert getattr(caught.value, "peer", None) == 2
