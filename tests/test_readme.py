"""README and docs: their Python runs, commands and links exist, tables and pictures are those of the code."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from zipccl_hooks import config, format, theory

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
    assert len(blocks) == 5
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


PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\((?!http)([^)#]+)", page.read_text()):
        assert (page.parent / link).exists(), link


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_pages_are_reachable(page: Path) -> None:
    assert page.name == "README.md" or f"{page.relative_to(ROOT)}" in README


def test_the_format_page_is_the_docstring() -> None:
    assert (format.__doc__ or "").strip() in (ROOT / "docs" / "format.md").read_text()


def test_the_theory_page_is_of_the_theory() -> None:
    """Else: python -m zipccl_hooks.theory --plot docs/theory.svg"""
    for name in ("theory.md", "theory.svg"):
        assert theory.shown_text() in (ROOT / "docs" / name).read_text()


def test_environment_table_is_complete() -> None:
    tuning = (ROOT / "docs" / "tuning.md").read_text()
    rows = dict(re.findall(r"^\| `(ZIPCCL_\w+)` \| (\S+) \|", tuning, re.MULTILINE))
    defaults = {k: str(int(v)) if isinstance(v, bool) else str(v) for k, v in config.variables().items()}
    assert rows == defaults


def test_tables_are_of_the_saved_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else: make tables."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import tables

    for name in tables.PAGES:
        page = (ROOT / name).read_text()
        assert page == tables.filled(page), name


def test_a_table_says_where_we_lose(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import tables

    rows = [
        {"call": "all_gather", "data": "bf16", "transport": transport, "mib": 64.0, "speedup": speedup}
        for transport, speedup in (("nvlink", 0.969), ("host", 1.456))
    ]
    monkeypatch.setattr(tables, "saved", lambda run: rows)
    page = "a\n<!-- saved collectives nvlink:64 host:64 -->\nold\n<!-- end of saved -->\nb\n"
    assert tables.filled(page).splitlines()[2:6] == [
        "| call | data | NVLink, 64 MiB | host memory, 64 MiB |",
        "|---|---|---|---|",
        "| all_gather | bf16 | **0.97x** | 1.46x |",
        "<!-- end of saved -->",
    ]
