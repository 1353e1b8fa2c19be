"""Lightning with FSDP2, through its ModelParallelStrategy. Trains on two processes, plainly and compressed.

    python examples/train_lightning_fsdp.py

Prints the sum of all parameters after both runs, as hexadecimal floats: they are equal.
"""

from __future__ import annotations

import logging
import warnings

import lightning
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.data import DataLoader, TensorDataset

from zipccl_hooks import Policy, ZipMixedPrecisionPolicy, stats

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
warnings.filterwarnings("ignore", module="lightning")


class Regression(lightning.LightningModule):
    def __init__(self, mp_policy: MixedPrecisionPolicy) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 1))
        self.mp_policy = mp_policy

    def configure_model(self) -> None:
        assert self.device_mesh is not None
        fully_shard(self.net, mesh=self.device_mesh["data_parallel"], mp_policy=self.mp_policy)

    def training_step(self, batch: list[Tensor], _: int) -> Tensor:
        x, y = batch
        return nn.functional.mse_loss(self.net(x).float(), y)

    def on_train_end(self) -> None:
        parameters = [p.full_tensor() for p in self.parameters()]  # type: ignore[attr-defined]
        total = float(sum(p.double().sum().item() for p in parameters))
        if self.trainer.is_global_zero:
            compressed = sum(c.compressed_calls for c in stats().calls.values())
            print(f"parameters {total.hex()} compressed calls {compressed}", flush=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def train(mp_policy: MixedPrecisionPolicy) -> None:
    lightning.seed_everything(0, verbose=False)
    x = torch.randn(256, 256)
    data = DataLoader(TensorDataset(x, x.sum(dim=1, keepdim=True)), batch_size=32)
    trainer = lightning.Trainer(
        accelerator="auto",
        devices=2,
        strategy=ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1),
        max_epochs=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Regression(mp_policy), data)


if __name__ == "__main__":
    train(MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    # This model is small: it is compressed only because the policy says so.
    always = Policy(min_bytes=0, adaptive=False)
    train(ZipMixedPrecisionPolicy(torch.bfloat16, torch.float32, policy=always))
