"""Tensors that between them take every branch of the codec; shared by tests and benchmarks.

``corpus(dtype, numel)`` names them. All are deterministic: a tensor's seed is its name, dtype and size.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, float32

from zipccl_hooks.format import DTYPES, TILE, DType

CODED = tuple(getattr(torch, d.name) for d in DTYPES.values() if d.exponent_bits)
STORED = tuple(getattr(torch, d.name) for d in DTYPES.values() if not d.exponent_bits)
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

_Maker = Callable[[int, torch.dtype, torch.Generator], Tensor]


def known(dtype: torch.dtype) -> DType:
    return DTYPES[str(dtype).removeprefix("torch.")]


def name_of(value: object) -> str | None:
    """Readable pytest id of a dtype; other values keep pytest's own."""
    return str(value).removeprefix("torch.") if isinstance(value, torch.dtype) else None


def bits(x: Tensor) -> np.ndarray:
    """A tensor's bits as a flat unsigned array: equal bits, where equal values are not enough."""
    flat = x.detach().contiguous().reshape(-1)
    if x.dtype.itemsize > 8:
        return flat.view(torch.uint8).numpy()
    return flat.view(BITS[x.dtype.itemsize]).numpy().view(f"u{x.dtype.itemsize}")


def from_bits(pattern: Tensor, dtype: torch.dtype) -> Tensor:
    """int64 bit patterns as a tensor of ``dtype``."""
    return pattern.to(BITS[dtype.itemsize]).view(dtype)


def compose(sign: Tensor | int, exponent: Tensor, mantissa: Tensor | int, dtype: torch.dtype) -> Tensor:
    """A tensor of a coded dtype from its three fields, int64."""
    mantissa_bits = 8 * dtype.itemsize - 1 - known(dtype).exponent_bits
    return from_bits(sign << (8 * dtype.itemsize - 1) | exponent << mantissa_bits | mantissa, dtype)


