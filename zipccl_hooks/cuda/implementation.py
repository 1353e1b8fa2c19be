"""The operators of ops.py on CUDA tensors. Nothing waits for the device, but where a docstring says so."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from ..errors import CorruptPayload, naming_peer
from ..format import DType, Header, Layout, Mode, cached_layout
from . import launch

_HERE = nullcontext()
CHECKSUM_WORDS = 1 << 24  # at a time: the sum is formed in int64 temporaries


def _on(device: int) -> AbstractContextManager[object]:
    """Makes a tensor's device the current one, where it is not."""
    return _HERE if torch._C._cuda_getDevice() == device else torch.cuda.device(device)


def encode_out(x: Tensor, lay: Layout, payload: Tensor) -> None:
    if payload.data_ptr() % 16:
        raise ValueError(f"payload: expected to start on 16 bytes, got {payload.data_ptr() % 16} beyond")
    with _on(x.get_device()):
        launch.encode(x, lay, payload)


def decode_out(payload: Tensor, dtype: DType, wire_mode: int, out: Tensor) -> None:
    """With the mode unknown (-1) waits for the header and raises CorruptPayload; else launch.corrupt_flag."""
    device = out.get_device()
    with _on(device):
        if wire_mode >= 0:
            launch.decode(payload, cached_layout(out.numel(), dtype, Mode(wire_mode)), out)
            return
        header = Header.read(payload)
        header.expect(dtype, out.numel())
        flag = torch.zeros(1, dtype=torch.int32, device=device)
        launch.decode(payload[: header.payload_bytes], header.layout, out, flag)
        if flag.item():
            raise CorruptPayload("payload: the dynamic part contradicts the static part")


def checksum(x: Tensor) -> Tensor:
    """For the public ``encode`` and ``decode``, which wait anyway: torch operations, not a kernel."""
    data = x.view(-1).view(torch.uint8)
    padded = torch.nn.functional.pad(data, (0, -data.numel() % 4)) if data.numel() % 4 else data
    padded = padded.clone() if padded.data_ptr() % 4 else padded
    words, mask = padded.view(torch.int32), 0xFFFFFFFF
    total = torch.zeros((), dtype=torch.int64, device=x.device)
    for start in range(0, words.numel(), CHECKSUM_WORDS):
        v = words[start : start + CHECKSUM_WORDS].to(torch.int64)
        index = torch.arange(start, start + len(v), dtype=torch.int64, device=x.device)
        v = (v + (index & mask) * 0x9E3779B1) & mask
        # 32 by 31 bits, so that the product stays below 2**63.
        v = ((v ^ (v >> 16)) * 0x7FEB352D) & mask
        total += (v ^ (v >> 15)).sum()
    return total & mask


def decode_sum_out(
    sources: list[Tensor], dtype: DType, scale: float, wire_mode: int, accumulate: bool, out: Tensor
) -> None:
    """Waits as decode_out does. Payloads of an unknown mode may have several."""
    with _on(out.get_device()):
        if wire_mode >= 0:
            lay = cached_layout(out.numel(), dtype, Mode(wire_mode))
            launch.decode_sum(sources, lay, scale, out, accumulate, None)
            return
        flags = torch.zeros(len(sources), dtype=torch.int32, device=out.device)
        terms, mode = [], Mode.RAW
        for k, source in enumerate(sources):
            term = source
            if source.dtype == torch.uint8:
                with naming_peer(k):
                    header = Header.read(source)
                    header.expect(dtype, out.numel())
                    if mode in (Mode.RAW, header.mode) and header.mode != Mode.RAW:
                        mode = header.mode
                    else:
                        term = torch.empty_like(out)
                        launch.decode(source[: header.payload_bytes], header.layout, term, flags[k : k + 1])
            terms.append(term)
        launch.decode_sum(terms, cached_layout(out.numel(), dtype, mode), scale, out, accumulate, flags)
        for k in flags.nonzero().view(-1).tolist():
            raise CorruptPayload("payload: the dynamic part contradicts the static part", peer=k)
