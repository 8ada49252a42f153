"""Base classes of strategies, and which is the default of a format. Source: Megatron-Core `strategies.base`.

Here a strategy stands for a choice of format: see `megackpt.contrib.megatron.our_strategies`.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from enum import Enum
from typing import Any

from megackpt.contrib.megatron.dist_checkpointing.strategies.async_utils import AsyncCallsQueue, AsyncRequest
from megackpt.entities import ShardedStateDict, StateDict
from megackpt.errors import CheckpointingException

__all__ = [
    "AsyncSaveShardedStrategy",
    "CheckpointingException",
    "LoadCommonStrategy",
    "LoadShardedStrategy",
    "LoadStrategyBase",
    "SaveCommonStrategy",
    "SaveShardedStrategy",
    "SaveStrategyBase",
    "StrategyAction",
    "async_calls",
    "default_strategies",
    "get_default_strategy",
    "register_default_strategy",
]


class StrategyAction(Enum):
    """What a strategy is for."""

    LOAD_COMMON = "load_common"
    LOAD_SHARDED = "load_sharded"
    SAVE_COMMON = "save_common"
    SAVE_SHARDED = "save_sharded"


default_strategies: dict[str, dict[tuple[str, int], Any]] = {action.value: {} for action in StrategyAction}
"""Registered strategies, by action and format. They go before megackpt's own."""
_MEGACKPT_STRATEGIES: dict[StrategyAction, Callable[[str, int], Any]] = {}
async_calls = AsyncCallsQueue()


def get_default_strategy(action: StrategyAction, backend: str, version: int) -> Any:
    """Return the strategy for an action and format.

    Raises:
        DeclarationError: there is none.
    """
    registered = default_strategies[action.value].get((backend, version))
    return _MEGACKPT_STRATEGIES[action](backend, version) if registered is None else registered


def resolve_strategy(action: StrategyAction, strategy: Any) -> Any:
    """Return the strategy for a format, `(backend, version)`, and any other strategy as it is. Local."""
    return get_default_strategy(action, *strategy) if isinstance(strategy, (tuple, list)) else strategy


def set_megackpt_strategy(action: StrategyAction, make: Callable[[str, int], Any]) -> None:
    """Set what makes megackpt's own strategy of an action from a backend and a version.

    The modules of the strategies call it, so this module, which they import, need not import them.
    """
    _MEGACKPT_STRATEGIES[action] = make


def register_default_strategy(
    action: StrategyAction, backend: str, version: int, strategy: SaveStrategyBase | LoadStrategyBase
) -> None:
    """Make a strategy the default of an action and format, in this process."""
    default_strategies[action.value][backend, version] = strategy


class LoadStrategyBase(ABC):
    """Reads something of a checkpoint."""

    @abstractmethod
    def check_backend_compatibility(self, loaded_backend: str) -> None:
        """Raise if a format cannot be read."""

    @abstractmethod
    def check_version_compatibility(self, loaded_version: int) -> None:
        """Raise if a version cannot be read."""

    @property
    def can_handle_sharded_objects(self) -> bool:
        """Whether ShardedObjects are read too."""
        return False


class SaveStrategyBase(ABC):  # noqa: B024 - abstract in Megatron-Core by what derives from it
    """Writes something of a checkpoint.

    Attributes:
        backend: name of the format.
        version: its version.
    """

    def __init__(self, backend: str, version: int) -> None:
        self.backend = backend
        self.version = version

    @property
    def can_handle_sharded_objects(self) -> bool:
        """Whether ShardedObjects are written too."""
        return False

    def __str__(self) -> str:
        return f"{type(self).__name__}({self.backend}, {self.version})"


class LoadCommonStrategy(LoadStrategyBase):
    """Reads common state."""

    @abstractmethod
    def load_common(self, checkpoint_dir: str | os.PathLike[str]) -> StateDict:
        """Return the common state."""

    @abstractmethod
    def load_sharded_objects(
        self, sharded_objects_state_dict: ShardedStateDict, checkpoint_dir: str | os.PathLike[str]
    ) -> StateDict:
        """Return the state dict with its ShardedObjects loaded."""

    def load_sharded_metadata(self, checkpoint_dir: str | os.PathLike[str]) -> ShardedStateDict:
        """Return the ShardedObjects of a checkpoint without data; none for a strategy that reads none."""
        if self.can_handle_sharded_objects:
            raise NotImplementedError(f"{type(self).__name__} does not say which objects a checkpoint holds.")
        return {}


class LoadShardedStrategy(LoadStrategyBase):
    """Reads what is sharded."""

    @abstractmethod
    def load(self, sharded_state_dict: ShardedStateDict, checkpoint_dir: str | os.PathLike[str]) -> StateDict:
        """Return the state dict with its entities loaded."""

    @abstractmethod
    def load_tensors_metadata(self, checkpoint_dir: str | os.PathLike[str]) -> dict[str, Any]:
        """Return the global arrays without data, by key."""

    def load_sharded_metadata(self, checkpoint_dir: str | os.PathLike[str]) -> dict[str, Any]:
        """Return global arrays and objects without data; arrays only for a strategy that reads no objects."""
        if self.can_handle_sharded_objects:
            raise NotImplementedError(f"{type(self).__name__} does not say which objects a checkpoint holds.")
        return self.load_tensors_metadata(checkpoint_dir)

    def remove_sharded_tensors(self, checkpoint_dir: str | os.PathLike[str], key_prefix: str) -> None:
        """Remove arrays from a checkpoint."""
        raise NotImplementedError(f"{type(self).__name__} removes nothing from a checkpoint.")


class SaveCommonStrategy(SaveStrategyBase):
    """Writes common state."""

    @abstractmethod
    def save_common(self, common_state_dict: StateDict, checkpoint_dir: str | os.PathLike[str]) -> None:
        """Write the common state."""

    def save_sharded_objects(
        self, sharded_objects_state_dict: ShardedStateDict, checkpoint_dir: str | os.PathLike[str]
    ) -> None:
        """Write ShardedObjects."""
        raise NotImplementedError(f"{type(self).__name__} writes no ShardedObjects.")


class SaveShardedStrategy(SaveStrategyBase):
    """Writes what is sharded."""

    @abstractmethod
    def save(self, sharded_state_dict: ShardedStateDict, checkpoint_dir: str | os.PathLike[str]) -> None:
        """Write the entities of a state dict."""


class AsyncSaveShardedStrategy(SaveShardedStrategy):
    """Writes what is sharded, also later."""

    @abstractmethod
    def async_save(
        self, sharded_state_dict: ShardedStateDict, checkpoint_dir: str | os.PathLike[str]
    ) -> AsyncRequest:
        """Return a request that writes the entities when it is executed."""

    def save(self, sharded_state_dict: ShardedStateDict, checkpoint_dir: str | os.PathLike[str]) -> None:
        """Write the entities now. Collective."""
        self.async_save(sharded_state_dict, checkpoint_dir).execute_sync()
