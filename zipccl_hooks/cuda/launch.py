"""Launchers: torch tensors to kernel arguments, on torch's current stream, without waiting for the device.

A kernel is compiled to PTX once for a dtype, mode and compute capability, kept on disk (the second
process does not start Numba's compiler), and launched through the driver with its arguments packed
into one buffer: a few microseconds, where Numba's own launch of torch tensors takes a hundred.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib
import importlib.metadata
import importlib.util
import os
import re
import struct
import tempfile
import threading
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..config import cache_directory
from ..errors import CorruptPayload
from ..format import DTYPES, GROUP, HEADER_BYTES, Header, Layout, Mode, cached_layout
from . import ACCUMULATE_WIDE, MAX_SOURCES, SCALED, SCAN_HEAD, TARGET_WIDE, THREADS

MIN_CAPABILITY = (8, 0)  # redux.sync, and L1 hints on loads
ARGUMENTS = {"encode": 10, "decode": 12, "decode_sum": 38, "stamp": 2, "rest": 10}  # of the kernels
# Registers a thread may use, of fp32 and of other dtypes. By itself the compiler takes more, and fewer blocks
# fit a multiprocessor; with fewer it keeps values in local memory. docs/kernels.md has what was tried.
MAX_REGISTERS = {
    "encode": (64, 48),
    "decode": (48, 32),
    "decode_sum": (80, 64),
    "stamp": (40, 40),
    "rest": (40, 40),
}


@cache
def missing() -> str | None:
    """Why the kernels cannot run here, in one line; None if they can."""
    if not torch.cuda.is_available():
        return "no CUDA device"
    for package in ("numba_cuda", "cuda"):
        if importlib.util.find_spec(package) is None:
            return f"package {package} is not installed: pip install zipccl_hooks[cu13], or [cu12]"
    return None


# Compilation


def _sources() -> bytes:
    here = Path(__file__).parent
    return b"".join(path.read_bytes() for path in sorted((*here.glob("*.py"), here.parent / "format.py")))


def compiled_ptx(kind: str, dtype_name: str, mode: Mode, capability: tuple[int, int]) -> str:
    """PTX of one of the kernels for a dtype and mode; from disk if these sources made it before."""
    key = hashlib.sha256(_sources())
    key.update(importlib.metadata.version("numba-cuda").encode())
    name = (
        f"{kind}-{dtype_name}-{mode.name.lower()}-{capability[0]}{capability[1]}-{key.hexdigest()[:16]}.ptx"
    )
    path = cache_directory() / name
    try:
        return path.read_text()
    except OSError:
        pass
    from . import _jit

    module = importlib.import_module(f".{kind}", __package__)
    text = _jit.compile_ptx(module.make(DTYPES[dtype_name], mode), ARGUMENTS[kind], capability)
    wide, narrow = MAX_REGISTERS[kind]
    registers = wide if DTYPES[dtype_name].low_bits else narrow
    # The compiler may be newer than the driver: ask for the oldest PTX that knows the target.
    text = re.sub(r"\.version \S+", f".version {'7.8' if capability < (10, 0) else '8.8'}", text, count=1)
    text = re.sub(r"(\.visible \.entry \w+\([^)]*\)\n)", rf"\g<1>.maxnreg {registers}\n", text)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
            file.write(text)
        os.replace(file.name, path)  # another process may write the same
    except OSError:
        pass  # a read-only home only costs the compilation again
    return text


def _checked(result: tuple[Any, ...]) -> Any:
    """The value of a driver call; RuntimeError with the driver's name of what failed."""
    from cuda.bindings import driver

    status, *values = result
    if status != driver.CUresult.CUDA_SUCCESS:
        raise RuntimeError(f"CUDA driver: {status.name}")
    return values[0] if values else None


@cache
def _function(kind: str, dtype_name: str, mode: Mode, device: int) -> Any:
    """The loaded kernel on a device."""
    from cuda.bindings import driver

    if (why := missing()) is not None:
        raise RuntimeError(f"zipccl CUDA codec: {why}")
    capability = torch.cuda.get_device_capability(device)
    if capability < MIN_CAPABILITY:
        raise RuntimeError(
            f"zipccl CUDA codec: needs compute capability 8.0, device {device} has {capability}"
        )
    text = compiled_ptx(kind, dtype_name, mode, capability)
    (entry,) = re.findall(r"\.visible \.entry (\w+)\(", text)
    with torch.cuda.device(device):
        torch.zeros(1, device=device)  # the driver loads into the context that torch has made
        module = _checked(driver.cuModuleLoadData(text.encode() + b"\0"))
        return _checked(driver.cuModuleGetFunction(module, entry.encode()))


