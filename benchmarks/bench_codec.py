"""Bench ``codec``: ours on one CPU thread beside zstd, blosc2 and ZipNN, if installed, on the same bytes.

    .venv/bin/pytest benchmarks --benchmark-only

Every codec reads and writes memory that it has touched before. Our encode computes the checksum and
our decode verifies it; the others run without one. A row is timed only once its bits have come back.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from zipccl_hooks import ops
from zipccl_hooks.codec import decode
from zipccl_hooks.format import Header, Mode

TENSOR_BYTES = 16 << 20
ROUNDS = 9


@dataclass(frozen=True)
class Codec:
    """A codec bound to one tensor: ``encode`` returns its payload, ``decode`` fills ``out`` from one."""

    encode: Callable[[], Any]
    decode: Callable[[Any], Any]


# Data


def gaussian(numel: int, seed: int = 0) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed))


def half_zeros(numel: int) -> Tensor:
    return gaussian(numel).bfloat16() * (gaussian(numel, seed=1) > 0)


def bf16_values(numel: int) -> Tensor:
    return gaussian(numel).bfloat16().float()


def bf16_sums(numel: int) -> Tensor:
    return torch.stack([gaussian(numel, seed).bfloat16().float() for seed in range(8)]).sum(0)


DATA: dict[str, tuple[Callable[[int], Tensor], torch.dtype]] = {
    "gaussian-bf16": (gaussian, torch.bfloat16),
    "half-zeros-bf16": (half_zeros, torch.bfloat16),
    "bf16-values-fp32": (bf16_values, torch.float32),
    "bf16-sums-fp32": (bf16_sums, torch.float32),
    "gaussian-fp32": (gaussian, torch.float32),
    "gaussian-fp16": (gaussian, torch.float16),
    "gaussian-e4m3": (gaussian, torch.float8_e4m3fn),
    "gaussian-e5m2": (gaussian, torch.float8_e5m2),
}


@functools.lru_cache(maxsize=1)
def make_data(name: str) -> Tensor:
    generate, dtype = DATA[name]
    return generate(TENSOR_BYTES // dtype.itemsize).to(dtype)


# Codecs


def zipccl(mode: Mode, x: Tensor, out: Tensor) -> Codec:
    buffer = torch.zeros(ops.payload_capacity(x.numel(), x.dtype, mode), dtype=torch.uint8)

    def encode() -> Tensor:
        ops.encode_out(x, mode, payload=buffer)
        return buffer[: Header.read(buffer).payload_bytes]

    return Codec(encode, lambda payload: decode(payload, out=out))


def zstd(x: Tensor, out: Tensor) -> Codec:
    zstandard = pytest.importorskip("zstandard")
    compressor, decompressor = zstandard.ZstdCompressor(level=1), zstandard.ZstdDecompressor()
    data, target = x.view(torch.uint8).numpy(), out.view(torch.uint8).numpy()
    return Codec(
        encode=lambda: compressor.compress(data),
        decode=lambda payload: decompressor.stream_reader(payload).readinto(target),
    )


def blosc(codec: str, clevel: int, shuffle: str, x: Tensor, out: Tensor) -> Codec:
    blosc2 = pytest.importorskip("blosc2")
    options = blosc2.CParams(
        codec=blosc2.Codec[codec],
        clevel=clevel,
        typesize=x.itemsize,
        nthreads=1,
        filters=[blosc2.Filter[shuffle]],
    )
    data, target = x.view(torch.uint8).numpy(), out.view(torch.uint8).numpy()
    return Codec(
        encode=lambda: blosc2.compress2(data, cparams=options),
        decode=lambda payload: blosc2.decompress2(payload, dst=target, nthreads=1),
    )


def zip_nn(x: Tensor, out: Tensor) -> Codec:
    """Whose compression works in place, so it gets a copy, and whose decompression makes its own output."""
    zipnn = pytest.importorskip("zipnn")
    codec = zipnn.ZipNN(bytearray_dtype=str(x.dtype).removeprefix("torch."), threads=1)
    data, target = x.view(torch.uint8).numpy(), out.view(torch.uint8).numpy()

    def decode(payload: bytes) -> None:
        target[:] = np.frombuffer(codec.decompress(payload), dtype=np.uint8)

    return Codec(lambda: codec.compress(bytearray(data)), decode)


CODECS: dict[str, Callable[[Tensor, Tensor], Codec]] = {
    "zipccl-fast": functools.partial(zipccl, Mode.FAST),
    "zipccl-dense": functools.partial(zipccl, Mode.DENSE),
    "zstd-1": zstd,
    "blosc2-blosclz-5-shuffle": functools.partial(blosc, "BLOSCLZ", 5, "SHUFFLE"),
    "blosc2-zstd-1-shuffle": functools.partial(blosc, "ZSTD", 1, "SHUFFLE"),
    "blosc2-lz4-5-bitshuffle": functools.partial(blosc, "LZ4", 5, "BITSHUFFLE"),
    "zipnn": zip_nn,
}


# Bench


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("direction", ["encode", "decode"])
@pytest.mark.parametrize("data", DATA)
def test_codec(benchmark: Any, data: str, direction: str, codec: str) -> None:
    x = make_data(data)
    out = torch.zeros_like(x)
    subject = CODECS[codec](x, out)
    payload = subject.encode()
    subject.decode(payload)
    wrong = int((x.view(torch.uint8) != out.view(torch.uint8)).sum())
    assert wrong == 0, f"{codec} on {data}: {wrong} bytes wrong"
    run = subject.encode if direction == "encode" else functools.partial(subject.decode, payload)
    benchmark.group = f"{data} {direction}"
    benchmark.pedantic(run, rounds=ROUNDS, warmup_rounds=2)
    benchmark.extra_info |= {
        "data": data,
        "codec": codec,
        "direction": direction,
        "dtype": str(x.dtype).removeprefix("torch."),
        "numel": x.numel(),
        "bytes": x.nbytes,
        "ratio": x.nbytes / len(payload),
        "wrong": wrong,
    }
    if benchmark.stats:
        benchmark.extra_info["gbps"] = x.nbytes / benchmark.stats.stats.median / 1e9
