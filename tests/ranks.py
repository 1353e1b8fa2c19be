"""Real ranks for tests: a pool of processes that share one group and run test functions.

``run(size, function, *args)`` runs ``function(group, *args)`` on ranks 0..size-1, in a group of that
size, and returns what each returned. Processes are started once a session (importing torch takes
seconds) and started anew after a test that hung or broke them. ``function`` must be importable from a
test module; it may raise, and an exception on any rank fails the test with that rank's traceback.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import socket
import sys
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

LARGEST = 8
SECONDS = 60  # of one test, after which the ranks are ended


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _serve(rank: int, store: str, connection: Any, largest: int, backend: str) -> None:
    sys.path.insert(0, str(Path(__file__).parent))
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    if devices := torch.cuda.device_count():
        torch.cuda.set_device(rank % devices)
        if backend == "nccl" and largest > devices:
            # NCCL refuses two ranks of one host on a GPU; so they say that they are of several.
            os.environ.update(NCCL_HOSTID=f"host {rank // devices}", NCCL_SOCKET_IFNAME="lo")
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=largest)
    groups = {n: dist.new_group(list(range(n)), timedelta(seconds=60)) for n in range(1, largest + 1)}
    while (task := connection.recv()) is not None:
        module, name, size, args = task
        try:
            result = getattr(importlib.import_module(module), name)(groups[size], *args)
            connection.send((True, result))
        except BaseException:
            connection.send((False, traceback.format_exc()))


class Ranks:
    """Up to ``largest`` ranks. With CUDA devices each has one, which several may share."""

    def __init__(self, largest: int = LARGEST, backend: str = "gloo") -> None:
        self._largest, self._backend = largest, backend
        self._processes: list[Any] = []
        self._connections: list[Any] = []

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        store = tempfile.mktemp(prefix="zipccl-store-")
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        for rank in range(self._largest):
            ours, theirs = context.Pipe()
            args = (rank, store, theirs, self._largest, self._backend)
            process = context.Process(target=_serve, args=args, daemon=True)
            process.start()
            self._processes.append(process)
            self._connections.append(ours)

    def stop(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()
        self._processes, self._connections = [], []

    def run(self, size: int, function: Callable[..., Any], *args: Any) -> list[Any]:
        if not self._processes:
            self._start()
        used = self._connections[:size]
        for connection in used:
            connection.send((function.__module__, function.__name__, size, args))
        results, failures = [], []
        for rank, connection in enumerate(used):
            if not connection.poll(SECONDS):
                self.stop()
                raise TimeoutError(f"{function.__name__}: rank {rank} of {size} hangs; {failures}")
            try:
                good, result = connection.recv()
            except EOFError:
                self.stop()
                raise RuntimeError(
                    f"{function.__name__}: rank {rank} of {size} is gone; {failures}"
                ) from None
            if good:
                results.append(result)
            else:
                failures.append(f"rank {rank} of {size}:\n{result}")
        if failures:
            self.stop()  # ranks that failed in the middle of a collective are out of step
            raise AssertionError("\n".join(failures))
        return results
