"""What a call costs that is passed on: host microseconds of tiny collectives, plain and under enable().

    python benchmarks/bench_pass_through.py

On PyTorch's fake backend, which does nothing, so that the price stands alone; least of 40 batches of this
thread's CPU time. "small" are floats below min_bytes, looked at longer than integers and counted.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from zipccl_hooks import disable, enable, handshake
from zipccl_hooks.config import default_policy

CALLS, BATCHES = 250, 40


def microseconds(call: Callable[[], object]) -> float:
    for _ in range(CALLS):
        call()
    times = []
    for _ in range(BATCHES):
        start = time.thread_time()
        for _ in range(CALLS):
            call()
        times.append(time.thread_time() - start)
    return 1e6 * min(times) / CALLS


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    world = dist.group.WORLD
    assert world is not None
    handshake._agreed[world] = [default_policy()]  # the fake backend has no other rank to agree with
    integer, small, wide = torch.ones(4, dtype=torch.int64), torch.ones(4), torch.ones(8)
    functional = torch.ops._c10d_functional

    def functional_all_reduce(x: torch.Tensor) -> None:
        functional.wait_tensor(functional.all_reduce(x, "sum", world.group_name))

    # Under their older names they warn, since torch 2.13.
    all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    cases: dict[str, Callable[[], object]] = {
        "all_reduce, integer": lambda: dist.all_reduce(integer),
        "all_reduce, small": lambda: dist.all_reduce(small),
        "all_gather_into_tensor, small": lambda: all_gather(wide, small),
        "reduce_scatter_tensor, small": lambda: reduce_scatter(small, wide),
        "broadcast, small": lambda: dist.broadcast(small, 0),
        "functional all_reduce, integer": lambda: functional_all_reduce(integer),
        "functional all_reduce, small": lambda: functional_all_reduce(small),
    }
    print(f"{'call':<32} {'plain us':>9} {'enabled us':>11} {'added us':>9}")
    for name, call in cases.items():
        plain = microseconds(call)
        enable()
        enabled = microseconds(call)
        disable()
        print(f"{name:<32} {plain:>9.1f} {enabled:>11.1f} {enabled - plain:>9.1f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
