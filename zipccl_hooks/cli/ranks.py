"""Ranks for commands: processes on this machine, or those that torchrun started.

A command that needs several ranks and runs by itself starts the same command once a rank, with the variables
that torchrun would set, and ends them all, whatever ends it.
"""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from ..config import local_rank, num_threads, rank_variables

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# What the ranks are told, and what it stands in for. Multicast stays off: hosts may be shared.
TRANSPORTS: dict[str, dict[str, str]] = {
    "nvlink": {"NCCL_NVLS_ENABLE": "0"},  # as NCCL chooses
    "host": {"NCCL_NVLS_ENABLE": "0", "NCCL_P2P_DISABLE": "1"},  # host memory: a NIC of 200 Gbit/s per GPU
    "socket": {
        "NCCL_NVLS_ENABLE": "0", "NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1", "NCCL_SOCKET_IFNAME": "lo",
    },  # 25 Gbit/s
    "gloo": {"CUDA_VISIBLE_DEVICES": ""},  # CPUs
}  # fmt: skip
GRACE_SECONDS = 5.0  # for the other ranks to say what they have seen, when one has failed


def default_transports(ranks: int = 2) -> str:
    """Those of NCCL where every rank can have a GPU, else gloo."""
    return "nvlink,host,socket" if torch.cuda.device_count() >= ranks else "gloo"


def free_port() -> int:
    """A TCP port that nobody uses now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _stop(number: int, frame: Any) -> None:
    raise SystemExit(128 + number)


def start(arguments: Sequence[str], ranks: int = 2, variables: Mapping[str, str] | None = None) -> int:
    """Runs ``python *arguments`` as ``ranks`` ranks; the exit status of the first that failed, else 0.

    Their input and output are this process's. None survives it: an interrupt, an end by SIGTERM or SIGHUP and
    a failing rank end the others.
    """
    port, processes = free_port(), list[subprocess.Popen[bytes]]()
    before = {number: signal.signal(number, _stop) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        for rank in range(ranks):
            env = rank_variables(rank, ranks, port, variables or {})
            # In a session of its own, where the terminal's Ctrl-C comes to this process alone.
            command = [sys.executable, *arguments]
            processes.append(subprocess.Popen(command, env=env, start_new_session=True))
        return _wait(processes)
    finally:
        for process in processes:  # all at once, or the last would have something to say
            process.kill()
        for process in processes:
            process.wait()
        for number, handler in before.items():
            signal.signal(number, handler)


def _wait(processes: Sequence[subprocess.Popen[bytes]]) -> int:
    deadline = float("inf")
    while True:
        codes = [process.poll() for process in processes]
        failed = [code for code in codes if code]
        if None not in codes or time.monotonic() > deadline:
            code = failed[0] if failed else 0
            return code if code >= 0 else 128 - code  # of a signal, as shells have it
        if failed:
            deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        time.sleep(0.02)


def on_every_transport(arguments: Sequence[str], names: str, ranks: int = 2) -> int:
    """``start`` once for each of the comma-separated names of TRANSPORTS, until one fails.

    Its ranks are told which, as ``--transports``.
    """
    for name in names.split(","):
        print(f"# transport {name}", flush=True)
        if (code := start([*arguments, "--transports", name], ranks, TRANSPORTS[name])) != 0:
            return code
    return 0


@contextmanager
def joined() -> Iterator[bool]:
    """This process as a rank of the default group, NCCL on its GPU if there are any; whether it is rank 0."""
    if DEVICE == "cuda":
        torch.cuda.set_device(local_rank())
    dist.init_process_group("nccl" if DEVICE == "cuda" else "gloo")
    torch.set_num_threads(num_threads())
    torch.manual_seed(dist.get_rank())
    yield dist.get_rank() == 0
    dist.destroy_process_group()
