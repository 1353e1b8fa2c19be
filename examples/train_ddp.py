"""Trains a small GPT twice with DistributedDataParallel, plainly and with zipccl_hook, and compares.

    python examples/train_ddp.py                                      # two processes on this machine
    torchrun --nproc-per-node 2 examples/train_ddp.py                 # the same, started by torchrun
    python examples/slow_link.py -- examples/train_ddp.py             # over a 1 Gbit/s link

Everything runs on CPUs over gloo. Both runs start from the same seed and see the same text (Python's
own documentation, which every installation has), so that with two ranks their losses must be equal
bit for bit. Exits with status 1 if they are not.
"""

from __future__ import annotations

import argparse
import os
import pydoc_data.topics
import socket
import statistics
import subprocess
import sys
import time

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import zipccl_hooks
from zipccl_hooks import zipccl_hook

CONTEXT, BATCH, WARM_UP = 64, 4, 3


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(self.norm_1(x)).chunk(3, -1)
        )
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.project(attended.transpose(1, 2).flatten(-2))
        return x + self.mlp(self.norm_2(x))


class GPT(nn.Module):
    """A byte-level GPT."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(256, width), nn.Embedding(CONTEXT, width)
        self.blocks = nn.Sequential(*(Block(width, width // 64) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions.weight
        return self.head(self.norm(self.blocks(x)))


def train(text: Tensor, args: argparse.Namespace, hook: bool) -> tuple[list[float], list[float], Tensor]:
    """(loss by step, seconds by step, all parameters)."""
    torch.manual_seed(0)
    model = DistributedDataParallel(GPT(args.width, args.layers))
    if hook:
        model.register_comm_hook(None, zipccl_hook)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    batches = torch.Generator().manual_seed(dist.get_rank())
    losses, seconds = [], []
    for _ in range(args.steps):
        starts = torch.randint(len(text) - CONTEXT - 1, (BATCH,), generator=batches)
        window = torch.stack([text[s : s + CONTEXT + 1] for s in starts.tolist()]).long()
        began = time.perf_counter()
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(window[:, :-1])
        loss = functional.cross_entropy(logits.float().flatten(0, 1), window[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(time.perf_counter() - began)
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        losses.append(mean.item() / dist.get_world_size())
    return losses, seconds, nn.utils.parameters_to_vector(model.parameters()).detach()


def compare(args: argparse.Namespace) -> int:
    """Trains both ways; prints from rank 0; returns the number of steps whose losses differ in a bit."""
    dist.init_process_group("gloo")
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // dist.get_world_size()))
    text = torch.frombuffer(bytearray("".join(pydoc_data.topics.topics.values()).encode()), dtype=torch.uint8)
    plain, plain_seconds, plain_parameters = train(text, args, hook=False)
    zipccl_hooks.reset_stats()
    zipped, zipped_seconds, zipped_parameters = train(text, args, hook=True)
    counted = zipccl_hooks.stats()
    differing = sum(a.hex() != b.hex() for a, b in zip(plain, zipped, strict=True))
    same_parameters = torch.equal(plain_parameters.view(torch.int32), zipped_parameters.view(torch.int32))
    if dist.get_rank() == 0:
        print(f"{dist.get_world_size()} processes, {len(plain_parameters) / 1e6:.1f} million parameters")
        print(f"{'step':>4}  {'loss, plain':>22}  {'loss, zipccl_hook':>22}  same bits")
        for step, (a, b) in enumerate(zip(plain, zipped, strict=True)):
            print(f"{step:>4}  {a:>22.17f}  {b:>22.17f}  {'yes' if a.hex() == b.hex() else 'NO'}")
        print(f"parameters after {args.steps} steps: {'same bits' if same_parameters else 'DIFFERENT'}")
        raw, sent = counted.raw_bytes / args.steps / 1e6, counted.sent_bytes / args.steps / 1e6
        print(f"gradients sent by a rank in a step: plain {raw:.2f} MB, zipccl_hook {sent:.2f} MB, "
              f"ratio {raw / max(sent, 1e-9):.2f}")  # fmt: skip
        a, b = (statistics.median(s[WARM_UP:]) * 1e3 for s in (plain_seconds, zipped_seconds))
        print(f"median step: plain {a:.0f} ms, zipccl_hook {b:.0f} ms, speed-up {a / b:.2f}")
        print(counted)
    dist.destroy_process_group()
    return differing + (not same_parameters)


def start_two_processes() -> int:
    """Runs this command line again as ranks 0 and 1; status of the first that failed, else 0."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    common = os.environ | {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    ranks = [subprocess.Popen([sys.executable, *sys.argv], env=common | {"RANK": str(r)}) for r in range(2)]
    return max((rank.wait() for rank in ranks), key=abs)


def main() -> int:
    parser = argparse.ArgumentParser(description="Train a small GPT plainly and with zipccl_hook.")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    args = parser.parse_args()
    if args.steps <= WARM_UP:
        parser.error(f"--steps: expected more than the {WARM_UP} of the warm-up, got {args.steps}")
    if "RANK" not in os.environ:
        return start_two_processes()
    return 1 if compare(args) else 0


if __name__ == "__main__":
    sys.exit(main())
