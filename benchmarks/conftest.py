"""Collects bench_*.py and prints one table after the run: a row per data and codec, nothing unverified."""

from __future__ import annotations

import json
import platform
import shlex
import subprocess
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

ROWS = pytest.StashKey[list[dict[str, Any]]]()
PACKAGES = ("torch", "numba", "numpy", "zstandard", "blosc2")
COLUMNS = "{:<17} {:<25} {:>9} {:>9} {:<14} {:>6} {:>11} {:>11} {:>6}"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--json", metavar="FILE", help="write the rows of bench_codec, a list of objects")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("python_files", "bench_*.py")
    config.stash[ROWS] = []


@pytest.fixture(autouse=True)
def collect_row(request: pytest.FixtureRequest) -> Iterator[None]:
    benchmark = request.getfixturevalue("benchmark")
    yield
    if "codec" in benchmark.extra_info and benchmark.stats:
        request.config.stash[ROWS].append(benchmark.extra_info)


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    rows = config.stash[ROWS]
    if not rows:
        return
    terminalreporter.section("zipccl benchmarks")
    for line in [*header(config), *table(rows)]:
        terminalreporter.write_line(line)
    if path := config.getoption("--json"):
        Path(path).write_text("[\n" + ",\n".join(" " + json.dumps(row) for row in rows) + "\n]\n")
    failed = len(terminalreporter.stats.get("failed", []))
    terminalreporter.write_line(f"# {f'FAILED: {failed} rows left out' if failed else 'OK'}")


def header(config: pytest.Config) -> list[str]:
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=config.rootpath, capture_output=True, text=True
    )
    return [
        f"# device   {cpu_model()}, 1 thread",
        f"# versions {' '.join(f'{name} {version(name)}' for name in PACKAGES)}",
        f"# commit   {commit.stdout.strip() or 'unknown'}",
        f"# command  {shlex.join(['pytest', *config.invocation_params.args])}",
        "# GB/s     bytes of the tensor over the median time; #wrong counts bytes, compared before timing",
    ]


def table(rows: list[dict[str, Any]]) -> list[str]:
    lines: dict[tuple[str, str], dict[str, Any]] = {}
    for row in rows:
        line = lines.setdefault((row["data"], row["codec"]), dict(row))
        line[row["direction"]] = f"{row['gbps']:.2f}"
        line["wrong"] = max(line["wrong"], row["wrong"])
    names = ("data", "codec", "size", "count", "type", "ratio", "encode GB/s", "decode GB/s", "#wrong")
    return ["# " + COLUMNS.format(*names), *("  " + table_line(line) for line in lines.values())]


def table_line(line: dict[str, Any]) -> str:
    described = (line[key] for key in ("data", "codec", "bytes", "numel", "dtype"))
    speeds = (line.get(direction, "-") for direction in ("encode", "decode"))
    return COLUMNS.format(*described, f"{line['ratio']:.3f}", *speeds, line["wrong"])


def cpu_model() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    text = cpuinfo.read_text() if cpuinfo.exists() else ""
    names = [line.split(":", 1)[1].strip() for line in text.splitlines() if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "-"
