"""Lightning: strategies whose checkpoints all ranks write, and a CheckpointIO without pickles.

    Trainer(strategy=MegackptDDPStrategy(), ...)              # or MegackptModelParallelStrategy
    Trainer(plugins=[MegackptIO()], ...)                      # any strategy that saves on rank 0
    Trainer(plugins=[AsyncCheckpointIO(MegackptIO())], ...)   # the same, in a thread

Checkpoints of the strategies load into each other, at any number of processes. Parameters have their names in
the LightningModule; what Lightning saves in addition (loops, callbacks, schedulers, hyperparameters) is one
object.

Source: lightning 2.6 `Strategy`, `ModelParallelStrategy`, `CheckpointIO`.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning.fabric.plugins.io import CheckpointIO
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy

from megackpt.api.collective import load, save
from megackpt.comm import SingleProcess
from megackpt.errors import UnsupportedError
from megackpt.integrations.torch_state import TorchState
from megackpt.mapping import ShardedObject

_OPTIMIZERS = "optimizer_states"
_MODEL = "state_dict"
_REST = "lightning"


class _SavedByAllRanks:
    """What the strategies have in common: all ranks save and load, after models and optimizers are set up."""

    lightning_module: Any
    optimizers: Any
    global_rank: int

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        return True

    @property
    def lightning_restore_optimizer(self) -> bool:
        return False  # `load_checkpoint` has restored it

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return nothing: `save_checkpoint` declares the model."""
        return {}

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Return nothing: `save_checkpoint` declares the optimizers."""
        return {}

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Do nothing: `load_checkpoint` has filled the model."""

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Do nothing: `load_checkpoint` has filled the optimizers."""

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any = None
    ) -> None:
        """Save as one checkpoint. Collective.

        Raises:
            UnsupportedError: storage_options is given.
        """
        _reject(storage_options)
        has_optimizers = _OPTIMIZERS in checkpoint  # not if the caller wants weights only
        rest = {key: value for key, value in checkpoint.items() if key not in (_MODEL, _OPTIMIZERS)}
        torch_state = self._torch_state()
        state = torch_state.sharded_state_dict() if has_optimizers else torch_state.models()
        save({**state, _REST: self._rest(rest)}, filepath)

    def load_checkpoint(
        self, checkpoint_path: str | Path, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Fill the model, and the optimizers if the Trainer fits it; return all else. Collective."""
        torch_state = self._torch_state()
        state = {**torch_state.sharded_state_dict(), _REST: self._rest(None)}
        loaded = load(state, checkpoint_path)
        torch_state.load_models(loaded)
        torch_state.load_optimizers(loaded)
        rest: dict[str, Any] = loaded[_REST]
        return rest

    def _torch_state(self) -> TorchState:
        return TorchState([self.lightning_module], self.optimizers)

    def _rest(self, value: Any) -> ShardedObject:
        """Declare what is neither model nor optimizer: rank 0's, as with Lightning's own checkpoints."""
        return ShardedObject(_REST, value, (1,), (0,), replica_id=self.global_rank)


class MegackptDDPStrategy(_SavedByAllRanks, DDPStrategy):
    """DistributedDataParallel; each rank writes its share of the model and the optimizers."""


class MegackptModelParallelStrategy(_SavedByAllRanks, ModelParallelStrategy):
    """FSDP2 and tensor parallelism of DTensors; each rank writes its own shards."""


class MegackptIO(CheckpointIO):
    """Writes what Lightning gives to rank 0: arrays and JSON in a directory, no pickle."""

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None
    ) -> None:
        """Save as one checkpoint. Called on rank 0 only.

        Raises:
            UnsupportedError: storage_options is given, or a value cannot be stored without a pickle.
        """
        _reject(storage_options)
        save(checkpoint, path, group=SingleProcess())

    def load_checkpoint(
        self, path: str | Path, map_location: Any = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Return the whole state in host memory; Lightning moves it to devices. Called on every rank."""
        loaded: dict[str, Any] = load({}, path, group=SingleProcess())
        return loaded

    def remove_checkpoint(self, path: str | Path) -> None:
        """Remove a checkpoint. Called on rank 0 only."""
        shutil.rmtree(path, ignore_errors=True)


def _reject(storage_options: Any) -> None:
    if storage_options is not None:
        raise UnsupportedError("storage_options are not known here. Leave them out of save_checkpoint.")
