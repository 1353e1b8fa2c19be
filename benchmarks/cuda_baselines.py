"""GPU codecs that bench_cuda.py measures ours against: nvCOMP's ANS and Bitcomp, a 4-bit code in Triton.

What needs doing once a tensor size is in ``prepare``, which no time includes: buffers, configurations,
and the choice of the 4-bit code's window, which its literature makes offline as well.
"""

# mypy: allow-untyped-defs
# Triton's kernels have no types; everything else here has.

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

try:
    import triton  # type: ignore[import-not-found,unused-ignore]
    import triton.language as tl  # type: ignore[import-not-found,unused-ignore]
except ImportError:
    triton = None  # type: ignore[assignment,unused-ignore]


class Codec:
    """A codec as the table measures it, on torch's current stream, for tensors like ``prepare``'s."""

    name: str

    def available(self) -> str | None:
        """Why it cannot run here, in one line; None if it can."""
        return None

    def prepare(self, x: Tensor) -> None:
        """Everything that is done once, not with every tensor."""

    def encode(self, x: Tensor) -> Any:
        """What ``decode`` takes; it lasts until the next ``encode``."""
        raise NotImplementedError

    def decode(self, encoded: Any, out: Tensor) -> None:
        raise NotImplementedError

    def encoded_bytes(self, encoded: Any) -> int:
        """Waits for the device. OverflowError if ``encoded`` does not hold the whole tensor."""
        raise NotImplementedError


def baselines() -> list[Codec]:
    """New instances, for bf16. nvCOMP's must not outlive the CUDA context: do not keep them in a module."""
    return [NvComp("ANS"), NvComp("Bitcomp"), FourBit()]


class NvComp(Codec):
    """nvCOMP 6 through its Python API, as its manual has it for a round trip that never waits.

    bf16 is shown to it as ``<f2``, the only 16-bit float it knows: it has to be lossless all the same.
    """

    def __init__(self, algorithm: str) -> None:
        self.name, self.algorithm = f"nvCOMP {algorithm}", algorithm

    def available(self) -> str | None:
        try:
            self.nvcomp: Any = importlib.import_module("nvidia.nvcomp")
        except (ImportError, OSError) as error:
            return f"not installed (pip install nvidia-nvcomp-cu13): {error}"
        return None

    def prepare(self, x: Tensor) -> None:
        # bench_cuda.py's current stream is not the default one, whose handle, 0, might count as "none given".
        self.stream = torch.cuda.current_stream().cuda_stream
        self.codec = self.nvcomp.Codec(algorithm=self.algorithm, data_type="<f2", cuda_stream=self.stream)
        self.encoding = self.codec.compression_config(x.nbytes)
        self.decoding = self.codec.decompression_config(self.encoding)
        capacity = self.codec.get_max_comp_buffer_size(self._array(x.view(torch.float16)))
        self.buffer = torch.empty(capacity, dtype=torch.uint8, device=x.device)

    def _array(self, tensor: Tensor) -> Any:
        return self.nvcomp.as_array(tensor, cuda_stream=self.stream)

    def encode(self, x: Tensor) -> Any:
        # The array around the buffer is made anew: nvCOMP may shrink the one it is given to what it wrote.
        out = self._array(self.buffer)
        return self.codec.encode(
            self._array(x.view(torch.float16)), out=out, compression_config=self.encoding
        )

    def decode(self, encoded: Any, out: Tensor) -> None:
        target = self._array(out.view(torch.uint8))
        self.codec.decode(encoded, out=target, decompression_config=self.decoding)

    def encoded_bytes(self, encoded: Any) -> int:
        torch.cuda.current_stream().synchronize()
        return int(encoded.buffer_size)


# The 4-bit exponent code


WINDOW = 15  # exponents that have a code
ESCAPE_CODE = 15
CAPACITY_PART = 256  # room for one escape in so many elements
ESCAPE_BYTES = 5  # position, exponent
# Words of two elements that a program takes, its warps; ``prepare`` takes the fastest.
SHAPES = ((512, 4), (1024, 4), (2048, 4), (2048, 8), (4096, 8))


@dataclass(frozen=True)
class FourBitPayload:
    """The sections of a tensor of n elements."""

    residual: Tensor  # uint8[n]: sign and mantissa
    codes: Tensor  # uint8[n / 2]: top - exponent, or ESCAPE_CODE, of two elements
    num_escapes: Tensor  # int32[1]; more than there is room for: overflow
    positions: Tensor  # int32[capacity]: elements whose exponent has no code, in any order
    exponents: Tensor  # uint8[capacity]
    top: int  # the window's largest exponent


