"""torchtitan: a checkpoint manager whose steps are those of a `Checkpointer`.

    config.checkpoint = MegackptManager.Config(enable=True, interval=500)     # a Trainer.Config

The trainer builds it from its config in place of its own. Model and optimizer have the names that torchtitan
gives them, and a step loads at any other data, tensor or pipeline parallel size. Weights of Hugging Face are
read through the state dict adapter of torchtitan's model.

Source: torchtitan 0.3.0 `components.checkpointer`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torchtitan.components.checkpointer import (
    DATALOADER,
    LR_SCHEDULER,
    MODEL,
    OPTIMIZER,
    BaseCheckpointManager,
    ModelWrapper,
)
from torchtitan.config import TORCH_DTYPE_MAP
from torchtitan.tools import filesystem

from megackpt.engine.checkpoint.step_roots import step_directories
from megackpt.entities import ReplicatedValue, ShardedStateDict, ShardedTensor
from megackpt.entities.sharded_tensor import TorchShardedTensor
from megackpt.errors import DeclarationError, NotACheckpointError, UnsupportedError
from megackpt.options import KeyRule, LoadOptions, Policy
from megackpt.run.checkpointer import Checkpointer
from megackpt.run.collective import load

_OTHER_STEP = re.compile(r"step-(\d+)")
_ANY_DTYPE = LoadOptions(rules=(KeyRule(keys="*", cast=Policy.IGNORE),))


class MegackptManager(BaseCheckpointManager):
    """Saves and loads the steps of torchtitan's trainer. Its methods are collective.

    The folder of the config is a root of a `Checkpointer`, with `iter_0000100` for step 100. A step that was
    being saved when the job ended is not loaded.

    Args:
        config: a `Config`.
        dataloader: with `state_dict` and `load_state_dict`, or None.
        model_parts: the model's parts on this rank, one for each pipeline stage.
        optimizers: torchtitan's container, which names state by parameter.
        lr_schedulers: torchtitan's container.
        states: other state by name; the trainer passes itself as `train_state`.
        sd_adapter: converts the model's state to Hugging Face's names and back; or None.
        base_folder: a directory or URL in which the config's folder is.

    Raises:
        DeclarationError: `exclude_from_loading` names something that is not saved.
        UnsupportedError: the config asks for a last save for Hugging Face, or for quantised weights.

    Attributes:
        checkpointer: saves and loads the steps. Absent, like all else, if the config does not enable
            checkpoints.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(BaseCheckpointManager.Config):
        """The fields that all of torchtitan's checkpoint managers have, and `async_save`.

        Attributes:
            async_save: return from a save when the state is copied; a process of its own writes it.
        """

        async_save: bool = False

    def __init__(
        self,
        config: Config,
        *,
        dataloader: Any,
        model_parts: list[torch.nn.Module],
        optimizers: Any,
        lr_schedulers: Any,
        states: Mapping[str, Any],
        sd_adapter: Any = None,
        base_folder: str = "",
    ) -> None:
        self.enable = config.enable
        if not config.enable:
            return
        _check_supported(config)
        self.save_future: Future[None] | None = None
        self._config = config
        self._adapter = sd_adapter
        self._model = ModelWrapper(model_parts)
        others = {OPTIMIZER: optimizers, LR_SCHEDULER: lr_schedulers, DATALOADER: dataloader, **states}
        self._others = {name: part for name, part in others.items() if part is not None}
        _check_names(config.exclude_from_loading, self._others)
        self._root = filesystem.join(base_folder, config.folder)
        self.checkpointer = Checkpointer(
            self._root,
            keep_last=config.keep_latest_k or None,
            async_save=config.async_save,
        )

    def _save(self, curr_step: int, last_step: bool = False) -> bool:
        if not self._is_due(curr_step, last_step):
            return False
        is_model_only = last_step and self._config.last_save_model_only
        saved = self.checkpointer.save(curr_step, self._exported() if is_model_only else self._state())
        if self._config.async_save and not last_step:
            self.save_future = Future()
        else:
            self.checkpointer.wait()
        return saved

    def _is_due(self, step: int, last_step: bool) -> bool:
        if self._config.load_only:
            return False
        is_first = step == 1 and self._config.enable_first_step_checkpoint
        return last_step or is_first or step % self._config.interval == 0

    def _load(self, step: int = -1) -> bool:
        newest = self.checkpointer.find_latest() if step == -1 else step
        if newest is None:
            self._check_no_other_steps()
            return self._load_initial()
        names = () if newest == 0 else self._names_to_load()  # step 0 is the model that a run begins with
        self._resume(self.checkpointer.load(self._state(names), newest))
        return True

    def _check_no_other_steps(self) -> None:
        """Check that the folder has no steps of torchtitan's own manager: a new run would hide them."""
        numbers = [
            int(match[1])
            for name in step_directories(self._root, objects=None).names()
            if (match := _OTHER_STEP.fullmatch(name))
        ]
        if numbers:
            raise NotACheckpointError(
                f"{self._root} has no step of megackpt, and steps of torchtitan's CheckpointManager: "
                f"step-{max(numbers)} is the newest. Go on with CheckpointManager, or begin anew in another "
                f"checkpoint.folder; with initial_load_in_hf a new run takes the weights that "
                f"CheckpointManager wrote with last_save_in_hf.",
                path=str(self._root),
            )

    def _load_initial(self) -> bool:
        """Load what a new run begins with; return False if the config names nothing."""
        config = self._config
        if config.initial_load_in_hf:
            self._load_from_huggingface(config.initial_load_path)
        elif config.initial_load_path:
            names = () if config.initial_load_model_only else self._names_to_load()
            self._resume(self.checkpointer.load_from(self._state(names), config.initial_load_path))
        else:
            return False
        return True

    def _load_from_huggingface(self, folder: str | None) -> None:
        if self._adapter is None:
            raise UnsupportedError(
                "initial_load_in_hf is set, and torchtitan has no state dict adapter for this model. Set "
                "initial_load_in_hf=False."
            )
        folder = folder or self._adapter.hf_assets_path
        if folder is None:
            raise DeclarationError("initial_load_in_hf is set without a folder. Set initial_load_path.")
        # The weights may have another dtype than the model, as with torchtitan's own manager.
        weights = load(self._adapter.to_hf(self._model.state_dict()), folder, options=_ANY_DTYPE)
        self._model.load_state_dict(self._adapter.from_hf(weights))

    def _names_to_load(self) -> tuple[str, ...]:
        return tuple(name for name in self._others if name not in self._config.exclude_from_loading)

    def _state(self, names: tuple[str, ...] | None = None) -> ShardedStateDict:
        """Declare the model and other state, by default all of it."""
        parts = {name: self._others[name].state_dict() for name in (self._others if names is None else names)}
        return {
            MODEL: {
                name: _tensor(f"{MODEL}.{name}", value) for name, value in self._model.state_dict().items()
            },
            **{part: _declared(part, values) for part, values in parts.items()},
        }

    def _exported(self) -> ShardedStateDict:
        """Declare the model alone, with floating-point values in the config's export_dtype."""
        dtype = TORCH_DTYPE_MAP[self._config.export_dtype]
        return {
            MODEL: {
                name: _tensor(f"{MODEL}.{name}", value.to(dtype) if value.is_floating_point() else value)
                for name, value in self._model.state_dict().items()
            }
        }

    def _resume(self, loaded: Mapping[str, Any]) -> None:
        self._model.load_state_dict(loaded[MODEL])
        for name, part in self._others.items():
            if name in loaded:
                part.load_state_dict(loaded[name])

    def _wait_for_saving(self) -> None:
        self.checkpointer.wait()
        self.save_future = None

    def _maybe_wait_for_staging(self) -> None:
        self.checkpointer.wait_staged()

    def _close(self) -> None:
        self.checkpointer.close()


