"""Exchange of tokens with gradients: the bits of PyTorch's own, compressed both ways."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from ranks import Ranks
from test_collectives import assert_bits, compressed_calls, data
from torch import Tensor

from zipccl_hooks import Policy, reset_stats
from zipccl_hooks.errors import PeerMismatch
from zipccl_hooks.moe import all_to_all_single_autograd

ALL = Policy(min_bytes=0)
BF16 = torch.bfloat16
HIDDEN = 61


def splits_of(rank: int, size: int) -> tuple[list[int], list[int]]:
    """(rows received, rows sent) of a rank, some none."""
    sent = [[(5 * source + 3 * target) % 7 * 30 for target in range(size)] for source in range(size)]
    return [sent[source][rank] for source in range(size)], sent[rank]


def dispatch_and_combine(group: dist.ProcessGroup) -> None:
    rank, size = group.rank(), group.size()
    received, sent = splits_of(rank, size)
    scale = torch.tensor(1.0 + rank, dtype=BF16)
    results: list[list[Tensor]] = []
    reset_stats(group)
    for exchange in (
        lambda x, outs, ins: functional.all_to_all_single_autograd(x, outs, ins, group),
        lambda x, outs, ins: all_to_all_single_autograd(x, outs, ins, group, policy=ALL),
    ):
        tokens = data(rank, sum(sent) * HIDDEN, BF16).view(-1, HIDDEN).requires_grad_()
        weight = (data(9, HIDDEN, BF16) + 1).requires_grad_()
        routed = exchange(tokens, received, sent)
        assert routed.shape == (sum(received), HIDDEN)
        combined = exchange(routed * weight * scale, sent, received)
        (combined * data(rank + 50, combined.numel(), BF16).view_as(combined)).float().sum().backward()
        assert tokens.grad is not None and weight.grad is not None
        results.append([routed.detach(), combined.detach(), tokens.grad, weight.grad])
    for plain, ours in zip(*results, strict=True):
        assert_bits(ours.reshape(-1), plain.reshape(-1))
    assert compressed_calls(group, "all_to_all_single") == 4


@pytest.mark.parametrize("size", [2, 3])
def test_dispatch_and_combine(ranks: Ranks, size: int) -> None:
    ranks.run(size, dispatch_and_combine)


def equal_parts(group: dist.ProcessGroup) -> None:
    """No splits, a non-contiguous input, and gradients of gradients."""
    size = group.size()
    x = data(group.rank(), 6 * size * 40, torch.float32).view(40, -1).t().requires_grad_()
    y = all_to_all_single_autograd(x, None, None, group, policy=ALL)
    (first,) = torch.autograd.grad((y**3).sum(), x, create_graph=True)
    torch.testing.assert_close(first, 3 * x**2)
    (second,) = torch.autograd.grad(first.sum(), x)
    torch.testing.assert_close(second, 6 * x)


def test_equal_parts_and_second_gradients(ranks: Ranks) -> None:
    ranks.run(2, equal_parts)


def bad_input(group: dist.ProcessGroup) -> None:
    x = torch.ones(10, 3)
    with pytest.raises(ValueError, match=r"input_split_sizes: expected 2 sizes that add up to 10 rows, got"):
        all_to_all_single_autograd(x, [5, 5], [5, 6], group)
    with pytest.raises(ValueError, match="input: expected at least one dimension, got a scalar"):
        all_to_all_single_autograd(torch.tensor(1.0), None, None, group)
    with pytest.raises(TypeError, match=r"input: expected a torch\.Tensor, got list"):
        all_to_all_single_autograd([1.0], None, None, group)
    sent = [5, 5] if group.rank() == 0 else [4, 6]
    with pytest.raises(PeerMismatch, match="rank 0 expects 15 elements of rank 1, got 12"):
        all_to_all_single_autograd(x, [5, 5], sent, group, policy=ALL)


def test_bad_input(ranks: Ranks) -> None:
    ranks.run(2, bad_input)
