"""Programs of driver calls, with a driver that only notes what it is given."""

from __future__ import annotations

import ctypes
import gc
from typing import Any

import pytest

from zipccl_hooks.cuda import program
from zipccl_hooks.cuda.launch import Launch


class Driver:
    """Notes its calls; fails in the one called ``broken``."""

    def __init__(self, broken: str = "") -> None:
        self.calls: list[tuple[Any, ...]] = []
        self._broken = broken

    def __getattr__(self, name: str) -> Any:
        def function(*arguments: Any) -> int:
            self.calls.append((name, *map(self._plain, arguments)))
            return 700 if name == self._broken else 0

        function.__name__ = name
        return function

    @staticmethod
    def _plain(argument: Any) -> Any:
        if isinstance(argument, ctypes.Array) and argument._type_ is ctypes.c_void_p:
            return [ctypes.c_uint64.from_address(pointer).value for pointer in argument]
        return list(argument) if isinstance(argument, ctypes.Array) else getattr(argument, "value", argument)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    made = Driver()
    monkeypatch.setattr(program, "library", lambda: made)
    return made


def test_a_launch_reads_its_arguments_when_it_runs(driver: Driver) -> None:
    """Also those that nobody else holds any more."""
    steps = program.Program()
    first = steps.launch(Launch(11, 3, (5, 2**40, 7)), stream=9)
    steps.launch(Launch(12, 1, tuple(range(100, 138))), stream=9)
    gc.collect()
    padding = [bytearray(304) for _ in range(1000)]  # would take the memory of what is gone
    first[1] = 2**41
    steps.run()
    steps.run()
    expected = [
        ("cuLaunchKernel", 11, 3, 1, 1, program.THREADS, 1, 1, 0, 9, [5, 2**41, 7], None),
        ("cuLaunchKernel", 12, 1, 1, 1, program.THREADS, 1, 1, 0, 9, list(range(100, 138)), None),
    ]
    assert driver.calls == expected * 2 and padding


def test_calls_come_in_order(driver: Driver) -> None:
    steps = program.Program()
    steps.wait(1, 20)
    steps.copy(1000, 2000, 30, 1)
    steps.call(lambda: driver.calls.append(("python",)))
    steps.record(21, 1)
    steps.run()
    assert driver.calls == [
        ("cuStreamWaitEvent", 1, 20, 0),
        ("cuMemcpyDtoDAsync_v2", 1000, 2000, 30, 1),
        ("python",),
        ("cuEventRecord", 21, 1),
    ]


def test_words_are_written_then_waited_for(driver: Driver) -> None:
    """CUstreamBatchMemOpParams: kind (1 waits for at least, 2 writes), address, value, flags, alias, padding."""
    operations = program.word_operations([64, 68], [128])
    steps = program.Program()
    steps.words(operations, 5)
    steps.words(program.word_operations([], []), 5)  # nothing
    for number in (3, 2**32 + 4):
        program.set_number(operations, number)
        steps.run()
    assert driver.calls == [
        ("cuStreamBatchMemOp_v2", 5, 3, [2, 64, n, 0, 0, 0, 2, 68, n, 0, 0, 0, 1, 128, n, 0, 0, 0], 0)
        for n in (3, 4)
    ]


def test_what_the_driver_refuses_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Driver("cuEventRecord")
    monkeypatch.setattr(program, "library", lambda: made)
    steps = program.Program()
    steps.record(1, 2)
    with pytest.raises(RuntimeError, match=r"CUDA driver: cuEventRecord failed with 700"):
        steps.run()