class _Arguments(threading.local):
    """A thread's buffer of 64-bit kernel arguments and the pointers to them that a launch takes."""

    def __init__(self) -> None:
        most = max(ARGUMENTS.values())
        self.values = (ctypes.c_uint64 * most)()
        start = ctypes.addressof(self.values)
        self.pointers = (ctypes.c_void_p * most)(*(start + 8 * k for k in range(most)))
        self.address = ctypes.addressof(self.pointers)
        self.packers = {n: struct.Struct(f"{n}Q").pack_into for n in ARGUMENTS.values()}


_arguments = _Arguments()


def _launch(function: Any, blocks: int, device: int, *arguments: int) -> None:
    from cuda.bindings import driver

    _arguments.packers[len(arguments)](_arguments.values, 0, *arguments)
    stream = torch._C._cuda_getCurrentRawStream(device)
    (status,) = driver.cuLaunchKernel(function, blocks, 1, 1, THREADS, 1, 1, 0, stream, _arguments.address, 0)
    if status != 0:
        raise RuntimeError(f"CUDA driver: {status.name}")


# Scratch


_scratch: dict[tuple[int, int], Tensor] = {}


def _scan_scratch(device: int, groups: int) -> Tensor:
    """Zeroed scratch for the encoder's scan; one a stream, whose launches follow each other."""
    num_words = SCAN_HEAD // 8 + groups
    if torch.cuda.is_current_stream_capturing():
        # Not kept: its memory and its zeroing belong to the graph.
        return torch.zeros(num_words, dtype=torch.int64, device=device)
    key = (device, torch._C._cuda_getCurrentRawStream(device))
    held = _scratch.get(key)
    if held is None or held.numel() < num_words:
        held = _scratch[key] = torch.zeros(max(num_words, 4096), dtype=torch.int64, device=device)
    return held


@cache
def _resident_blocks(function: Any, device: int) -> int:
    """Blocks of a kernel that the device holds at a time."""
    from cuda.bindings import driver

    with torch.cuda.device(device):
        a_processor = _checked(driver.cuOccupancyMaxActiveBlocksPerMultiprocessor(function, THREADS, 0))
    return a_processor * torch.cuda.get_device_properties(device).multi_processor_count


@cache
def corrupt_flag(device: int) -> Tensor:
    """int32[1] on the device, set by decodes that nobody waits for; look at it when you wait anyway."""
    return torch.zeros(1, dtype=torch.int32, device=device)


# The launchers


