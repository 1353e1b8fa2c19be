"""``torch.ops.zipccl``: the codec as PyTorch operators. Schema, fake, implementations, in that order.

Buffers have sizes that follow from shapes, so nothing here depends on data under ``torch.compile``: a
payload buffer holds ``payload_capacity`` bytes, and the payload's header tells how many are used.
Implementations are registered on a plain ``torch.library.Library``: about 5 us of dispatch a call,
where ``torch.library.custom_op`` takes about 25. None communicates: Inductor may reorder them freely.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .cuda import implementation
from .errors import naming_peer
from .format import DTYPES, GROUP, HEADER_BYTES, TILE, DType, Header, Layout, Mode, cached_layout, layout

if TYPE_CHECKING:
    import numpy as np

# What decode_sum adds up: the dtypes whose sums the collectives form.
SUM_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Elements per worker that decode_sum decodes before it adds them, so that both stay in the L2 cache.
SUM_BLOCK = GROUP * TILE * 8

_library = torch.library.Library("zipccl", "DEF")
# Not "mode": torch's auto_functionalized, which compiles the mutating ops, has a parameter of that name.
_library.define("encode(Tensor x, int wire_mode) -> Tensor")
_library.define("encode.out(Tensor x, int wire_mode, *, Tensor(a!) payload) -> ()")
_library.define("decode(Tensor payload, SymInt numel, ScalarType dtype) -> Tensor")
_library.define("decode.out(Tensor payload, *, int wire_mode=-1, Tensor(a!) out) -> ()")
_library.define("checksum(Tensor x) -> Tensor")
_library.define("decode_sum(Tensor[] sources, SymInt numel, ScalarType dtype, float scale=1.0) -> Tensor")
_library.define(
    "decode_sum.out(Tensor[] sources, float scale=1.0, *, bool accumulate=False, int wire_mode=-1, "
    "Tensor(a!) out) -> ()"
)


@cache
def format_dtype(dtype: torch.dtype) -> DType:
    """What the wire format knows of a torch dtype; TypeError where it cannot hold it."""
    known = DTYPES.get(str(dtype).removeprefix("torch."))
    if known is None:
        raise TypeError(f"dtype: expected one of {', '.join(DTYPES)}, got {dtype}")
    return known


def payload_capacity(numel: int, dtype: torch.dtype, mode: Mode) -> int:
    """Bytes of a buffer that holds any payload of ``numel`` elements of ``dtype`` in ``mode``."""
    return layout(numel, format_dtype(dtype), mode).max_bytes


def _plain_cuda(x: Tensor) -> bool:
    """Whether nothing would watch an operator on ``x``: then its dispatch is spared."""
    return (
        type(x) in (Tensor, torch.nn.Parameter)
        and x.is_cuda
        and not torch.compiler.is_compiling()
        and torch._C._len_torch_dispatch_stack() == 0
    )


def encode(x: Tensor, wire_mode: int) -> Tensor:
    """``x``, any shape, as a payload in exactly ``wire_mode`` (format.Mode).

    Returns uint8[payload_capacity], zeros behind the payload. Mode raw takes every dtype
    of the format, the others bfloat16, float16, float32, float8_e4m3fn and float8_e5m2 (ValueError).
    """
    return torch.ops.zipccl.encode.default(x, wire_mode)


def encode_out(x: Tensor, wire_mode: int, *, payload: Tensor) -> None:
    """``encode`` into ``payload``, a contiguous uint8 buffer of at least payload_capacity bytes.

    The buffer is only written where the payload is.
    """
    if _plain_cuda(x):
        return _encode_out_cuda(x, wire_mode, payload=payload)
    torch.ops.zipccl.encode.out(x, wire_mode, payload=payload)


def decode(payload: Tensor, numel: int, dtype: torch.dtype) -> Tensor:
    """The flat tensor in ``payload``, a payload or a longer buffer that starts with one."""
    return torch.ops.zipccl.decode.default(payload, numel, dtype)


def decode_out(payload: Tensor, *, wire_mode: int = -1, out: Tensor) -> None:
    """``decode`` into ``out``, contiguous, of the encoded tensor's dtype and numel.

    On CUDA a caller who knows the payload's mode passes it: then nothing waits for the device, and a
    corrupt payload sets ``cuda.launch.corrupt_flag`` instead of raising.
    """
    if _plain_cuda(out):
        return _decode_out_cuda(payload, wire_mode=wire_mode, out=out)
    torch.ops.zipccl.decode.out(payload, wire_mode=wire_mode, out=out)


def decode_sum_out(
    sources: Sequence[Tensor],
    *,
    scale: float = 1.0,
    accumulate: bool = False,
    wire_mode: int = -1,
    out: Tensor,
) -> None:
    """``out = sum(source * scale)``: products in out's dtype, summed in fp32 in order, rounded once.

    With ``accumulate``, what stands in ``out`` comes first, not scaled.

    A source is a payload (uint8) of out's dtype and numel, or a plain tensor of out's dtype: a rank's
    own part is never encoded. Each product is rounded before it is added, as in NCCL's AVG and
    PREMUL_SUM and in DDP, so that two ranks get their bits. ``out`` is contiguous float32, bfloat16 or
    float16, and may be one of the sources. The ``peer`` of a ZipcclError is the index of the source at fault.
    """
    terms = list(sources)
    if _plain_cuda(out):
        return _decode_sum_out_cuda(terms, scale, accumulate=accumulate, wire_mode=wire_mode, out=out)
    torch.ops.zipccl.decode_sum.out(terms, scale, accumulate=accumulate, wire_mode=wire_mode, out=out)


def checksum(x: Tensor) -> Tensor:
    """The format's checksum of a contiguous tensor's bytes, int64[] below 2**32, on x's device."""
    return torch.ops.zipccl.checksum.default(x)


