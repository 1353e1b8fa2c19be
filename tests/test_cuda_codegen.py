"""What the CUDA kernels compile to, on a machine without a GPU: wide accesses, no local memory."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from zipccl_hooks.cuda import launch
from zipccl_hooks.format import Mode

pytest.importorskip("numba_cuda", reason="numba-cuda is not installed")

CASES = [
    ("encode", "bfloat16", Mode.FAST, (8, 0)),
    ("encode", "bfloat16", Mode.FAST, (9, 0)),
    ("encode", "float32", Mode.DENSE, (10, 0)),
    ("decode", "bfloat16", Mode.DENSE, (8, 0)),
    ("decode", "bfloat16", Mode.FAST, (9, 0)),
    ("decode", "float8_e5m2", Mode.DENSE, (10, 0)),
    ("decode_sum", "bfloat16", Mode.FAST, (9, 0)),
    ("decode_sum", "float32", Mode.DENSE, (8, 0)),
]


@pytest.mark.parametrize(("kind", "dtype", "mode", "capability"), CASES)
def test_ptx(
    kind: str,
    dtype: str,
    mode: Mode,
    capability: tuple[int, int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    text = launch.compiled_ptx(kind, dtype, mode, capability)
    assert f".target sm_{capability[0]}{capability[1]}" in text
    (entry,) = re.findall(r"\.visible \.entry (\w+)\(", text)
    parameters = re.findall(rf"\.param \.u64 {entry}_param_\d+", text)
    assert len(parameters) == launch.ARGUMENTS[kind]
    assert not re.search(r"(ld|st)\.local|\.local \.", text), "local memory"
    wide = "load" if kind == "encode" else "store"
    item = 1 if dtype.startswith("float8") else 2
    pattern = {"load": r"ld\.global\S*\.v4\.u32", "store": rf"st\.global\.v{2 * item}\.u32"}[wide]
    assert len(re.findall(pattern, text)) >= 4, f"a wide {wide} per group"
    assert ("redux.sync" in text) == (kind == "encode")
    # The second time it comes from disk.
    (kept,) = (tmp_path / "zipccl_hooks").iterdir()
    kept.write_text("kept")
    assert launch.compiled_ptx(kind, dtype, mode, capability) == "kept"
    registers = launch.MAX_REGISTERS[kind][dtype != "float32"]
    assert f".maxnreg {registers}\n" in text
