"""Trains under Lightning's ModelParallelStrategy with asynchronous checkpoints of megackpt; for test_hosts.

FSDP2 shards the parameters if the variable LIGHTNING_TP is not set; otherwise tensor parallelism does.
"""

import os
import sys

import torch
from lightning.pytorch import Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader, TensorDataset

from examples.hosts.lightning_fit import Regression
from megackpt.contrib.lightning import MegackptModelParallelStrategy

TENSOR_PARALLEL = int(os.environ.get("LIGHTNING_TP", "1"))


class Sharded(Regression):
    """The example's module, sharded."""

    def configure_model(self) -> None:
        if TENSOR_PARALLEL > 1:
            plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
            parallelize_module(self.net, self.device_mesh["tensor_parallel"], plan)
        else:
            fully_shard(self.net, mesh=self.device_mesh["data_parallel"])


if __name__ == "__main__":
    root, steps, resume = sys.argv[1], int(sys.argv[2]), sys.argv[3:]
    seed_everything(0)
    world = int(os.environ["WORLD_SIZE"])
    data_parallel = world // TENSOR_PARALLEL
    x = torch.randn(20, 8)
    Trainer(
        accelerator="cpu",
        devices=world,
        strategy=MegackptModelParallelStrategy(
            data_parallel_size=data_parallel, tensor_parallel_size=TENSOR_PARALLEL, async_save=True
        ),
        callbacks=[ModelCheckpoint(root, "{step}", every_n_train_steps=5, save_top_k=-1)],
        max_steps=steps,
        logger=False,
    ).fit(
        Sharded(),
        DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), 4 // data_parallel),
        ckpt_path=resume[0] if resume else None,
    )
