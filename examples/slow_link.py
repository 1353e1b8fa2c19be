"""Runs a program as two hosts joined by a slow link, on one Linux machine.

    python examples/slow_link.py --rate 1gbit -- examples/train_ddp.py --steps 20

Each "host" is a network namespace; a veth pair joins them, limited by tc's token bucket filter in both
directions. The program is started once in each with the environment that torchrun would give it.
Needs root and iproute2 (ip, tc). Everything it sets up is removed when it ends.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys

ADDRESSES = ("10.233.0.1", "10.233.0.2")


def missing() -> str | None:
    """What keeps this machine from doing it, in one line; None if nothing does."""
    if os.geteuid() != 0:
        return "slow link: needs root, to make network namespaces"
    tools = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if tools:
        return f"slow link: needs {' and '.join(tools)} (package iproute2)"
    name = f"zipccl-try-{os.getpid()}"
    tried = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    if tried.returncode:
        return f"slow link: this machine allows no network namespaces ({tried.stderr.strip()})"
    subprocess.run(["ip", "netns", "del", name], check=True)
    return None


def _ip(*args: str) -> None:
    subprocess.run(["ip", *args], check=True)


def set_up(hosts: list[str], rate: str) -> None:
    links = [f"veth-{host[-6:]}" for host in hosts]
    for host in hosts:
        _ip("netns", "add", host)
    _ip(
        "link",
        "add",
        links[0],
        "netns",
        hosts[0],
        "type",
        "veth",
        "peer",
        "name",
        links[1],
        "netns",
        hosts[1],
    )
    for host, link, address in zip(hosts, links, ADDRESSES, strict=True):
        _ip("-n", host, "link", "set", link, "name", "slow0")
        _ip("-n", host, "addr", "add", f"{address}/24", "dev", "slow0")
        _ip("-n", host, "link", "set", "slow0", "up")
        _ip("-n", host, "link", "set", "lo", "up")
        limit = ["tbf", "rate", rate, "burst", "256kb", "latency", "50ms"]
        subprocess.run(["tc", "-n", host, "qdisc", "add", "dev", "slow0", "root", *limit], check=True)


def run(hosts: list[str], program: list[str]) -> int:
    """Exit status of the first host's program that failed, else 0."""
    processes = []
    for rank, host in enumerate(hosts):
        environment = os.environ | {
            "RANK": str(rank),
            "LOCAL_RANK": "0",
            "WORLD_SIZE": "2",
            "MASTER_ADDR": ADDRESSES[0],
            "MASTER_PORT": "29500",
            "GLOO_SOCKET_IFNAME": "slow0",
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 2) // 2))),
        }
        command = ["ip", "netns", "exec", host, sys.executable, *program]
        processes.append(subprocess.Popen(command, env=environment))
    try:
        return max((process.wait() for process in processes), key=abs)
    finally:
        for process in processes:
            process.kill()


def main() -> int:
    parser = argparse.ArgumentParser(description="Run a program as two hosts joined by a slow link.")
    parser.add_argument("--rate", default="1gbit", help="as tc writes it (default: %(default)s)")
    parser.add_argument("program", nargs="+", help="-- program.py arguments...")
    args = parser.parse_args()
    if (why := missing()) is not None:
        print(why, file=sys.stderr)
        return 2
    hosts = [f"zipccl-{os.getpid() % 10000:04d}-{rank}" for rank in range(2)]
    try:
        set_up(hosts, args.rate)
        return run(hosts, args.program)
    finally:
        for host in hosts:
            subprocess.run(["ip", "netns", "del", host], stderr=subprocess.DEVNULL)


if __name__ == "__main__":
    sys.exit(main())
