"""What each collective does when it is compressed: its arguments checked, its exchanges described.

One function a collective, for collectives.py and c10d.py alike. ``group`` is None where this rank is in
none, which torch.distributed then reports; ``root`` is a rank of the group. TypeError and ValueError name
the argument.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor

from .arguments import check_like, check_list, check_tensor, check_times, split_numels
from .dispatch import Request, engine, equal_parts, exchange_all, exchange_sum, flatten, sum_in_place
from .eligible import scale_of
from .exchange import Call

Group = dist.ProcessGroup


def _size(group: Group | None) -> int:
    return 1 if group is None else group.size()


# Gathers


def all_gather_into_tensor(output_tensor: Tensor, input_tensor: Tensor, group: Group | None) -> Request:
    check_tensor("output_tensor", output_tensor)
    check_tensor("input_tensor", input_tensor)
    check_like("output_tensor", output_tensor, input_tensor)
    size = _size(group)
    if group is not None:
        check_times("output_tensor", output_tensor, size, "input", input_tensor)

    def body(call: Call, flat: list[Tensor]) -> None:
        n = input_tensor.numel()
        engine(call).agree(call, 0.0, [n] * size, [n] * size)
        engine(call).all_gather(call, flatten(call, input_tensor), equal_parts(flat[0], size))

    return Request(
        "all_gather_into_tensor", body, [input_tensor], [output_tensor], input_tensor.nbytes, detail=()
    )


def all_gather(tensor_list: list[Tensor], tensor: Tensor, group: Group | None) -> Request:
    check_tensor("tensor", tensor)
    check_list("tensor_list", tensor_list, tensor, group)
    # Every rank's list shows all sizes. The plain gloo collective has no uneven form.
    even = len({t.numel() for t in tensor_list}) == 1
    num_bytes = max((t.nbytes for t in tensor_list), default=0) if even else None

    def body(call: Call, flat: list[Tensor]) -> None:
        n = tensor.numel()
        engine(call).agree(call, 0.0, [n] * call.comm.size, [t.numel() for t in flat])
        engine(call).all_gather(call, flatten(call, tensor), flat)

    return Request("all_gather", body, [tensor], tensor_list, num_bytes)


# Reductions


def reduce_scatter_tensor(output: Tensor, input: Tensor, op: Any, group: Group | None) -> Request:
    check_tensor("output", output)
    check_tensor("input", input)
    check_like("output", output, input)
    size = _size(group)
    if group is not None:
        check_times("input", input, size, "output", output)

    def body(call: Call, flat: list[Tensor]) -> None:
        n = output.numel()
        scale = scale_of(op, size, input.dtype) or 1.0
        engine(call).agree(call, scale, [n] * size, [n] * size)
        exchange_sum(call, equal_parts(flatten(call, input), size), flat[0], scale)

    return Request("reduce_scatter_tensor", body, [input], [output], output.nbytes, op, detail=())


def reduce_scatter(output: Tensor, input_list: list[Tensor], op: Any, group: Group | None) -> Request:
    check_tensor("output", output)
    check_list("input_list", input_list, output, group)

    def body(call: Call, flat: list[Tensor]) -> None:
        parts = [flatten(call, t) for t in input_list]
        scale = scale_of(op, call.comm.size, output.dtype) or 1.0
        engine(call).agree(call, scale, [p.numel() for p in parts], [output.numel()] * call.comm.size)
        exchange_sum(call, parts, flat[0], scale)

    return Request(
        "reduce_scatter", body, input_list, [output], max((t.nbytes for t in input_list), default=0), op
    )


def all_reduce(tensor: Tensor, op: Any) -> Request:
    check_tensor("tensor", tensor)

    def body(call: Call, flat: list[Tensor]) -> None:
        size, x = call.comm.size, flat[0]
        if not tensor.is_contiguous():
            x.copy_(flatten(call, tensor))
        scale = scale_of(op, size, tensor.dtype) or 1.0
        engine(call).agree(call, scale, [len(x)] * size, [len(x)] * size)
        sum_in_place(call, x, scale)

    return Request("all_reduce", body, [tensor], [tensor], tensor.nbytes, op, detail=())


# Exchanges


def all_to_all_single(
    output: Tensor,
    input: Tensor,
    output_split_sizes: Sequence[int] | None,
    input_split_sizes: Sequence[int] | None,
    group: Group | None,
) -> Request:
    check_tensor("output", output)
    check_tensor("input", input)
    check_like("output", output, input)
    sends: list[int] = []
    expects: list[int] = []
    if group is not None:
        sends = split_numels("input", input, input_split_sizes, group.size())
        expects = split_numels("output", output, output_split_sizes, group.size())

    # Without split sizes every rank's tensor is as large.
    even = output_split_sizes is None and input_split_sizes is None

    def body(call: Call, flat: list[Tensor]) -> None:
        exchange_all(
            call, flatten(call, input).split(sends), flat[0].split(expects), sends[0] if even else None
        )

    if even:
        return Request("all_to_all_single", body, [input], [output], input.nbytes, detail=())
    return Request("all_to_all_single", body, [input], [output], None)


def all_to_all(
    output_tensor_list: list[Tensor], input_tensor_list: list[Tensor], group: Group | None
) -> Request:
    if not input_tensor_list:
        raise ValueError("input_tensor_list: expected one tensor per rank, got none")
    check_tensor("input_tensor_list[0]", input_tensor_list[0])
    check_list("input_tensor_list", input_tensor_list, input_tensor_list[0], group)
    check_list("output_tensor_list", output_tensor_list, input_tensor_list[0], group)

    def body(call: Call, flat: list[Tensor]) -> None:
        exchange_all(call, [flatten(call, t) for t in input_tensor_list], flat)

    return Request("all_to_all", body, input_tensor_list, output_tensor_list, None)


# With a root


def broadcast(tensor: Tensor, root: int) -> Request:
    check_tensor("tensor", tensor)

    def body(call: Call, flat: list[Tensor]) -> None:
        comm, x = call.comm, flat[0]
        if not tensor.is_contiguous():
            x.copy_(flatten(call, tensor))
        sends = [len(x)] * comm.size if comm.rank == root else [0] * comm.size
        expects = [len(x) if rank == root else 0 for rank in range(comm.size)]
        engine(call).agree(call, float(root), sends, expects)
        engine(call).broadcast(call, x, root)

    return Request("broadcast", body, [tensor], [tensor], tensor.nbytes, detail=root)


def scatter(tensor: Tensor, scatter_list: list[Tensor] | None, root: int, group: Group | None) -> Request:
    _check_root_list("scatter_list", scatter_list, tensor, root, group)

    def body(call: Call, flat: list[Tensor]) -> None:
        nothing = flat[0][:0]
        parts = [flatten(call, t) for t in scatter_list or []] or [nothing] * call.comm.size
        outs = [flat[0] if rank == root else nothing for rank in range(call.comm.size)]
        exchange_all(call, parts, outs, tensor.numel())

    return Request("scatter", body, scatter_list or [], [tensor], tensor.nbytes)


def gather(tensor: Tensor, gather_list: list[Tensor] | None, root: int, group: Group | None) -> Request:
    _check_root_list("gather_list", gather_list, tensor, root, group)

    def body(call: Call, flat: list[Tensor]) -> None:
        x = flatten(call, tensor)
        parts = [x if rank == root else x[:0] for rank in range(call.comm.size)]
        exchange_all(call, parts, flat or [x[:0]] * call.comm.size, tensor.numel())

    return Request("gather", body, [tensor], gather_list or [], tensor.nbytes)


def _check_root_list(
    name: str, tensors: list[Tensor] | None, tensor: Tensor, root: int, group: Group | None
) -> None:
    """The root alone has a tensor per rank like ``tensor``."""
    check_tensor("tensor", tensor)
    if group is None or group.rank() != root:
        if tensors:
            raise ValueError(f"{name}: expected none but at the root, got {len(tensors)} tensors")
        return
    check_list(name, tensors or [], tensor, group)
    for k, one in enumerate(tensors or []):
        if one.numel() != tensor.numel():
            raise ValueError(f"{name}[{k}]: expected {tensor.numel()} elements, got {one.numel()}")
