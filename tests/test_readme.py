"""The README: its Python runs, its commands exist, its tables are those of the code."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from zipccl_hooks import config

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
PREAMBLE = """
import sys
import torch
import torch.distributed as dist
dist.init_process_group("gloo", init_method="file://" + sys.argv[1], rank=0, world_size=1)
model = torch.nn.Linear(4, 4)
"""


def test_python_blocks_run(tmp_path: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert len(blocks) == 4
    script = tmp_path / "readme.py"
    script.write_text(PREAMBLE + "\n".join(blocks) + "\nwork.wait()\ndist.destroy_process_group()\n")
    done = subprocess.run([sys.executable, script, tmp_path / "store"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "zipccl statistics" in done.stdout


def test_make_targets_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for name in ("README.md", "CONTRIBUTING.md"):
        named = set(re.findall(r"make ((?:[a-z-]+ ?)+)", (ROOT / name).read_text()))
        assert named and {target for call in named for target in call.split()} <= targets, name


def test_links_lead_somewhere() -> None:
    for link in re.findall(r"\]\((?!http)([^)#]+)", README):
        assert (ROOT / link).exists(), link


def test_environment_table_is_complete() -> None:
    rows = dict(re.findall(r"^\| `(ZIPCCL_\w+)` \| (\S+) \|", README, re.MULTILINE))
    defaults = {k: str(int(v)) if isinstance(v, bool) else str(v) for k, v in config.variables().items()}
    assert rows == defaults
