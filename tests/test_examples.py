"""The examples and the README's commands, run as a user runs them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "examples"


def run(*command: str, status: int = 0) -> str:
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    done = subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, cwd=ROOT, env=environment, timeout=300
    )
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout


def test_demo_trains_with_equal_losses() -> None:
    output = run("examples/train_ddp.py", "--steps", "5", "--layers", "2")
    assert output.count("yes") == 5 and "NO" not in output
    assert "parameters after 5 steps: same bits" in output
    losses = re.findall(r"^ +\d+ +(\d\.\d+) +(\d\.\d+) +yes$", output, re.MULTILINE)
    assert len(losses) == 5 and float(losses[-1][1]) < float(losses[0][1])
    ratio = re.search(r"ratio (\d\.\d+)", output)
    assert ratio and 2.0 < float(ratio.group(1)) < 3.0  # 2.9 for the gradients, 2.0 for sums of two


def test_demo_refuses_too_few_steps() -> None:
    done = subprocess.run(
        [sys.executable, "examples/train_ddp.py", "--steps", "3"], capture_output=True, text=True, cwd=ROOT
    )
    assert done.returncode == 2
    assert "--steps: expected more than the 3 of the warm-up, got 3" in done.stderr


def same_parameters(output: str) -> None:
    plain, zipped = re.findall(r"parameters (\S+) compressed calls (\d+)", output)
    assert plain[1] == "0" and int(zipped[1]) > 0
    assert plain[0] == zipped[0]


def test_lightning() -> None:
    pytest.importorskip("lightning")
    same_parameters(run("examples/train_lightning.py"))


def test_accelerate() -> None:
    pytest.importorskip("accelerate")
    launch = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    same_parameters(run(*launch, "examples/train_accelerate.py"))


@pytest.mark.parametrize("package", ["lightning", "accelerate"])
def test_fsdp2_in(package: str) -> None:
    pytest.importorskip(package)
    launch = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    starter = launch if package == "accelerate" else ()
    same_parameters(run(*starter, f"examples/train_{package}_fsdp.py"))


def test_fsdp() -> None:
    launch = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    output = run(*launch, "examples/train_fsdp.py")
    same_parameters(output)
    ratio = re.search(r"reduce_scatter_tensor .* (\d\.\d+)  dense", output)
    assert ratio and float(ratio.group(1)) > 2.5


def test_slow_link_says_what_is_missing(tmp_path: Path) -> None:
    """Without iproute2 on the path: one line, status 2."""
    done = subprocess.run(
        [sys.executable, "examples/slow_link.py", "--", "x.py"],
        capture_output=True, text=True, cwd=ROOT, env={"PATH": str(tmp_path)},
    )  # fmt: skip
    assert done.returncode == 2 and done.stdout == ""
    assert re.fullmatch(r"slow link: needs (root|ip and tc).*\n", done.stderr)


def test_slow_link_joins_two_hosts() -> None:
    sys.path.insert(0, str(EXAMPLES))
    import slow_link

    if (why := slow_link.missing()) is not None:
        pytest.skip(why)
    output = run(
        "examples/slow_link.py", "--rate", "1gbit", "--",
        "examples/train_ddp.py", "--steps", "4", "--width", "64", "--layers", "1",
    )  # fmt: skip
    assert output.count("yes") == 4 and "same bits" in output
    left = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout
    assert "zipccl-" not in left
