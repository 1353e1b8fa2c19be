"""Training steps of a Llama-style model, plain against compressed: seconds a step, and whether losses differ.

    python benchmarks/bench_training.py                                   # two GPUs, over each transport
    torchrun --nproc-per-node 2 benchmarks/bench_training.py --tiny       # gloo: does it run at all

"fsdp2": parameters gathered in bf16, gradients reduced in fp32; "ddp": autocast to bf16, fp32 gradients.
Compressed is ``zipccl_hooks.compressed()`` around a step and nothing else. A model makes the same steps plain
and compressed, by turns, with PyTorch's deterministic algorithms: losses are compared bit for bit before a
time is printed. (Not two models: they differed in speed when all calls of both were plain.)
Times are medians of the slowest rank. Few tokens a step make communication the bound, --tokens says how many;
and the garbage collector rests, as in most frameworks. --trace DIR keeps a profile of a compressed step, and
prints how long its parts took on the device, and how much of that they ran beside an exchange.
"""

from __future__ import annotations

import argparse
import gc
import gzip
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import zipccl_hooks
from zipccl_hooks.cli.measure import slowest
from zipccl_hooks.cli.ranks import DEVICE, default_transports, joined, on_every_transport
from zipccl_hooks.config import is_rank


class Block(nn.Module):
    """Attention with grouped queries and SwiGLU, each behind an RMSNorm."""

    def __init__(self, width: int, heads: int, kv_heads: int, hidden: int) -> None:
        super().__init__()
        self.head = width // heads
        self.widths = [width, kv_heads * self.head, kv_heads * self.head]
        self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in range(2))
        self.qkv, self.out = (nn.Linear(width, n, bias=False) for n in (sum(self.widths), width))
        self.gate, self.up = (nn.Linear(width, hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        parts = self.qkv(self.norms[0](x)).split(self.widths, dim=-1)
        q, k, v = (part.view(batch, length, -1, self.head).transpose(1, 2) for part in parts)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        y = self.norms[1](x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Llama(nn.Module):
    def __init__(
        self, vocabulary: int, width: int, heads: int, kv_heads: int, hidden: int, layers: int
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        nn.init.normal_(self.embedding.weight, std=0.02)  # it is the head, too
        self.blocks = nn.ModuleList(Block(width, heads, kv_heads, hidden) for _ in range(layers))
        self.norm = nn.RMSNorm(width)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return F.linear(self.norm(x), self.embedding.weight)


STEPS = 6  # of a turn
# Those of Llama 3.2 1B, 1.24 billion parameters; and one for a laptop.
SIZES = {
    False: {"vocabulary": 128256, "width": 2048, "heads": 32, "kv_heads": 8, "hidden": 8192, "layers": 16},
    True: {"vocabulary": 512, "width": 128, "heads": 4, "kv_heads": 2, "hidden": 352, "layers": 2},
}


def wrapped(kind: str, tiny: bool, compiled: bool) -> nn.Module:
    torch.manual_seed(0)
    with torch.device(DEVICE):
        model = Llama(**SIZES[tiny])
    if compiled:
        for block in model.blocks:
            block.compile()
    if kind == "ddp":
        return DistributedDataParallel(model)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.blocks:
        fully_shard(block, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    return model


class Training:
    """A model in training, and what it was at an earlier step."""

    def __init__(self, kind: str, args: argparse.Namespace) -> None:
        self.autocast = kind == "ddp"
        self.model = wrapped(kind, args.tiny, args.compile)
        self.optimizer = torch.optim.SGD(self.model.parameters(), 1e-3, momentum=0.9)
        self.generator = torch.Generator(DEVICE).manual_seed(dist.get_rank())
        self.vocabulary, self.length = SIZES[args.tiny]["vocabulary"], args.tokens + 1

    def step(self) -> tuple[float, float]:
        """(loss, seconds of the slowest rank)."""
        tokens = torch.randint(self.vocabulary, (1, self.length), device=DEVICE, generator=self.generator)
        dist.barrier()
        start = time.perf_counter()
        with torch.autocast(DEVICE, torch.bfloat16) if self.autocast else nullcontext():
            logits = self.model(tokens[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item(), slowest(time.perf_counter() - start)  # item waits for the GPU

    def _state(self) -> list[Tensor]:
        """What a step changes."""
        momenta = [state["momentum_buffer"] for state in self.optimizer.state.values()]
        tensors = [*self.model.parameters(), *momenta]
        return [t.to_local() if isinstance(t, DTensor) else t.detach() for t in tensors]

    def save(self) -> tuple[list[Tensor], Tensor]:
        return [t.clone() for t in self._state()], self.generator.get_state()

    def restore(self, saved: tuple[list[Tensor], Tensor]) -> None:
        tensors, tokens = saved
        with torch.no_grad():
            for now, before in zip(self._state(), tensors, strict=True):
                now.copy_(before)
        self.generator.set_state(tokens)


SCOPES: dict[str, Callable[[], AbstractContextManager[object]]] = {
    "plain": nullcontext,
    "zipped": zipccl_hooks.compressed,
}


def measured(kind: str, args: argparse.Namespace) -> dict[str, Any]:
    """A row: medians in seconds of the slowest rank, and the losses at both ends."""
    zipccl_hooks.reset_stats()
    training = Training(kind, args)
    training.step()
    losses: dict[str, list[float]] = {name: [] for name in SCOPES}
    times: dict[str, list[float]] = {name: [] for name in SCOPES}
    for turn in range(args.turns + 1):
        saved = training.save()
        for name in sorted(SCOPES, reverse=turn % 2 == 1):
            training.restore(saved)
            with SCOPES[name]():
                steps = [training.step() for _ in range(STEPS)]
            losses[name] += [loss for loss, _ in steps]
            if turn:  # links, ratios and rooms are known
                times[name] += [seconds for _, seconds in steps[1:]]
    before, after = (statistics.median(times[name]) for name in SCOPES)
    if args.trace:
        traced(training, Path(args.trace) / f"{args.transports}-{kind}.json.gz")
    return {
        "transport": args.transports, "kind": kind, "compiled": args.compile, "tokens": args.tokens,
        "plain_seconds": before, "zipped_seconds": after, "speedup": before / after,
        "ratio": zipccl_hooks.stats().total.ratio, "same_losses": losses["zipped"] == losses["plain"],
        "losses": [losses["plain"][0], losses["plain"][-1]],
    }  # fmt: skip


Spans = list[tuple[float, float]]  # from, to; microseconds


def traced(training: Training, file: Path) -> None:
    """Profiles a compressed step into a file. Collective."""
    with zipccl_hooks.compressed(), torch.profiler.profile() as profiler:
        training.step()
    if dist.get_rank() == 0:
        file.parent.mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(str(file))
        print(overlap(file), flush=True)


def overlap(file: Path) -> str:
    """How long the parts of a traced step took on the device, and how much of it an exchange ran beside."""
    parts: dict[str, Spans] = {"exchange": [], "codec": [], "other kernels": []}
    for event in json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]:
        if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset"):
            name = event["name"]
            moved = "nccl" in name.lower() or "PtoP" in name
            part = "codec" if "zipccl_hooks" in name else "exchange" if moved else "other kernels"
            parts[part].append((event["ts"], event["ts"] + event["dur"]))
    found = {part: beside(spans, parts["exchange"]) for part, spans in parts.items()}
    texts = [f"{part} {total / 1e3:.1f} ms, {both / 1e3:.1f} of it beside an exchange"
             for part, (total, both) in found.items() if part != "exchange"]  # fmt: skip
    return f"# {file.name}: exchanges {found['exchange'][0] / 1e3:.1f} ms; {'; '.join(texts)}"


def beside(spans: Spans, others: Spans) -> tuple[float, float]:
    """How long some spans are together, and how much of that lies within others."""
    edges = [(at, kind, step) for kind, found in enumerate((spans, others))
             for one in found for at, step in zip(one, (1, -1), strict=True)]  # fmt: skip
    running, total, both, last = [0, 0], 0.0, 0.0, 0.0
    for at, kind, step in sorted(edges):
        total += (at - last) * (running[0] > 0)
        both += (at - last) * (running[0] > 0 and running[1] > 0)
        running[kind] += step
        last = at
    return total, both


def text(row: dict[str, Any]) -> str:
    times = f"{1e3 * row['plain_seconds']:>10.1f}{1e3 * row['zipped_seconds']:>11.1f}{row['speedup']:>9.2f}"
    same, (first, last) = "the same bits" if row["same_losses"] else "DIFFER", row["losses"]
    return f"  {row['kind']:<8}{times}{row['ratio']:>7.2f}  {same}, {first:.4f} to {last:.4f}"


def save(row: dict[str, Any], file: Path) -> None:
    """Adds a row to the list in a file."""
    rows = [*(json.loads(file.read_text()) if file.exists() else []), row]
    file.write_text("[\n" + ",\n".join(" " + json.dumps(one) for one in rows) + "\n]\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kinds", default="fsdp2,ddp", help="(default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=512, help="of a rank in a step (default: %(default)s)")
    parser.add_argument("--turns", type=int, default=4, help=f"of {STEPS} steps each (default: %(default)s)")
    parser.add_argument("--compile", action="store_true", help="torch.compile each block")
    parser.add_argument("--json", metavar="FILE", help="add the rows to a list of objects")
    parser.add_argument("--trace", metavar="DIR", help="keep profiles of a step")
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
        gc.disable()
        bad = 0
        if lead:
            print(f"# {dist.get_world_size()} ranks, {args.tokens} tokens a step, torch {torch.__version__}")
            print(f"# {'kind':<8}{'plain ms':>10}{'zipped ms':>11}{'speedup':>9}{'ratio':>7}  losses")
        for kind in args.kinds.split(","):
            row = measured(kind, args)
            gc.collect()  # the models: before others are made, and before the group goes
            bad += not row["same_losses"]
            if lead:
                print(text(row), flush=True)
                if args.json:
                    save(row, Path(args.json))
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