def _declared(part: str, values: Mapping[str, Any]) -> ShardedStateDict:
    """Declare state by name. Ranks of a pipeline stage, or of a share of the data, may have other names."""
    return {
        name: value if isinstance(value, DTensor) else ReplicatedValue(f"{part}.{name}", value)
        for name, value in values.items()
    }


def _tensor(key: str, tensor: Tensor) -> Any:
    """Declare a tensor of the model as an array, also if only ranks of one pipeline stage have it."""
    if isinstance(tensor, DTensor):
        return tensor
    whole = ShardedTensor.from_rank_offsets(key, tensor)
    return TorchShardedTensor(key, tensor, (whole,), ranks=1)


def _check_supported(config: MegackptManager.Config) -> None:
    for name, instead in (
        ("last_save_in_hf", "Set it to False, or use torchtitan's CheckpointManager for the last save"),
        ("initial_load_in_hf_quantized", "Give a folder with weights that are not quantised"),
    ):
        if getattr(config, name):
            raise UnsupportedError(f"{name} does not work with MegackptManager. {instead}.")


def _check_names(excluded: list[str], others: Mapping[str, Any]) -> None:
    unknown = sorted(set(excluded) - others.keys())
    if unknown:
        raise DeclarationError(
            f"exclude_from_loading has {', '.join(map(repr, unknown))}, which is not saved. Known are "
            f"{', '.join(map(repr, others))}."
        )
