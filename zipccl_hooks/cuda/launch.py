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
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..config import cache_directory
from ..errors import CorruptPayload
from ..format import DTYPES, GROUP, HEADER_BYTES, Header, Layout, Mode, cached_layout
from . import ACCUMULATE_WIDE, MAX_SOURCES, SCALED, SCAN_HEAD, TARGET_WIDE, THREADS

MIN_CAPABILITY = (8, 0)  # redux.sync, and L1 hints on loads
ARGUMENTS = {"encode": 10, "decode": 12, "decode_sum": 38, "stamp": 2, "rest": 10}  # of the kernels
# Places among them of what changes from call to call.
ENCODE_SOURCE, DECODE_TARGET, SUM_TARGET = 0, 8, 3 * MAX_SOURCES + 8
STAMP_TABLE, REST_TABLE, REST_RATE, REST_NUMBER = 0, 0, 3, 7
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


def checked(result: tuple[Any, ...]) -> Any:
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
        module = checked(driver.cuModuleLoadData(text.encode() + b"\0"))
        return checked(driver.cuModuleGetFunction(module, entry.encode()))


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


class Launch(NamedTuple):
    """A kernel and what it is given: addresses and numbers of 64 bits. Blocks are of THREADS."""

    function: Any
    blocks: int
    arguments: tuple[int, ...]


def _start(kernel: Launch, stream: int) -> None:
    from cuda.bindings import driver

    _arguments.packers[len(kernel.arguments)](_arguments.values, 0, *kernel.arguments)
    (status,) = driver.cuLaunchKernel(
        kernel.function, kernel.blocks, 1, 1, THREADS, 1, 1, 0, stream, _arguments.address, 0
    )
    if status != 0:
        raise RuntimeError(f"CUDA driver: {status.name}")


# Scratch


_scratch: dict[tuple[int, int], Tensor] = {}


def scan_scratch(lay: Layout, device: int, stream: int) -> Tensor:
    """Zeroed scratch for the encoder's scan; one a stream, whose launches follow each other."""
    num_words = SCAN_HEAD // 8 + _groups(lay)
    if torch.cuda.is_current_stream_capturing():
        # Not kept: its memory and its zeroing belong to the graph.
        return torch.zeros(num_words, dtype=torch.int64, device=device)
    held = _scratch.get((device, stream))
    if held is None or held.numel() < num_words:
        held = torch.zeros(max(num_words, 4096), dtype=torch.int64, device=device)
        _scratch[device, stream] = held
    return held


@cache
def _resident_blocks(function: Any, device: int) -> int:
    """Blocks of a kernel that the device holds at a time."""
    from cuda.bindings import driver

    with torch.cuda.device(device):
        a_processor = checked(driver.cuOccupancyMaxActiveBlocksPerMultiprocessor(function, THREADS, 0))
    return a_processor * torch.cuda.get_device_properties(device).multi_processor_count


@cache
def corrupt_flag(device: int) -> Tensor:
    """int32[1] on the device, set by decodes that nobody waits for; look at it when you wait anyway."""
    return torch.zeros(1, dtype=torch.int32, device=device)


# The kernels and their arguments, at addresses on 16 bytes


