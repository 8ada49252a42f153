"""The entry points in Megatron-Core's order of arguments.

Each version up to 0.18 has added arguments at the end. 0.19 has taken `common_strategy` out of the middle: a
call by position is understood in both orders, as what follows is a flag, which no strategy is.

Source: Megatron-Core `dist_checkpointing.serialization`, for names and signatures.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar, cast

from megackpt import api
from megackpt.comm import subgroup, together, world_group
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
    COMMON_STATE_FNAME,
    TorchCommonLoadStrategy,
    TorchCommonSaveStrategy,
)
from megackpt.compat.megatron.dist_checkpointing.utils import _clean_metadata_for_serialization
from megackpt.compat.megatron.dist_checkpointing.validation import (
    StrictHandling,
    verify_checkpoint_and_load_strategy,
)
from megackpt.compat.megatron.integrity import verify_integrity_manifest, write_on_rank_0
from megackpt.compat.megatron.ours import (
    check_load_strategy,
    load_by,
    refuse_strangers,
    request_by,
    save_as_rank_0,
)
from megackpt.errors import DeclarationError
from megackpt.mapping import ShardedBase, ShardedStateDict, StateDict
from megackpt.options import LoadOptions

if TYPE_CHECKING:
    import torch.distributed as dist

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

F = TypeVar("F", bound=Callable[..., Any])
CkptShardedMetadata = dict[str, ShardedBase]
logger = logging.getLogger(__name__)

_CONTENT_METADATA = "content_metadata"


def _in_both_orders(function: F) -> F:
    """Let calls by position leave out the fourth argument, `common_strategy`, as from 0.19 on."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if len(args) > 3 and isinstance(args[3], bool):
            args = (*args[:3], None, *args[3:])
        return function(*args, **kwargs)

    return cast(F, call)


@_in_both_orders
def load(
    sharded_state_dict: ShardedStateDict,
    checkpoint_dir: str,
    sharded_strategy: LoadShardedStrategy | tuple[str, int] | None = None,
    common_strategy: LoadCommonStrategy | tuple[str, int] | None = None,
    validate_access_integrity: bool = True,
    strict: str | StrictHandling = StrictHandling.ASSUME_OK_UNEXPECTED,
    verify_integrity: bool = False,
    process_group: dist.ProcessGroup | None = None,
) -> StateDict | tuple[StateDict, set[str], set[str]]:
    """Load with `megackpt.load`, which see. Collective.

    The format is detected, whatever strategy of ours is given. validate_access_integrity has no effect:
    every rank is given what it asks for, so no proof is needed that the ranks ask for everything once.
    verify_integrity first compares every file with the SHA-256 in integrity.json, on rank 0. With
    process_group only its ranks load.

    Raises:
        UnsupportedError: a strategy of someone else's.
        IntegrityError: verify_integrity finds a file that differs, or no integrity.json.
        CheckpointError: as `megackpt.load`. A MissingKeyError or MismatchError is also a
            `torch.distributed.checkpoint.CheckpointException`, which Megatron-Core raises there.
    """
    check_load_strategy(sharded_strategy)
    _check_common(common_strategy, TorchCommonLoadStrategy, StrategyAction.LOAD_COMMON)
    strictness = StrictHandling.of(strict)
    group = None if process_group is None else subgroup(process_group, timeout_s=LoadOptions().timeout_s)
    if verify_integrity:
        verify_integrity_manifest(checkpoint_dir, group)
    loaded: StateDict | tuple[StateDict, set[str], set[str]]
    loaded = load_by(sharded_strategy, sharded_state_dict, checkpoint_dir, strictness, group)
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
    """Return every global array as a whole tensor, by key. Collective: an error of a rank is raised on all.

    `megackpt.load_plain_tensors` does the same for one process alone.
    """
    tensors: StateDict = {}

    def read() -> bytes:
        tensors.update(api.load_plain_tensors(checkpoint_dir))
        return b""

    together(world_group(timeout_s=LoadOptions().timeout_s), read, doing="loading plain tensors")
    return tensors


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


@_in_both_orders
def save(
    sharded_state_dict: ShardedStateDict,
    checkpoint_dir: str,
    sharded_strategy: SaveShardedStrategy | tuple[str, int] | None = None,
    common_strategy: SaveCommonStrategy | tuple[str, int] | None = None,
    validate_access_integrity: bool = True,
    async_sharded_save: bool = False,
    preprocess_common_before_consistancy_check: Callable[[StateDict], StateDict] | None = None,
    content_metadata: dict[str, Any] | None = None,
    async_strategy: str | None = "nvrx",
    verify_integrity: bool = False,
) -> AsyncRequest | None:
    """Save with `megackpt.save`, which see; without a strategy in the native format. Collective.

    The directory need not exist, and the state dict is not changed. `load` puts content metadata into what it
    returns, where programs look for it. Where ranks disagree about common state, that of rank 0 is stored
    and a warning says where, as there: optimizers of 0.12 have it so with pipeline parallelism.

    With async_sharded_save nothing is begun: the request that is returned saves when a queue is given it, or
    when it is executed. The tensors are read then, so schedule it before they change. async_strategy has no
    effect: megackpt's own writer processes save, whatever it names.

    With verify_integrity rank 0 reads all files again after the commit, and writes their SHA-256 into
    integrity.json, which `load(verify_integrity=True)` and Megatron-Core from 0.17 on check.

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
        request = request_by(sharded_strategy, sharded_state_dict, checkpoint_dir, **arguments)
        if verify_integrity:
            request.add_finalize_fn(functools.partial(write_on_rank_0, checkpoint_dir))
        return request
    save_as_rank_0(sharded_strategy, sharded_state_dict, checkpoint_dir, **arguments)
    if verify_integrity:
        write_on_rank_0(checkpoint_dir)
    return None


def _legacy_common_state_exists(checkpoint_dir: str | os.PathLike[str]) -> bool:
    """Say whether common state lies in a file of its own, as Megatron-Core up to 0.18 wrote it. Local."""
    return os.path.exists(os.path.join(checkpoint_dir, COMMON_STATE_FNAME))


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


def get_default_load_sharded_strategy(checkpoint_dir: str | None = None) -> LoadShardedStrategy:
    """Return the strategy that reads a checkpoint; without a directory, one for any. Local.

    Raises:
        NotACheckpointError: nothing was committed there.
    """
    if checkpoint_dir is None:
        found: LoadShardedStrategy = get_default_strategy(StrategyAction.LOAD_SHARDED, "torch_dist", 1)
        return found
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
