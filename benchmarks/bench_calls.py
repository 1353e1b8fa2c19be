"""Bench ``calls``: collectives and training steps of two gloo ranks, plain beside compressed.

    .venv/bin/pytest benchmarks/bench_calls.py --benchmark-only
    .venv/bin/pytest benchmarks/bench_calls.py --benchmark-only --benchmark-save=before      # then a change
    .venv/bin/pytest benchmarks/bench_calls.py --benchmark-only --benchmark-compare

This process is rank 0; a process of its own is rank 1 and does the same. Bits, and losses, are compared
before anything is timed. Over loopback a codec on CPUs costs more than it saves: examples/slow_link.py has a
link.
"""

from __future__ import annotations

import argparse
import multiprocessing
import tempfile
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from bench_training import Training
from torch.nn.parallel import DistributedDataParallel

import zipccl_hooks
from zipccl_hooks.cli.cases import ROWS, whole_parts
from zipccl_hooks.cli.measure import wrong_elements

MIB = 8
ROUNDS, WARM_UP = 15, 2
STEPS = 3  # whose losses are compared
EVERYTHING = zipccl_hooks.Policy(min_bytes=0)
COLLECTIVES = {f"{make.__name__} {label}": (make, dtype, data) for make, dtype, data, label in ROWS}
TRAINING = ("ddp", "fsdp2")
WAYS = ("plain", "compressed")


def collective(name: str, way: str) -> Callable[[], object]:
    """The call, whose bits are those of the plain one."""
    make, dtype, data = COLLECTIVES[name]
    torch.manual_seed(dist.get_rank())
    case = make(data(whole_parts(MIB, dtype), dtype), EVERYTHING)
    case.plain()
    case.zipped()
    assert wrong_elements(case.plain_out, case.zipped_out) == 0
    return case.plain if way == "plain" else case.zipped


def step(kind: str, way: str) -> Callable[[], object]:
    """A step of a tiny Llama, whose losses are those of the plain one."""
    args = argparse.Namespace(tiny=True, tokens=64, compile=False)
    trained, losses = {}, {}
    for one in WAYS:
        training = trained[one] = Training(kind, args)
        if one == "compressed" and isinstance(training.model, DistributedDataParallel):
            state = zipccl_hooks.ZipState(None, EVERYTHING)
            training.model.register_comm_hook(state, zipccl_hooks.zipccl_hook)
        elif one == "compressed":
            zipccl_hooks.apply(training.model, policy=EVERYTHING)
        losses[one] = [training.step()[0] for _ in range(STEPS)]
    assert losses["plain"] == losses["compressed"]
    return trained[way].step


def _join(rank: int, store: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)


def _serve(store: str, connection: Connection) -> None:
    """Rank 1: what it is told, as often as it is told."""
    _join(1, store)
    while (task := connection.recv()) is not None:
        make, arguments, calls = task
        call = globals()[make](*arguments)
        for _ in range(calls):
            call()
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def other() -> Iterator[Connection]:
    """The other rank."""
    ours, theirs = multiprocessing.Pipe()
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder) / "store")
        process = multiprocessing.get_context("spawn").Process(target=_serve, args=(store, theirs))
        process.start()
        _join(0, store)
        yield ours
        ours.send(None)
        dist.destroy_process_group()
        process.join()


def compare(benchmark: Any, other: Connection, make: Callable[[str, str], Any], name: str, way: str) -> None:
    benchmark.group = name
    other.send((make.__name__, (name, way), 1 if benchmark.disabled else ROUNDS + WARM_UP))
    benchmark.pedantic(make(name, way), rounds=ROUNDS, warmup_rounds=WARM_UP)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", COLLECTIVES)
def test_collective(benchmark: Any, other: Connection, name: str, way: str) -> None:
    compare(benchmark, other, collective, name, way)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", TRAINING)
def test_step(benchmark: Any, other: Connection, kind: str, way: str) -> None:
    compare(benchmark, other, step, kind, way)