class FourBit(Codec):
    """bf16 as a byte of sign and mantissa and a 4-bit code of the exponent, in Triton.

    The kind of code that SplitZip and others describe, written for this table. One window for the tensor: the
    15 neighbouring exponents that hold most of a sample. Other exponents go to a bounded list, through an
    atomic counter. A list that overflows loses elements: ``encoded_bytes`` raises OverflowError.
    """

    name = "4-bit Triton"

    def available(self) -> str | None:
        return "not installed (pip install triton)" if triton is None else None

    def prepare(self, x: Tensor) -> None:
        n, device = x.numel(), x.device
        if x.dtype != torch.bfloat16 or n % 2 or n >= 2**31:
            raise ValueError(f"x: expected bfloat16, an even number below 2**31, got {n} of {x.dtype}")
        sample = x.view(torch.int16)[:: max(1, n >> 20)].to(torch.int32) >> 7 & 0xFF
        counts = torch.bincount(sample, minlength=256)
        capacity = n // CAPACITY_PART + 1024
        self.payload = FourBitPayload(
            residual=torch.empty(n, dtype=torch.uint8, device=device),
            codes=torch.empty(n // 2, dtype=torch.uint8, device=device),
            num_escapes=torch.zeros(1, dtype=torch.int32, device=device),
            positions=torch.empty(capacity, dtype=torch.int32, device=device),
            exponents=torch.empty(capacity, dtype=torch.uint8, device=device),
            top=int(counts.unfold(0, WINDOW, 1).sum(1).argmax()) + WINDOW - 1,
        )
        out = torch.empty_like(x)
        self.encode_shape = _fastest(lambda shape: self._encode(x, *shape))
        self.decode_shape = _fastest(lambda shape: self._decode(self.payload, out, *shape))

    def encode(self, x: Tensor) -> FourBitPayload:
        self._encode(x, *self.encode_shape)
        return self.payload

    def decode(self, encoded: FourBitPayload, out: Tensor) -> None:
        self._decode(encoded, out, *self.decode_shape)

    def _encode(self, x: Tensor, block: int, num_warps: int) -> None:
        p, num_words = self.payload, x.numel() // 2
        p.num_escapes.zero_()
        _encode_kernel[(triton.cdiv(num_words, block),)](
            x.view(torch.int32), p.residual.view(torch.int16), p.codes, p.num_escapes, p.positions,
            p.exponents, p.top, p.positions.numel(), num_words, WINDOW, ESCAPE_CODE, block,
            num_warps=num_warps,
        )  # fmt: skip

    def _decode(self, p: FourBitPayload, out: Tensor, block: int, num_warps: int) -> None:
        num_words, capacity = out.numel() // 2, p.positions.numel()
        _decode_kernel[(triton.cdiv(num_words, block),)](
            out.view(torch.int32), p.residual.view(torch.int16), p.codes, p.top, num_words, block,
            num_warps=num_warps,
        )  # fmt: skip
        _patch_kernel[(triton.cdiv(capacity, block),)](
            out.view(torch.int16), p.residual, p.num_escapes, p.positions, p.exponents, capacity, block,
            num_warps=num_warps,
        )  # fmt: skip

    def encoded_bytes(self, encoded: FourBitPayload) -> int:
        count, capacity = int(encoded.num_escapes), encoded.positions.numel()
        if count > capacity:
            raise OverflowError(f"{count} escapes, room for {capacity}")
        return encoded.residual.nbytes + encoded.codes.nbytes + count * ESCAPE_BYTES


def _fastest(call: Callable[[tuple[int, int]], None]) -> tuple[int, int]:
    return min(
        SHAPES, key=lambda shape: float(triton.testing.do_bench(lambda: call(shape), return_mode="median"))
    )


if triton is not None:

    @triton.jit
    def _escape(escaped, position, exponent, num_escapes, positions, exponents, capacity):
        slot = tl.atomic_add(num_escapes + tl.zeros_like(position), 1, mask=escaped, sem="relaxed")
        fits = escaped & (slot < capacity)
        tl.store(positions + slot, position, mask=fits)
        tl.store(exponents + slot, exponent.to(tl.uint8), mask=fits)

    @triton.jit
    def _encode_kernel(
        words, residual, codes, num_escapes, positions, exponents, top, capacity, num_words,
        WINDOW: tl.constexpr, ESCAPE_CODE: tl.constexpr, BLOCK: tl.constexpr,
    ):  # fmt: skip
        """A word holds two elements, the first in its low half; so do the halves and nibbles written."""
        index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        inside = index < num_words
        word = tl.load(words + index, mask=inside, other=0)
        sign_mantissa = word & 0x7F | word >> 8 & 0x7F80 | word >> 16 & 0x8000
        tl.store(residual + index, sign_mantissa.to(tl.int16), mask=inside)
        low, high = word >> 7 & 0xFF, word >> 23 & 0xFF
        low_escaped = inside & ((low > top) | (low <= top - WINDOW))
        high_escaped = inside & ((high > top) | (high <= top - WINDOW))
        low_code = tl.where(low_escaped, ESCAPE_CODE, top - low)
        high_code = tl.where(high_escaped, ESCAPE_CODE, top - high)
        tl.store(codes + index, (low_code | high_code << 4).to(tl.uint8), mask=inside)
        # Few blocks have an escape.
        if tl.max((low_escaped | high_escaped).to(tl.int32), axis=0) > 0:
            _escape(low_escaped, 2 * index, low, num_escapes, positions, exponents, capacity)
            _escape(high_escaped, 2 * index + 1, high, num_escapes, positions, exponents, capacity)

    @triton.jit
    def _decode_kernel(words, residual, codes, top, num_words, BLOCK: tl.constexpr):
        """Every element as if it had a code; _patch_kernel rewrites the others."""
        index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        inside = index < num_words
        sign_mantissa = tl.load(residual + index, mask=inside, other=0).to(tl.int32)
        code = tl.load(codes + index, mask=inside, other=0).to(tl.int32)
        low, high = top - (code & 15) & 0xFF, top - (code >> 4) & 0xFF
        word = sign_mantissa & 0x7F | (sign_mantissa & 0x7F80) << 8 | (sign_mantissa & 0x8000) << 16
        tl.store(words + index, word | low << 7 | high << 23, mask=inside)

    @triton.jit
    def _patch_kernel(elements, residual, num_escapes, positions, exponents, capacity, BLOCK: tl.constexpr):
        slot = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        used = (slot < tl.load(num_escapes)) & (slot < capacity)
        position = tl.load(positions + slot, mask=used, other=0)
        exponent = tl.load(exponents + slot, mask=used, other=0).to(tl.int32)
        sign_mantissa = tl.load(residual + position, mask=used, other=0).to(tl.int32)
        element = (sign_mantissa & 0x80) << 8 | exponent << 7 | sign_mantissa & 0x7F
        tl.store(elements + position, element.to(tl.int16), mask=used)
