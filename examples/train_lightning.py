"""Lightning: the hook goes into DDPStrategy. Trains on two GPUs, or CPU processes, plainly and with the hook.

    python examples/train_lightning.py

Prints the sum of all parameters after both runs, as hexadecimal floats: they are equal.
"""

from __future__ import annotations

import logging
import warnings

import lightning
import torch
from lightning.pytorch.overrides.distributed import _register_ddp_comm_hook
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from zipccl_hooks import Policy, ZipState, stats, zipccl_hook

GPUS = torch.cuda.device_count() >= 2
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
warnings.filterwarnings("ignore", module="lightning")


class Regression(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 1))

    def training_step(self, batch: list[Tensor], _: int) -> Tensor:
        x, y = batch
        return nn.functional.mse_loss(self.net(x), y)

    def on_train_start(self) -> None:
        # Lightning registers DDPStrategy's hook on GPUs only; on a CPU it is done here, by its own function.
        strategy = self.trainer.strategy
        assert isinstance(strategy, DDPStrategy) and isinstance(strategy.model, DistributedDataParallel)
        if strategy.root_device.type == "cpu":
            _register_ddp_comm_hook(
                strategy.model,
                strategy._ddp_comm_state,
                strategy._ddp_comm_hook,
                strategy._ddp_comm_wrapper,
            )

    def on_train_end(self) -> None:
        total = float(sum(p.double().sum().item() for p in self.parameters()))
        if self.trainer.is_global_zero:
            compressed = sum(c.compressed_calls for c in stats().calls.values())
            print(f"parameters {total.hex()} compressed calls {compressed}", flush=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def train(**hook: object) -> None:
    lightning.seed_everything(0, verbose=False)
    x = torch.randn(256, 256)
    data = DataLoader(TensorDataset(x, x.sum(dim=1, keepdim=True)), batch_size=32)
    trainer = lightning.Trainer(
        accelerator="gpu" if GPUS else "cpu",
        devices=2,
        strategy=DDPStrategy(process_group_backend="nccl" if GPUS else "gloo", **hook),  # type: ignore[arg-type]
        max_epochs=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Regression(), data)


if __name__ == "__main__":
    train()
    # This model is small: it is compressed only because the policy says so.
    train(ddp_comm_state=ZipState(policy=Policy(min_bytes=0, adaptive=False)), ddp_comm_hook=zipccl_hook)