# Fake


@torch.library.register_fake("zipccl::encode", lib=_library)
def _(x: Tensor, wire_mode: int) -> Tensor:
    return x.new_empty(payload_capacity(x.numel(), x.dtype, Mode(wire_mode)), dtype=torch.uint8)


@torch.library.register_fake("zipccl::decode", lib=_library)
def _(payload: Tensor, numel: int, dtype: torch.dtype) -> Tensor:
    return payload.new_empty(numel, dtype=dtype)


@torch.library.register_fake("zipccl::checksum", lib=_library)
def _(x: Tensor) -> Tensor:
    return x.new_empty((), dtype=torch.int64)


@torch.library.register_fake("zipccl::decode_sum", lib=_library)
def _(sources: list[Tensor], numel: int, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
    return sources[0].new_empty(numel, dtype=dtype)


@torch.library.register_fake("zipccl::encode.out", lib=_library)
def _(x: Tensor, wire_mode: int, *, payload: Tensor) -> None: ...


@torch.library.register_fake("zipccl::decode.out", lib=_library)
def _(payload: Tensor, *, wire_mode: int = -1, out: Tensor) -> None: ...


@torch.library.register_fake("zipccl::decode_sum.out", lib=_library)
def _(
    sources: list[Tensor],
    scale: float = 1.0,
    *,
    accumulate: bool = False,
    wire_mode: int = -1,
    out: Tensor,
) -> None: ...


# CPU


_BITS = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32}


def _bits(x: Tensor, dtype: DType) -> np.ndarray[Any, Any]:
    """The bits of a contiguous tensor as a flat array: of its own width where that is coded, else bytes."""
    return x.detach().reshape(-1).view(_BITS[dtype.itemsize] if dtype.exponent_bits else torch.uint8).numpy()


def _aligned(payload: Tensor) -> Tensor:
    """The kernels read a payload's words in place; a slice that starts elsewhere is copied."""
    return payload if payload.data_ptr() % 4 == 0 and payload.is_contiguous() else payload.clone()


def _checked_layout(payload: Tensor, out: Tensor) -> tuple[np.ndarray[Any, Any], Layout]:
    """(payload's bytes, layout), once the header is found to describe ``out``."""
    _check_uint8(payload)
    data = _aligned(payload.reshape(-1)).numpy()
    header = Header.unpack(data[:HEADER_BYTES].tobytes(), len(data))
    header.expect(format_dtype(out.dtype), out.numel())
    return data[: header.payload_bytes], header.layout


def _check_uint8(payload: Tensor) -> None:
    if payload.dtype != torch.uint8:
        raise TypeError(f"payload: expected torch.uint8, got {payload.dtype}")


def _check_contiguous(name: str, tensor: Tensor) -> None:
    if not tensor.is_contiguous():
        raise ValueError(f"{name}: expected a contiguous tensor, got strides {tensor.stride()}")


def _encode_layout(x: Tensor, wire_mode: int, payload: Tensor) -> Layout:
    """The layout of what is to be encoded, once ``payload`` is found to hold it."""
    lay = cached_layout(x.numel(), format_dtype(x.dtype), Mode(wire_mode))
    _check_contiguous("payload", payload)
    if payload.dtype != torch.uint8 or payload.numel() < lay.max_bytes or payload.data_ptr() % 4:
        raise ValueError(
            f"payload: expected torch.uint8 of at least {lay.max_bytes} elements starting on 4 bytes, "
            f"got {payload.dtype} of {payload.numel()} at {payload.data_ptr() % 4}"
        )
    return lay


def _encode_out_cpu(x: Tensor, wire_mode: int, *, payload: Tensor) -> None:
    from . import cpu

    lay = _encode_layout(x, wire_mode, payload)
    cpu.encode(_bits(x.contiguous(), lay.dtype), lay, payload.view(-1).numpy())


def _decode_out_cpu(payload: Tensor, *, wire_mode: int = -1, out: Tensor) -> None:
    from . import cpu

    _check_contiguous("out", out)
    data, lay = _checked_layout(payload, out)
    cpu.decode(data, lay, _bits(out, lay.dtype))


