"""What importing costs, and who may import whom."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "zipccl_hooks"
FILES = sorted(PACKAGE.rglob("*.py"))
# A module imports only from those left of it; cuda stands for all files of that folder.
ORDER = (
    "errors", "config", "plot", "format", "theory", "reference", "_cpu_kernels", "cpu", "cuda", "ops",
    "codec", "ranges", "counters", "choose", "scale", "link", "communicator", "peers",
    "rests", "channel", "exchange", "plan", "replay", "nodes", "cuda_exchange", "cuda_work", "eligible",
    "switch", "message_kind", "messages", "arguments", "dispatch", "requests", "rooted", "p2p",
    "coalesced", "collectives", "moe", "scopes", "handshake", "untraced", "premul", "operators",
    "interpose", "methods", "c10d", "activation", "backend", "compile", "ddp", "fsdp", "__init__",
    "cli", "__main__",
)  # fmt: skip
NUMBA = {"_cpu_kernels.py", "cuda/_jit.py"}
MAX_LINES = 400
# Kernels in loops that Numba compiles as they stand.
LONGER = {"_cpu_kernels.py": 600, "cuda/encode.py": 460}

IMPORT = """
import sys, threading
import zipccl_hooks, torch
assert not [name for name in sys.modules if name.split(".")[0] == "numba"], "imports numba"
assert "zipccl_hooks.cpu" not in sys.modules and "zipccl_hooks.reference" not in sys.modules
assert not torch.cuda.is_initialized(), "initialises CUDA"
assert not torch.distributed.is_initialized(), "makes a process group"
assert threading.active_count() == 1, "starts a thread"
zipccl_hooks.decode(zipccl_hooks.encode(torch.ones(5)))
assert "numba" in sys.modules, "this test looks for the wrong thing"
"""


def relative(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


def unit(path: Path) -> str:
    """The name under which a file stands in ORDER."""
    return Path(relative(path)).parts[0].removesuffix(".py")


def imports(path: Path) -> tuple[set[str], set[str]]:
    """(units of this package, top-level names of others) imported anywhere in a file, in functions too."""
    ours: set[str] = set()
    others: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            package = PACKAGE.name.split() + list(path.relative_to(PACKAGE).parent.parts)
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            # "from . import x" names modules, "from .x import y" their contents.
            names = [f"{module}.{alias.name}" for alias in node.names] if module == PACKAGE.name else [module]
        else:
            continue
        for name in names:
            top, _, rest = name.partition(".")
            if top == PACKAGE.name:
                ours.add(rest.split(".")[0] or "__init__")
            else:
                others.add(top)
    return ours - {unit(path)}, others


def test_import_is_free() -> None:
    done = subprocess.run([sys.executable, "-c", IMPORT], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("path", FILES, ids=relative)
def test_imports_point_to_the_left(path: Path) -> None:
    assert unit(path) in ORDER, "give the module a place in ORDER"
    allowed = set(ORDER[: ORDER.index(unit(path))])
    assert imports(path)[0] <= allowed


@pytest.mark.parametrize("path", FILES, ids=relative)
def test_nothing_but_check_imports_the_reference(path: Path) -> None:
    assert "reference" not in imports(path)[0] or relative(path) == "cli/check.py"


def test_numba_stays_in_its_file() -> None:
    assert {relative(path) for path in FILES if "numba" in imports(path)[1]} <= NUMBA
    assert "numba" in imports(PACKAGE / "_cpu_kernels.py")[1]


def test_environment_is_read_in_one_file() -> None:
    readers = {
        relative(path) for path in FILES if "environ" in path.read_text() or "getenv" in path.read_text()
    }
    assert readers <= {"config.py"}


@pytest.mark.parametrize("path", FILES, ids=relative)
def test_files_stay_short(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= LONGER.get(relative(path), MAX_LINES)
