"""Copies among peers: who has them, what happens where they fail, and where a peer does not come.

That what they carry arrives whole is tested with the collectives: the transports "_peers" of
test_cuda_collectives.py.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import Ranks
from test_collectives import assert_bits, data
from test_cuda_collectives import ALL, prepared

from zipccl_hooks import channel, collectives, link, peers, switch
from zipccl_hooks.choose import Cost, Link
from zipccl_hooks.config import peer_to_peer
from zipccl_hooks.cuda import ipc, program


@pytest.mark.parametrize(
    ("variable", "value", "allowed"),
    [("NCCL_P2P_DISABLE", "1", False), ("NCCL_P2P_DISABLE", "0", True), ("NCCL_P2P_LEVEL", "LOC", False),
     ("NCCL_P2P_LEVEL", "NVL", True)],
)  # fmt: skip
def test_what_nccl_is_told_holds(
    variable: str, value: str, allowed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, value)
    assert peer_to_peer() is allowed


@pytest.fixture(scope="module")
def two_ranks() -> Iterator[Ranks]:
    pool = Ranks(largest=2)
    yield pool
    pool.stop()


def gathered(group: dist.ProcessGroup, numel: int) -> None:
    x = data(group.rank(), numel, torch.bfloat16, False)
    out = torch.empty(group.size() * numel, dtype=torch.bfloat16)
    collectives.all_gather_into_tensor(out, x, group, policy=ALL)
    assert_bits(out, torch.cat([data(r, numel, torch.bfloat16, False) for r in range(group.size())]))


def own_group() -> dist.ProcessGroup:
    """One of the test's own: what its channel finds out lasts."""
    return dist.new_group([0, 1])


def regions(group: dist.ProcessGroup) -> list[int]:
    """Bytes of a region after calls of growing and falling size."""
    group = own_group()
    found = channel.channel(group, torch.device("cpu")).peers
    assert found is not None
    sizes = []
    for numel in (1000, 2_000_000, 5000, 2_500_000):
        peers.MIN_REGION = 4096
        channel.channel(group, torch.device("cpu"))
        gathered(group, numel)
        sizes.append(found.region)
    return sizes


def test_regions_grow_when_needed(two_ranks: Ranks) -> None:
    """Pieces are of 32 KiB here, so a long tensor needs no more than one of them."""
    for sizes in two_ranks.run(2, prepared, "regions", (), "emulated_peers", __name__):
        assert sizes == [4096, 32768, 32768, 32768]


def measured(group: dist.ProcessGroup) -> list[int]:
    """Regions, and plans that are left, before and after a switch is made for a channel that was used."""
    group = own_group()
    slow = {"all_gather": Cost(1.0, 1.0)}
    link.measure_backend = lambda backend, device: Link(group.size(), 1, slow)
    link.native_agree = lambda backend, device: list
    gathered(group, 40_000)
    found = channel.channel(group, torch.device("cpu"))
    seen = []
    for _ in range(2):
        assert found.peers is not None
        (flow,) = (flow for key, flow in found._flows.items() if key[0] == "all_gather_into_tensor")
        seen += [found.peers.region, len(flow.plans)]
        switch.switch(found)
    gathered(group, 40_000)
    return seen


def test_measuring_invalidates_plans_of_smaller_regions(two_ranks: Ranks) -> None:
    """Their copies would go to memory that other groups may have by now."""
    for seen in two_ranks.run(2, prepared, "measured", (), "emulated_peers", __name__):
        small, plans, large, left = seen
        assert small < max(switch.PEERS_SIZES) <= large and plans > 0 and left == 0


def without(group: dist.ProcessGroup, how: str) -> Any:
    """A group one of whose ranks cannot; whether its peers are usable afterwards."""
    group = own_group()
    if group.rank() == 1:
        if how == "export":

            def refuse(memory: torch.Tensor) -> bytes:
                raise RuntimeError("CUDA driver: CUDA_ERROR_NOT_SUPPORTED")

            ipc.export = refuse
        elif how == "attach":

            def refuse_too(handle: bytes, device: torch.device) -> int:
                raise RuntimeError("CUDA driver: CUDA_ERROR_PEER_ACCESS_UNSUPPORTED")

            ipc.attach, peers._attached = refuse_too, {}
        else:
            copy = program.Program.copy

            def lost(self: Any, target: int, source: int, num_bytes: int, stream: int) -> Any:
                return None if num_bytes == 128 else copy(self, target, source, num_bytes, stream)

            program.Program.copy = lost  # of the probe's bytes
    for numel in (5000, 70_001):
        gathered(group, numel)
    found = channel.channel(group, torch.device("cpu")).peers
    return None if found is None else found.usable


@pytest.mark.parametrize("how", ["export", "attach", "copy"])
def test_where_one_rank_cannot_all_use_the_backend(how: str, two_ranks: Ranks) -> None:
    assert two_ranks.run(2, prepared, "without", (how,), "emulated_peers", __name__) == [False] * 2


def on_nodes(group: dist.ProcessGroup) -> bool:
    node_name, peers.node_name = peers.node_name, lambda: f"node {group.rank()}"
    try:
        group = own_group()
        gathered(group, 5000)
        return channel.channel(group, torch.device("cpu")).peers is None
    finally:
        peers.node_name = node_name


def test_ranks_of_several_nodes_are_no_peers(two_ranks: Ranks) -> None:
    assert two_ranks.run(2, prepared, "on_nodes", (), "emulated_peers", __name__) == [True] * 2


ABSENT = """
import sys, time
from datetime import timedelta
import torch, torch.distributed as dist
import emulated
from zipccl_hooks import Policy, collectives, peers
store, rank = sys.argv[1], int(sys.argv[2])
limit = timedelta(seconds=4)
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2, timeout=limit)
from staged import StagedBackend
from zipccl_hooks import channel, eligible, nodes
emulated.install()
eligible.BACKENDS = {"cpu": "gloo", "cuda": "gloo"}
channel.group_backend = StagedBackend.of
peers.peer_to_peer = lambda: True
x, out = torch.randn(9000).bfloat16(), torch.empty(18000, dtype=torch.bfloat16)
for turn in range(3):
    if turn == 2 and rank == 1:
        sys.stdin.read()
    collectives.all_gather_into_tensor(out, x, policy=Policy(min_bytes=0, adaptive=False))
"""


def test_a_rank_whose_peer_does_not_come_ends(tmp_path: Path) -> None:
    """It does not hang, and no one sees what is not complete: as with NCCL's watchdog."""
    started = [
        subprocess.Popen(
            [sys.executable, "-c", ABSENT, str(tmp_path / "store"), str(rank)],
            cwd=Path(__file__).parent,
            stdin=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        assert started[0].stderr is not None
        assert started[0].wait(60) == -signal.SIGABRT
        assert "rank 0: all_gather_into_tensor not complete after 4 s" in started[0].stderr.read()
    finally:
        for process in started:
            process.kill()
            process.communicate()
