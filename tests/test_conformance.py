"""A quick part of ``make conformance``: PyTorch's tests that pass over gloo pass compressed."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

pytest.importorskip("expecttest")  # which PyTorch's tests import

from conformance import PASSED, Runner, names

SOME = (
    "test_DistributedDataParallelCPU",
    "test_accumulate_gradients_no_sync",
    "test_all_gather",
    "test_all_gather_coalesced_complex",
    "test_all_gather_object_default_pg",
    "test_all_reduce_coalesced_full_group_sum",
    "test_all_reduce_group_sum",
    "test_all_reduce_sum_async",
    "test_broadcast_full_group",
    "test_gather_group",
    "test_scatter_full_group",
)


@pytest.fixture(scope="module")
def runner() -> Iterator[Runner]:
    made = Runner()
    yield made
    made.stop()


def test_the_tests_are_there() -> None:
    assert len(names()) > 300 and set(SOME) <= set(names())


@pytest.mark.parametrize("name", SOME)
def test_passes_compressed(runner: Runner, name: str) -> None:
    assert runner.outcome(name, compress=False) == runner.outcome(name, compress=True) == PASSED


def test_calls_were_compressed(runner: Runner) -> None:
    assert runner.compressed_calls > 100
