"""Trains under Lightning's ModelParallelStrategy (FSDP2) with checkpoints of megackpt; for test_hosts."""

import os
import sys

import torch
from lightning.pytorch import Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

from examples.hosts.lightning_fit import Regression
from megackpt.integrations.lightning import MegackptModelParallelStrategy


class Sharded(Regression):
    """The example's module; FSDP2 shards its parameters."""

    def configure_model(self) -> None:
        fully_shard(self.net, mesh=self.device_mesh["data_parallel"])


if __name__ == "__main__":
    root, steps, resume = sys.argv[1], int(sys.argv[2]), sys.argv[3:]
    seed_everything(0)
    world = int(os.environ["WORLD_SIZE"])
    x = torch.randn(20, 8)
    Trainer(
        accelerator="cpu",
        devices=world,
        strategy=MegackptModelParallelStrategy(data_parallel_size=world, tensor_parallel_size=1),
        callbacks=[ModelCheckpoint(root, "{step}", every_n_train_steps=5, save_top_k=-1)],
        max_steps=steps,
        logger=False,
    ).fit(
        Sharded(),
        DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), 4 // world),
        ckpt_path=resume[0] if resume else None,
    )
