"""Runs a script that trains with Megatron-Core 0.16.1, or Megatron-Bridge 0.3.1, on processors with gloo.

torchrun --nproc-per-node 2 tests/contrib/megatron/megatron_on_cpu.py SCRIPT ARGUMENTS...

Nothing of Megatron-Core is replaced. These are, and none of them is part of a checkpoint:

* the device "cuda" and its random generator, which torch is told are those of the processors
* Apex's FusedAdam, which Megatron-Core trains with, by an AdamW that keeps its state in the same way

Megatron-Bridge's training config imports its model providers, which import Transformer Engine; ModelOpt and
three packages of loggers are imported, too. None of them is used in a script without these, so they are empty
here. Its checkpointing module and its config are its own.
"""

from __future__ import annotations

import runpy
import sys
import types

import torch
import torch._dynamo  # it makes a list of torch's functions, before some are replaced

from tests.contrib.megatron.megatron_stand_ins import CudaIsTheCpu, FusedAdam, replace_packages

NOT_USED_OF_BRIDGE = (
    "megatron.bridge.data",
    "megatron.bridge.models",
    "megatron.bridge.peft.base",
    "megatron.bridge.training.tokenizers.tokenizer",
    "mlflow",
    "modelopt",
    "torch.utils.tensorboard",
    "wandb",
)


def replace_accelerator() -> None:
    """Make this process answer for a GPU, for good."""
    torch.cuda.current_device = lambda: torch.device("cpu")
    torch.cuda.set_device = torch.cuda.synchronize = lambda *_: None
    torch.cuda.get_rng_state = torch.cuda.random.get_rng_state = lambda *_, **__: torch.get_rng_state()
    torch.cuda.set_rng_state = torch.cuda.random.set_rng_state = lambda state, *_: torch.set_rng_state(state)
    CudaIsTheCpu().__enter__()


def replace_apex() -> None:
    """Let Megatron-Core find Apex's optimizers, and nothing else of Apex."""
    optimizers = types.ModuleType("apex.optimizers")
    optimizers.FusedAdam, optimizers.FusedSGD = FusedAdam, torch.optim.SGD
    sys.modules[optimizers.__name__] = optimizers


if __name__ == "__main__":
    replace_accelerator()
    replace_apex()
    replace_packages(["megatron.bridge"], NOT_USED_OF_BRIDGE)
    del sys.argv[0]
    runpy.run_path(sys.argv[0], run_name="__main__")
