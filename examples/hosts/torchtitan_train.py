"""torchtitan's trainer and Llama: one field of the config, `checkpoint`, changes.

torchrun --nproc-per-node 2 examples/hosts/torchtitan_train.py run
torchrun --nproc-per-node 1 examples/hosts/torchtitan_train.py run 20
"""

import os
import sys
from dataclasses import dataclass
from types import SimpleNamespace

import torch
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.llama3.config_registry import llama3_debugmodel

from megackpt.contrib.torchtitan import MegackptManager


class Tokens(BaseDataLoader):
    """Batches of four sequences that follow from the batch's number, at any number of processes."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        """Without options."""

    def __init__(self, config, *, dp_world_size, dp_rank, seq_len, **_):
        self.batch, self.seq_len, self.share = 0, seq_len, slice(dp_rank, None, dp_world_size)

    def __iter__(self):
        print(f"begins after step {self.batch}", flush=True)
        while True:
            first = torch.randint(2000, (4, 1), generator=torch.Generator().manual_seed(self.batch))
            rows = (first + torch.arange(self.seq_len + 1) % 3)[self.share]
            self.batch += 1
            yield {"input": rows[:, :-1].contiguous()}, rows[:, 1:].contiguous()

    def state_dict(self):
        """Return the number of the next batch."""
        return {"batch": self.batch}

    def load_state_dict(self, state):
        """Go on with the batch of that number."""
        self.batch = state["batch"]


config = llama3_debugmodel()
config.checkpoint = MegackptManager.Config(enable=True, interval=5, last_save_model_only=False)
config.dump_folder, config.debug.seed, config.validator.enable = sys.argv[1], 0, False
config.dataloader, config.tokenizer = Tokens.Config(), SimpleNamespace(build=lambda tokenizer_path: None)
config.training.steps = int(sys.argv[2]) if len(sys.argv) > 2 else 10
config.training.local_batch_size, config.training.seq_len = 4 // int(os.environ["WORLD_SIZE"]), 16
config.training.mixed_precision_param, config.training.disable_cuda_graphs = "float32", True
config.parallelism.spmd_backend = "partial_dtensor"  # its other choices need a newer torch than 2.13
config.model_spec.model.layers = config.model_spec.model.layers[:2]
for layer in config.model_spec.model.layers:
    layer.attention.inner_attention = ScaledDotProductAttention.Config()
trainer = config.build()
trainer.train()
trainer.close()
