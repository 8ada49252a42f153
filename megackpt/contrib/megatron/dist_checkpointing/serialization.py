"""The entry points in Megatron-Core's order of arguments.

Each version up to 0.18 has added arguments at the end. 0.19 has taken `common_strategy` out of the middle.
Calls by position follow the order of the version that the program uses; calls by name work with all.

Source: Megatron-Core `dist_checkpointing.serialization`, for names and signatures.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

from megackpt.comm import errors_on_all_ranks, world_group
from megackpt.comm.process_groups import subgroup
from megackpt.contrib.megatron.dist_checkpointing.core import maybe_load_config
from megackpt.contrib.megatron.dist_checkpointing.strategies import (
    torch as _torch_strategies,  # noqa: F401 - sets the strategies of the format torch_dist
)
from megackpt.contrib.megatron.dist_checkpointing.strategies.async_utils import AsyncRequest
from megackpt.contrib.megatron.dist_checkpointing.strategies.base import (
    LoadCommonStrategy,
    LoadShardedStrategy,
    SaveCommonStrategy,
    SaveShardedStrategy,
    StrategyAction,
    default_strategies,
    get_default_strategy,
)
from megackpt.contrib.megatron.dist_checkpointing.strategies.common import (
    COMMON_STATE_FNAME,
    CONTENT_METADATA,
    TorchCommonLoadStrategy,
    TorchCommonSaveStrategy,
    add_content_metadata,
)
from megackpt.contrib.megatron.dist_checkpointing.utils import _clean_metadata_for_serialization
from megackpt.contrib.megatron.dist_checkpointing.validation import (
    StrictHandling,
    validate_sharded_objects_handling,
    verify_checkpoint_and_load_strategy,
)
from megackpt.contrib.megatron.errors import also_of_torch
from megackpt.contrib.megatron.integrity import verify_integrity_manifest, write_on_rank_0
from megackpt.contrib.megatron.our_strategies import (
    is_loaded_by_us,
    is_saved_by_us,
    load_by,
    request_by,
    save_as_rank_0,
)
from megackpt.contrib.megatron.settings import OPTIONS, core_version
from megackpt.contrib.megatron.stored_metadata import stored_metadata, stored_tensors
from megackpt.contrib.megatron.user_loads import load_with
from megackpt.contrib.megatron.user_saves import save_with
from megackpt.entities import ShardedBase, ShardedStateDict, StateDict
from megackpt.errors import DeclarationError, UnsupportedError
from megackpt.run import local

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


def _in_order_of_version(function: F) -> F:
    """Let calls by position leave out the fourth argument, `common_strategy`, where the version does.

    Raises:
        DeclarationError: a call has the order of other versions.
    """

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if len(args) > 3:
            args = _with_common_strategy(function.__name__, args)
        return function(*args, **kwargs)

    return cast(F, call)


def _with_common_strategy(name: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
    version = core_version()
    expected = "common_strategy" if version.has_common_strategy else "validate_access_integrity"
    # No strategy is a flag, so the fourth argument shows which order was meant.
    if isinstance(args[3], bool) == version.has_common_strategy:
        raise DeclarationError(
            f"{name}() got {args[3]!r:.80} as its fourth argument by position, which is {expected} in "
            f"Megatron-Core {version.text} ({version.source}). Pass it, and what follows, by name: "
            f"common_strategy stands there up to 0.18, validate_access_integrity from 0.19 on."
        )
    return args if version.has_common_strategy else (*args[:3], None, *args[3:])


@_in_order_of_version
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
    """Load with `megackpt.load`, under Megatron-Core's arguments. Collective.

    The format is detected, also if a strategy of megackpt is given. A user's strategy, given here or
    registered for the format in metadata.json, loads its part: it gets the sharded state dict after
    factories.

    validate_access_integrity has no effect. In Megatron-Core it proves that the ranks together ask for every
    element exactly once, because ranks there may read for each other by replica ids. Here each rank gets what
    it asks for, independently of other ranks, so a request for a part is not an error.

    verify_integrity first compares every file with the SHA-256 in integrity.json, on rank 0. With
    process_group, only the ranks of this group load.

    Raises:
        IntegrityError: verify_integrity finds a file that differs, or no integrity.json.
        CheckpointError: as `megackpt.load`. A MissingKeyError or MismatchError is also a
            `torch.distributed.checkpoint.CheckpointException`, which Megatron-Core raises there.
    """
    sharded = _chosen(StrategyAction.LOAD_SHARDED, sharded_strategy, checkpoint_dir)
    common = _chosen(StrategyAction.LOAD_COMMON, common_strategy, checkpoint_dir)
    mode = StrictHandling.of(strict)
    timeout_s = OPTIONS.load_options.timeout_s
    group = None if process_group is None else subgroup(process_group, timeout_s=timeout_s)
    if verify_integrity:
        verify_integrity_manifest(checkpoint_dir, group)
    loaded: StateDict | tuple[StateDict, set[str], set[str]]
    if not (is_loaded_by_us(sharded) and _is_common_of_ours(common)):
        with also_of_torch():
            loaded = load_with(sharded, common, sharded_state_dict, checkpoint_dir, mode, group)
        return loaded
    loaded = load_by(sharded, sharded_state_dict, checkpoint_dir, mode, group)
    state = loaded[0] if isinstance(loaded, tuple) else loaded
    add_content_metadata(state, checkpoint_dir)
    return loaded


def load_common_state_dict(checkpoint_dir: str | os.PathLike[str]) -> StateDict:
    """Return the common state of a checkpoint, content metadata under its key. Local."""
    strategy = _chosen(StrategyAction.LOAD_COMMON, None, checkpoint_dir) or TorchCommonLoadStrategy()
    state: StateDict = strategy.load_common(checkpoint_dir)
    return state


def load_tensors_metadata(
    checkpoint_dir: str, sharded_strategy: LoadShardedStrategy | None = None
) -> CkptShardedMetadata:
    """Return the global arrays without data, by key. Local."""
    sharded = _chosen(StrategyAction.LOAD_SHARDED, sharded_strategy, checkpoint_dir)
    if sharded is not None:
        return dict(sharded.load_tensors_metadata(Path(checkpoint_dir)))
    return stored_tensors(checkpoint_dir)


def load_sharded_metadata(
    checkpoint_dir: str,
    sharded_strategy: LoadShardedStrategy | None = None,
    common_strategy: LoadCommonStrategy | None = None,
) -> CkptShardedMetadata:
    """Return global arrays and objects without data. Local."""
    sharded = _chosen(StrategyAction.LOAD_SHARDED, sharded_strategy, checkpoint_dir)
    common = _chosen(StrategyAction.LOAD_COMMON, common_strategy, checkpoint_dir)
    if sharded is not None:
        metadata = dict(sharded.load_sharded_metadata(Path(checkpoint_dir)))
        if not sharded.can_handle_sharded_objects:
            common = common or TorchCommonLoadStrategy()
            validate_sharded_objects_handling(sharded, common)
            metadata |= common.load_sharded_metadata(Path(checkpoint_dir))
        return metadata
    return stored_metadata(checkpoint_dir)


def load_plain_tensors(checkpoint_dir: str) -> StateDict:
    """Return every global array as a whole tensor, by key. Collective: an error of a rank is raised on all.

    `megackpt.load_plain_tensors` does the same for one process alone.
    """
    sharded = _chosen(StrategyAction.LOAD_SHARDED, None, checkpoint_dir)
    if not is_loaded_by_us(sharded):
        asked = load_tensors_metadata(checkpoint_dir, sharded)
        loaded: Any = load(dict(asked), checkpoint_dir, sharded)
        return {key: loaded[key] for key in asked}

    group = world_group(timeout_s=OPTIONS.load_options.timeout_s)
    with errors_on_all_ranks(group, "loading plain tensors"):
        tensors = local.load_plain_tensors(checkpoint_dir)
        arrays = stored_tensors(checkpoint_dir)
    return {key: tensor for key, tensor in tensors.items() if key in arrays}


def load_content_metadata(
    checkpoint_dir: str | None = None, *, preloaded_state_dict: StateDict | None = None
) -> dict[str, Any] | None:
    """Return the `content_metadata` of a checkpoint, or of a state dict loaded from one. Local.

    Raises:
        DeclarationError: neither is given.
    """
    if preloaded_state_dict is not None:
        return preloaded_state_dict.get(CONTENT_METADATA)
    if checkpoint_dir is None:
        raise DeclarationError(
            "load_content_metadata has neither checkpoint_dir nor preloaded_state_dict. Give one of them."
        )
    return load_common_state_dict(checkpoint_dir).get(CONTENT_METADATA)


def remove_sharded_tensors(checkpoint_dir: str, key_prefix: str) -> None:
    """Remove every array and object whose key begins with key_prefix from a checkpoint, atomically.

    Local: one process calls it. If a user's strategy is registered for the format, its method is called.
    """
    sharded = _chosen(StrategyAction.LOAD_SHARDED, None, checkpoint_dir)
    if not is_loaded_by_us(sharded):
        sharded.remove_sharded_tensors(checkpoint_dir, key_prefix)
        return
    local.remove_sharded_tensors(checkpoint_dir, key_prefix)


@_in_order_of_version
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
    """Save with `megackpt.save`, under Megatron-Core's arguments. Collective.

    The default format is the native one.

    The directory need not exist, and the state dict does not change. `load` returns the content metadata in
    the state dict, as in Megatron-Core. If common state differs between ranks, rank 0's is stored and a
    warning names the paths, as in Megatron-Core: optimizers of 0.12 have such state with pipeline
    parallelism.

    With async_sharded_save, this call starts nothing. The returned request saves when it is scheduled in a
    queue or executed. The tensors are read at that time, so schedule it before they change. async_strategy
    has no effect: megackpt's own writer processes save.

    With verify_integrity, rank 0 reads all files again after the commit and writes their SHA-256 into
    integrity.json. `load(verify_integrity=True)` and Megatron-Core from 0.17 on check it.

    A user's strategy gets copies of the sharded entities, after factories; see docs/megatron-compat.md.

    Raises:
        UnsupportedError: a user's common strategy is given for a format of megackpt, which stores common
            state itself.
        CheckpointError: as `megackpt.save`.
    """
    chosen = _chosen(StrategyAction.SAVE_SHARDED, sharded_strategy)
    common = _chosen(StrategyAction.SAVE_COMMON, common_strategy)
    described = _clean_metadata_for_serialization(content_metadata)
    if not is_saved_by_us(chosen):
        request = save_with(
            chosen,
            common or TorchCommonSaveStrategy("torch", 1),
            sharded_state_dict,
            checkpoint_dir,
            is_async=async_sharded_save,
            validate=validate_access_integrity,
            common_to_compare=preprocess_common_before_consistancy_check,
            content_metadata=described,
        )
        return _with_integrity(request, checkpoint_dir) if verify_integrity else request
    if not _is_common_of_ours(common):
        raise UnsupportedError(
            f"common_strategy={common} would not be used: a format of megackpt commits common state with the "
            f"rest. Give it together with a sharded strategy of your own, or leave it out."
        )
    arguments = {
        "validate_access_integrity": validate_access_integrity,
        "content_metadata": described,
        "preprocess_common_before_consistancy_check": preprocess_common_before_consistancy_check,
    }
    request = None
    if async_sharded_save:
        request = request_by(chosen, sharded_state_dict, checkpoint_dir, **arguments)
    else:
        save_as_rank_0(chosen, sharded_state_dict, checkpoint_dir, **arguments)
    return _with_integrity(request, checkpoint_dir) if verify_integrity else request


def _with_integrity(request: AsyncRequest | None, checkpoint_dir: str) -> AsyncRequest | None:
    """Write integrity.json: at the end of a request, or now if there is none. Collective."""
    if request is None:
        write_on_rank_0(checkpoint_dir)
    else:
        request.add_finalize_fn(functools.partial(write_on_rank_0, checkpoint_dir))
    return request


def _legacy_common_state_exists(checkpoint_dir: str | os.PathLike[str]) -> bool:
    """Return whether common state lies in a file of its own, as Megatron-Core up to 0.18 wrote it. Local."""
    return os.path.exists(os.path.join(checkpoint_dir, COMMON_STATE_FNAME))


def get_default_save_sharded_strategy(backend: str = "torch_dist", version: int = 1) -> SaveShardedStrategy:
    """Return the strategy for a format; see `ours.default_save_strategy` about torch_dist.

    Raises:
        DeclarationError: there is no such format.
    """
    strategy: SaveShardedStrategy = get_default_strategy(StrategyAction.SAVE_SHARDED, backend, version)
    return strategy


def get_default_save_common_strategy(backend: str = "torch", version: int = 1) -> SaveCommonStrategy:
    """Return what stands for the common state of a checkpoint in a save."""
    strategy: SaveCommonStrategy = get_default_strategy(StrategyAction.SAVE_COMMON, backend, version)
    return strategy


def get_default_load_sharded_strategy(checkpoint_dir: str | None = None) -> LoadShardedStrategy:
    """Return the strategy that reads a checkpoint; without a directory, one for any. Local.

    Raises:
        NotACheckpointError: nothing was committed there.
    """
    if checkpoint_dir is None:
        strategy: LoadShardedStrategy = get_default_strategy(StrategyAction.LOAD_SHARDED, "torch_dist", 1)
        return strategy
    return verify_checkpoint_and_load_strategy(checkpoint_dir)[0]


def _chosen(action: StrategyAction, strategy: Any, checkpoint_dir: str | os.PathLike[str] = "") -> Any:
    """Return the strategy for an action; for None the one that a program has registered, or else None. Local.

    Megatron-Core saves as ("torch_dist", 1) without a strategy, and loads by what metadata.json names.
    """
    if isinstance(strategy, (tuple, list)):
        return get_default_strategy(action, *strategy)
    registered = default_strategies[action.value]
    if strategy is not None or not registered:
        return strategy
    if action is StrategyAction.SAVE_SHARDED:
        return registered.get(("torch_dist", 1))
    if action is StrategyAction.SAVE_COMMON:
        return registered.get(("torch", 1))
    config = maybe_load_config(os.fspath(checkpoint_dir))
    if config is None:
        return None
    if action is StrategyAction.LOAD_SHARDED:
        return registered.get((config.sharded_backend, config.sharded_backend_version))
    return registered.get((config.common_backend, config.common_backend_version))


def _is_common_of_ours(strategy: Any) -> bool:
    """Return whether a common strategy is one of ours, and not a subclass with methods of its own."""
    return type(strategy) in (type(None), TorchCommonSaveStrategy, TorchCommonLoadStrategy)
