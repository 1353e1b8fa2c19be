"""Accelerate: the hook is registered on the prepared model. Trains plainly and with the hook.

    torchrun --nproc-per-node 2 examples/train_accelerate.py

Prints the sum of all parameters after both runs, as hexadecimal floats: they are equal.
"""

from __future__ import annotations

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from zipccl_hooks import Policy, ZipState, stats, zipccl_hook


def train(accelerator: Accelerator, hook: bool) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 1))
    x = torch.randn(256, 256)
    data = DataLoader(TensorDataset(x, x.sum(dim=1, keepdim=True)), batch_size=16)
    model, optimizer, data = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.01), data)
    if hook:
        # This model is small: it is compressed only because the policy says so.
        model.register_comm_hook(ZipState(policy=Policy(min_bytes=0, adaptive=False)), zipccl_hook)
    for inputs, targets in data:
        with accelerator.accumulate(model):
            loss = nn.functional.mse_loss(model(inputs), targets)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
    total = float(sum(p.double().sum().item() for p in model.parameters()))
    compressed = sum(c.compressed_calls for c in stats().calls.values())
    accelerator.print(f"parameters {total.hex()} compressed calls {compressed}", flush=True)


def main() -> None:
    accelerator = Accelerator(cpu=not torch.cuda.is_available(), gradient_accumulation_steps=2)
    train(accelerator, hook=False)
    train(accelerator, hook=True)
    accelerator.end_training()


if __name__ == "__main__":
    main()
