"""The backend named "zipccl", for init_process_group, new_group and DeviceMesh: gloo or NCCL, compressed.

    dist.init_process_group("zipccl")                     # NCCL where there are GPUs, else gloo
    dist.init_process_group("cpu:gloo,cuda:zipccl")

What serves such a group is PyTorch's own ProcessGroupNCCL or ProcessGroupGloo, made as it makes them, so
timeouts, watchdog, flight recorder, abort, splitting and options are theirs. The name only tells c10d.py to
compress the group's traffic with ``Policy()``, unless a scope says otherwise.

The name is registered at import. PyTorch then leaves groups whose backend string has several devices, or
one with a colon, and none "nccl", without a default backend: they are called "undefined" and work.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import torch.distributed as dist

from . import c10d
from .eligible import BACKEND_NAME


def register() -> None:
    """Makes the name known to torch.distributed."""
    devices = ["cuda"] if _has_gpus() else ["cpu"]
    dist.Backend.register_backend(BACKEND_NAME, _create, extended_api=True, devices=devices)


def _has_gpus() -> bool:
    """Asks the driver's library only, so that processes can still be forked."""
    return dist.is_nccl_available() and torch.cuda.device_count() > 0


def _create(options: Any, backend_options: Any) -> Any:
    """The native backend of a new group; arguments are those of register_backend's extended interface."""
    _install()
    make = _nccl if _has_gpus() else _gloo
    backend = make(options, backend_options)
    backend._set_sequence_number_for_group()
    return backend


@cache
def _install() -> None:
    """The kernels stay for good: groups of the name may live as long as the process."""
    c10d.install()


def _gloo(options: Any, backend_options: Any) -> Any:
    backend: Any = dist.ProcessGroupGloo(
        options.store, options.group_rank, options.group_size, timeout=options.timeout
    )
    backend.options.global_ranks_in_group = options.global_ranks_in_group
    backend.options.group_name = options.group_id
    return backend


def _nccl(options: Any, backend_options: Any) -> Any:
    """As distributed_c10d makes it for "nccl", split off the default group's where that one would be."""
    chosen = backend_options
    if chosen is None:
        chosen = dist.ProcessGroupNCCL.Options()
        chosen.is_high_priority_stream = False
    elif not isinstance(chosen, dist.ProcessGroupNCCL.Options):
        raise TypeError(f"pg_options: expected ProcessGroupNCCL.Options, got {type(chosen).__name__}")
    chosen._timeout = options.timeout
    module: Any = dist.distributed_c10d
    default = module._world.default_pg
    source = None if default is None or not default.bound_device_id else module._get_split_source(default)
    if source:
        chosen.split_from = source
        chosen.split_color = module._process_group_color(options.global_ranks_in_group)
    chosen.global_ranks_in_group = options.global_ranks_in_group
    chosen.group_name = options.group_id
    return dist.ProcessGroupNCCL(options.store, options.group_rank, options.group_size, chosen)
