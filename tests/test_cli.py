"""python -m zipccl_hooks: what it prints, its exit status, and that it leaves nothing behind."""

from __future__ import annotations

import contextlib
import csv
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

import zipccl_hooks
from zipccl_hooks import config, plot
from zipccl_hooks.__main__ import COMMANDS, main, make_parser
from zipccl_hooks.choose import KINDS, CodecSpeed, Cost, Link, default_ratios, predict
from zipccl_hooks.cli import Failure, bench, check, inspect, profile, ranks
from zipccl_hooks.format import Mode

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


def test_commands_of_the_documentation_can_be_given() -> None:
    pattern = r"^    (?:python|torchrun --nproc-per-node \d) -m zipccl_hooks (.*?) *(?:#.*)?$"
    for name in ("README.md", "docs/cli.md"):
        given = re.findall(pattern, (ROOT / name).read_text(), re.MULTILINE)
        parsed = [make_parser().parse_args(line.split()) for line in given if "COMMAND" not in line]
        assert {args.command for args in parsed} == set(COMMANDS), name


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
    if name.endswith(".safetensors"):
        pytest.importorskip("safetensors")
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


# bench


def test_bench_prints_and_writes_what_it_measured(tmp_path: Path) -> None:
    files = [tmp_path / "rows.json", tmp_path / "rows.csv"]
    arguments = ["--sizes", "0.5", "--repetitions", "1", "--only", "all_reduce"]
    done = started("bench", *arguments, "--json", str(files[0]), "--csv", str(files[1]))
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == "# transport gloo" and lines[1].startswith("# gloo, 2 ranks, torch ")
    assert lines[2].split()[1:4] == ["call", "dtype", "MiB"] and lines[2].endswith("#wrong")
    rows = json.loads(files[0].read_text())
    assert [row["data"] for row in rows] == ["bf16", "fp32 of bf16", "fp32"]
    for row, line in zip(rows, lines[3:], strict=True):
        assert (row["transport"], row["call"], row["mib"], row["wrong"]) == ("gloo", "all_reduce", 0.5, 0)
        assert row["path"] == "dense" and row["model_seconds"] is None
        assert row["speedup"] == row["plain_seconds"] / row["zipped_seconds"]
        # Two ranks' all_reduce: its bus bandwidth is size / time.
        assert row["plain_busbw"] == pytest.approx(2**19 / row["plain_seconds"] / 1e9)
        assert line.split()[-3:] == [f"{row['ratio']:.3f}", f"{row['speedup']:.3f}", "0"]
    assert [row["ratio"] for row in rows] == pytest.approx([1.5, 2.4, 1.2], rel=0.02)
    with files[1].open() as file:
        assert [row["ratio"] for row in csv.DictReader(file)] == [str(row["ratio"]) for row in rows]


def test_sums_of_three_ranks_are_not_compared(capfd: pytest.CaptureFixture[str]) -> None:
    arguments = [
        "bench",
        "--sizes",
        "0.3",
        "--repetitions",
        "1",
        "--only",
        "ce",
    ]  # reduce_scatter, all_reduce
    assert ranks.start(["-m", "zipccl_hooks", *arguments], 3, ranks.TRANSPORTS["gloo"]) == 0
    rows = [line.split() for line in capfd.readouterr().out.splitlines() if not line.startswith("#")]
    assert [row[-1] for row in rows] == ["-"] * 5


WRONG = """
import sys
from zipccl_hooks.__main__ import main
from zipccl_hooks.cli import measure
measure.wrong_elements = lambda plain, zipped: 3
sys.exit(main(["bench", "--sizes", "0.1", "--repetitions", "1", "--only", "broadcast"]))
"""


def test_wrong_bits_are_status_1() -> None:
    env = {**CPUS, **config.rank_variables(0, 1, ranks.free_port(), {})}
    done = subprocess.run([sys.executable, "-c", WRONG], capture_output=True, text=True, env=env)
    assert done.returncode == 1, done.stderr
    assert done.stdout.splitlines()[-1].split()[-1] == "3"


