"""Driver calls that are prepared once and then made again and again: what an exchange enqueues.

The host time of an exchange is that of its dozen driver calls and of the Python around them. Prepared, a call
is a C function and its arguments in C memory: what changes from one exchange to the next (addresses,
numbers) is written there, and the rest is a loop.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

from . import THREADS
from .launch import Launch

_WAIT_VALUE, _WRITE_VALUE = 1, 2  # CU_STREAM_MEM_OP_WAIT_VALUE_32, CU_STREAM_MEM_OP_WRITE_VALUE_32
_WORDS = 6  # of 64 bits that a CUstreamBatchMemOpParams has: kind, address, value, flags, alias, padding

Values = Any  # a ctypes array of 64-bit words


@cache
def library() -> Any:
    """The CUDA driver. Its functions are called without the GIL.

    One that waits for room in a full queue waits for the device, and that may wait for a thread of ours.
    """
    return ctypes.CDLL("libcuda.so.1")


def word_operations(writes: Sequence[int], waits: Sequence[int]) -> Values:
    """Writes of a number to 32-bit words at some addresses, then waits until others have reached it.

    A write comes after all memory traffic of the stream before it. Waits compare modulo 2**32.
    """
    values = (ctypes.c_uint64 * (_WORDS * (len(writes) + len(waits))))()
    kinds = [_WRITE_VALUE] * len(writes) + [_WAIT_VALUE] * len(waits)
    for k, (kind, address) in enumerate(zip(kinds, (*writes, *waits), strict=True)):
        values[_WORDS * k], values[_WORDS * k + 1] = kind, address
    return values


def set_number(operations: Values, number: int) -> None:
    for at in range(2, len(operations), _WORDS):
        operations[at] = number & 0xFFFFFFFF


def _made(function: Callable[[], object]) -> None:
    function()


class Program:
    """A sequence of calls, for certain streams and events (their handles)."""

    def __init__(self) -> None:
        self._calls: list[tuple[Callable[..., Any], tuple[Any, ...]]] = []
        self._arguments: list[Values] = []  # kernels' parameters are pointers into them

    @classmethod
    def joined(cls, *programs: Program) -> Program:
        """One that makes the calls of these, in their order."""
        whole = cls()
        for one in programs:
            whole._calls += one._calls
            whole._arguments += one._arguments
        return whole

    def launch(self, kernel: Launch, stream: int) -> Values:
        """Adds a launch; returns its arguments, to be changed."""
        count = len(kernel.arguments)
        values = (ctypes.c_uint64 * count)(*kernel.arguments)
        self._arguments.append(values)
        start = ctypes.addressof(values)
        pointers = (ctypes.c_void_p * count)(*(start + 8 * k for k in range(count)))
        one, none = ctypes.c_uint(1), ctypes.c_uint(0)
        shape = ctypes.c_uint(kernel.blocks), one, one, ctypes.c_uint(THREADS), one, one, none
        function = ctypes.c_void_p(int(kernel.function))
        self._add("cuLaunchKernel", function, *shape, ctypes.c_void_p(stream), pointers, None)
        return values

    def record(self, event: int, stream: int) -> None:
        self._add("cuEventRecord", ctypes.c_void_p(event), ctypes.c_void_p(stream))

    def wait(self, stream: int, event: int) -> None:
        self._add("cuStreamWaitEvent", ctypes.c_void_p(stream), ctypes.c_void_p(event), ctypes.c_uint(0))

    def copy(self, target: int, source: int, num_bytes: int, stream: int) -> Values:
        """Adds a copy between addresses of any GPUs; returns these two, to be changed."""
        values = (ctypes.c_uint64 * 2)(target, source)
        first, second = (ctypes.c_uint64.from_buffer(values, at) for at in (0, 8))
        self._add("cuMemcpyDtoDAsync_v2", first, second, ctypes.c_size_t(num_bytes), ctypes.c_void_p(stream))
        return values

    def words(self, operations: Values, stream: int) -> None:
        """Adds word_operations, in one call."""
        if count := len(operations) // _WORDS:
            self._add(
                "cuStreamBatchMemOp_v2", ctypes.c_void_p(stream), ctypes.c_uint(count), operations,
                ctypes.c_uint(0),
            )  # fmt: skip

    def call(self, function: Callable[[], object]) -> None:
        """Adds something else, whatever it returns."""
        self._calls.append((_made, (function,)))

    def _add(self, name: str, *arguments: Any) -> None:
        self._calls.append((getattr(library(), name), arguments))

    def run(self) -> None:
        for function, arguments in self._calls:
            if status := function(*arguments):
                raise RuntimeError(f"CUDA driver: {function.__name__} failed with {status}")
