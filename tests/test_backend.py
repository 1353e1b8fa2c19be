"""The backend named "zipccl": a native backend object, options and all, whose groups are compressed."""

from __future__ import annotations

import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest

RANK = """
import sys
from datetime import timedelta
import torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
import zipccl_hooks
from zipccl_hooks import Policy, compressed, stats

rank = int(sys.argv[2])
dist.init_process_group(
    sys.argv[3], init_method="file://" + sys.argv[1], rank=rank, world_size=2, timeout=timedelta(seconds=77)
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
assert dist.get_backend() == sys.argv[3]
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


@pytest.mark.parametrize(("name", "debug"), [("zipccl", "OFF"), ("zipccl", "DETAIL"), ("cpu:zipccl", "OFF")])
def test_groups_of_the_name_are_compressed(
    tmp_path: Path, name: str, debug: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", debug)
    monkeypatch.setenv("ZIPCCL_MIN_BYTES", "0")
    command = [sys.executable, "-c", RANK, str(tmp_path / "store")]
    processes = [
        subprocess.Popen([*command, str(r), name], stdout=subprocess.PIPE, text=True) for r in range(2)
    ]
    for process in processes:
        assert process.communicate(timeout=timedelta(seconds=60).total_seconds())[0] == "done\n"
