"""The backend named "zipccl": a native backend object, options and all, whose groups are compressed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

RANK = """
import sys
from datetime import timedelta
import torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
import zipccl_hooks
from zipccl_hooks import Policy, compressed, stats

rank = int(sys.argv[3])
dist.init_process_group(
    sys.argv[2], init_method="file://" + sys.argv[1], rank=rank, world_size=2, timeout=timedelta(seconds=77)
)

def check(group, count):
    before = stats(group).calls["all_reduce"].compressed_calls if stats(group).calls else 0
    x = torch.full((9000,), 1.5)
    dist.all_reduce(x, group=group)
    assert x.eq(3).all()
    assert stats(group).calls["all_reduce"].compressed_calls - before == count

world = dist.group.WORLD
assert type(world) is dist.ProcessGroup
native = world._get_backend(torch.device("cpu"))
native = getattr(native, "wrapped_pg", native)
assert isinstance(native, dist.ProcessGroupGloo) and native.options._timeout == timedelta(seconds=77)
assert dist.get_backend() == sys.argv[2]
check(world, 1)

objects = [None, None]
dist.all_gather_object(objects, rank)
assert objects == [0, 1]
dist.barrier()
dist.distributed_c10d._set_pg_timeout(timedelta(seconds=78))

sub = dist.new_group([0, 1], timedelta(seconds=5))
assert sub._get_backend(torch.device("cpu")) is not world._get_backend(torch.device("cpu"))
check(sub, 1)
check(dist.new_group([0, 1], backend="zipccl"), 1)
plain = dist.new_group([0, 1], backend="gloo")
dist.all_reduce(torch.ones(9000), group=plain)
assert not stats(plain).calls
check(init_device_mesh("cpu", (1, 2), mesh_dim_names=("a", "b"))["b"].get_group(), 1)
with compressed(Policy(enabled=False)):
    check(world, 0)
check(world, 1)
dist.destroy_process_group()
print("done")
"""


def ends_of_ranks(*command: str) -> list[str]:
    """What two ranks print that run Python on ``command`` and their rank."""
    processes = [
        subprocess.Popen([sys.executable, *command, str(rank)], stdout=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    try:
        printed = [process.communicate(timeout=60)[0] for process in processes]
        assert [process.returncode for process in processes] == [0, 0]
    finally:
        for process in processes:
            process.kill()
    return printed


@pytest.mark.parametrize(("name", "debug"), [("zipccl", "OFF"), ("zipccl", "DETAIL"), ("cpu:zipccl", "OFF")])
def test_groups_of_the_name_are_compressed(
    tmp_path: Path, name: str, debug: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", debug)
    monkeypatch.setenv("ZIPCCL_MIN_BYTES", "0")
    assert ends_of_ranks("-c", RANK, str(tmp_path / "store"), name) == ["done\n"] * 2


NCCL_RANK = """
import os, pickle, sys
from datetime import timedelta
import torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
import zipccl_hooks
from zipccl_hooks import reset_stats, stats

store, rank, devices = sys.argv[1], int(sys.argv[2]), torch.cuda.device_count()
device = torch.device("cuda", rank % devices)
torch.cuda.set_device(device)
if devices == 1:
    os.environ.update(NCCL_HOSTID=f"host {rank}", NCCL_SOCKET_IFNAME="lo")  # as in ranks.py
os.environ["TORCH_FR_BUFFER_SIZE"] = "100"

options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
dist.init_process_group(
    "zipccl", init_method="file://" + store, rank=rank, world_size=2, timeout=timedelta(seconds=77),
    pg_options=options, device_id=device,
)

def native_of(group):
    found = group._get_backend(device)
    assert isinstance(found, dist.ProcessGroupNCCL)
    return found

def check(group):
    x = torch.full((90000,), 1.5, device=device)
    dist.all_reduce(x, group=group)
    assert x.eq(3).all()
    assert stats(group).calls["all_reduce"].compressed_calls == 1, stats(group)
    reset_stats(group)

world = dist.group.WORLD
native = native_of(world)
assert native.options._timeout == timedelta(seconds=77) and native.options.is_high_priority_stream
assert dist.get_backend() == "zipccl" and world.bound_device_id == device
check(world)

def splits():
    return native.comm_split_count()

# The communicator is there from the start, so new groups are split off it, as those of NCCL by name are.
before = splits()
sub = dist.new_group([0, 1], timedelta(seconds=50))
check(sub)
assert splits() == before + 1 and native_of(sub).options._timeout == timedelta(seconds=50)
# One each: split_group names a group by how many this rank has.
alone = [dist.new_group([0]), dist.new_group([1])]
assert alone[1 - rank] is dist.GroupMember.NON_GROUP_MEMBER and native_of(alone[rank]).size() == 1
split = dist.split_group(split_ranks=[[0, 1]])
check(split)
check(init_device_mesh("cuda", (1, 2), mesh_dim_names=("a", "b"))["b"].get_group())

objects = [None, None]
dist.all_gather_object(objects, rank)
assert objects == [0, 1]
dist.barrier()

kept = pickle.loads(torch._C._distributed_c10d._dump_nccl_trace(True, False, False))
assert any(entry["process_group"][0] == world.group_name for entry in kept["entries"])

try:
    dist.new_group([0, 1], pg_options=dist.ProcessGroupGloo._Options())
except TypeError as error:
    assert "pg_options: expected ProcessGroupNCCL.Options, got _Options" in str(error), error
else:
    raise AssertionError("options of gloo were taken")
dist.all_reduce(torch.ones(10_000_000, device=device), async_op=True)  # in flight
dist.destroy_process_group()
print("done")
"""


@pytest.mark.gpu
def test_nccl_keeps_its_device_options_splits_and_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ZIPCCL_MIN_BYTES", "0")
    monkeypatch.setenv("ZIPCCL_ADAPTIVE", "0")
    assert ends_of_ranks("-c", NCCL_RANK, str(tmp_path / "store")) == ["done\n"] * 2
