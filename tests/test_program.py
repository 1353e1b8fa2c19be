"""Programs of driver calls, with a driver that only notes what it is given."""

from __future__ import annotations

import ctypes
import gc
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from zipccl_hooks import plan
from zipccl_hooks.cuda import ACCUMULATE_WIDE, SCALED, TARGET_WIDE, launch, program
from zipccl_hooks.cuda.launch import Launch
from zipccl_hooks.format import DTYPES, Mode, cached_layout


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
    ends = steps.copy(0, 0, 30, 1)
    ends[0], ends[1] = 1000, 2000
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
    """CUstreamBatchMemOpParams: kind (1 waits, 2 writes), address, value, flags, alias, padding."""
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


def test_a_sum_of_many_finds_its_own_term_and_its_target(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twelve ranks take two launches, of which the first leaves its sums in fp32 for the second."""
    size, rank, numel = 12, 9, 5000
    monkeypatch.setattr(launch, "_function", lambda *key: 77)
    monkeypatch.setattr(launch, "corrupt_flag", lambda device: torch.zeros(1, dtype=torch.int32))
    wide = torch.empty(4 * numel, dtype=torch.uint8)
    stream: Any = SimpleNamespace(cuda_stream=3)
    comm: Any = SimpleNamespace(rank=rank)
    channel: Any = SimpleNamespace(comm=comm, index=0, decoding=stream, slots=lambda name, sizes: [wide])
    lay = cached_layout(numel, DTYPES["bfloat16"], Mode.FAST)
    layouts = [None if peer == rank else lay for peer in range(size)]
    received = [torch.empty(100 + peer, dtype=torch.uint8) for peer in range(size)]
    made = plan.Plan(0, 0, np.zeros(0), 0, 0, 0, [])
    plan._add_sum(channel, made, 0.5, layouts, received, received)
    made.place([], [], own=4096, total=8192)
    made.decode.run()
    first, last = (call[10] for call in driver.calls)
    assert first[:8] == [r.data_ptr() for r in received[:8]] and first[8:16] == list(range(100, 108))
    assert last[:4] == [received[8].data_ptr(), 4096, *(r.data_ptr() for r in received[10:])]
    assert last[8:12] == [108, 0, 110, 111] and (first[24], last[24]) == (8, 4)
    assert first[31:33] == [0, wide.data_ptr()] and last[31:33] == [wide.data_ptr(), 8192]
    assert first[33] == TARGET_WIDE | SCALED and last[33] == ACCUMULATE_WIDE | SCALED
