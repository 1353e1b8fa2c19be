"""torch.compile: what collectives take compressed, for Inductor's overlap scheduler.

Compiled code needs nothing of this: its collectives pass c10d.py when it runs. But where the scheduler is on,
it weighs them against compute, and reckons with plain ones unless told::

    options = torch._inductor.config.aten_distributed_optimizations
    options.enable_overlap_scheduling = True
    options.custom_runtime_estimation = zipccl_hooks.estimate_ms

It is told what the switch knows, and that measures a group's link at the group's first call: call ``explain``
for each before anything is compiled. With a function of its own, Inductor (2.13) estimates little else than
matrix products and fused regions. Caches of compiled graphs know this function by its name only, so a graph
found there is in the order that suited the link it was compiled for.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import fx

from .eligible import MOVABLE_DTYPES, policy_reason
from .scopes import policy_of
from .switch import known_switch

_NAMES = {
    "all_gather_into_tensor": "all_gather_into_tensor",
    "all_gather_into_tensor_out": "all_gather_into_tensor",
    "all_reduce": "all_reduce",
    "all_reduce_": "all_reduce",
    "all_to_all_single": "all_to_all_single",
    "broadcast": "broadcast",
    "broadcast_": "broadcast",
    "reduce_scatter_tensor": "reduce_scatter_tensor",
}
_OPS = {"sum": dist.ReduceOp.SUM, "avg": dist.ReduceOp.AVG}


def estimate_ms(node: fx.Node, override_size: int | None = None) -> float | None:
    """What a functional collective on CUDA tensors takes, by the path that the switch takes, in milliseconds.

    Args:
        node: of an Inductor graph, whose ``meta["val"]`` is a tensor.
        override_size: 0 for what it takes however small it is; else the node's own size counts.

    Returns:
        None, upon which Inductor estimates by itself, for all other nodes: no collectives, such as go plain
        by the policy, of groups that are not measured, of sizes not known when compiling.
    """
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or target.namespace != "_c10d_functional":
        return None
    name = _NAMES.get(target._opname)
    if name is None:
        return None
    names = [argument.name for argument in target._schema.arguments]
    arguments: dict[str, Any] = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
    x, group = arguments["input"].meta["val"], _group(arguments["group_name"])
    policy, switch, numel = policy_of(group), known_switch(group, x.device), x.numel()
    if policy is None or not policy.enabled or switch is None or not isinstance(numel, int):
        return None
    num_bytes = numel * x.itemsize // (group.size() if name == "reduce_scatter_tensor" else 1)
    op = _OPS.get(arguments["reduce_op"], dist.ReduceOp.MAX) if "reduce_op" in arguments else None
    if num_bytes < policy.min_bytes or x.dtype not in MOVABLE_DTYPES:
        return None
    if policy_reason(x.dtype, group, policy, op) is not None:
        return None
    expected = switch.expected(name, 0 if override_size == 0 else num_bytes, x.dtype, policy.mode)
    return 1e3 * (expected.plan.seconds if expected.plan else expected.native)


def _group(named: Any) -> dist.ProcessGroup:
    """A functional collective's group: named, itself, or a node that is one, by version and graph."""
    found: Any = named.meta["val"] if isinstance(named, fx.Node) else named
    return (
        found if isinstance(found, dist.ProcessGroup) else dist.distributed_c10d._resolve_process_group(found)
    )
