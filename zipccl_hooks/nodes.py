"""Reductions in groups that span nodes of several ranks: inside the node, then compressed between nodes.

A flat exchange sends every shard's term of every rank through the network, as often as a node has ranks::

    node 0: ranks 0, 1                node 1: ranks 2, 3
    1. plain, inside the node:        rank 0: terms of 0 + 1 for shards 0 and 2;  rank 1: for shards 1 and 3
                                      rank 2: terms of 2 + 3 for shards 0 and 2;  rank 3: for shards 1 and 3
    2. compressed, between ranks 0 and 2 (and 1 and 3): shard 0 to rank 0, shard 2 to rank 2

So a node sends each shard once. The order of the additions is then: within the node as the plain
collective has it, rounded to the dtype, then nodes in order, in fp32. fp16, whose sums may overflow before
they are scaled, is exchanged flat.

A node is a host name, or what ZIPCCL_NODE says. all_gather needs none of this on GPUs: its payloads travel
by NCCL's own, which crosses each node once.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from .channel import Channel
from .communicator import Communicator, bare_backend
from .config import node_name
from .exchange import Call
from .format import GROUP, TILE
from .peers import find_peers

STEP_BYTES = 64 * 1024 * 1024  # of the tensor that is reduced inside the node at a time
DTYPES = (torch.float32, torch.bfloat16)

Flat = Callable[[Call, Sequence[Tensor], Tensor, float], None]


def columns_of(nodes: Sequence[int]) -> list[list[int]] | None:
    """The ranks by local rank, then node, from each rank's node; None where there is nothing to gain.

    That is with one node, one rank a node, or nodes of different sizes.

    >>> columns_of([7, 7, 5, 5])
    [[0, 2], [1, 3]]
    """
    ranks = {node: [rank for rank, other in enumerate(nodes) if other == node] for node in nodes}
    sizes = {len(members) for members in ranks.values()}
    if len(ranks) == 1 or len(sizes) > 1 or sizes == {1}:
        return None
    return [list(column) for column in zip(*ranks.values(), strict=True)]


class Tree:
    """What a group's ranks need to reduce by nodes. Creating one is collective."""

    def __init__(
        self, comm: Communicator, columns: list[list[int]], kind: str, channel: Channel | None
    ) -> None:
        self.columns = columns
        self.local = next(k for k, column in enumerate(columns) if comm.rank in column)
        self.node = columns[self.local].index(comm.rank)
        num_nodes, num_local = len(columns[0]), len(columns)

        def store(name: str) -> dist.Store:
            return dist.PrefixStore(f"{kind} {name}", comm.store)

        self.inside = bare_backend(kind, store(f"node {self.node}"), self.local, num_local, comm.timeout)
        between = store(f"column {self.local}")
        members = [comm.members[rank] for rank in columns[self.local]]
        self.comm = Communicator(between, self.node, members, comm.timeout, comm.recorder)
        self.comm.connect()
        comm.closers.append(self.comm.close)
        self.channel: Channel | None = None
        if channel is not None:
            backend = bare_backend(kind, store(f"{kind} {self.local}"), self.node, num_nodes, comm.timeout)
            peers = find_peers(self.comm, channel.device)
            self.channel = Channel(self.comm, backend, channel.device, peers)
            comm.closers.append(self.channel.close)

    def reduce_scatter(
        self, call: Call, parts: Sequence[Tensor], out: Tensor, scale: float, flat: Flat
    ) -> None:
        """The engine's reduce_scatter in two levels; ``flat`` is its own, for the ranks of a column."""
        longest = max(part.numel() for part in parts)
        step = STEP_BYTES // len(parts) // call.dtype.itemsize // (GROUP * TILE) * GROUP * TILE
        step = max(step, GROUP * TILE)
        for start in range(0, longest, step):
            partial = self._reduce_inside(call, parts, start, min(step, longest - start))
            column = [parts[rank][start : start + step] for rank in self.columns[self.local]]
            terms = [row[: len(part)] for row, part in zip(partial, column, strict=True)]
            self._exchange(call, terms, out[start : start + step], scale, flat)

    def _reduce_inside(self, call: Call, parts: Sequence[Tensor], start: int, width: int) -> Tensor:
        """The node's sums for this rank's column, a row a node; enqueued on the encoding stream."""
        if call.channel is not None:
            call.channel.use(call.channel.encoding)
        whole = parts[0].new_zeros(len(self.columns), len(self.columns[0]), width)
        for rows, column in zip(whole, self.columns, strict=True):
            for row, rank in zip(rows, column, strict=True):
                part = parts[rank][start : start + width]
                row[: len(part)].copy_(part)
        partial = whole.new_empty(len(self.columns[0]), width)
        options = dist.distributed_c10d.ReduceScatterOptions()
        options.asyncOp = False
        work = self.inside._reduce_scatter_base(partial.view(-1), whole.view(-1), options)
        if work is not None and call.channel is None:
            work.wait()
        return partial

    def _exchange(self, call: Call, terms: list[Tensor], out: Tensor, scale: float, flat: Flat) -> None:
        sub = Call(self.comm, call.name, call.dtype, call.mode, verify=call.verify)
        sizes = [term.numel() for term in terms]
        sub.description = (scale, sizes, [out.numel()] * len(terms))
        upper, lower = call.channel, self.channel
        if upper is None or lower is None:
            flat(sub, terms, out, scale)
        else:
            sub.channel = lower
            caller = lower.begin()  # the encoding stream of the whole group's channel
            try:
                for term in terms:
                    term.record_stream(lower.decoding)  # nothing comes after decoding
                flat(sub, terms, out, scale)
                lower.join(upper.decoding, lower.decoding)
            finally:
                lower.leave(caller)
            call.ratios = sub.ratios
            call.stage += 1
        call.error = call.error or sub.error
        call.raw_bytes += sub.raw_bytes
        call.sent_bytes += sub.sent_bytes
        call.modes.update(sub.modes)


def tree(comm: Communicator, channel: Channel | None) -> Tree | None:
    """How a group reduces by nodes; None if flat. The first call for a group is collective.

    With a channel, for the tensors of its device, over NCCL; else for CPU tensors, over gloo.
    """
    kind = "gloo" if channel is None else "nccl"
    if kind not in comm.trees:
        found = None
        if comm.size >= 4:
            rows = comm.gather_in_turn([zlib.crc32(node_name().encode())])
            found = columns_of([row[0] for row in rows])
        comm.trees[kind] = None if found is None else Tree(comm, found, kind, channel)
    return comm.trees[kind]
