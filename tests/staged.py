"""A stand-in for NCCL where several ranks share a GPU: the same backend calls, through host memory and gloo.

With it, the exchange between GPUs runs in groups of any size on a machine with one.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from zipccl_hooks.communicator import bare_backend


class StagedBackend:
    """Blocks the host in every call, as NCCL does not; streams see the same order."""

    def __init__(self, gloo: Any) -> None:
        self._gloo, self.options = gloo, gloo.options
        self._rank, self._size = gloo.rank(), gloo.size()
        self._batch: list[tuple[bool, Tensor, int, int]] | None = None

    @classmethod
    def of(cls, group: dist.ProcessGroup, device: torch.device) -> StagedBackend:
        return cls(group._get_backend(torch.device("cpu")))

    @classmethod
    def bare(cls, kind: str, *arguments: Any) -> Any:
        """communicator.bare_backend, with this in place of NCCL."""
        gloo = bare_backend("gloo", *arguments)
        return gloo if kind == "gloo" else cls(gloo)

    def _reduce_scatter_base(self, output: Tensor, input: Tensor, options: Any) -> None:
        staged = torch.zeros_like(output, device="cpu")
        self._gloo._reduce_scatter_base(staged, input.cpu()).wait()
        self._received([output], [staged])

    def allreduce(self, tensors: list[Tensor]) -> Any:
        staged = [t.cpu() for t in tensors]
        work = self._gloo.allreduce(staged)
        work.wait()
        self._received(tensors, staged)
        return work

    def _allgather_base(self, output: Tensor, input: Tensor, options: Any) -> None:
        staged = torch.zeros(output.numel(), dtype=torch.uint8)
        self._gloo._allgather_base(staged, input.cpu()).wait()
        self._received([output], [staged])

    def broadcast(self, tensors: list[Tensor], options: Any) -> None:
        staged = tensors[0].cpu()
        self._gloo.broadcast([staged], options).wait()
        self._received(tensors, [staged])

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], options: Any) -> None:
        staged = [torch.zeros(t.numel(), dtype=torch.uint8) for t in outputs]
        sent = [t.cpu() for t in inputs]
        peers = [p for p in range(self._size) if p != self._rank]
        works = [self._gloo.recv([staged[p]], p, 7) for p in peers if staged[p].numel()]
        works += [self._gloo.send([sent[p]], p, 7) for p in peers if sent[p].numel()]
        for work in works:
            work.wait()
        self._received(outputs, staged)

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> None:
        self._message(True, tensors[0], peer, tag)

    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> None:
        self._message(False, tensors[0], peer, tag)

    def _start_coalescing(self) -> None:
        self._batch = []

    def _end_coalescing(self) -> None:
        batch, self._batch = self._batch or [], None
        staged = [t.cpu() for _, t, *_ in batch]
        works = [
            (self._gloo.send if sends else self._gloo.recv)([s], peer, tag)
            for s, (sends, _, peer, tag) in zip(staged, batch, strict=True)
        ]
        for work in works:
            work.wait()
        arrived = [(t, s) for s, (sends, t, *_) in zip(staged, batch, strict=True) if not sends]
        self._received([t for t, _ in arrived], [s for _, s in arrived])

    def _message(self, sends: bool, tensor: Tensor, peer: int, tag: int) -> None:
        if self._batch is not None:
            self._batch.append((sends, tensor, peer, tag))
        else:
            self._batch = [(sends, tensor, peer, tag)]
            self._end_coalescing()

    @staticmethod
    def _received(targets: list[Tensor], staged: list[Tensor]) -> None:
        for target, source in zip(targets, staged, strict=True):
            target.copy_(source)
