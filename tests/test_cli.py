"""python -m zipccl_hooks: what it prints, its exit status, and that it leaves nothing behind."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

import zipccl_hooks
from zipccl_hooks.__main__ import COMMANDS, main
from zipccl_hooks.cli import check, inspect

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


# inspect


def saved(folder: Path, kind: str) -> tuple[Path, str]:
    """A file of a kind with the same tensors, and what stands before their names."""
    generator = torch.Generator().manual_seed(3)
    tensors = {
        "normal": (torch.randn(3, 70_001, generator=generator) * 0.02).bfloat16(),
        "autocast": torch.randn(50_021, generator=generator).bfloat16().float(),
        "noise": torch.randint(-(2**15), 2**15, (9_999,), generator=generator).short().view(torch.float16),
        "empty": torch.zeros(0),
        "counter": torch.tensor([7]),
    }
    path = folder / f"saved.{kind}"
    if kind == "safetensors":
        pytest.importorskip("safetensors.torch").save_file(tensors, path)
        return path, ""
    if kind == "checkpoint":
        dcp.save({"model": tensors, "step": 3}, checkpoint_id=path, no_dist=True)
    else:
        torch.save({"model": tensors, "step": 3}, path, _use_new_zipfile_serialization=kind == "pt")
    return path, "model."


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("kind", ["safetensors", "pt", "pth", "checkpoint"])  # .pth: torch's old format
def test_inspect_reads(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, prefix = saved(tmp_path, kind)
    assert main(["inspect", str(path), "--histogram"]) == 0
    out = capsys.readouterr().out
    rows = {line.split()[0]: line.split()[1:] for line in out.splitlines() if line}
    dtype, megabytes, fast, dense, mode, entropy, window = rows[f"{prefix}normal"]
    assert (dtype, megabytes, mode) == ("bfloat16", "0.420", "dense")
    # theory.py: 1.439 and 1.497 of long Gaussian tensors, 2.544 bits, 0.97 to 0.98.
    assert 1.42 < float(fast) < 1.44 and 1.48 < float(dense) < 1.50
    assert 2.53 < float(entropy) < 2.56 and 0.97 < float(window) < 0.98
    assert (
        rows[f"{prefix}autocast"][0] == "float32" and float(rows[f"{prefix}autocast"][3]) > 2.85
    )  # 48 tiles and a tail, which is not coded
    assert rows[f"{prefix}noise"][2:5] == ["0.994", "0.994", "raw"]
    assert rows[f"{prefix}counter"] == ["int64", "0.000", "raw"]
    # The sum of 420.0 kB over 1.49, 200.1 over 2.88, and 20.0 as they are.
    sent = 0.420006 / float(dense) + 0.200084 / float(rows[f"{prefix}autocast"][3]) + 0.020006
    assert f"5 tensors, 0.640 MB as {sent:.3f} MB: ratio 1.7" in out and "(dense 2, raw 3)" in out
    assert "exponents of bfloat16, floor(log2 |x|)" in out


def test_inspect_samples_whole_blocks_and_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    x = torch.arange(100_001)
    seen = inspect.sample(x, 30_000)
    assert seen.tolist() == [*range(8192), *range(4 * 8192, 5 * 8192), *range(8 * 8192, 9 * 8192)]
    assert torch.equal(inspect.sample(x, 100_001), x)
    monkeypatch.setattr(inspect, "SAMPLE", 30_000)
    path = tmp_path / "x.pt"
    torch.save({"large": torch.randn(100_001), "small": torch.randn(3000)}, path)
    assert main(["inspect", str(path)]) == 0
    out = capsys.readouterr().out
    assert "\nlarge*" in out and "\nsmall " in out and "* of 30000 elements" in out
    assert main(["inspect", "--all", str(path)]) == 0
    assert "*" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("missing.pt", "No such file or directory"),
        ("text.pt", "cannot be read, "),
        ("text.safetensors", "cannot be read, "),
        ("text.txt", "expected .safetensors, .pt, .pth, .bin or the directory"),
        ("folder", "expected a distributed checkpoint, with a file .metadata"),
        ("none.pt", "no tensors in it"),
    ],
)
def test_inspect_of_what_it_cannot_read_is_one_line(
    name: str, why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / name
    if name == "folder":
        path.mkdir()
    elif name == "none.pt":
        torch.save({"epoch": 3}, path)
    elif name != "missing.pt":
        path.write_text("no tensors")
    assert main(["inspect", str(path)]) == 1
    error = capsys.readouterr().err
    assert error.startswith(f"python -m zipccl_hooks inspect: {path}: {why}") and error.count("\n") == 1


def test_inspect_without_permission(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def forbidden(self: Path, mode: str) -> None:
        raise PermissionError(13, "Permission denied", str(self))  # root may read everything

    monkeypatch.setattr(Path, "open", forbidden)
    assert main(["inspect", "model.pt"]) == 1
    assert capsys.readouterr().err == "python -m zipccl_hooks inspect: model.pt: Permission denied\n"


def test_inspect_names_the_extra_before_it_reads(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["inspect", "missing.pt", "--plot", "x.png"]) == 1
    assert "pip install zipccl_hooks[plot]" in capsys.readouterr().err


def test_inspect_draws(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path, _ = saved(tmp_path, "pt")
    assert main(["inspect", str(path), "--plot", str(tmp_path / "x.png")]) == 0
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")
    assert main(["inspect", str(path), "--plot", str(tmp_path / "missing" / "x.png")]) == 1
