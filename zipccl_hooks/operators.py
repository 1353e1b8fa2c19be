"""The dispatcher's collectives that methods.py and c10d.py take over, and the requests each call makes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from . import coalesced, premul, requests
from .dispatch import Request

Group = dist.ProcessGroup
Arguments = Sequence[Any]


@dataclass(frozen=True)
class Operator:
    """``torch.ops.c10d.<name>``.

    ``schema`` is what torch 2.11 to 2.14 have, less the namespace of its classes. ``requests(arguments,
    group)`` returns one a dtype, none for a form that is not compressed. The first tensor in argument
    number ``probe`` tells dtype and device, on every rank; where ``sized``, also what is compared with
    ``min_bytes``, as the request called ``counted_as`` will.
    """

    name: str
    schema: str
    counted_as: str
    requests: Callable[[Arguments, Group], list[Request]]
    probe: int = 0
    sized: bool = True

    @property
    def overload(self) -> Any:
        return getattr(torch.ops.c10d, self.name).default

    @property
    def found_schema(self) -> str:
        text = str(self.overload._schema).replace("__torch__.torch.classes.c10d.", "")
        return text[text.index("(") :]

    @cached_property
    def group_at(self) -> int:
        """Where the process group is among the arguments; before it are tensors."""
        return self._position(" process_group")

    @cached_property
    def async_at(self) -> int:
        return self._position(" async_op")

    @cached_property
    def returns_outputs(self) -> bool:
        return self.schema.endswith("Work)")

    def first(self, a: Arguments) -> Any:
        """The first tensor of argument ``probe``; None of an empty list."""
        x = a[self.probe]
        while type(x) is list:
            x = x[0] if x else None
        return x

    def num_bytes(self, a: Arguments, x: Tensor) -> int | None:
        """The request's ``num_bytes``, before one is made; None where that takes more than ``x``."""
        return x.nbytes if self.sized and (type(a[0]) is not list or len(a[0]) <= 1) else None

    def _position(self, argument: str) -> int:
        return [argument in text for text in self.schema.split(",")].index(True)


def _all_reduce(a: Arguments, group: Group) -> list[Request]:
    if len(a[0]) > 1 or a[3] is not None:  # of several devices; sparse
        return []
    return [requests.all_reduce(a[0][0], premul.reduce_op(a[2]))]


def _all_reduce_coalesced(a: Arguments, group: Group) -> list[Request]:
    op = premul.reduce_op(a[2])
    if len(a[0]) == 1:
        return [requests.all_reduce(a[0][0], op)]
    return coalesced.requests_of_all_reduce(a[0], op)


def _all_gather(a: Arguments, group: Group) -> list[Request]:
    return [requests.all_gather(a[0][0], a[1][0], group)] if len(a[1]) == 1 else []


def _all_gather_single(a: Arguments, group: Group) -> list[Request]:
    return [requests.all_gather_into_tensor(a[0], a[1], group)]


def _all_gather_coalesced(a: Arguments, group: Group) -> list[Request]:
    if len(a[0]) == 1:
        return [requests.all_gather_into_tensor(a[0][0], a[1][0], group)]
    return coalesced.requests_of_all_gather(a[0], a[1], group)


def _reduce_scatter(a: Arguments, group: Group) -> list[Request]:
    op = premul.reduce_op(a[3])
    return [requests.reduce_scatter(a[0][0], a[1][0], op, group)] if len(a[0]) == 1 else []


def _reduce_scatter_single(a: Arguments, group: Group) -> list[Request]:
    return [requests.reduce_scatter_tensor(a[0], a[1], premul.reduce_op(a[3]), group)]


def _reduce_scatter_coalesced(a: Arguments, group: Group) -> list[Request]:
    op = premul.reduce_op(a[3])
    if len(a[0]) == 1:
        return [requests.reduce_scatter_tensor(a[0][0], a[1][0], op, group)]
    return coalesced.requests_of_reduce_scatter(a[0], a[1], op, group)


