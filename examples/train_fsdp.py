"""FSDP2: the usual policy (parameters in bf16, reduction in fp32), plainly and compressed.

    torchrun --nproc-per-node 2 examples/train_fsdp.py

Runs on GPUs over NCCL where there are any, else on CPUs over gloo. Prints the sum of all parameters after
both runs, as hexadecimal floats: they are equal.
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from zipccl_hooks import Policy, ZipMixedPrecisionPolicy, stats

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def train(mp_policy: MixedPrecisionPolicy) -> None:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 256)) for _ in range(3)]
    model = nn.Sequential(*layers).to(DEVICE)
    for layer in model:
        fully_shard(layer, mp_policy=mp_policy)
    fully_shard(model, mp_policy=mp_policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    generator = torch.Generator(DEVICE).manual_seed(dist.get_rank())
    for _ in range(10):
        x = torch.randn(64, 256, device=DEVICE, generator=generator)
        loss = (model(x).float() - x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    parameters = [p.full_tensor() for p in model.parameters()]  # type: ignore[attr-defined]
    total = float(sum(p.double().sum().item() for p in parameters))
    compressed = sum(c.compressed_calls for c in stats().calls.values())
    if dist.get_rank() == 0:
        print(f"parameters {total.hex()} compressed calls {compressed}", flush=True)


def main() -> None:
    if DEVICE == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if DEVICE == "cuda" else "gloo")
    train(MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    # This model is small: it is compressed only because the policy says so.
    always = Policy(min_bytes=0, adaptive=False)
    train(ZipMixedPrecisionPolicy(torch.bfloat16, torch.float32, policy=always))
    if dist.get_rank() == 0:
        print(stats())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
