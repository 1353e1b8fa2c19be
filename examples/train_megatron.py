"""Megatron-LM core as it is (DDP, distributed optimizer, tensor parallelism): see ZIPCCL_AUTO_ENABLE.

    torchrun --nproc-per-node 2 examples/train_megatron.py 1    # or 2: ranks that are tensor-parallel

Prints losses and gradient norms as hexadecimal floats: they are equal. Without GPUs it stands in for one.
"""

from __future__ import annotations

import sys
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.distributed.finalize_model_grads import finalize_model_grads
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.overrides import TorchFunctionMode

from zipccl_hooks import stats

CPU, BF16 = not torch.cuda.is_available(), torch.bfloat16
DEVICE = "cpu" if CPU else "cuda"
VOCABULARY, CONTEXT, BATCH = 512, 64, 4


class OnCpu(TorchFunctionMode):
    """Tensors that are asked for on a GPU are made on the CPU, and say that they are on a GPU."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = {k: "cpu" if v == "cuda" else v for k, v in (kwargs or {}).items()}
        found = function(*args, **kwargs)
        return found.replace("torch.", "torch.cuda.") if isinstance(found, str) else found


def train(tensor_parallel: int) -> None:
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=tensor_parallel)
    torch.manual_seed(0)
    config = TransformerConfig(
        num_layers=2, hidden_size=128, num_attention_heads=4, hidden_dropout=0.0, attention_dropout=0.0,
        bf16=True, params_dtype=BF16, use_cpu_initialization=True, tensor_model_parallel_size=tensor_parallel,
    )  # fmt: skip
    gpt = GPTModel(config, get_gpt_layer_local_spec(), VOCABULARY, CONTEXT).to(DEVICE, BF16)
    ddp = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=True)
    model = DistributedDataParallel(config, ddp, gpt)
    adam = OptimizerConfig(lr=1e-3, bf16=True, params_dtype=BF16, use_distributed_optimizer=True)
    optimizer = get_megatron_optimizer(adam, [model])
    generator = torch.Generator().manual_seed(parallel_state.get_data_parallel_rank())
    positions = torch.arange(CONTEXT, device=DEVICE).expand(BATCH, -1)
    for step in range(5):
        model.zero_grad_buffer()
        tokens = torch.randint(VOCABULARY, (BATCH, CONTEXT + 1), generator=generator).to(DEVICE)
        loss = model(tokens[:, :-1], positions, None, labels=tokens[:, 1:]).mean()
        loss.backward()
        finalize_model_grads([model])
        _, norm, _ = optimizer.step()
        if dist.get_rank() == 0:
            print(f"step {step + 1} loss {loss.item().hex()} norm {float(norm).hex()}", flush=True)


if __name__ == "__main__":
    dist.init_process_group("gloo" if CPU else "nccl")
    if CPU:
        torch.cuda.current_device = lambda: "cpu"  # type: ignore
    else:
        torch.cuda.set_device(dist.get_rank())
    # States of random numbers on GPUs; nothing here is random.
    CudaRNGStatesTracker.fork = lambda self, name="": nullcontext()
    with OnCpu() if CPU else nullcontext():
        train(tensor_parallel=int(sys.argv[1]))
    if dist.get_rank() == 0:
        print(stats())
    dist.destroy_process_group()
