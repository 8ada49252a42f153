"""Lightning's Trainer with checkpoints that all ranks write: one argument of the Trainer changes.

torchrun --nproc-per-node 2 examples/hosts/lightning_fit.py run
torchrun --nproc-per-node 1 examples/hosts/lightning_fit.py run 20
"""

import os
import sys
from pathlib import Path

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader, TensorDataset

from megackpt.contrib.lightning import MegackptDDPStrategy


class Regression(LightningModule):
    """A small network that learns to sum its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))

    def on_train_start(self) -> None:
        """Say where the run begins."""
        print(f"begins after step {self.global_step}", flush=True)

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        """Return the squared error."""
        x, y = batch
        return (self.net(x) - y).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return AdamW over all parameters."""
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def main(root: str, steps: int) -> None:
    """Train until a step, from the newest checkpoint under root if there is one."""
    seed_everything(0)
    world = int(os.environ["WORLD_SIZE"])
    x = torch.randn(20, 8)  # five steps are an epoch: Lightning resumes exactly at the end of one
    data = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), 4 // world)
    trainer = Trainer(
        accelerator="cpu",
        devices=world,
        strategy=MegackptDDPStrategy(),
        callbacks=[ModelCheckpoint(root, "{step}", every_n_train_steps=5, save_top_k=-1)],
        max_steps=steps,
        logger=False,
    )
    whole = sorted(Path(root).glob("*/metadata.json"), key=lambda path: path.stat().st_mtime)
    trainer.fit(Regression(), data, ckpt_path=whole[-1].parent if whole else None)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 10)