@pytest.mark.parametrize(
    "argv", [["--sizes", "0"], ["--sizes", "a,b"], ["--mode", "lossy"], ["--transports", "pigeon"]], ids=str
)
def test_bad_arguments_of_bench(argv: Sequence[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["bench", *argv])
    assert ended.value.code == 2 and f"argument {argv[0]}: " in capsys.readouterr().err


def test_bench_measures_nothing_whose_file_it_cannot_write(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench, "start", lambda *arguments: pytest.fail("measured"))
    path = tmp_path / "missing" / "rows.csv"
    assert main(["bench", "--csv", str(path)]) == 1
    assert capsys.readouterr().err == f"python -m zipccl_hooks bench: {path}: No such file or directory\n"


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupted_bench_leaves_no_process(number: int, status: int, tmp_path: Path) -> None:
    mark = f"rows-{os.getpid()}-{status}.csv"  # found in the ranks' command lines, too
    command = [sys.executable, "-m", "zipccl_hooks", "bench", "--sizes", "8", "--csv", str(tmp_path / mark)]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=CPUS,
        # Not ignored, as a shell has what it starts in the background do.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
    assert process.stdout is not None
    for _ in range(3):  # until a rank has printed the head of the table
        process.stdout.readline()
    assert len(running(mark)) == 3
    process.send_signal(number)
    _, errors = process.communicate(timeout=30)
    assert (process.returncode, errors) == (status, "")
    assert not running(mark)


def running(mark: str) -> list[str]:
    """Processes with ``mark`` in their command line."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # gone
            found += [path.parent.name] if mark in path.read_text() else []
    return found


def test_a_rank_that_fails_ends_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "GRACE_SECONDS", 0.2)
    script = tmp_path / "ranks.py"
    script.write_text("import os, time\nif os.environ['RANK'] == '1': raise SystemExit(7)\ntime.sleep(60)\n")
    assert ranks.start([str(script)]) == 7
    assert not running(str(script))


# profile


PROFILE = """
import sys
from zipccl_hooks.__main__ import main
from zipccl_hooks.cli import profile
profile.SIZES, profile.REPETITIONS = (1, 32), 1
sys.exit(main(["profile", "--measure", "--file", sys.argv[1]]))
"""


def test_profile_predicts_and_measures(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path, _ = saved(tmp_path, "pt")  # most of it bf16
    assert ranks.start(["-c", PROFILE, str(path)], 2, ranks.TRANSPORTS["gloo"]) == 0
    lines = [line.split() for line in capfd.readouterr().out.splitlines()]
    assert lines[0][:6] == ["#", "gloo,", "2", "ranks", "on", "1"]
    costs = {line[0]: float(line[-1]) for line in lines[2:8]}
    assert list(costs) == [*KINDS, "pairwise"] and min(costs.values()) > 0
    assert [line[0] for line in lines if len(line) == 4 and line[0] != "#"] == ["fast", "dense"]
    ratios = {line[0]: line[1:] for line in lines[12:14]}
    assert lines[11][:4] == ["#", "ratio", "of", "torch.bfloat16"] and 1.4 < float(ratios["fast"][0]) < 1.45
    rows = [line for line in lines if line[0] in KINDS and len(line) > 3]
    assert [(row[0], row[1]) for row in rows] == [(kind, mib) for kind in KINDS for mib in ("1", "32")]
    for row in rows:
        assert float(row[4][:-1]) == pytest.approx(
            float(row[2]) / float(row[3]), abs=0.02
        )  # plain over zipped
        assert (row[5] == "plain") == (float(row[4][:-1]) <= 1.03) or 1.02 < float(row[4][:-1]) < 1.04
        # Only sizes to MEASURED_MIB are run; the last column is the number of wrong elements.
        assert (len(row), row[-1]) == ((10, "0") if row[1] == "1" else (6, row[5]))


@pytest.mark.parametrize(
    ("tensor", "why"), [(None, "No such file"), (torch.arange(9), "no tensors of a dtype")]
)
def test_profile_of_a_file_that_will_not_do(
    tensor: torch.Tensor | None, why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "x.pt"
    if tensor is None:
        assert main(["profile", "--file", str(path)]) == 1
        assert capsys.readouterr().err.startswith(f"python -m zipccl_hooks profile: {path}: {why}")
    else:
        torch.save(tensor, path)
        with pytest.raises(Failure, match=why):
            profile.file_sample(str(path))


def test_profile_draws(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    link = Link(2, 1, dict.fromkeys(KINDS, Cost(1e-4, 1e8)))
    cost = Cost(1e-5, 2e9)
    speeds = {Mode.DENSE: CodecSpeed(cost, cost, cost)}
    rows = [
        (mib, predict(kind, mib * 2**20, 2, link, speeds, default_ratios("bfloat16")), None)
        for kind in KINDS
        for mib in profile.SIZES
    ]
    plot.save(partial(profile.figure, rows), str(tmp_path / "x.png"))
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")
