"""Megatron-Bridge: a checkpoint manager that saves and loads through megackpt.

    register_allowed_target_prefix("megackpt.")             # of megatron.bridge.utils.instantiate_utils
    CheckpointConfig(custom_manager_class="megackpt.contrib.megatron_bridge.MegackptManager", ...)

Megatron-Bridge still decides what is saved, and writes its run_config.yaml and train_state.pt as before. The
checkpoint is in the format torch_dist, so its other tools read it.

Source: Megatron-Bridge 0.6.0 `training.checkpointing`: `CheckpointManager`, `DefaultCheckpointManager`.
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any

from megackpt.contrib.megatron.installing import OURS, THEIRS
from megackpt.errors import UnsupportedError

_CHECKPOINTING = "megatron.bridge.training.checkpointing"
_REPLACED = tuple(f"{THEIRS}.{part}" for part in ("serialization", "strategies"))


class MegackptManager:
    """What `CheckpointConfig.custom_manager_class` names. All methods are collective.

    Without `megackpt.contrib.megatron.install()`, the manager gives Megatron-Bridge's module of checkpoints
    the functions and strategies of megackpt in place of Megatron-Core's. Models keep their classes.

    Args:
        checkpoint_config: Megatron-Bridge's `CheckpointConfig`.

    Raises:
        UnsupportedError: `async_save` without `install()`, or this Megatron-Bridge has no custom managers.
    """

    def __init__(self, checkpoint_config: Any) -> None:
        bridge = importlib.import_module(_CHECKPOINTING)
        if not hasattr(bridge, "DefaultCheckpointManager"):
            raise UnsupportedError(
                "This Megatron-Bridge has no checkpoint managers. Call megackpt.contrib.megatron.install() "
                "before importing it, and leave custom_manager_class out."
            )
        if not _is_installed():
            if checkpoint_config.async_save:
                raise UnsupportedError(
                    "async_save=True needs Megatron-Core's queue of saves to be megackpt's. Call "
                    "megackpt.contrib.megatron.install() before importing Megatron-Bridge, or set "
                    "async_save=False."
                )
            _use_megackpt(bridge)
        self._default = bridge.DefaultCheckpointManager(checkpoint_config)

    @property
    def checkpointing_context(self) -> dict[str, Any]:
        """What Megatron-Bridge keeps from one save or load to the next, such as strategies."""
        context: dict[str, Any] = self._default.checkpointing_context
        return context

    def save(self, ctx: Any, callback_manager: Any = None) -> None:
        """Save a checkpoint.

        Args:
            ctx: Megatron-Bridge's `CheckpointSaveContext`.
            callback_manager: its callbacks, or None.

        Raises:
            CheckpointError: as `megackpt.save`.
        """
        self._default.save(ctx, callback_manager)

    def load(self, ctx: Any) -> tuple[int, int]:
        """Load the checkpoint that the config names; return the iteration and the floating-point operations.

        Args:
            ctx: Megatron-Bridge's `CheckpointLoadContext`.

        Raises:
            CheckpointError: as `megackpt.load`.
        """
        iteration, operations = self._default.load(ctx)
        return iteration, operations

    def finalize_async_saves(self, state: Any, blocking: bool = False, terminate: bool = False) -> None:
        """Commit asynchronous saves that all ranks have written.

        Args:
            state: Megatron-Bridge's `GlobalState`.
            blocking: wait for pending saves.
            terminate: end the queue of saves.

        Raises:
            CheckpointError: a save has failed.
        """
        self._default.finalize_async_saves(state, blocking, terminate)


def _is_installed() -> bool:
    return importlib.import_module(THEIRS).__name__ == OURS


def _use_megackpt(bridge: ModuleType) -> None:
    """Replace what a module has imported from Megatron-Core to save and load; entities stay."""
    for name, value in list(vars(bridge).items()):
        if isinstance(value, ModuleType) and value.__name__ == THEIRS:
            setattr(bridge, name, importlib.import_module(OURS))
        elif str(getattr(value, "__module__", "")).startswith(_REPLACED):
            ours = importlib.import_module(OURS + value.__module__.removeprefix(THEIRS))
            setattr(bridge, name, getattr(ours, value.__name__, value))
