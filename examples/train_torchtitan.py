"""TorchTitan's Llama 3 debug model, by TorchTitan as it is: plain, or compressed with ZIPCCL_AUTO_ENABLE=1.

    torchrun --nproc-per-node 2 examples/train_torchtitan.py --training.steps 5 [other options of TorchTitan]

Prints losses and gradient norms as hexadecimal floats, which are equal, and what a step took. It gives text,
and lets TorchTitan run on CPUs, where it looks for a GPU; GPUs need only `torchrun ... -m torchtitan.train`.
"""

from __future__ import annotations

import pydoc_data.topics
import statistics
import sys
import tempfile
import time
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule

if not torch.cuda.is_available():
    # Before TorchTitan is imported, as it looks for the accelerator then.
    torch._utils._get_available_device_type = lambda: "cpu"
    cpu: Any = torch.cpu
    cpu.current_device, cpu.get_device_name, cpu.memory_stats = lambda: 0, lambda _: "CPU", lambda _: {}
    cpu.get_device_properties = lambda _: SimpleNamespace(total_memory=2**30)
    cpu.reset_peak_memory_stats = cpu.empty_cache = lambda: None
    # TorchTitan asks for gradients summed and not divided: PREMUL_SUM by 1, which gloo has not.
    fsdp: Any = FSDPModule
    fsdp.set_gradient_divide_factor = lambda self, _: self.set_force_sum_reduction_for_comms(True)

from tokenizers import ByteLevelBPETokenizer
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.config import ConfigManager
from torchtitan.hf_datasets import DatasetConfig
from torchtitan.hf_datasets.text_datasets import DATASETS, Dataset
from torchtitan.train import Trainer

from zipccl_hooks import stats

# Python's own documentation, which every installation has.
TEXT = [{"text": text} for text in pydoc_data.topics.topics.values()]
torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # takes time
_log = MetricsProcessor.log
ends: list[float] = []  # of steps


def log(self: MetricsProcessor, step: int, loss: float, largest: float, norm: float, **rest: Any) -> None:
    _log(self, step, loss, largest, norm, **rest)
    if torch.distributed.get_rank() == 0:
        print(f"step {step} loss {loss.hex()} norm {norm.hex()}", flush=True)
        ends.append(time.perf_counter())


def options(folder: str) -> list[str]:
    """The debug model's, small enough for a CPU."""
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator((one["text"] for one in TEXT), vocab_size=2048, special_tokens=["<|end|>"])
    tokenizer.save(f"{folder}/tokenizer.json")
    given = {
        "job.dump_folder": folder, "debug.seed": "0", "model.name": "llama3", "model.flavor": "debugmodel",
        "model.hf_assets_path": folder, "training.dataset": "topics", "training.local_batch_size": "2",
        "training.seq_len": "128", "lr_scheduler.warmup_steps": "2", "metrics.log_freq": "1",
    }  # fmt: skip
    return [word for name, value in given.items() for word in (f"--{name}", value)]


if __name__ == "__main__":
    DATASETS["topics"] = DatasetConfig("", lambda _: Dataset.from_list(TEXT), lambda sample: sample["text"])
    MetricsProcessor.log = log
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(ConfigManager().parse_args(options(folder) + sys.argv[1:]))
        trainer.train()
        trainer.close()
    if torch.distributed.get_rank() == 0:
        print(f"{statistics.median(b - a for a, b in pairwise(ends)):.4f} s a step", stats(), sep="\n")
    torch.distributed.destroy_process_group()
