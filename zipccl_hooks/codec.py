"""``encode`` and ``decode``: one tensor to one payload and back, for users; the collectives use ops.py."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from . import ops
from .config import MODES
from .errors import CorruptPayload
from .format import HEADER_BYTES, MAX_DIMS, Header, Mode, max_encoded_bytes


def resolve_mode(mode: str, dtype: torch.dtype) -> Mode:
    """The wire mode of a ``mode`` argument; "auto" is the densest that the dtype has.

    Raises ValueError for an unknown name, TypeError for a dtype that the format cannot hold.
    """
    if mode not in MODES:
        raise ValueError(f"mode: expected one of {MODES}, got {mode!r}")
    if not ops.format_dtype(dtype).exponent_bits:
        return Mode.RAW
    return Mode.DENSE if mode == "auto" else Mode[mode.upper()]


def encode_into(x: Tensor, mode: Mode, payload: Tensor) -> Header:
    """Encodes ``x`` into a buffer of payload_capacity bytes; returns the header of what was written.

    Falls back to mode raw where coding does not shrink ``x``: at most its size plus the header is used.
    """
    ops.encode_out(x, mode, payload=payload)
    header = Header.read(payload)
    if mode != Mode.RAW and header.payload_bytes >= max_encoded_bytes(header.numel, header.dtype):
        ops.encode_out(x, Mode.RAW, payload=payload)
        header = Header.read(payload)
    return header


def seal(header: Header, x: Tensor, payload: Tensor) -> None:
    """Adds the checksum of ``x``, contiguous, to the header at the start of its payload."""
    header = header.sealed(int(ops.checksum(x)))
    packed = torch.frombuffer(bytearray(header.pack()), dtype=torch.uint8)
    payload[:HEADER_BYTES] = packed.to(payload.device)


def check_seal(header: Header, x: Tensor) -> None:
    """Raises CorruptPayload where a header has a checksum that is not that of ``x``, the decoded tensor."""
    if header.checksum is not None and header.sealed(int(ops.checksum(x))) != header:
        raise CorruptPayload("payload checksum: the tensor or the header is damaged")


def encode(x: Tensor, *, mode: str = "auto") -> Tensor:
    """Losslessly compresses a tensor.

    Args:
        x: any shape of up to 8 dimensions, any device with a codec. bfloat16, float16, float32,
            float8_e4m3fn and float8_e5m2 are compressed, other dtypes stored as they are.
        mode: "fast" (3-bit exponent code; bf16 ratio about 1.43), "dense" (levelled 2-bit code, 1.49),
            "raw", or "auto" for the densest.

    Returns:
        uint8[n], self-describing, n at most ``x.nbytes + 128``.

    Raises:
        TypeError: ``x`` is not a tensor, or its dtype has no place in the format.
        ValueError: unknown mode, or more than 8 dimensions.
    """
    if not isinstance(x, Tensor):
        raise TypeError(f"x: expected a torch.Tensor, got {type(x).__name__}")
    if x.dim() > MAX_DIMS:
        raise ValueError(f"x: expected at most {MAX_DIMS} dimensions, got {x.dim()}")
    wire_mode, x = resolve_mode(mode, x.dtype), x.detach()
    buffer = torch.empty(
        ops.payload_capacity(x.numel(), x.dtype, wire_mode), dtype=torch.uint8, device=x.device
    )
    header = replace(encode_into(x, wire_mode, buffer), shape=tuple(x.shape))
    payload = buffer[: header.payload_bytes].clone()
    seal(header, x.contiguous(), payload)
    return payload


def decode(payload: Tensor, *, out: Tensor | None = None) -> Tensor:
    """The tensor that ``encode`` was given, bit for bit, checked against the checksum.

    Args:
        payload: uint8[n], exactly what ``encode`` returned.
        out: where to decode to, of the encoded dtype and number of elements; any strides.

    Returns:
        ``out``, or a new tensor of the encoded shape on the payload's device.

    Raises:
        CorruptPayload: damaged, truncated or foreign data.
        FormatMismatch: a payload of another format version.
        TypeError, ValueError: ``payload`` is not a flat uint8 tensor, or ``out`` does not fit.
    """
    if not isinstance(payload, Tensor) or payload.dtype != torch.uint8:
        got = payload.dtype if isinstance(payload, Tensor) else type(payload).__name__
        raise TypeError(f"payload: expected a torch.uint8 tensor, got {got}")
    if payload.dim() != 1:
        raise ValueError(f"payload: expected 1 dimension, got shape {tuple(payload.shape)}")
    header = Header.read(payload)
    if header.payload_bytes != payload.numel():
        raise CorruptPayload(f"payload size: expected {header.payload_bytes} bytes, got {payload.numel()}")
    dtype = getattr(torch, header.dtype.name)
    if not (out is None or isinstance(out, Tensor)):
        raise TypeError(f"out: expected a torch.Tensor, got {type(out).__name__}")
    if out is not None and (out.dtype != dtype or out.numel() != header.numel):
        raise ValueError(
            f"out: expected {header.numel} elements of {dtype}, got {out.numel()} of {out.dtype}"
        )
    result = out
    if result is None or not result.is_contiguous():
        result = torch.empty(header.shape, dtype=dtype, device=payload.device)
    ops.decode_out(payload, out=result)
    check_seal(header, result)
    if out is not None and result is not out:
        out.copy_(result.view(out.shape))
        return out
    return result