def _all_to_all(a: Arguments, group: Group) -> list[Request]:
    return [requests.all_to_all(a[0], a[1], group)]


def _all_to_all_single(a: Arguments, group: Group) -> list[Request]:
    return [requests.all_to_all_single(a[0], a[1], a[3] or None, a[4] or None, group)]


def _broadcast(a: Arguments, group: Group) -> list[Request]:
    return [requests.broadcast(a[0][0], a[2])] if len(a[0]) == 1 else []


def _gather(a: Arguments, group: Group) -> list[Request]:
    return [requests.gather(a[1][0], a[0][0] if a[0] else None, a[3], group)] if len(a[1]) == 1 else []


def _scatter(a: Arguments, group: Group) -> list[Request]:
    return [requests.scatter(a[0][0], a[1][0] if a[1] else None, a[3], group)] if len(a[0]) == 1 else []


_GROUP = "ProcessGroup process_group"
_TENSORS = f"Tensor[] tensors, {_GROUP}"
_LISTS = f"Tensor[] output_tensors, Tensor[] input_tensors, {_GROUP}"
_GATHERS = f"Tensor[][] output_tensors, Tensor[] input_tensors, {_GROUP}"
_SCATTERS = f"Tensor[] output_tensors, Tensor[][] input_tensors, {_GROUP}"
_SINGLE = f"Tensor output_tensor, Tensor input_tensor, {_GROUP}"
_COALESCED = f"Tensor[] outputs, Tensor[] inputs, {_GROUP}"
_SPLITS = "int[] output_split_sizes, int[] input_split_sizes"
_OP = "ReduceOp reduce_op"
_END = "bool async_op=True, int timeout=-1) ->"

OPERATORS = (
    Operator("allreduce_", f"({_TENSORS}, {_OP}, Tensor? sparse_indices, {_END} (Tensor[], Work)",
             "all_reduce", _all_reduce),
    Operator("allreduce_coalesced_", f"({_TENSORS}, {_OP}, {_END} Work",
             "all_reduce", _all_reduce_coalesced),
    Operator("allgather_", f"({_GATHERS}, {_END} (Tensor[][], Work)",
             "all_gather", _all_gather, probe=1, sized=False),
    Operator("_allgather_base_", f"({_SINGLE}, {_END} (Tensor, Work)",
             "all_gather_into_tensor", _all_gather_single, probe=1),
    Operator("allgather_into_tensor_coalesced_", f"({_COALESCED}, bool async_op=True) -> Work",
             "all_gather_into_tensor", _all_gather_coalesced, probe=1),
    Operator("reduce_scatter_", f"({_SCATTERS}, {_OP}, {_END} (Tensor[], Work)",
             "reduce_scatter", _reduce_scatter, sized=False),
    Operator("_reduce_scatter_base_", f"({_SINGLE}, {_OP}, {_END} (Tensor, Work)",
             "reduce_scatter_tensor", _reduce_scatter_single),
    Operator("reduce_scatter_tensor_coalesced_", f"({_COALESCED}, {_OP}, {_END} Work",
             "reduce_scatter_tensor", _reduce_scatter_coalesced),
    Operator("alltoall_", f"({_LISTS}, {_END} (Tensor[], Work)",
             "all_to_all", _all_to_all, sized=False),
    Operator("alltoall_base_", f"(Tensor output, Tensor input, {_GROUP}, {_SPLITS}, {_END} Work",
             "all_to_all_single", _all_to_all_single, sized=False),
    Operator("broadcast_", f"({_TENSORS}, int root_rank, int root_tensor, {_END} (Tensor[], Work)",
             "broadcast", _broadcast),
    Operator("gather_", f"({_GATHERS}, int root_rank, {_END} Work",
             "gather", _gather, probe=1),
    Operator("scatter_", f"({_SCATTERS}, int root_rank, {_END} (Tensor[], Work)",
             "scatter", _scatter),
)  # fmt: skip
