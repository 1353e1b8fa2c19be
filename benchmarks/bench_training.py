"""Training steps of a Llama-style model, plain against compressed: seconds a step, and whether losses differ.

    python benchmarks/bench_training.py                                   # two GPUs, over each transport
    torchrun --nproc-per-node 2 benchmarks/bench_training.py --tiny       # gloo: does it run at all

"fsdp2": parameters gathered in bf16, gradients reduced in fp32; "ddp": autocast to bf16, fp32 gradients.
Compressed is ``zipccl_hooks.enable()`` and nothing else. Both runs start from the same seed and see the same
tokens, with PyTorch's deterministic algorithms: losses are compared bit for bit before a time is printed.
Times are medians of the slowest rank. Few tokens a step make communication the bound; --tokens says how many.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from contextlib import nullcontext

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import zipccl_hooks
from zipccl_hooks.cli.measure import slowest
from zipccl_hooks.cli.ranks import DEVICE, default_transports, joined, on_every_transport
from zipccl_hooks.config import is_rank


class Block(nn.Module):
    """Attention and SwiGLU, each behind an RMSNorm."""

    def __init__(self, width: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in range(2))
        self.qkv, self.out = (nn.Linear(width, n, bias=False) for n in (3 * width, width))
        self.gate, self.up = (nn.Linear(width, hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norms[0](x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        y = self.norms[1](x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Llama(nn.Module):
    def __init__(self, vocabulary: int, width: int, heads: int, hidden: int, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width, heads, hidden) for _ in range(layers))
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


# About 0.95 billion parameters; and one for a laptop.
SIZES = {
    False: {"vocabulary": 32000, "width": 2048, "heads": 16, "hidden": 5632, "layers": 16},
    True: {"vocabulary": 512, "width": 128, "heads": 4, "hidden": 352, "layers": 2},
}


def wrapped(kind: str, tiny: bool) -> nn.Module:
    torch.manual_seed(0)
    with torch.device(DEVICE):
        model = Llama(**SIZES[tiny])
    if kind == "ddp":
        return DistributedDataParallel(model)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.blocks:
        fully_shard(block, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    return model


def train(kind: str, args: argparse.Namespace) -> tuple[list[float], float]:
    """(losses, seconds of a step)"""
    model = wrapped(kind, args.tiny)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3, momentum=0.9)
    generator = torch.Generator(DEVICE).manual_seed(dist.get_rank())
    vocabulary = SIZES[args.tiny]["vocabulary"]
    losses, times = [], []
    for _ in range(args.warm_up + args.steps):
        tokens = torch.randint(vocabulary, (1, args.tokens + 1), device=DEVICE, generator=generator)
        dist.barrier()
        start = time.perf_counter()
        with torch.autocast(DEVICE, torch.bfloat16) if kind == "ddp" else nullcontext():
            loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1).float(), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())  # waits for the GPU
        times.append(slowest(time.perf_counter() - start))
    return losses, statistics.median(times[args.warm_up :])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kinds", default="fsdp2,ddp", help="(default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=512, help="of a rank in a step (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--warm-up", type=int, default=4)
    parser.add_argument("--tiny", action="store_true", help="a model of half a million parameters")
    parser.add_argument("--transports", default=default_transports(), help="(default: %(default)s)")
    args = parser.parse_args()
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # or cuBLAS is not deterministic
    torch.use_deterministic_algorithms(True)
    # Which takes time, for nothing here.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    if not is_rank():
        return on_every_transport([__file__, *sys.argv[1:]], args.transports)
    with joined() as lead:
        bad = 0
        if lead:
            print(f"# {dist.get_world_size()} ranks, {args.tokens} tokens a step, torch {torch.__version__}")
            print(f"# {'kind':<8}{'plain ms':>10}{'zipped ms':>11}{'speedup':>9}{'ratio':>7}  losses")
        for kind in args.kinds.split(","):
            plain_losses, plain = train(kind, args)
            zipccl_hooks.reset_stats()
            zipccl_hooks.enable()
            losses, zipped = train(kind, args)
            zipccl_hooks.disable()
            same = losses == plain_losses
            bad += not same
            if lead:
                counted = zipccl_hooks.stats()
                ratio = counted.raw_bytes / counted.sent_bytes if counted.sent_bytes else 1.0
                times = f"{plain * 1e3:>10.1f}{zipped * 1e3:>11.1f}{plain / zipped:>9.2f}"
                bits = f"{'the same bits' if same else 'DIFFER'}, {losses[0]:.4f} to {losses[-1]:.4f}"
                print(f"  {kind:<8}{times}{ratio:>7.2f}  {bits}", flush=True)
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
