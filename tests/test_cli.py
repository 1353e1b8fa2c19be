"""python -m zipccl_hooks: what it prints, its exit status, and that it leaves nothing behind."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

import zipccl_hooks
from zipccl_hooks.__main__ import COMMANDS, main
from zipccl_hooks.cli import check

ROOT = Path(__file__).parent.parent
CPUS = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}


def started(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """The command in a process without GPUs."""
    command = [sys.executable, "-m", "zipccl_hooks", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env={**CPUS, **variables}, timeout=120)


@pytest.mark.parametrize("argv", [[], ["nothing"], ["check", "--ranks", "many"], ["env", "more"]], ids=str)
def test_bad_arguments_are_status_2(argv: Sequence[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(argv)
    assert ended.value.code == 2
    assert "usage: python -m zipccl_hooks" in capsys.readouterr().err


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert ended.value.code == 0
    out = capsys.readouterr().out
    assert all(f"\n    {name} " in out for name in COMMANDS)


# env


def test_env_without_gpus() -> None:
    done = started("env", ZIPCCL_MODE="fast", NCCL_P2P_DISABLE="1", AWS_SECRET_ACCESS_KEY="hidden")
    assert done.returncode == 0, done.stderr
    for line in (
        f"zipccl_hooks {zipccl_hooks.__version__}, wire format 1",
        f"torch        {torch.__version__}, ",
        "GPUs         none",
        "  ZIPCCL_MODE=fast",
        "  NCCL_P2P_DISABLE=1",
        "  collectives over gloo        yes",
        "  DDP: zipccl_hook             yes",
        "  FSDP2: apply(model)          yes",
        "  enable(), compressed()       yes",
        '  backend "zipccl"             yes',
    ):
        assert line in done.stdout
    assert "codec on GPUs                no: no CUDA device" in done.stdout
    assert "Policy(enabled=True, mode='fast'" in done.stdout
    assert "hidden" not in done.stdout


def test_env_reports_variables_that_make_no_policy(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ZIPCCL_MIN_BYTES", "much")
    assert main(["env"]) == 0
    assert "environment variable ZIPCCL_MIN_BYTES: invalid literal" in capsys.readouterr().out


# check


def test_check_finds_every_bit_right() -> None:
    done = started("check")
    assert done.returncode == 0, done.stdout + done.stderr
    for what in (
        "codec on cpu, bfloat16",
        "codec on cpu, 14 dtypes that are stored",
        "codec on cpu, bytes of the specification",
        "all_gather_into_tensor over gloo, 2 ranks, compressed",
        "batch_isend_irecv over gloo, 2 ranks, compressed",
        "all_reduce over gloo, 2 ranks, compressed",
    ):
        assert what in done.stdout
    assert done.stdout.endswith("all bits are right\n") and "WRONG" not in done.stdout


def test_check_tells_a_codec_that_is_wrong(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(check, "decode", lambda payload: zipccl_hooks.decode(payload) * 1.0)
    monkeypatch.setattr(check.ranks, "start", lambda *arguments: 1)
    monkeypatch.setattr(check, "STORED", [torch.int16])
    assert main(["check"]) == 1
    out = capsys.readouterr().out
    assert "WRONG: 9, first torch.bfloat16, 1023 elements, fast: other bits" in out
    assert out.endswith("SOMETHING IS WRONG\n")