def _groups(lay: Layout) -> int:
    return max(1, -(-lay.num_tiles // GROUP))


def encoding(lay: Layout, device: int, source: int, payload: int, scratch: int) -> Launch:
    """Encodes ``source`` into ``payload``. ENCODE_SOURCE tells which argument ``source`` is."""
    function = _function("encode", lay.dtype.name, lay.mode, device)
    return Launch(
        function,
        min(_groups(lay), _resident_blocks(function, device)),
        (source, payload, lay.meta, lay.bases, lay.codes, lay.residual, lay.tail, lay.static_bytes, scratch,
         lay.numel),
    )  # fmt: skip


def decoding(
    lay: Layout, device: int, payload: int, num_bytes: int, target: int, flag: int, spill: int
) -> Launch:
    """Decodes ``payload``, of ``num_bytes``, into ``target``, argument DECODE_TARGET."""
    return Launch(
        _function("decode", lay.dtype.name, lay.mode, device),
        _groups(lay),
        (payload, num_bytes, lay.meta, lay.bases, lay.codes, lay.residual, lay.tail, lay.static_bytes, target,
         lay.numel, flag, spill),
    )  # fmt: skip


def summing(
    lay: Layout,
    device: int,
    terms: Sequence[tuple[int, int]],
    spills: Sequence[int],
    scale: float,
    start: int,
    target: int,
    partial: int,
    flag: int,
    flag_step: int,
) -> list[Launch]:
    """Adds terms times ``scale`` to what is at ``start``, into ``target``: SUM_TARGET of the last launch.

    ``terms`` are (address, bytes) of payloads, (address, 0) of tensors; ``start`` 0: nothing. More than
    MAX_SOURCES take several launches, between which the sums stay in fp32 at ``partial``.
    """
    function = _function("decode_sum", lay.dtype.name, lay.mode, device)
    (scale_bits,) = struct.unpack("<I", struct.pack("<f", scale))
    launches, first, bits = [], start, 0
    for k in range(0, len(terms), MAX_SOURCES):
        some, last = terms[k : k + MAX_SOURCES], k + MAX_SOURCES >= len(terms)
        spare = [0] * (MAX_SOURCES - len(some))
        written = target if last else partial
        arguments = (
            *(address for address, _ in some), *spare, *(size for _, size in some), *spare,
            *spills[k : k + MAX_SOURCES], *spare, len(some),
            lay.meta, lay.bases, lay.codes, lay.residual, lay.tail, lay.static_bytes,
            first, written, bits | (0 if last else TARGET_WIDE) | (SCALED if scale != 1.0 else 0),
            scale_bits, lay.numel, flag + flag_step * k, flag_step,
        )  # fmt: skip
        launches.append(Launch(function, _groups(lay), arguments))
        first, bits = written, ACCUMULATE_WIDE
    return launches


def stamping(device: int, table: int, entries: int) -> Launch:
    """The kernel of cuda/stamp.py."""
    return Launch(_function("stamp", "uint8", Mode.RAW, device), 1, (table, entries))


def resting(device: int, *arguments: int) -> Launch:
    """The kernel of cuda/rest.py, whose arguments but the corrupt flag these are, in its order."""
    *first, stamped = arguments
    function = _function("rest", "uint8", Mode.RAW, device)
    return Launch(function, 1, (*first, corrupt_flag(device).data_ptr(), stamped))


# The launchers


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
    x, stream = _aligned(x), torch._C._cuda_getCurrentRawStream(device)
    scratch = scan_scratch(lay, device, stream)
    _start(encoding(lay, device, x.data_ptr(), payload.data_ptr(), scratch.data_ptr()), stream)


def decode(payload: Tensor, lay: Layout, out: Tensor, flag: Tensor | None = None) -> None:
    """Starts decoding a payload of a known layout into contiguous ``out``.

    ``flag``, int32[1] on the device, is set to 1 if the payload contradicts itself; see corrupt_flag.
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
    flag = corrupt_flag(device) if flag is None else flag
    kernel = decoding(lay, device, payload.data_ptr(), payload.numel(), target.data_ptr(), flag.data_ptr(), 0)
    _start(kernel, torch._C._cuda_getCurrentRawStream(device))
    if target is not out:
        out.detach().copy_(target)


def decode_sum(
    sources: list[Tensor],
    lay: Layout,
    scale: float,
    out: Tensor,
    accumulate: bool = False,
    flags: Tensor | None = None,
) -> None:
    """Starts ``out = sum(source * scale)``, as ops.decode_sum_out has it, of payloads of one layout.

    Sources are payloads (uint8) or contiguous tensors of out's dtype and numel. ``flags``, int32[number of
    sources] on the device, are set to 1 where a payload contradicts itself; None: all set corrupt_flag.
    """
    device = out.get_device()
    mode = Mode.FAST if lay.mode == Mode.RAW else lay.mode
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
    wide = torch.empty(lay.numel if len(terms) > MAX_SOURCES else 0, dtype=torch.float32, device=out.device)
    flag, step = (corrupt_flag(device), 0) if flags is None else (flags, flags.element_size())
    stream = torch._C._cuda_getCurrentRawStream(device)
    for kernel in summing(
        cached_layout(lay.numel, lay.dtype, mode), device, [(t.data_ptr(), n) for t, n in terms],
        [0] * len(terms), scale, target.data_ptr() if accumulate else 0, target.data_ptr(), wide.data_ptr(),
        flag.data_ptr(), step,
    ):  # fmt: skip
        _start(kernel, stream)
    if target is not out:
        out.detach().copy_(target)
