"""The CPU codec: the reference's bytes, within its buffers, at the sizes that theory expects."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from corpus import (
    BITS,
    CODED,
    bf16_in_fp32,
    bits,
    corpus,
    from_bits,
    golden,
    half_zeros,
    known,
    mixed_layers,
    name_of,
    random_bits,
    sum_of_8,
    tensor,
)

from zipccl_hooks import codec, cpu, format, reference, theory
from zipccl_hooks.errors import CorruptPayload
from zipccl_hooks.format import TILE, Header, Mode, layout

DTYPES = pytest.mark.parametrize("dtype", CODED, ids=name_of)
CODING = pytest.mark.parametrize("mode", [Mode.FAST, Mode.DENSE], ids=["fast", "dense"])
SIZES = (0, 1, 1023, 1024, 1025, 8192 + 77, 3 * 8192 + 1024 + 5)
CANARY = 0x5A


@pytest.fixture(params=[1, 2, 3], ids="threads {}".format)
def num_threads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """Workers that get a range each as soon as there is a group of tiles for each."""
    monkeypatch.setattr(cpu, "MIN_WORKER_BYTES", 1024)
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def encode(x: torch.Tensor, mode: Mode) -> np.ndarray:
    """The payload, written into a buffer of canaries that must survive behind it."""
    lay = layout(x.numel(), known(x.dtype), mode)
    buffer = np.full(lay.max_bytes + 64, CANARY, np.uint8)
    size = cpu.encode(bits(x), lay, buffer)
    assert size <= lay.max_bytes and np.all(buffer[size:] == CANARY)
    return buffer[:size]


def decode(payload: np.ndarray, start: int = 0, stop: int | None = None) -> np.ndarray:
    header = Header.unpack(payload[:128].tobytes(), len(payload))
    stop = header.numel if stop is None else stop
    guarded = np.full(stop - start + 16, CANARY, f"u{header.dtype.itemsize}")
    cpu.decode(payload, header.layout, guarded[8:-8], start)
    assert np.all(guarded[:8] == CANARY) and np.all(guarded[-8:] == CANARY)
    return guarded[8:-8]


def test_poison_reaches_the_codec() -> None:
    """The fixture of conftest.py; without it the tests below would prove less."""
    assert np.all(cpu.np.empty(9, np.uint16) == 0xA5A5)
    allocated = {"torch": torch, "__name__": "zipccl_hooks.pretended"}
    exec("a = torch.empty(5); b = a.new_empty((), dtype=torch.int16)", allocated)
    assert all((allocated[name].view(-1).view(torch.uint8) == 0xA5).all() for name in "ab")


@DTYPES
@CODING
def test_bytes_of_the_reference(dtype: torch.dtype, mode: Mode, num_threads: int) -> None:
    for numel in SIZES if num_threads == 3 else SIZES[-2:]:
        for name, x in corpus(dtype, numel).items():
            expected = np.frombuffer(reference.encode(bits(x), known(dtype), mode), np.uint8)
            payload = encode(x, mode)
            assert np.array_equal(payload, expected), f"{name}, {numel} elements"
            assert np.array_equal(decode(payload), bits(x)), f"{name}, {numel} elements"


@CODING
def test_work_is_really_split(mode: Mode, num_threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    submitted = []

    class Pool(ThreadPoolExecutor):
        def map(self, fn, *iterables, **kwargs):
            calls = list(iterables[0])
            submitted.append(len(calls))
            return super().map(fn, calls, **kwargs)

    with Pool() as pool:
        monkeypatch.setattr(cpu, "_pool", lambda: pool)
        x = tensor(mixed_layers, torch.float32, SIZES[-1])
        decode(encode(x, mode))
        cpu.checksum(bits(x).view(np.uint8))
    # Tiles, tiles again, checksum; one worker needs no pool.
    assert submitted == ([] if num_threads == 1 else [num_threads] * 3)


@pytest.mark.parametrize("numel", [0, 1, 7, 4096, 4 * 8192 + 3, 100_001])
def test_checksum_of_the_reference(numel: int, num_threads: int) -> None:
    data = bits(tensor(random_bits, torch.uint8, numel))
    assert cpu.checksum(data) == reference.checksum(data.tobytes())


@DTYPES
@pytest.mark.parametrize("mode", list(Mode), ids=["raw", "fast", "dense"])
def test_decode_of_a_part(dtype: torch.dtype, mode: Mode, num_threads: int) -> None:
    x = tensor(mixed_layers, dtype, SIZES[-1])
    payload, whole = encode(x, mode), bits(x)
    numel = x.numel()
    for start, stop in [
        (0, 1024),
        (0, 8192),
        (8192, 11 * 1024),
        (16384, numel),
        (24576, numel),
        (8192, 8192),
    ]:
        assert np.array_equal(decode(payload, start, stop), whole[start:stop]), f"{start}:{stop}"


@DTYPES
@CODING
def test_damaged_tiles_stay_in_their_buffers(dtype: torch.dtype, mode: Mode) -> None:
    """Meta, bases, codes and dynamic part replaced by noise: CorruptPayload or garbage, within bounds."""
    payload = encode(golden(dtype), mode)
    lay = Header.unpack(payload[:128].tobytes(), len(payload)).layout
    noise, refused = np.random.default_rng(0), 0
    for first, last in [(lay.meta, lay.bases), (lay.bases, lay.codes), (lay.codes, lay.residual)]:
        for _ in range(20):
            damaged = payload.copy()
            damaged[first:last] = noise.integers(0, 256, last - first)
            try:
                decode(damaged)
            except CorruptPayload:
                refused += 1
    assert refused > 20


# Sizes


@DTYPES
@CODING
def test_gaussian_takes_the_bits_of_theory(dtype: torch.dtype, mode: Mode) -> None:
    """Exponents by their probabilities, the rest as it is. Padding adds about 0.1 %."""
    numel = 2**18
    normal = torch.randn(numel, generator=torch.Generator().manual_seed(5))
    for sigma in theory.octave(7):
        size = len(encode((normal * sigma / 8).to(dtype), mode)) - format.HEADER_BYTES
        expected = theory.expected_bits(sigma / 8, known(dtype), mode)
        assert 8 * size / numel == pytest.approx(expected, rel=0.0025), f"sigma {sigma:.3f}"


def mean_ratio(dtype: torch.dtype, mode: str) -> float:
    """Of Gaussians, averaged over an octave of sigma."""
    normal = torch.randn(2**18, generator=torch.Generator().manual_seed(6))
    tensors = [(normal * sigma * 0.01).to(dtype) for sigma in theory.octave(8)]
    return sum(x.nbytes / codec.encode(x, mode=mode).numel() for x in tensors) / len(tensors)


@pytest.mark.parametrize(
    ("dtype", "mode", "floor"),
    [
        (torch.bfloat16, "fast", 1.42),
        (torch.bfloat16, "dense", 1.49),
        (torch.float32, "auto", 1.17),
        (torch.float16, "auto", 1.13),
        (torch.float8_e5m2, "auto", 1.25),
        (torch.float8_e4m3fn, "auto", 1.1),
    ],
    ids=lambda v: name_of(v) or str(v),
)
def test_ratio_of_gaussians(dtype: torch.dtype, mode: str, floor: float) -> None:
    assert mean_ratio(dtype, mode) >= floor


@pytest.mark.parametrize(
    ("make", "dtype", "mode", "floor"),
    [
        (half_zeros, torch.bfloat16, "fast", 1.42),
        (half_zeros, torch.bfloat16, "dense", 1.42),
        (bf16_in_fp32, torch.float32, "auto", 2.8),
        (sum_of_8, torch.float32, "auto", 1.6),
    ],
    ids=lambda v: getattr(v, "__name__", None) or name_of(v) or str(v),
)
def test_ratio_of_training_tensors(make, dtype: torch.dtype, mode: str, floor: float) -> None:
    x = tensor(make, dtype, 2**18)
    assert x.nbytes / codec.encode(x, mode=mode).numel() >= floor


@DTYPES
@pytest.mark.parametrize("mode", ["fast", "dense", "auto", "raw"])
def test_random_bits_cost_a_header(dtype: torch.dtype, mode: str) -> None:
    x = tensor(random_bits, dtype, 2 * 8192 + 77)
    assert codec.encode(x, mode=mode).numel() == x.nbytes + 128


@CODING
def test_every_exponent_at_every_place_of_a_tile(mode: Mode) -> None:
    """All 256 exponents in each window position: 256 constant tiles with one odd element each."""
    top = torch.arange(256).repeat_interleave(TILE)
    odd = torch.arange(256 * TILE) % (TILE + 3) == 0
    exponent = torch.where(odd, torch.arange(256 * TILE) % 256, top)
    x = from_bits(exponent << 7, torch.bfloat16)
    assert x.view(BITS[2]).unique().numel() == 256
    payload = encode(x, mode)
    assert payload.tobytes() == reference.encode(bits(x), known(x.dtype), mode)
    assert np.array_equal(decode(payload), bits(x))
