"""Megatron-LM core: its DDP, distributed optimizer and tensor-parallel layers, with ZIPCCL_AUTO_ENABLE=1 or not.

    torchrun --nproc-per-node 2 examples/train_megatron.py --tensor-parallel 2

Prints losses and gradient norms as hexadecimal floats: plain and compressed they are equal. Runs on GPUs over
NCCL where there are any, else on CPUs over gloo, where it stands in for the GPU that Megatron asks for.
"""

from __future__ import annotations

import argparse
import os
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
from megatron.core.tensor_parallel.random import CudaRNGStatesTracker, model_parallel_cuda_manual_seed
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.overrides import TorchFunctionMode

from zipccl_hooks import stats

CPU, BF16 = not torch.cuda.is_available(), torch.bfloat16
VOCABULARY, CONTEXT, BATCH = 512, 64, 4


class OnCpu(TorchFunctionMode):
    """Tensors that are asked for on a GPU are made on the CPU, and say that they are on a GPU."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = {k: "cpu" if v == "cuda" else v for k, v in (kwargs or {}).items()}
        found = function(*args, **kwargs)
        named = function is torch.Tensor.type and isinstance(found, str)
        return found.replace("torch.", "torch.cuda.") if named else found


def train(tensor_parallel: int) -> None:
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=tensor_parallel)
    torch.manual_seed(0)
    if not CPU:
        model_parallel_cuda_manual_seed(0)
    config = TransformerConfig(
        num_layers=2, hidden_size=128, num_attention_heads=4, hidden_dropout=0.0, attention_dropout=0.0,
        bf16=True, params_dtype=BF16, use_cpu_initialization=True,
        tensor_model_parallel_size=tensor_parallel,
    )  # fmt: skip
    gpt = GPTModel(config, get_gpt_layer_local_spec(), VOCABULARY, CONTEXT).to("cpu" if CPU else "cuda", BF16)
    ddp = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=True)
    model = DistributedDataParallel(config, ddp, gpt)
    adam = OptimizerConfig(lr=1e-3, bf16=True, params_dtype=BF16, use_distributed_optimizer=True)
    optimizer = get_megatron_optimizer(adam, [model])
    generator = torch.Generator().manual_seed(parallel_state.get_data_parallel_rank())
    positions, mask = torch.arange(CONTEXT).expand(BATCH, -1), torch.ones(1, 1, CONTEXT, CONTEXT).triu(1) > 0
    for step in range(5):
        model.zero_grad_buffer()
        tokens = torch.randint(VOCABULARY, (BATCH, CONTEXT + 1), generator=generator)
        inputs = [x if CPU else x.cuda() for x in (tokens[:, :-1], positions, mask)]
        loss = model(*inputs, labels=tokens[:, 1:].to(inputs[0].device)).mean()
        loss.backward()
        finalize_model_grads([model])
        _, norm, _ = optimizer.step()
        if dist.get_rank() == 0:
            print(f"step {step + 1} loss {loss.item().hex()} norm {float(norm).hex()}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--tensor-parallel", type=int, default=1)
    tensor_parallel = parser.parse_args().tensor_parallel
    if CPU:
        torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment, return-value]
        CudaRNGStatesTracker.fork = lambda self, name="": nullcontext()
    else:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("gloo" if CPU else "nccl")
    with OnCpu() if CPU else nullcontext():
        train(tensor_parallel)
    if dist.get_rank() == 0:
        print(stats())
    dist.destroy_process_group()
