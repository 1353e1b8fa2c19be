"""Mixture of experts: tokens to their experts and back, compressed both ways, with gradients.

    routed = all_to_all_single_autograd(tokens, received_rows, sent_rows, group)      # dispatch
    tokens = all_to_all_single_autograd(experts(routed), sent_rows, received_rows, group)   # combine

For compiled code there is torch.distributed._functional_collectives' function of this name inside
``compressed()``: Dynamo does not look into this one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from . import collectives
from .arguments import check_tensor
from .config import Policy

_Splits = Sequence[int] | None


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        output_splits: _Splits,
        input_splits: _Splits,
        group: dist.ProcessGroup | None,
        policy: Policy | None,
    ) -> Tensor:
        ctx.reverse = (input_splits, output_splits, group, policy)
        rows = x.shape[0] if output_splits is None else sum(output_splits)
        output = x.new_empty(rows, *x.shape[1:])
        collectives.all_to_all_single(
            output, x.contiguous(), output_splits, input_splits, group, policy=policy
        )
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        return _Exchange.apply(gradients[0], *ctx.reverse), None, None, None, None


def all_to_all_single_autograd(
    input: Tensor,
    output_split_sizes: Sequence[int] | None,
    input_split_sizes: Sequence[int] | None,
    group: dist.ProcessGroup | None = None,
    *,
    policy: Policy | None = None,
) -> Tensor:
    """all_to_all_single that returns its output and that gradients go back through, by the reverse splits.

    Args:
        input: at least one dimension; its rows are sent.
        output_split_sizes: rows that come from each rank; None: equal parts.
        input_split_sizes: rows that go to each rank; None: equal parts.
        group: the process group; None: the default one.
        policy: how; None: ``Policy()``.

    Returns:
        The rows received, in rank order, of ``input``'s dtype, device and further dimensions.

    Raises:
        TypeError, ValueError: split sizes that do not add up; as all_to_all_single's.
        PeerMismatch: ranks expect other rows than they are sent; on every rank.
    """
    check_tensor("input", input)
    if input.dim() == 0:
        raise ValueError("input: expected at least one dimension, got a scalar")
    return _Exchange.apply(input, output_split_sizes, input_split_sizes, group, policy)
