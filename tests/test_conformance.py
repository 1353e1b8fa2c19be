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
    "test_all_gather_object_subgroup",
    "test_all_reduce_coalesced_full_group_sum",
    "test_all_reduce_sum_async",
    "test_all_to_all_single_unequal_split",
    "test_broadcast_full_group",
    "test_gather_full_group",
    "test_scatter_complex",
)


@pytest.fixture(scope="module")
def runner() -> Iterator[Runner]:
    made = Runner()
    yield made
    made.stop()


def test_the_tests_are_there() -> None:
    assert len(names()) > 250 and set(SOME) <= set(names())


@pytest.mark.parametrize("name", SOME)
def test_passes_compressed(runner: Runner, name: str) -> None:
    assert runner.outcome(name, compress=False) == runner.outcome(name, compress=True) == PASSED


def test_calls_were_compressed(runner: Runner) -> None:
    assert runner.compressed_calls > 50
