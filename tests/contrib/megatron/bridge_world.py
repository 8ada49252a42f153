"""Megatron-Bridge 0.3.1's own `save_checkpoint` and `load_checkpoint` on CPU ranks.

Every function runs in a worker of a RankPool. Megatron-Bridge cannot be installed without CUDA packages, so
its modules of checkpoints are imported from a folder, and the packages and parts that these import and do
not need here are empty stand-ins. Its checkpoint managers came after the newest release on PyPI, 0.3.1:
`DefaultCheckpointManager` here has the methods of 0.6.0 over the functions of 0.3.1.
"""

from __future__ import annotations

import importlib
import json
import sys
import types
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megackpt.contrib.megatron_bridge import MegackptManager
from tests.contrib.megatron.megatron_stand_ins import replace_packages
from tests.contrib.megatron.megatron_world import Case, Layout, build, fill, logits_of

STAND_INS = (
    "megatron.bridge.peft.base",
    "megatron.bridge.training.config",
    "megatron.bridge.training.tokenizers",
    "mlflow",
    "modelopt",
    "omegaconf",
    "torch.utils.tensorboard",
    "wandb",
)
PACKAGES = [f"megatron.bridge{name}" for name in ("", ".training", ".training.utils", ".peft", ".utils")]
CASE = Case("bridge", tied=True)
STEP, OPERATIONS = 7, 1000


def checkpointing() -> Any:
    """Import `megatron.bridge.training.checkpointing`, with managers."""
    if PACKAGES[0] not in sys.modules:
        replace_packages(PACKAGES, STAND_INS)
        torch.cuda.get_rng_state = lambda *_: torch.zeros(1, dtype=torch.uint8)
        torch.cuda.set_rng_state = lambda *_: None
    bridge: Any = importlib.import_module("megatron.bridge.training.checkpointing")
    bridge.DefaultCheckpointManager = DefaultCheckpointManager
    return bridge


class DefaultCheckpointManager:
    """The methods of Megatron-Bridge 0.6.0's class."""

    def __init__(self, checkpoint_config: Any) -> None:
        self.checkpoint_config = checkpoint_config
        self.checkpointing_context: dict[str, Any] = {}

    def save(self, ctx: Any, callback_manager: Any) -> None:
        checkpointing().save_checkpoint(
            num_floating_point_operations_so_far=ctx.num_floating_point_operations_so_far,
            pg_collection=ctx.pg_collection,
            **self._passed(ctx),
        )

    def load(self, ctx: Any) -> tuple[int, int]:
        result: tuple[int, int] = checkpointing().load_checkpoint(strict=ctx.strict, **self._passed(ctx))
        return result

    def _passed(self, ctx: Any) -> dict[str, Any]:
        names = ("state", "model", "optimizer", "opt_param_scheduler")
        passed = {name: getattr(ctx, name) for name in names}
        return passed | {"checkpointing_context": self.checkpointing_context}

    def finalize_async_saves(self, state: Any, blocking: bool, terminate: bool) -> None:
        checkpointing().maybe_finalize_async_save(
            global_state=state, ckpt_cfg=self.checkpoint_config, blocking=blocking, terminate=terminate
        )


def save(layout: Layout, path: str, installed: bool, async_save: bool) -> torch.Tensor | None:
    """Save a model filled from the oracle; return its logits."""
    manager, context = _managed(layout, path, seed=1, installed=installed, async_save=async_save)
    fill(context.model[0].sharded_state_dict())
    context.state.train_state.step = STEP
    manager.save(context, None)
    manager.finalize_async_saves(context.state, blocking=True, terminate=True)
    return logits_of(context.model[0])


def load(layout: Layout, path: str, installed: bool) -> tuple[tuple[int, int], torch.Tensor | None]:
    """Load into a model with other weights; return what the manager returns, and the logits."""
    manager, context = _managed(layout, path, seed=2, installed=installed, async_save=False)
    return manager.load(context), logits_of(context.model[0])


def _managed(layout: Layout, path: str, *, seed: int, installed: bool, async_save: bool) -> tuple[Any, Any]:
    model = build(CASE, layout, seed=seed, installed=installed)
    bridge = checkpointing()
    from megatron.bridge.training.state import GlobalState, TrainState
    from megatron.bridge.training.utils import checkpoint_utils
    from megatron.core import num_microbatches_calculator as calculator
    from megatron.core.process_groups_config import ProcessGroupCollection

    # It remembers what this rank has read, without the others; a worker here is a rank of several jobs.
    for function in vars(checkpoint_utils).values():
        if hasattr(function, "cache_clear"):
            function.cache_clear()
    calculator.destroy_num_microbatches_calculator()
    calculator.init_num_microbatches_calculator(dist.get_rank(), None, 2, 1, 1)
    state = GlobalState()
    state.train_state = TrainState()
    state._cfg = _config(layout, path, async_save)
    state.initialize_async_checkpoint_worker()
    groups = ProcessGroupCollection.use_mpu_process_groups()
    bridge.get_pg_collection = lambda model: groups
    context = types.SimpleNamespace(  # the fields of both contexts that are used here
        state=state,
        model=[model],
        pg_collection=groups,
        optimizer=None,
        opt_param_scheduler=None,
        num_floating_point_operations_so_far=OPERATIONS,
        strict=True,
    )
    return MegackptManager(state.cfg.checkpoint), context


def _config(layout: Layout, path: str, async_save: bool) -> Any:
    settings = _Settings(
        checkpoint=_Settings(
            save=path,
            load=path,
            ckpt_format="torch_dist",
            async_save=async_save,
            most_recent_k=-1,
            save_optim=False,
            load_optim=False,
            save_rng=True,
            load_rng=False,  # ends the process if the tracker has no streams, as without a GPU
            fully_parallel_save=True,
            fully_parallel_load=True,
            dist_ckpt_strictness="assume_ok_unexpected",
        ),
        model=_Settings(
            tensor_model_parallel_size=layout.tp,
            pipeline_model_parallel_size=layout.pp,
            fp16=False,
            bf16=False,
        ),
    )
    settings.to_yaml = lambda file: Path(file).write_text(
        json.dumps(
            {
                "model": vars(settings.model),
                "checkpoint": {"save_rng": True, "save_optim": False, "fully_parallel_save": True},
            }
        )
    )
    return settings


class _Settings(types.SimpleNamespace):
    """A part of the config: what was not given is None, or without anything set in its turn."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Settings() if name in ("optimizer", "rng", "dataset", "logger", "ft", "tokenizer") else None
