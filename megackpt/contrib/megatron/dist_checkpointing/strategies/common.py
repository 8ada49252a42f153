"""Common state by Megatron-Core's names. Source: Megatron-Core `dist_checkpointing.strategies.common`.

In our formats common state is a part of the checkpoint, which `load` and `save` read and write. With a
sharded strategy of a user, these write and read the files that Megatron-Core does.
"""

from __future__ import annotations

import os
from functools import partial
from typing import Any

import torch.distributed as dist

from megackpt.contrib.megatron.dist_checkpointing.dict_utils import dict_list_map_inplace, nested_values
from megackpt.contrib.megatron.dist_checkpointing.strategies.base import (
    LoadCommonStrategy,
    SaveCommonStrategy,
    StrategyAction,
    set_megackpt_strategy,
)
from megackpt.contrib.megatron.stored_metadata import stored_metadata
from megackpt.entities import ShardedObject, ShardedStateDict, StateDict, is_main_replica
from megackpt.errors import DeclarationError, FormatError, NotACheckpointError
from megackpt.formats.safe_pickle import load_value, save_value
from megackpt.formats.torch_dist.checking import COMMON_MAX_BYTES
from megackpt.run import collective, local
from megackpt.storage import opened_store

COMMON_STATE_FNAME = "common.pt"
"""Where Megatron-Core keeps common state."""
CONTENT_METADATA = "content_metadata"
"""The key of content metadata in common state."""


class TorchCommonSaveStrategy(SaveCommonStrategy):
    """Writes common state to common.pt and each object to a file of its own, as torch.save does.

    `save` calls it together with a sharded strategy of a user. Our formats store common state by themselves.
    """

    def save_common(self, common_state_dict: StateDict, checkpoint_dir: str | os.PathLike[str]) -> None:
        """Write common.pt on rank 0; do nothing elsewhere. Local.

        Raises:
            UnserializableError: `torch.load(weights_only=True)` could not read a value.
        """
        if _rank() == 0:
            _write(checkpoint_dir, COMMON_STATE_FNAME, save_value(common_state_dict, path="common state"))

    def save_sharded_objects(
        self, sharded_objects_state_dict: ShardedStateDict, checkpoint_dir: str | os.PathLike[str]
    ) -> None:
        """Write each object whose main replica this rank has. Local.

        Raises:
            UnserializableError: as `save_common`.
        """
        for entity in nested_values(sharded_objects_state_dict):
            if is_main_replica(entity.replica_id):
                data = save_value(entity.data, path=entity.unique_key)
                _write(checkpoint_dir, f"{entity.unique_key}.pt", data)

    @property
    def can_handle_sharded_objects(self) -> bool:
        """True."""
        return True


class TorchCommonLoadStrategy(LoadCommonStrategy):
    """Reads the common state of a checkpoint of any format that megackpt reads.

    If a user's sharded strategy has saved the checkpoint, it reads the file of `TorchCommonSaveStrategy`.
    """

    def load_common(self, checkpoint_dir: str | os.PathLike[str]) -> StateDict:
        """Return the common state. Local."""
        if _is_read_here(checkpoint_dir):
            state = local.load_common_state_dict(checkpoint_dir)
            add_content_metadata(state, checkpoint_dir)
            return state
        common: StateDict = _read(checkpoint_dir, COMMON_STATE_FNAME)
        return common

    def load_sharded_objects(
        self, sharded_objects_state_dict: ShardedStateDict, checkpoint_dir: str | os.PathLike[str]
    ) -> StateDict:
        """Return the state dict with its objects loaded. Collective where the format can be read here.

        Common state is then in it too.
        """
        if _is_read_here(checkpoint_dir):
            loaded: StateDict = collective.load(sharded_objects_state_dict, checkpoint_dir)
            return loaded

        def read(entity: Any) -> Any:
            is_object = isinstance(entity, ShardedObject)
            return _read(checkpoint_dir, f"{entity.unique_key}.pt") if is_object else entity

        values: StateDict = dict_list_map_inplace(read, sharded_objects_state_dict)
        return values

    def load_sharded_metadata(self, checkpoint_dir: str | os.PathLike[str]) -> ShardedStateDict:
        """Return global arrays and objects without data; where another's strategy saved, objects. Local."""
        if _is_read_here(checkpoint_dir):
            return dict(stored_metadata(checkpoint_dir))
        with opened_store(checkpoint_dir) as store:
            files = [name.removesuffix(".pt") for name in store.names() if _is_object_file(name)]
        return {name: ShardedObject.empty_from_unique_key(name) for name in files}

    @property
    def can_handle_sharded_objects(self) -> bool:
        """True."""
        return True

    def check_backend_compatibility(self, loaded_backend: str) -> None:
        """Do nothing: opening a format that cannot be read raises the error."""

    def check_version_compatibility(self, loaded_version: int) -> None:
        """Do nothing: opening a version that cannot be read raises the error."""


def _default(action: StrategyAction, backend: str, version: int) -> Any:
    if backend not in ("torch", "megackpt"):
        raise DeclarationError(
            f"There is no {action.value} strategy for {(backend, version)}. Use ('torch', 1)."
        )
    saves = action is StrategyAction.SAVE_COMMON
    return TorchCommonSaveStrategy(backend, version) if saves else TorchCommonLoadStrategy()


for _action in (StrategyAction.SAVE_COMMON, StrategyAction.LOAD_COMMON):
    set_megackpt_strategy(_action, partial(_default, _action))


def load_common(checkpoint_dir: str | os.PathLike[str]) -> StateDict:
    """As `TorchCommonLoadStrategy.load_common`. From Megatron-Core 0.17 on."""
    return TorchCommonLoadStrategy().load_common(checkpoint_dir)


def save_common(common_state_dict: StateDict, checkpoint_dir: str | os.PathLike[str]) -> None:
    """As `TorchCommonSaveStrategy.save_common`. From Megatron-Core 0.17 on.

    It writes common.pt into a directory in which a user's strategy saves. A checkpoint in a format of
    megackpt has its common state already.
    """
    TorchCommonSaveStrategy("torch", 1).save_common(common_state_dict, checkpoint_dir)


def register_default_common_strategies() -> None:
    """Do nothing: our strategies are there without being registered."""


def add_content_metadata(state: StateDict, checkpoint_dir: str | os.PathLike[str]) -> None:
    """Put the content metadata of a checkpoint where Megatron-Core stores it: into the state, in place."""
    described = None if CONTENT_METADATA in state else local.load_content_metadata(checkpoint_dir)
    if described is not None:
        state[CONTENT_METADATA] = described


def _rank() -> int:
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def _is_read_here(checkpoint_dir: str | os.PathLike[str]) -> bool:
    """Return whether the checkpoint is in a format of megackpt, rather than of a user's strategy."""
    try:
        stored_metadata(checkpoint_dir)
    except (FormatError, NotACheckpointError):
        with opened_store(checkpoint_dir) as store:
            if store.exists(COMMON_STATE_FNAME):
                return False
        raise
    return True


def _is_object_file(name: str) -> bool:
    return name.endswith(".pt") and name.rpartition("/")[2].startswith("shard_")


def _write(checkpoint_dir: str | os.PathLike[str], name: str, data: bytes) -> None:
    with opened_store(checkpoint_dir) as store:
        store.replace(name, data)


def _read(checkpoint_dir: str | os.PathLike[str], name: str) -> Any:
    with opened_store(checkpoint_dir) as store:
        data = store.read(name, max_bytes=COMMON_MAX_BYTES)
    return load_value(data, where=f"{os.fspath(checkpoint_dir)}/{name}")
