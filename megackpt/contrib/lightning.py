"""Lightning: strategies whose checkpoints all ranks write, and a CheckpointIO without pickles.

    Trainer(strategy=MegackptDDPStrategy(), ...)              # or MegackptModelParallelStrategy
    Trainer(strategy=MegackptDDPStrategy(async_save=True))    # training goes on while a step is written
    Trainer(plugins=[MegackptIO()], ...)                      # any strategy that saves on rank 0
    Trainer(plugins=[AsyncCheckpointIO(MegackptIO())], ...)   # the same, in a thread

Checkpoints of the strategies load into each other, at any number of processes. Parameters have their names in
the LightningModule; what Lightning saves in addition (loops, callbacks, schedulers, hyperparameters) is one
object.

Source: lightning 2.6 `Strategy`, `ModelParallelStrategy`, `CheckpointIO`.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any, cast

from lightning.fabric.plugins.io import CheckpointIO
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy

from megackpt.comm import SingleProcess, group_or_world
from megackpt.contrib.torch_state import TorchState
from megackpt.engine.background.messages import CheckpointLocation
from megackpt.engine.background.prepared_save import Destination
from megackpt.engine.background.saver import AsyncSaver
from megackpt.engine.checkpoint.removal import is_leftover
from megackpt.engine.saving.save_request import save_request
from megackpt.entities import ShardedObject, ShardedStateDict
from megackpt.errors import MissingKeyError, NotACheckpointError, UnsupportedError
from megackpt.formats.strategy import MANIFEST
from megackpt.options import AsyncOptions, SaveOptions
from megackpt.run.collective import load, save
from megackpt.run.local import load_sharded_metadata
from megackpt.storage import LocalStore, absolute_path

log = logging.getLogger(__name__)

_OPTIMIZERS = "optimizer_states"
_MODEL = "state_dict"
_REST = "lightning"


class _AsyncDirectories:
    """Saves into directories, one save at a time, by a writer process of each rank."""

    def __init__(self) -> None:
        self._saver = AsyncSaver(AsyncOptions())
        self._superseded: list[Path] = []

    def save(self, state: ShardedStateDict, path: Path) -> None:
        """Return as soon as the state is copied. Collective; waits until the last save is committed.

        Raises:
            CheckpointError: the last save has failed, or this one is wrong; the same on every rank.
        """
        options = SaveOptions()
        group = group_or_world(None, timeout_s=options.timeout_s)
        self._saver.may_save(group, options, waits=True)
        self._remove_superseded()
        root, name = os.path.split(absolute_path(path))
        destination = Destination(
            request=save_request(state, options=options),
            location=CheckpointLocation(root=root, name=name),
            label=str(path),
            on_commit=lambda _: None,
            on_failure=lambda _: False,
        )
        self._saver.save([destination], group, options)

    def remove_after_commit(self, path: Path) -> None:
        """Remove a checkpoint once the pending save is committed: until then it may be the only one."""
        self._superseded.append(path)

    def wait(self) -> None:
        """Wait until no save is pending. Local.

        Raises:
            CheckpointError: the last save has failed. Checkpoints that it supersedes stay.
        """
        self._saver.wait()
        self._remove_superseded()

    def close(self) -> None:
        """Wait, and end the writer process. All ranks call it.

        Raises:
            CheckpointError: as `wait`.
        """
        self._saver.close()
        self._remove_superseded()

    def _remove_superseded(self) -> None:
        for path in self._superseded:
            _remove(path)
        self._superseded.clear()


class _SavedByAllRanks:
    """What the strategies have in common: all ranks save and load, after models and optimizers are set up.

    Args:
        async_save: go on with training as soon as the state is copied. A process of each rank writes it. The
            next save, or the end of the run, waits for the commit and raises its error.
    """

    lightning_module: Any
    optimizers: Any
    global_rank: int
    is_global_zero: bool

    def __init__(self, *args: Any, async_save: bool = False, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._is_async = async_save
        self._directories: _AsyncDirectories | None = None  # from the first save on

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
        """Save as one checkpoint, in the directory that rank 0 gives. Collective.

        Raises:
            UnsupportedError: storage_options is given.
        """
        _reject(storage_options)
        path = Path(cast(Any, self).broadcast(filepath))  # its name may have metrics, which differ by rank
        has_optimizers = _OPTIMIZERS in checkpoint  # not if the caller wants weights only
        rest = {key: value for key, value in checkpoint.items() if key not in (_MODEL, _OPTIMIZERS)}
        torch_state = self._torch_state()
        state = torch_state.sharded_state_dict() if has_optimizers else torch_state.models()
        state = {**state, _REST: self._rest(rest)}
        if not self._is_async:
            save(state, path)
            return
        if self._directories is None:
            self._directories = _AsyncDirectories()
        self._directories.save(state, path)

    def load_checkpoint(
        self, checkpoint_path: str | Path, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Fill the model, and the optimizers if the Trainer fits it; return all else. Collective.

        Raises:
            NotACheckpointError: Lightning itself or MegackptIO wrote it, or nothing is there.
            MissingKeyError: the Trainer fits, and only the model was saved.
        """
        if self._directories is not None:
            self._directories.wait()
        path = Path(cast(Any, self).broadcast(checkpoint_path))
        if path.exists() and not (path / MANIFEST).exists():
            inside = sorted(path.glob(f"*/{MANIFEST}"))
            if inside:
                raise NotACheckpointError(
                    f"{path} is a folder with checkpoints in it. Name one of them, such as "
                    f"{inside[-1].parent}.",
                    path=str(path),
                )
            raise NotACheckpointError(
                f"{path} is no checkpoint of megackpt: it has no {MANIFEST}. If it is a .ckpt file of "
                f"Lightning, resume it once with the plugin MegackptIO, or with the "
                f"strategy that saved it.",
                path=str(path),
            )
        torch_state = self._torch_state()
        state = {**torch_state.sharded_state_dict(is_loading=True), _REST: self._rest(None)}
        try:
            loaded = load(state, path)
        except MissingKeyError as error:
            if any(entity.key == _REST for entity in load_sharded_metadata(path).values()):
                raise
            raise NotACheckpointError(
                f"{path} was not saved by a strategy of megackpt. If MegackptIO saved it, resume it with "
                f"that plugin and another strategy.",
                path=str(path),
            ) from error
        torch_state.load_models(loaded)
        torch_state.load_optimizers(loaded)
        rest: dict[str, Any] = loaded[_REST]
        return rest

    def remove_checkpoint(self, filepath: str | Path) -> None:
        """Remove a checkpoint, after the commit of a pending save. All ranks call it.

        One that Lightning itself has written stays.
        """
        if not self.is_global_zero:
            return
        if self._directories is not None:
            self._directories.remove_after_commit(Path(filepath))
        else:
            _remove(Path(filepath))

    def teardown(self) -> None:
        """End the strategy; a pending save is committed before. All ranks call it.

        Raises:
            CheckpointError: the last save has failed.
        """
        directories, self._directories = self._directories, None
        try:
            if directories is not None:
                directories.close()
        finally:
            cast(Any, super()).teardown()

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
        """Return the whole state in host memory; Lightning moves it to devices. Called on every rank.

        Raises:
            NotACheckpointError: a strategy of megackpt wrote it, or nothing is there.
        """
        loaded: dict[str, Any] = load({}, path, group=SingleProcess())
        if _MODEL not in loaded:
            raise NotACheckpointError(
                f"{path} was not saved by MegackptIO: it has no {_MODEL!r}. If a strategy of megackpt "
                f"saved it, resume it with MegackptDDPStrategy or MegackptModelParallelStrategy.",
                path=str(path),
            )
        return loaded

    def remove_checkpoint(self, path: str | Path) -> None:
        """Remove a checkpoint; not one of Lightning's own. Called on rank 0 only."""
        _remove(Path(path))


def _remove(path: Path) -> None:
    """Remove a directory that a save of ours has written, finished or not."""
    if not path.exists():
        return
    if path.is_dir():
        with closing(LocalStore(path)) as store:
            if (path / MANIFEST).exists() or is_leftover(store):
                shutil.rmtree(path, ignore_errors=True)
                return
    # After a resume, `save_top_k` may name a checkpoint that Lightning itself has written.
    log.warning("%s stays: megackpt has not written it. Remove it yourself if you do not need it.", path)


def _reject(storage_options: Any) -> None:
    if storage_options is not None:
        raise UnsupportedError("storage_options are not known here. Leave them out of save_checkpoint.")
