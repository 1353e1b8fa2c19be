"""Activation by ``import torch`` itself, through the entry point that pyproject.toml declares."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-W", "always", "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


IS_ENABLED = (
    "torch.ops.c10d.allreduce_.default.has_kernel_for_dispatch_key(torch._C.DispatchKey.BackendSelect)"
)


def test_without_the_variable_nothing_is_imported(installed: Path) -> None:
    modules = "[m for m in sys.modules if m.split('.')[0] in ('zipccl_hooks', 'numba')]"
    assert "[] True" in run(f"import sys, torch; print({modules}, 'zipccl_autoload' in sys.modules)")


@pytest.mark.parametrize(
    ("value", "order", "expected"),
    [("1", "torch, zipccl_hooks", True), ("on", "zipccl_hooks, torch", True), ("0", "torch", False)],
)
def test_the_variable_decides(
    installed: Path, monkeypatch: pytest.MonkeyPatch, value: str, order: str, expected: bool
) -> None:
    monkeypatch.setenv("ZIPCCL_AUTO_ENABLE", value)
    printed = run(f"import {order}, sys; print('enabled', {IS_ENABLED}, 'numba' in sys.modules)")
    assert f"enabled {expected} False" in printed


def test_no_error_reaches_import_torch(installed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZIPCCL_AUTO_ENABLE", "maybe")
    printed = run(f"import torch; print('enabled', {IS_ENABLED})")
    assert "enabled False" in printed and "zipccl_hooks is not enabled: expected one of 1" in printed
    monkeypatch.setenv("ZIPCCL_AUTO_ENABLE", "1")
    monkeypatch.setenv("ZIPCCL_MODE", "best")
    printed = run(f"import torch; print('enabled', {IS_ENABLED})")
    assert "enabled False" in printed and "not enabled: mode: expected one of" in printed