def random_bits(numel: int, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """NaN payloads, infinities, subnormals: every pattern is as likely as another."""
    octets = torch.randint(256, (numel * dtype.itemsize,), generator=generator, dtype=torch.uint8)
    return octets % 2 == 1 if dtype == torch.bool else octets.view(dtype)


def gaussian(numel: int, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    return (torch.randn(numel, generator=generator) * 0.02).to(dtype)


def half_zeros(numel: int, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """As behind a ReLU."""
    zero = torch.rand(numel, generator=generator) < 0.5
    return torch.where(zero, torch.zeros(()), torch.randn(numel, generator=generator)).to(dtype)


def all_zeros(numel: int, dtype: torch.dtype, _: torch.Generator) -> Tensor:
    return torch.zeros(numel, dtype=dtype)


def negative_zeros(numel: int, dtype: torch.dtype, _: torch.Generator) -> Tensor:
    return compose(1, torch.zeros(numel, dtype=torch.int64), 0, dtype)


def constant(numel: int, dtype: torch.dtype, _: torch.Generator) -> Tensor:
    return torch.full((numel,), -0.375).to(dtype)


def far_exponents(numel: int, dtype: torch.dtype, _: torch.Generator) -> Tensor:
    """The smallest and the largest exponent by turns: none near the mean, every tile is RAW."""
    largest = 2 ** known(dtype).exponent_bits - 2
    return compose(0, torch.where(torch.arange(numel) % 2 == 0, 1, largest), 0, dtype)


def subnormals(numel: int, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    mantissa = torch.randint(2**2, (numel,), generator=generator)
    return compose(mantissa & 1, torch.zeros(numel, dtype=torch.int64), mantissa, dtype)


def exponent_ramp(numel: int, dtype: torch.dtype, _: torch.Generator) -> Tensor:
    """Every exponent with every neighbour: window edges and wrap-around modulo 256."""
    step = torch.arange(numel)
    return compose(step % 2, step // 64 % 2 ** known(dtype).exponent_bits, step % 4, dtype)


def laplace(numel: int, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    u = torch.rand(numel, generator=generator) - 0.5
    return (-0.01 * u.sign() * torch.log1p(-2 * u.abs())).to(dtype)


def student_t(numel: int, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Two degrees of freedom: tails far beyond the window, a few exponents on the last level."""
    chi = -torch.log(1 - torch.rand(numel, generator=generator))
    return (torch.randn(numel, generator=generator) * 0.01 / chi.sqrt()).to(dtype)


def mixed_layers(numel: int, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """A bucket of layers of 1500 elements whose sigmas spread over sixteen octaves."""
    sigma = 2.0 ** -((torch.arange(numel) // 1500) * 5 % 16)
    return (torch.randn(numel, generator=generator) * sigma).to(dtype)


def few_zeros(numel: int, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Tiles with as many zeros as the ZERO flag needs in some mode, and one fewer."""
    x = 1 + torch.rand(numel, generator=generator)
    tile, position = torch.arange(numel) // TILE, torch.arange(numel) % TILE
    count = torch.tensor([7, 8, 34, 35, 1023])[tile % 5]
    return torch.where(position * 7 % TILE < count, torch.zeros(()), x).to(dtype)


def zero_run(numel: int, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Zeros from the middle of a tile to the middle of the next but one, as padding leaves them."""
    position = torch.arange(numel) % (5 * TILE)
    x = torch.randn(numel, generator=generator)
    return torch.where((position >= 700) & (position < 2500), torch.zeros(()), x).to(dtype)


def bf16_in_fp32(numel: int, _: torch.dtype, generator: torch.Generator) -> Tensor:
    """Gradients of mixed precision before they are reduced."""
    return gaussian(numel, torch.bfloat16, generator).to(float32)


def sum_of_2(numel: int, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    return bf16_in_fp32(numel, dtype, generator) + bf16_in_fp32(numel, dtype, generator)


def sum_of_8(numel: int, _: torch.dtype, generator: torch.Generator) -> Tensor:
    return sum((gaussian(numel, torch.bfloat16, generator).to(float32) for _ in range(8)), torch.zeros(numel))


def odd_low_bits(numel: int, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """bf16 values in fp32, one in about a hundred of them with low bits: the low escapes."""
    odd = torch.rand(numel, generator=generator) < 0.01
    return torch.where(odd, gaussian(numel, float32, generator), bf16_in_fp32(numel, dtype, generator))


def low_width_ties(numel: int, _: torch.dtype, generator: torch.Generator) -> Tensor:
    """Tile t needs t % 16 low bits, but for 31 elements that need one more: both widths cost the same."""
    tile, position = torch.arange(numel) // TILE % 16, torch.arange(numel) % TILE
    width = tile + (position * 7 % TILE < 31)
    lowest = torch.where(width > 0, 1 << (16 - width), 0)
    return from_bits(
        gaussian(numel, torch.bfloat16, generator).view(torch.int16).long() << 16 | lowest, float32
    )


ANY: tuple[_Maker, ...] = (
    gaussian, half_zeros, all_zeros, negative_zeros, constant, far_exponents, random_bits, subnormals,
    exponent_ramp, laplace, student_t, mixed_layers, few_zeros, zero_run,
)  # fmt: skip
FP32: tuple[_Maker, ...] = (bf16_in_fp32, sum_of_2, sum_of_8, odd_low_bits, low_width_ties)


def corpus(dtype: torch.dtype, numel: int) -> dict[str, Tensor]:
    """The tensors of a coded dtype, by name."""
    return {
        make.__name__: make(numel, dtype, _generator(make.__name__, dtype, numel))
        for make in (*ANY, *(FP32 if dtype == float32 else ()))
    }


def tensor(make: _Maker, dtype: torch.dtype, numel: int) -> Tensor:
    """One of the makers' tensors."""
    return make(numel, dtype, _generator(make.__name__, dtype, numel))


def _generator(*key: object) -> torch.Generator:
    return torch.Generator().manual_seed(zlib.crc32(repr(key).encode()))


def golden(dtype: torch.dtype) -> Tensor:
    """Three tiles and 77 elements in integer arithmetic only, so that no library's randn or exp matters.

    Exponents with geometric tails, every eighth upwards; the same with every third element 0; random bits.
    In fp32 the low bits are 0, but for the upper three of the first tile and one odd element in 32 of the
    first two.
    """
    numel = 3 * TILE + 77
    words = np.random.PCG64(len(known(dtype).name)).random_raw(numel)
    word = torch.from_numpy((words >> np.uint64(1)).astype(np.int64))
    tail = torch.from_numpy(np.bitwise_count((words & -words) - np.uint64(1)).astype(np.int64))
    tile = torch.arange(numel) // TILE
    zero = (tile == 1) & (torch.arange(numel) % 3 == 0)
    mantissa_bits = 8 * dtype.itemsize - 1 - known(dtype).exponent_bits
    center, largest = 2 ** (known(dtype).exponent_bits - 1) - 1, 2 ** known(dtype).exponent_bits - 1
    upwards = torch.where(torch.arange(numel) % 8 == 5, tail, -tail)
    exponent = torch.where(zero, 0, (center + upwards).clamp(1, largest))
    mantissa = torch.where(zero, 0, word >> 20 & 2**mantissa_bits - 1)
    if known(dtype).low_bits:
        clear = torch.where(tile == 0, ~0x1FFF, ~0xFFFF)
        mantissa &= torch.where((tile < 2) & (torch.arange(numel) % 32 != 5), clear, -1)
    pattern = (word >> 50 & 1) << (8 * dtype.itemsize - 1) | exponent << mantissa_bits | mantissa
    return from_bits(torch.where(tile == 2, word >> 10, pattern), dtype)