def _checksum_cpu(x: Tensor) -> Tensor:
    from . import cpu

    _check_contiguous("x", x)
    return torch.tensor(cpu.checksum(_bits(x, format_dtype(x.dtype)).view("uint8")))


def _check_sum(sources: list[Tensor], out: Tensor) -> None:
    if out.dtype not in SUM_DTYPES:
        raise TypeError(f"out: expected one of {SUM_DTYPES}, got {out.dtype}")
    if not sources:
        raise ValueError("sources: expected at least one tensor, got none")
    _check_contiguous("out", out)
    for source in sources:
        if source.dtype != torch.uint8 and (source.dtype, source.numel()) != (out.dtype, out.numel()):
            raise ValueError(
                f"sources: expected payloads or {out.numel()} elements of {out.dtype}, "
                f"got {source.numel()} of {source.dtype}"
            )


def _decode_sum_out_cpu(
    sources: list[Tensor],
    scale: float = 1.0,
    *,
    accumulate: bool = False,
    wire_mode: int = -1,
    out: Tensor,
) -> None:
    from . import cpu

    _check_sum(sources, out)
    flat = out.view(-1)
    parsed: list[tuple[np.ndarray[Any, Any], Layout] | Tensor] = []
    for k, source in enumerate(sources):
        if source.dtype == torch.uint8:
            with naming_peer(k):
                parsed.append(_checked_layout(source, out))
        else:
            parsed.append(source.reshape(-1))
    block = SUM_BLOCK * torch.get_num_threads()
    decoded, total = (
        flat.new_empty(min(block, len(flat))),
        flat.new_empty(min(block, len(flat)), dtype=torch.float32),
    )
    for start in range(0, len(flat), block):
        stop = min(start + block, len(flat))
        acc = total[: stop - start]
        if accumulate:
            acc.copy_(flat[start:stop])
        for k, operand in enumerate(parsed):
            if isinstance(operand, Tensor):
                term = operand[start:stop]
            else:
                term, (data, lay) = decoded[: stop - start], operand
                with naming_peer(k):
                    cpu.decode(data, lay, _bits(term, lay.dtype), start)
            term = term if scale == 1.0 else term * scale
            acc.add_(term) if k or accumulate else acc.copy_(term)
        flat[start:stop].copy_(acc)


# CUDA


def _encode_out_cuda(x: Tensor, wire_mode: int, *, payload: Tensor) -> None:
    lay = _encode_layout(x, wire_mode, payload)
    implementation.encode_out(x.contiguous(), lay, payload)


def _decode_out_cuda(payload: Tensor, *, wire_mode: int = -1, out: Tensor) -> None:
    _check_contiguous("out", out)
    _check_uint8(payload)
    flat = payload if payload.dim() == 1 and payload.is_contiguous() else payload.reshape(-1)
    implementation.decode_out(flat, format_dtype(out.dtype), wire_mode, out)


def _checksum_cuda(x: Tensor) -> Tensor:
    _check_contiguous("x", x)
    return implementation.checksum(x.detach())


def _decode_sum_out_cuda(
    sources: list[Tensor],
    scale: float = 1.0,
    *,
    accumulate: bool = False,
    wire_mode: int = -1,
    out: Tensor,
) -> None:
    _check_sum(sources, out)
    flat = [source.contiguous() for source in sources]
    implementation.decode_sum_out(flat, format_dtype(out.dtype), scale, wire_mode, accumulate, out)


# Functional forms, on every device


def _encode(x: Tensor, wire_mode: int) -> Tensor:
    capacity = payload_capacity(x.numel(), x.dtype, Mode(wire_mode))
    payload = torch.zeros(capacity, dtype=torch.uint8, device=x.device)
    encode_out(x, wire_mode, payload=payload)
    return payload


def _decode(payload: Tensor, numel: int, dtype: torch.dtype) -> Tensor:
    out = torch.empty(numel, dtype=dtype, device=payload.device)
    decode_out(payload, out=out)
    return out


def _decode_sum(sources: list[Tensor], numel: int, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
    out = torch.empty(numel, dtype=dtype, device=sources[0].device if sources else None)
    decode_sum_out(sources, scale=scale, out=out)
    return out


for _name, _cpu, _cuda in (
    ("encode.out", _encode_out_cpu, _encode_out_cuda),
    ("decode.out", _decode_out_cpu, _decode_out_cuda),
    ("checksum", _checksum_cpu, _checksum_cuda),
    ("decode_sum.out", _decode_sum_out_cpu, _decode_sum_out_cuda),
):
    _library.impl(_name, _cpu, "CPU")
    _library.impl(_name, _cuda, "CUDA")
for _name, _function in (("encode", _encode), ("decode", _decode), ("decode_sum", _decode_sum)):
    _library.impl(_name, _function, "CPU")
    _library.impl(_name, _function, "CUDA")
