"""Common state by Megatron-Core's names. Source: Megatron-Core `dist_checkpointing.strategies.common`.

Common state is part of our formats and read and written by `load` and `save`; there is no file of its own
that could be written alone.
"""

from __future__ import annotations

import os

from megackpt import api
from megackpt.compat.megatron.dist_checkpointing.strategies.base import LoadCommonStrategy, SaveCommonStrategy
from megackpt.compat.megatron.refusal import refuse, refused
from megackpt.mapping import ShardedStateDict, StateDict

COMMON_STATE_FNAME = "common.pt"
"""Where Megatron-Core keeps common state; our own formats do not use it."""


class TorchCommonSaveStrategy(SaveCommonStrategy):
    """Stands for the common state of a checkpoint, in the format of the checkpoint."""

    def save_common(self, common_state_dict: StateDict, checkpoint_dir: str | os.PathLike[str]) -> None:
        """Refuse: common state is committed with the rest.

        Raises:
            UnsupportedError: always.
        """
        _refuse("save_common", "save")

    def save_sharded_objects(
        self, sharded_objects_state_dict: ShardedStateDict, checkpoint_dir: str | os.PathLike[str]
    ) -> None:
        """Refuse: objects are committed with the rest.

        Raises:
            UnsupportedError: always.
        """
        _refuse("save_sharded_objects", "save")

    @property
    def can_handle_sharded_objects(self) -> bool:
        """True: every format of ours stores objects."""
        return True


class TorchCommonLoadStrategy(LoadCommonStrategy):
    """Reads the common state of a checkpoint of any format that can be read here."""

    def load_common(self, checkpoint_dir: str | os.PathLike[str]) -> StateDict:
        """Return the common state. Local."""
        return api.load_common_state_dict(checkpoint_dir)

    def load_sharded_objects(
        self, sharded_objects_state_dict: ShardedStateDict, checkpoint_dir: str | os.PathLike[str]
    ) -> StateDict:
        """Return the state dict with its objects loaded, common state included. Collective."""
        loaded: StateDict = api.load(sharded_objects_state_dict, checkpoint_dir)
        return loaded

    def load_sharded_metadata(self, checkpoint_dir: str | os.PathLike[str]) -> ShardedStateDict:
        """Return global arrays and objects without data. Local."""
        return dict(api.load_sharded_metadata(checkpoint_dir))

    @property
    def can_handle_sharded_objects(self) -> bool:
        """True: every format of ours stores objects."""
        return True

    def check_backend_compatibility(self, loaded_backend: str) -> None:
        """Do nothing: a format that cannot be read is refused when it is opened."""

    def check_version_compatibility(self, loaded_version: int) -> None:
        """Do nothing: a version that cannot be read is refused when it is opened."""


def load_common(checkpoint_dir: str | os.PathLike[str]) -> StateDict:
    """Return the common state of a checkpoint. Local. From Megatron-Core 0.17 on."""
    return api.load_common_state_dict(checkpoint_dir)


save_common = refused(
    "save_common",
    because="a checkpoint is committed all at once, so no part of it is written alone.",
    instead="Pass the whole state dict to save().",
)


def register_default_common_strategies() -> None:
    """Do nothing: our strategies are there without being registered."""


def _refuse(name: str, instead: str) -> None:
    refuse(
        f"TorchCommonSaveStrategy.{name}",
        because="a checkpoint is committed all at once, so no part of it is written alone.",
        instead=f"Pass the whole state dict to {instead}().",
    )
