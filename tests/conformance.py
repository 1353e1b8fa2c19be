"""PyTorch's own tests of torch.distributed, plain and compressed: what passes over gloo must pass both ways.

    make conformance                                                      # all that there are
    PYTHONPATH=. python tests/conformance.py test_all_reduce_sum ...      # some
    WORLD_SIZE=8 make conformance                                         # with those for larger groups

They are torch.testing._internal.distributed.distributed_test's, run one after the other by the same few
processes, each in a process group of its own. Compressed means ``enable(Policy(min_bytes=0))``. Aside stay
the tests' looks at the profiler for events that gloo names.
"""

from __future__ import annotations

import os
import sys
import tempfile
import unittest
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from ranks import Ranks

from zipccl_hooks import Policy, compressed, reset_stats, stats

WORLD = int(os.environ.get("WORLD_SIZE", 4))  # many tests of sub-groups are for 8 and more
ENVIRONMENT = {"BACKEND": "gloo", "WORLD_SIZE": str(WORLD)}
TIMEOUT = timedelta(seconds=10)  # of a process group's calls
PASSED, SKIPPED = "passed", "skipped"


@cache
def tests() -> type[Any]:
    """The class of the tests, whose module reads the environment."""
    os.environ.update(ENVIRONMENT)
    from torch.testing._internal.distributed import distributed_test as module

    module.PROFILING_SUPPORTED_BACKENDS.clear()

    class Conformance(module.TestDistBackend, module.DistributedTest._DistTestBase):
        def _barrier(self, *args: Any, **kwargs: Any) -> None:
            dist.barrier()

    return Conformance


def names() -> list[str]:
    return unittest.TestLoader().getTestCaseNames(tests())


def one_test(group: dist.ProcessGroup, name: str, compress: bool, folder: str) -> tuple[str, int]:
    """(outcome, calls that were compressed) of a test on this rank."""
    if dist.is_initialized():
        dist.destroy_process_group()  # the pool's, or what a test left
    rank, store = group.rank(), f"{folder}/store"
    os.environ["TEMP_DIR"] = folder
    case = tests()(name)
    torch.manual_seed(0)  # as alike as in fresh processes
    case.rank, case.file_name = rank, store
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=WORLD, timeout=TIMEOUT
    )
    reset_stats()
    with compressed(Policy(enabled=compress, min_bytes=0)):
        outcome = _outcome(getattr(case, name))
    return outcome, sum(call.compressed_calls for call in stats().calls.values())


def _outcome(test: Callable[[], None]) -> str:
    try:
        test()
    except unittest.SkipTest:
        return SKIPPED
    except SystemExit as end:
        return SKIPPED if end.code else PASSED
    except Exception as error:
        return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
    return PASSED


class Runner:
    """Runs tests on a pool of ranks, started anew after one that failed or hung."""

    def __init__(self) -> None:
        self._pool = Ranks(WORLD)
        self.compressed_calls = 0

    def outcome(self, name: str, compress: bool) -> str:
        """What came of a test: on the ranks that did not pass, if any."""
        with tempfile.TemporaryDirectory() as folder:
            os.mkdir(f"{folder}/test_dir")
            try:
                results = self._pool.run(WORLD, one_test, name, compress, folder)
            except (AssertionError, TimeoutError) as error:  # the pool is started anew
                return f"{type(error).__name__} outside the test"
        self.compressed_calls += sum(count for _, count in results)
        found = sorted({outcome for outcome, _ in results}, key=(PASSED, SKIPPED).__contains__)
        if not set(found) <= {PASSED, SKIPPED}:
            self._pool.stop()  # the ranks are out of step
        return found[0]

    def stop(self) -> None:
        self._pool.stop()


def main(chosen: list[str]) -> int:
    runner, counted, different = Runner(), Counter[str](), []
    for name in chosen or names():
        plain = runner.outcome(name, compress=False)
        counted[plain if plain in (PASSED, SKIPPED) else "failed"] += 1
        ours = runner.outcome(name, compress=True) if plain == PASSED else plain
        if ours != plain:
            different.append(name)
        print(f"{name}: {plain}", "" if ours == plain else f"but compressed: {ours}", flush=True)
    runner.stop()
    print(
        f"conformance: plain {dict(counted)}; of the passed {len(different)} do not pass compressed "
        f"{different}; {runner.compressed_calls} compressed calls"
    )
    return bool(different)


if __name__ == "__main__":
    import conformance  # by the name under which the ranks know it

    sys.exit(conformance.main(sys.argv[1:]))
