"""The entry points in Megatron-Core's order of arguments.

Each version has added arguments at the end, so calls written for 0.6 to 0.16 mean the same here.

Source: Megatron-Core `dist_checkpointing.serialization`, for names and signatures.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import Any

from megackpt import api
from megackpt.compat.megatron.dist_checkpointing.strategies.async_utils import AsyncRequest
from megackpt.compat.megatron.dist_checkpointing.strategies.base import (
    LoadCommonStrategy,
    LoadShardedStrategy,
    SaveCommonStrategy,
    SaveShardedStrategy,
    StrategyAction,
    get_default_strategy,
)
from megackpt.compat.megatron.dist_checkpointing.strategies.common import (
    TorchCommonLoadStrategy,
    TorchCommonSaveStrategy,
)
from megackpt.compat.megatron.dist_checkpointing.utils import _clean_metadata_for_serialization
from megackpt.compat.megatron.dist_checkpointing.validation import (
    StrictHandling,
    verify_checkpoint_and_load_strategy,
)
from megackpt.compat.megatron.ours import (
    check_load_strategy,
    load_by,
    refuse_strangers,
    request_by,
    save_as_rank_0,
)
from megackpt.errors import DeclarationError
from megackpt.mapping import ShardedBase, ShardedStateDict, StateDict

__all__ = [
    "CkptShardedMetadata",
    "get_default_load_sharded_strategy",
    "get_default_save_common_strategy",
    "get_default_save_sharded_strategy",
    "load",
    "load_common_state_dict",
    "load_content_metadata",
    "load_plain_tensors",
    "load_sharded_metadata",
    "load_tensors_metadata",
    "remove_sharded_tensors",
    "save",
]

CkptShardedMetadata = dict[str, ShardedBase]
logger = logging.getLogger(__name__)

_CONTENT_METADATA = "content_metadata"


def load(
    sharded_state_dict: ShardedStateDict,
    checkpoint_dir: str,
    sharded_strategy: LoadShardedStrategy | tuple[str, int] | None = None,
    common_strategy: LoadCommonStrategy | tuple[str, int] | None = None,
    validate_access_integrity: bool = True,
    strict: str | StrictHandling = StrictHandling.ASSUME_OK_UNEXPECTED,
) -> StateDict | tuple[StateDict, set[str], set[str]]:
    """Load with `megackpt.load`, which see. Collective.

    The format is detected, whatever strategy of ours is given. validate_access_integrity has no effect:
    every rank is given what it asks for, so no proof is needed that the ranks ask for everything once.

    Raises:
        UnsupportedError: a strategy of someone else's.
        CheckpointError: as `megackpt.load`.
    """
    check_load_strategy(sharded_strategy)
    _check_common(common_strategy, TorchCommonLoadStrategy, StrategyAction.LOAD_COMMON)
    loaded: StateDict | tuple[StateDict, set[str], set[str]]
    loaded = load_by(sharded_strategy, sharded_state_dict, checkpoint_dir, StrictHandling.of(strict))
    state = loaded[0] if isinstance(loaded, tuple) else loaded
    _describe(state, checkpoint_dir)
    return loaded


def load_common_state_dict(checkpoint_dir: str | os.PathLike[str]) -> StateDict:
    """Return the common state of a checkpoint, content metadata under its key. Local."""
    state = api.load_common_state_dict(checkpoint_dir)
    _describe(state, checkpoint_dir)
    return state


def load_tensors_metadata(
    checkpoint_dir: str, sharded_strategy: LoadShardedStrategy | None = None
) -> CkptShardedMetadata:
    """Return the global arrays without data, by key. Local."""
    check_load_strategy(sharded_strategy)
    return dict(api.load_tensors_metadata(checkpoint_dir))


def load_sharded_metadata(
    checkpoint_dir: str,
    sharded_strategy: LoadShardedStrategy | None = None,
    common_strategy: LoadCommonStrategy | None = None,
) -> CkptShardedMetadata:
    """Return global arrays and objects without data. Local."""
    check_load_strategy(sharded_strategy)
    _check_common(common_strategy, TorchCommonLoadStrategy, StrategyAction.LOAD_COMMON)
    return api.load_sharded_metadata(checkpoint_dir)


def load_plain_tensors(checkpoint_dir: str) -> StateDict:
    """Return every global array as a whole tensor, by key. Local."""
    return dict(api.load_plain_tensors(checkpoint_dir))


def load_content_metadata(
    checkpoint_dir: str | None = None, *, preloaded_state_dict: StateDict | None = None
) -> dict[str, Any] | None:
    """Return the `content_metadata` of a checkpoint, or of a state dict loaded from one. Local.

    Raises:
        DeclarationError: neither is given.
    """
    if preloaded_state_dict is not None:
        return preloaded_state_dict.get(_CONTENT_METADATA)
    if checkpoint_dir is None:
        raise DeclarationError("load_content_metadata needs checkpoint_dir or preloaded_state_dict.")
    found: dict[str, Any] | None = api.load_content_metadata(checkpoint_dir)
    return found


def remove_sharded_tensors(checkpoint_dir: str, key_prefix: str) -> None:
    """Take every array and object whose key begins with key_prefix out of a checkpoint, atomically.

    Local: one process calls it.
    """
    api.remove_sharded_tensors(checkpoint_dir, key_prefix)


def save(
    sharded_state_dict: ShardedStateDict,
    checkpoint_dir: str,
    sharded_strategy: SaveShardedStrategy | tuple[str, int] | None = None,
    common_strategy: SaveCommonStrategy | tuple[str, int] | None = None,
    validate_access_integrity: bool = True,
    async_sharded_save: bool = False,
    preprocess_common_before_consistancy_check: Callable[[StateDict], StateDict] | None = None,
    content_metadata: dict[str, Any] | None = None,
) -> AsyncRequest | None:
    """Save with `megackpt.save`, which see; without a strategy in the native format. Collective.

    The directory need not exist, and the state dict is not changed. `load` puts content metadata into what it
    returns, where programs look for it. Where ranks disagree about common state, that of rank 0 is stored
    and a warning says where, as there: optimizers of 0.12 have it so with pipeline parallelism.

    With async_sharded_save nothing is begun: the request that is returned saves when a queue is given it, or
    when it is executed. The tensors are read then, so schedule it before they change.

    Raises:
        UnsupportedError: a strategy of someone else's.
        CheckpointError: as `megackpt.save`.
    """
    _check_common(common_strategy, TorchCommonSaveStrategy, StrategyAction.SAVE_COMMON)
    described = _clean_metadata_for_serialization(content_metadata)
    arguments = {
        "validate_access_integrity": validate_access_integrity,
        "content_metadata": described,
        "preprocess_common_before_consistancy_check": preprocess_common_before_consistancy_check,
    }
    if async_sharded_save:
        return request_by(sharded_strategy, sharded_state_dict, checkpoint_dir, **arguments)
    save_as_rank_0(sharded_strategy, sharded_state_dict, checkpoint_dir, **arguments)
    return None


def get_default_save_sharded_strategy(backend: str = "torch_dist", version: int = 1) -> SaveShardedStrategy:
    """Return the strategy for a format; see `ours.default_save_strategy` about torch_dist.

    Raises:
        DeclarationError: there is no such format.
    """
    found: SaveShardedStrategy = get_default_strategy(StrategyAction.SAVE_SHARDED, backend, version)
    return found


def get_default_save_common_strategy(backend: str = "torch", version: int = 1) -> SaveCommonStrategy:
    """Return what stands for the common state of a checkpoint in a save."""
    found: SaveCommonStrategy = get_default_strategy(StrategyAction.SAVE_COMMON, backend, version)
    return found


def get_default_load_sharded_strategy(checkpoint_dir: str) -> LoadShardedStrategy:
    """Return the strategy that reads a checkpoint. Local.

    Raises:
        NotACheckpointError: nothing was committed there.
    """
    return verify_checkpoint_and_load_strategy(checkpoint_dir)[0]


def _check_common(strategy: Any, ours: type, action: StrategyAction) -> None:
    if isinstance(strategy, (tuple, list)):
        strategy = get_default_strategy(action, *strategy)
    if strategy is not None and not isinstance(strategy, ours):
        refuse_strangers(strategy, "megackpt.formats.strategy, whose strategies store common state too")


def _describe(state: StateDict, checkpoint_dir: str | os.PathLike[str]) -> None:
    """Put the content metadata of a checkpoint where Megatron-Core stores it: into the state."""
    described = api.load_content_metadata(checkpoint_dir)
    if described is not None:
        state.setdefault(_CONTENT_METADATA, described)
