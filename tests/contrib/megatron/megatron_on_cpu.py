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

import importlib.machinery
import runpy
import sys
import types
from pathlib import Path

import torch
import torch._dynamo  # it makes a list of torch's functions, before some are replaced

from tests.contrib.megatron.empty_modules import EmptyModules
from tests.contrib.megatron.megatron_stand_ins import CudaIsTheCpu, FusedAdam

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


def replace_parts_of_bridge() -> None:
    """Make Megatron-Bridge's config and checkpointing importable, without what its __init__ imports."""
    megatron = importlib.machinery.PathFinder.find_spec("megatron")
    for path in megatron.submodule_search_locations if megatron else ():
        if Path(path, "bridge").is_dir():
            bridge = types.ModuleType("megatron.bridge")
            bridge.__path__ = [str(Path(path, "bridge"))]
            sys.modules[bridge.__name__] = bridge
    sys.meta_path.insert(0, EmptyModules(NOT_USED_OF_BRIDGE))


if __name__ == "__main__":
    replace_accelerator()
    replace_apex()
    replace_parts_of_bridge()
    del sys.argv[0]
    runpy.run_path(sys.argv[0], run_name="__main__")