def _groups(lay: Layout) -> int:
    return max(1, -(-lay.num_tiles // GROUP))


def _aligned(tensor: Tensor) -> Tensor:
    return tensor if tensor.data_ptr() % 16 == 0 else tensor.clone()


def encode(x: Tensor, lay: Layout, payload: Tensor) -> None:
    """Starts encoding contiguous ``x`` into ``payload``, on 16 bytes, of the layout's max_bytes or more."""
    device = x.get_device()
    if lay.mode == Mode.RAW:
        header = Header(lay.dtype, lay.mode, lay.numel, 0, (lay.numel,)).pack()
        payload = payload.view(-1)
        payload[:HEADER_BYTES].copy_(torch.frombuffer(bytearray(header), dtype=torch.uint8))
        payload[HEADER_BYTES : lay.static_bytes].copy_(x.detach().view(-1).view(torch.uint8))
        return
    x = _aligned(x)
    groups = _groups(lay)
    function = _function("encode", lay.dtype.name, lay.mode, device)
    _launch(
        function, min(groups, _resident_blocks(function, device)), device,
        x.data_ptr(), payload.data_ptr(), lay.meta, lay.bases, lay.codes, lay.residual, lay.tail,
        lay.static_bytes, _scan_scratch(device, groups).data_ptr(), lay.numel,
    )  # fmt: skip


def decode(payload: Tensor, lay: Layout, out: Tensor, flag: Tensor | None = None, spill: int = 0) -> None:
    """Starts decoding a payload of a known layout into contiguous ``out``.

    ``flag``, int32[1] on the device, is set to 1 if the payload contradicts itself; see corrupt_flag.
    ``spill`` is the address of where its dynamic part may have been moved to (cuda/rest.py).
    """
    device = out.get_device()
    if payload.numel() < lay.static_bytes:
        raise CorruptPayload(
            f"payload size: expected at least {lay.static_bytes} bytes, got {payload.numel()}"
        )
    if lay.mode == Mode.RAW:
        out.detach().view(-1).view(torch.uint8).copy_(payload[HEADER_BYTES : lay.static_bytes])
        return
    payload = _aligned(payload)
    target = out if out.data_ptr() % 16 == 0 else torch.empty_like(out)
    _launch(
        _function("decode", lay.dtype.name, lay.mode, device), _groups(lay), device,
        payload.data_ptr(), payload.numel(), lay.meta, lay.bases, lay.codes, lay.residual, lay.tail,
        lay.static_bytes, target.data_ptr(), lay.numel,
        (corrupt_flag(device) if flag is None else flag).data_ptr(), spill,
    )  # fmt: skip
    if target is not out:
        out.detach().copy_(target)


def decode_sum(
    sources: list[Tensor],
    lay: Layout,
    scale: float,
    out: Tensor,
    accumulate: bool = False,
    flags: Tensor | None = None,
    spills: Sequence[int] | None = None,
) -> None:
    """Starts ``out = sum(source * scale)``, as ops.decode_sum_out has it, of payloads of one layout.

    Sources are payloads (uint8) or contiguous tensors of out's dtype and numel. ``flags``, int32[number of
    sources] on the device, are set to 1 where a payload contradicts itself; None: all set corrupt_flag.
    ``spills`` are addresses, one a source, as in decode.
    """
    device, dtype = out.get_device(), lay.dtype
    mode = Mode.FAST if lay.mode == Mode.RAW else lay.mode
    known = cached_layout(lay.numel, dtype, mode)
    terms: list[tuple[Tensor, int]] = []  # with the sizes of payloads
    for source in sources:
        if source.dtype != torch.uint8:
            terms.append((_aligned(source), 0))
        elif source.numel() < lay.static_bytes:
            raise CorruptPayload(
                f"payload size: expected at least {lay.static_bytes} bytes, got {source.numel()}",
                peer=len(terms),
            )
        elif lay.mode == Mode.RAW:
            terms.append((_aligned(source[HEADER_BYTES : lay.static_bytes]), 0))
        else:
            terms.append((_aligned(source), source.numel()))
    target = out
    if out.data_ptr() % 16:
        target = out.clone() if accumulate else torch.empty_like(out)
    # More sources than a launch takes: the sums so far stay in fp32 in between.
    partial = (
        torch.empty(lay.numel, dtype=torch.float32, device=out.device) if len(terms) > MAX_SOURCES else None
    )
    function = _function("decode_sum", dtype.name, mode, device)
    flag, step = (corrupt_flag(device), 0) if flags is None else (flags, flags.element_size())
    (scale_bits,) = struct.unpack("<I", struct.pack("<f", scale))
    first, bits = (target.data_ptr(), 0) if accumulate else (0, 0)
    for start in range(0, len(terms), MAX_SOURCES):
        some = terms[start : start + MAX_SOURCES]
        spare = [0] * (MAX_SOURCES - len(some))
        last = start + MAX_SOURCES >= len(terms)
        written = target if last or partial is None else partial
        _launch(
            function, _groups(known), device,
            *(term.data_ptr() for term, _ in some), *spare, *(size for _, size in some), *spare,
            *(spills[start : start + MAX_SOURCES] if spills else [0] * len(some)), *spare, len(some),
            known.meta, known.bases, known.codes, known.residual, known.tail, known.static_bytes,
            first, written.data_ptr(), bits | (0 if last else TARGET_WIDE) | (SCALED if scale != 1.0 else 0),
            scale_bits, lay.numel, flag.data_ptr() + step * start, step,
        )  # fmt: skip
        first, bits = written.data_ptr(), ACCUMULATE_WIDE
    if target is not out:
        out.detach().copy_(target)


# Between encoding and decoding; tables and words are channel.py's


def stamp(device: int, table: int, entries: int) -> None:
    """Starts the kernel of cuda/stamp.py."""
    _launch(_function("stamp", "uint8", Mode.RAW, device), 1, device, table, entries)


def rest(device: int, *arguments: int) -> None:
    """Starts the kernel of cuda/rest.py, whose arguments but the corrupt flag these are, in its order."""
    *first, stamped = arguments
    _launch(
        _function("rest", "uint8", Mode.RAW, device), 1, device,
        *first, corrupt_flag(device).data_ptr(), stamped,
    )  # fmt: skip
