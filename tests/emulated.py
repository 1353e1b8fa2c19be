"""The exchange between GPUs without one: CPU tensors, streams that do nothing, kernels in Python.

``install()`` replaces, in this process, what channel.py and cuda_exchange.py use of CUDA. What is left is
everything those modules do themselves: plans, room, tables, the thread that fetches rests. Kernels
read the same tables, at the same addresses, as on a device.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import struct
import tempfile
import time
from typing import Any

import numpy as np
import torch
from torch import Tensor

from zipccl_hooks import cpu, dispatch, eligible, ops, p2p, rests
from zipccl_hooks.cuda import ENTRY_BYTES, MAX_SOURCES, MOVED, STAMP, TARGET_WIDE, ipc, launch, program
from zipccl_hooks.format import DTYPES, HEADER_BYTES, DType, Layout, Mode, cached_layout


class Stream:
    stream_id = device_index = device_type = cuda_stream = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def wait_event(self, event: Any) -> None: ...

    def wait_stream(self, stream: Any) -> None: ...

    def query(self) -> bool:
        return True

    def synchronize(self) -> None: ...


class Event:
    cuda_event = 0

    def __init__(self, **kwargs: Any) -> None: ...

    def record(self, *stream: Any) -> None: ...

    def query(self) -> bool:
        return True

    def synchronize(self) -> None: ...

    def elapsed_time(self, end: Event) -> float:
        return 1.0


def _bytes(address: int, num_bytes: int) -> np.ndarray[Any, Any]:
    return np.ctypeslib.as_array((ctypes.c_uint8 * num_bytes).from_address(address))


def _words(address: int, count: int) -> np.ndarray[Any, Any]:
    return _bytes(address, 8 * count).view(np.int64)


def _dynamic(payload: int) -> int:
    return int(_words(payload + 16, 1)[0])


def _rate(payload: int, tiles: int) -> int:
    return -(-16 * _dynamic(payload) // tiles) if tiles else 0


def _tensor(address: int, numel: int, dtype: DType) -> Tensor:
    wanted = getattr(torch, dtype.name)
    if not numel:
        return torch.empty(0, dtype=wanted)
    return torch.from_numpy(_bytes(address, numel * dtype.itemsize)).view(wanted)


def encode(dtype: DType, mode: Mode, source: int, payload: int, *layout: int) -> None:
    lay = cached_layout(layout[-1], dtype, mode)
    room = torch.from_numpy(_bytes(payload, lay.max_bytes))
    ops.encode_out(_tensor(source, lay.numel, dtype), mode, payload=room)


def _whole(payload: int, num_bytes: int, lay: Layout, spill: int) -> np.ndarray[Any, Any]:
    """A payload with its dynamic part, wherever that is."""
    data = _bytes(payload, num_bytes)
    if data[MOVED]:
        data = np.concatenate([data[: lay.static_bytes], _bytes(spill, _dynamic(payload))])
    data = data.copy()
    data[STAMP:HEADER_BYTES] = 0
    return data


def decode(dtype: DType, mode: Mode, payload: int, num_bytes: int, *rest: int) -> None:
    target, numel, _, spill = rest[-4:]
    lay = cached_layout(numel, dtype, mode)
    out = ops._bits(_tensor(target, numel, dtype), dtype)
    cpu.decode(_whole(payload, num_bytes, lay, spill), lay, out)


def decode_sum(dtype: DType, mode: Mode, *arguments: int) -> None:
    addresses, sizes, spills = (arguments[k * MAX_SOURCES : (k + 1) * MAX_SOURCES] for k in range(3))
    count, (first, written, bits, scale_bits, numel) = arguments[3 * MAX_SOURCES], arguments[-7:-2]
    assert count <= MAX_SOURCES and not first and not bits & TARGET_WIDE, "several launches are not emulated"
    lay, terms = cached_layout(numel, dtype, mode), []
    for address, size, spill in list(zip(addresses, sizes, spills, strict=True))[:count]:
        if size:
            term = torch.empty(numel, dtype=getattr(torch, dtype.name))
            cpu.decode(_whole(address, size, lay, spill), lay, ops._bits(term, dtype))
        else:
            term = _tensor(address, numel, dtype)
        terms.append(term)
    (scale,) = struct.unpack("<f", struct.pack("<I", scale_bits))
    ops.decode_sum_out(terms, scale=scale, out=_tensor(written, numel, dtype))


def stamp(dtype: DType, mode: Mode, table: int, entries: int) -> None:
    rows = _words(table, entries * ENTRY_BYTES // 8).reshape(entries, -1)
    sent = [(int(row[0]), int(row[3])) for row in rows if row[0]]
    largest = max((_rate(payload, tiles) for payload, tiles in sent), default=0)
    for payload, _ in sent:
        _bytes(payload + STAMP, 4).view(np.uint32)[0] = largest


def rest(
    dtype: DType, mode: Mode, table: int, entries: int, control: int, rate_word: int, wants_at: int,
    staging: int, stage: int, number: int, corrupt: int, stamped: int,
) -> None:  # fmt: skip
    """cuda/rest.py, step by step."""
    rows = _words(table, entries * ENTRY_BYTES // 8).reshape(entries, -1).tolist()
    words, wants = _words(control, 4), _words(wants_at, 2 * entries).reshape(entries, 2)
    rates, needs = [0], np.zeros((entries, 2), np.int64)
    for k, row in enumerate(rows):
        for side, (payload, static, exchanged, tiles) in enumerate((row[0:4], row[4:8])):
            if payload:
                needs[k, side] = max(static + _dynamic(payload) - exchanged, 0)
                assert side == 0 or _dynamic(payload) <= row[9]
                stamped_rate = int(_bytes(payload + STAMP, 4).view(np.uint32)[0])
                rates.append(stamped_rate if stamped else _rate(payload, tiles))
    if needs.any():
        wants[:] = needs
        for (_, back), row in zip(needs, rows, strict=True):
            if back:
                had = row[6] - row[5]
                _bytes(row[8], had)[:] = _bytes(row[4] + row[5], had)
                _bytes(row[4] + MOVED, 1)[0] = 1
        for turn in range(-(-int(needs.max()) // stage)):
            done = turn * stage
            parts = np.clip(needs - done, 0, stage)
            for k, row in enumerate(rows):
                size = int(parts[k, 0])
                _bytes(staging + 2 * k * stage, size)[:] = _bytes(row[0] + row[2] + done, size)
            request = number << 16 | turn + 1
            words[rests.REQUEST] = request
            while (reply := int(words[rests.REPLY])) != request:
                assert reply >= 0
                time.sleep(0.0005)
            for k, row in enumerate(rows):
                size, had = int(parts[k, 1]), row[6] - row[5]
                _bytes(row[8] + had + done, size)[:] = _bytes(staging + (2 * k + 1) * stage, size)
    _words(rate_word, 1)[0] = max(rates)
    words[rests.DONE] = number


def run_words(operations: Any) -> None:
    """program.word_operations, carried out at once."""
    deadline = time.monotonic() + 30
    for k in range(0, len(operations), 6):
        kind, address, number = operations[k : k + 3]
        word = _bytes(address, 4).view(np.uint32)
        if kind == program._WRITE_VALUE:
            word[0] = number
        else:
            while int(word[0]) < number:
                assert time.monotonic() < deadline, f"word {int(word[0])} does not reach {number}"
                time.sleep(0.0001)


class Program(program.Program):
    """Calls that are made in Python."""

    def launch(self, kernel: launch.Launch, stream: int) -> Any:
        name, dtype_name, mode, _ = kernel.function
        values = (ctypes.c_uint64 * len(kernel.arguments))(*kernel.arguments)
        self.call(lambda: globals()[name](DTYPES[dtype_name], mode, *values))
        return values

    def record(self, event: int, stream: int) -> None: ...

    def wait(self, stream: int, event: int) -> None: ...

    def copy(self, target: int, source: int, num_bytes: int, stream: int) -> Any:
        values = (ctypes.c_uint64 * 2)(target, source)
        self.call(lambda: ctypes.memmove(values[0], values[1], num_bytes))
        return values

    def words(self, operations: Any, stream: int) -> None:
        self.call(lambda: run_words(operations))


_mapped: list[Tensor] = []  # kept for good, as ipc.py keeps them
_files: dict[int, str] = {}


def _map(path: str, num_bytes: int) -> Tensor:
    _mapped.append(torch.from_file(path, shared=True, size=num_bytes, dtype=torch.uint8))
    return _mapped[-1]


def ipc_allocate(num_bytes: int, device: Any) -> Tensor:
    descriptor, path = tempfile.mkstemp(prefix="zipccl-")
    atexit.register(os.unlink, path)
    os.ftruncate(descriptor, num_bytes)
    os.close(descriptor)
    memory = _map(path, num_bytes)
    _files[memory.data_ptr()] = path
    return memory


def ipc_export(memory: Tensor) -> bytes:
    return _files[memory.data_ptr()].encode().ljust(ipc.HANDLE_BYTES, b"\0")


def ipc_attach(handle: bytes, device: Any) -> int:
    path = handle.rstrip(b"\0").decode()
    return _map(path, os.path.getsize(path)).data_ptr()


def install() -> None:
    cuda: Any = torch.cuda
    cuda.Stream, cuda.Event = Stream, Event
    cuda.current_stream = Stream
    cuda.device = cuda.stream = lambda target: contextlib.nullcontext()
    cuda.synchronize = cuda._sleep = lambda *argument: None
    core: Any = torch._C
    core._cuda_setStream = lambda **stream: None
    core._cuda_getDevice = lambda: None
    core._cuda_getCurrentRawStream = lambda index: 0
    core._cuda_getCurrentStream = lambda index: (0, 0, 0)
    tensor: Any = torch.Tensor
    tensor.pin_memory = lambda self: self
    tensor.record_stream = lambda self, stream: None
    kernels: Any = launch
    kernels._function = lambda *key: key
    kernels._resident_blocks = lambda function, device: 1
    kernels.scan_scratch = lambda lay, device, stream: torch.zeros(1)
    for function in (ipc_allocate, ipc_export, ipc_attach):
        setattr(ipc, function.__name__.removeprefix("ipc_"), function)
    for name in ("launch", "record", "wait", "copy", "words"):
        setattr(program.Program, name, vars(Program)[name])
    dispatch.uses_streams = p2p.uses_streams = lambda x: True
    eligible.BACKENDS = {"cpu": "gloo"}
