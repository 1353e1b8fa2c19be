"""Policy: fields, environment, errors. Counters: sums and the printed table."""

from __future__ import annotations

from collections import Counter
from dataclasses import FrozenInstanceError

import pytest

from zipccl_hooks import Policy, config
from zipccl_hooks.counters import CallStats, Stats


def test_defaults() -> None:
    assert Policy() == Policy(
        enabled=True, mode="auto", min_bytes=2097152, reduce="fp32", adaptive=True, verify=False
    )
    with pytest.raises(FrozenInstanceError):
        Policy().mode = "fast"  # type: ignore[misc]
    assert hash(Policy()) == hash(Policy())


def test_the_environment_sets_defaults_and_code_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZIPCCL_MODE", "fast")
    monkeypatch.setenv("ZIPCCL_MIN_BYTES", "7")
    monkeypatch.setenv("ZIPCCL_ENABLED", "off")
    monkeypatch.setenv("ZIPCCL_REDUCE", "native")
    monkeypatch.setenv("ZIPCCL_ADAPTIVE", "0")
    monkeypatch.setenv("ZIPCCL_VERIFY", "1")
    assert Policy() == Policy(
        enabled=False, mode="fast", min_bytes=7, reduce="native", adaptive=False, verify=True
    )
    assert Policy(mode="dense", enabled=True).mode == "dense"
    names = ("ADAPTIVE", "ENABLED", "MIN_BYTES", "MODE", "REDUCE", "VERIFY")
    assert set(config.variables()) == {f"ZIPCCL_{name}" for name in names}


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("ZIPCCL_ENABLED", "maybe", "environment variable ZIPCCL_ENABLED: expected one of 1, true"),
        ("ZIPCCL_MIN_BYTES", "1 MiB", "environment variable ZIPCCL_MIN_BYTES: invalid literal"),
        ("ZIPCCL_MODE", "best", r"mode: expected one of \('auto', 'fast', 'dense', 'raw'\), got 'best'"),
        ("ZIPCCL_REDUCE", "fp64", r"reduce: expected one of \('fp32', 'native'\), got 'fp64'"),
    ],
)
def test_bad_environment(monkeypatch: pytest.MonkeyPatch, variable: str, value: str, message: str) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(ValueError, match=message):
        Policy()


@pytest.mark.parametrize("value", [-1, 1.5, "1"])
def test_bad_min_bytes(value: object) -> None:
    with pytest.raises(ValueError, match="min_bytes: expected an integer of at least 0"):
        Policy(min_bytes=value)  # type: ignore[arg-type]


def test_counters_add_up_and_print() -> None:
    one = CallStats(2, 3000, 1000, Counter(dense=4), Counter({"below min_bytes": 1}), 17)
    total = CallStats()
    assert total.ratio == 1.0
    total.add(one)
    total.add(one)
    assert total == CallStats(4, 6000, 2000, Counter(dense=8), Counter({"below min_bytes": 2}), 34)
    assert total.calls == 6 and total.ratio == 3.0
    stats = Stats("g", {"all_reduce": total})
    assert (stats.raw_bytes, stats.sent_bytes) == (6000, 2000)
    lines = str(stats).splitlines()
    assert lines[0] == "zipccl statistics of group g"
    assert lines[2].split() == [
        "all_reduce", "6", "4", "0.006", "0.002", "3.000", "dense", "8;", "below", "min_bytes", "2",
    ]  # fmt: skip
