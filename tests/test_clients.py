"""Programs of others, which do not know of this package, beside themselves under ZIPCCL_AUTO_ENABLE=1."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from test_examples import run

LAUNCH = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
STEPS = 5


def compressed_calls(monkeypatch: pytest.MonkeyPatch, *command: str) -> dict[str, int]:
    """Runs it both ways: the same bits in each step. By kind, how many calls of rank 0 were compressed."""
    plain = run(*LAUNCH, *command)
    monkeypatch.setenv("ZIPCCL_AUTO_ENABLE", "1")
    monkeypatch.setenv("ZIPCCL_MIN_BYTES", "0")
    zipped = run(*LAUNCH, *command)
    numbers, counts = r"^step \d+ loss \S+ norm \S+$", r"^(\w+) +\d+ +(\d+) +[\d.]+ +[\d.]+"
    steps = re.findall(numbers, plain, re.MULTILINE)
    assert len(set(steps)) == STEPS
    assert re.findall(numbers, zipped, re.MULTILINE) == steps
    assert re.findall(counts, plain, re.MULTILINE) == []
    return {name: int(calls) for name, calls in re.findall(counts, zipped, re.MULTILINE)}


TITAN = ("examples/train_torchtitan.py", "--training.steps", str(STEPS))


def test_torchtitan_fsdp2(installed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight groups of parameters; those of the six layers are gathered for the backward pass once more."""
    pytest.importorskip("torchtitan")
    found = compressed_calls(monkeypatch, *TITAN)
    assert found["reduce_scatter_tensor"] == 8 * STEPS and found["all_gather_into_tensor"] > 14 * STEPS


@pytest.mark.parametrize("option", ["--parallelism.tensor_parallel_degree=2", "--compile.enable"])
def test_torchtitan(installed: Path, monkeypatch: pytest.MonkeyPatch, option: str) -> None:
    pytest.importorskip("torchtitan")
    found = compressed_calls(monkeypatch, *TITAN, option)
    assert min(found["reduce_scatter_tensor"], found["all_gather_into_tensor"]) >= 8 * STEPS


def test_megatron_distributed_optimizer(installed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("megatron.core")
    found = compressed_calls(monkeypatch, "examples/train_megatron.py", "1")
    assert found["reduce_scatter_tensor"] == found["all_gather_into_tensor"] == STEPS


def test_megatron_tensor_parallel(installed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("megatron.core")
    assert compressed_calls(monkeypatch, "examples/train_megatron.py", "2")["all_reduce"] > 10 * STEPS
