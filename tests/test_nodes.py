"""Reductions by nodes over gloo: ranks that say on which node they are."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist
from ranks import LARGEST, Ranks
from test_collectives import ALL, assert_bits, data, rank_order_sum, small_pieces

from zipccl_hooks import collectives, nodes, reset_stats, stats
from zipccl_hooks.nodes import columns_of


@pytest.mark.parametrize(
    ("node_of", "columns"),
    [
        ([7, 7, 5, 5], [[0, 2], [1, 3]]),
        ([7, 5, 7, 5], [[0, 1], [2, 3]]),
        ([1, 1, 1, 2, 2, 2], [[0, 3], [1, 4], [2, 5]]),
        ([1, 1, 1, 1], None),
        ([1, 2, 3, 4], None),
        ([1, 1, 2], None),
    ],
)
def test_columns(node_of: list[int], columns: list[list[int]] | None) -> None:
    assert columns_of(node_of) == columns


def reduce_by_nodes(group: dist.ProcessGroup, node_of: list[int], exact: bool) -> None:
    rank, size, numel = group.rank(), group.size(), 3 * 8192 + 77
    os.environ["ZIPCCL_NODE"] = f"node {node_of[rank]}"
    nodes.STEP_BYTES = 0  # steps of a group of tiles
    own = dist.new_group(list(range(size)))
    for dtype in (torch.float32, torch.bfloat16):
        terms = [data(r, size * numel, torch.float32) for r in range(size)]
        terms = [((t * 500).round() if exact else t).to(dtype) for t in terms]
        # Two ranks a node: their sum, rounded; then the nodes' in order.
        partial = [
            rank_order_sum([t for t, node in zip(terms, node_of, strict=True) if node == n])
            for n in dict.fromkeys(node_of)
        ]
        with small_pieces():
            for op, scale in ((dist.ReduceOp.SUM, 1.0), (dist.ReduceOp.AVG, 1 / size)):
                expected = rank_order_sum(partial, scale)
                out = torch.empty(numel, dtype=dtype)
                collectives.reduce_scatter_tensor(out, terms[rank], op, own, policy=ALL)
                assert_bits(out, expected.view(size, numel)[rank])
                y = terms[rank][:-1000].clone()
                collectives.all_reduce(y, op, own, policy=ALL)
                assert_bits(y, expected[:-1000])
        counted = stats(own).calls["reduce_scatter_tensor"]
        assert counted.raw_bytes == 2 * (len(partial) - 1) * numel * dtype.itemsize
        assert counted.sent_bytes < counted.raw_bytes
        reset_stats(own)
    del os.environ["ZIPCCL_NODE"]


@pytest.mark.parametrize(
    ("node_of", "exact"),
    [([0, 0, 1, 1, 2, 2, 3, 3], False), ([0, 1, 2, 3] * 2, False), ([0, 1] * 4, True)],
    ids=["4 nodes", "4 nodes, mixed", "2 nodes of 4"],
)
def test_reduce_by_nodes(ranks: Ranks, node_of: list[int], exact: bool) -> None:
    ranks.run(LARGEST, reduce_by_nodes, node_of, exact)
