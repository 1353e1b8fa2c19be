"""Accelerate with FSDP2: the policy goes into its plugin. Trains plainly and compressed.

    torchrun --nproc-per-node 2 examples/train_accelerate_fsdp.py

Prints the sum of all parameters after both runs, as hexadecimal floats: they are equal.
"""

from __future__ import annotations

import torch
from accelerate import Accelerator, DistributedType, FullyShardedDataParallelPlugin
from accelerate.state import AcceleratorState
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils.data import DataLoader, TensorDataset

from zipccl_hooks import Policy, ZipMixedPrecisionPolicy, stats

CPU = not torch.cuda.is_available()


def train(mp_policy: MixedPrecisionPolicy) -> Accelerator:
    AcceleratorState._reset_state(reset_partial_state=True)
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        mixed_precision_policy=mp_policy,
        auto_wrap_policy="size_based_wrap",
        min_num_params=1000,
    )
    accelerator = Accelerator(cpu=CPU, fsdp_plugin=plugin)
    if CPU:
        # There Accelerate takes DDP and leaves the plugin alone, without a word; FSDP2 itself has no need to.
        accelerator.state.distributed_type, accelerator.state.fsdp_plugin = DistributedType.FSDP, plugin
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 1))
    x = torch.randn(256, 256)
    data = DataLoader(TensorDataset(x, x.sum(dim=1, keepdim=True)), batch_size=16)
    model, optimizer, data = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.01), data)
    for inputs, targets in data:
        loss = nn.functional.mse_loss(model(inputs).float(), targets)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    parameters = [p.full_tensor() for p in model.parameters()]
    total = float(sum(p.double().sum().item() for p in parameters))
    compressed = sum(c.compressed_calls for c in stats().calls.values())
    accelerator.print(f"parameters {total.hex()} compressed calls {compressed}", flush=True)
    return accelerator


if __name__ == "__main__":
    train(MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    # This model is small: it is compressed only because the policy says so.
    always = Policy(min_bytes=0, adaptive=False)
    train(ZipMixedPrecisionPolicy(torch.bfloat16, torch.float32, policy=always)).end_training()
