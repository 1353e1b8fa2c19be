"""Poisoned memory: what the package allocates without initialising it is full of 0xA5 in every test.

An output byte that is not written then differs from what is expected, instead of being 0 by luck.
"""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ranks import Ranks
from transports import on_ranks as on_ranks

from zipccl_hooks import cpu

ROOT = Path(__file__).parent.parent
POISON = 0xA5


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))


def _poisoned(allocate: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def poisoned(*args: Any, **kwargs: Any) -> torch.Tensor:
        tensor = allocate(*args, **kwargs)
        if torch.compiler.is_compiling() or type(tensor) is not torch.Tensor or tensor.is_meta:
            return tensor  # Dynamo must not trace the rest; fake tensors have no memory
        if sys._getframe(1).f_globals.get("__name__", "").startswith("zipccl_hooks"):
            tensor.view(-1).view(torch.uint8).fill_(POISON)
        return tensor

    return poisoned


class _PoisonedNumpy:
    """numpy as cpu.py sees it. Not numpy itself: Numba must find the real ``np.empty``."""

    def __getattr__(self, name: str) -> Any:
        return getattr(np, name)

    @staticmethod
    def empty(*args: Any, **kwargs: Any) -> np.ndarray:
        array = np.empty(*args, **kwargs)
        array.view(np.uint8).fill(POISON)
        return array


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "empty", _poisoned(torch.empty))
    monkeypatch.setattr(torch.Tensor, "new_empty", _poisoned(torch.Tensor.new_empty))
    monkeypatch.setattr(cpu, "np", _PoisonedNumpy())


def _pool(**options: Any) -> Iterator[Ranks]:
    pool = Ranks(**options)
    yield pool
    pool.stop()


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    yield from _pool()


@pytest.fixture(scope="session")
def staged_ranks() -> Iterator[Ranks]:
    """Ranks that may share a GPU: see tests/staged.py."""
    yield from _pool(largest=4)


@pytest.fixture(scope="session")
def emulated_ranks() -> Iterator[Ranks]:
    """Ranks whose CUDA is emulated: see tests/emulated.py."""
    yield from _pool(largest=5)


@pytest.fixture(scope="session")
def emulated_peers_ranks() -> Iterator[Ranks]:
    """Others than those: a group's channel has peers or has not."""
    yield from _pool(largest=3)


@pytest.fixture(scope="session")
def emulated_4_ranks() -> Iterator[Ranks]:
    """As many as two nodes of two have."""
    yield from _pool(largest=4)


@pytest.fixture(scope="session")
def staged_peers_ranks() -> Iterator[Ranks]:
    yield from _pool(largest=3)


@pytest.fixture(scope="session")
def nccl_ranks() -> Iterator[Ranks]:
    yield from _pool(largest=4, backend="nccl")


@pytest.fixture(scope="session")
def nccl_peers_ranks() -> Iterator[Ranks]:
    yield from _pool(largest=4, backend="nccl")


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Metadata as of an installed package, for child processes to find."""
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    folder = tmp_path / "zipccl_of_this_test-1.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: zipccl-of-this-test\nVersion: 1\n")
    (folder / "entry_points.txt").write_text(
        "".join(
            f"[{group}]\n" + "".join(f"{name} = {where}\n" for name, where in entries.items())
            for group, entries in declared.items()
        )
    )
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{ROOT}")
    monkeypatch.delenv("ZIPCCL_AUTO_ENABLE", raising=False)
    return tmp_path
