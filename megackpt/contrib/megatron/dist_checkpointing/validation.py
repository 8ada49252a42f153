"""What a load is strict about, and proofs over declarations.

Source: Megatron-Core `dist_checkpointing.validation`, for the names.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from megackpt.codec import leaf_digests
from megackpt.comm import world_group
from megackpt.contrib.megatron.dist_checkpointing.core import CheckpointingConfig, maybe_load_config
from megackpt.contrib.megatron.dist_checkpointing.dict_utils import extract_matching_values
from megackpt.contrib.megatron.dist_checkpointing.strategies.base import (
    LoadCommonStrategy,
    LoadShardedStrategy,
    SaveCommonStrategy,
    SaveShardedStrategy,
    StrategyAction,
    resolve_strategy,
)
from megackpt.contrib.megatron.errors import unsupported_name
from megackpt.contrib.megatron.integrity import (
    INTEGRITY_FNAME,
    save_integrity_manifest,
    verify_integrity_manifest,
)
from megackpt.entities import ShardedBase, ShardedStateDict, StateDict
from megackpt.entities.describe import describe
from megackpt.entities.flatten import flatten_state
from megackpt.errors import DeclarationError, FormatError, MissingKeyError, NotACheckpointError
from megackpt.plans.metadata.merge import merge_declarations
from megackpt.plans.validation import StrictHandling, check_coverage
from megackpt.plans.validation.equality import check_common_equal

__all__ = [
    "INTEGRITY_FNAME",
    "StrictHandling",
    "adjust_non_strict_load",
    "determine_global_metadata",
    "maybe_report_missing_and_unexpected_keys",
    "parse_strict_flag",
    "save_integrity_manifest",
    "validate_integrity_and_strict_load",
    "validate_sharded_objects_handling",
    "validate_sharding_integrity",
    "verify_checkpoint",
    "verify_checkpoint_and_load_strategy",
    "verify_integrity_manifest",
]

logger = logging.getLogger(__name__)

Entities = Sequence[Any]  # ShardedTensors and ShardedObjects without data


def parse_strict_flag(strict: str | StrictHandling) -> StrictHandling:
    """Return the mode for a mode or its value.

    Raises:
        DeclarationError: there is no such mode.
    """
    return StrictHandling.of(strict)


validate_integrity_and_strict_load = unsupported_name(
    "validate_integrity_and_strict_load",
    because="a load compares its request with the checkpoint's index in one place.",
    instead="Call load(strict=...), or megackpt.load_with_report to look at what differs.",
)


def verify_checkpoint_and_load_strategy(
    checkpoint_dir: str,
    sharded_strategy: LoadShardedStrategy | tuple[str, int] | None = None,
    common_strategy: LoadCommonStrategy | tuple[str, int] | None = None,
) -> tuple[LoadShardedStrategy, LoadCommonStrategy]:
    """Return the strategies that read a checkpoint; those given are checked against it. Local.

    Raises:
        NotACheckpointError: nothing was committed there.
        FormatError: a strategy that was given does not read this format.
    """
    config = _config_of(checkpoint_dir)
    sharded_name = (config.sharded_backend, config.sharded_backend_version)
    common_name = (config.common_backend, config.common_backend_version)
    sharded = resolve_strategy(StrategyAction.LOAD_SHARDED, sharded_strategy or sharded_name)
    common = resolve_strategy(StrategyAction.LOAD_COMMON, common_strategy or common_name)
    _check_reads(sharded, *sharded_name, checkpoint_dir)
    _check_reads(common, *common_name, checkpoint_dir)
    return sharded, common


def _check_reads(
    strategy: LoadShardedStrategy | LoadCommonStrategy, backend: str, version: int, checkpoint_dir: str
) -> None:
    try:
        strategy.check_backend_compatibility(backend)
        strategy.check_version_compatibility(version)
    except NotImplementedError as error:
        raise FormatError(
            f"{checkpoint_dir} is in format {backend!r} version {version}, which {strategy} does not read. "
            f"Pass no strategy: the format is detected.",
            path=str(checkpoint_dir),
        ) from error


def verify_checkpoint(checkpoint_dir: str) -> None:
    """Check that a directory holds a metadata.json. Local.

    Raises:
        NotACheckpointError: it does not.
        FormatError: metadata.json is damaged.
    """
    _config_of(checkpoint_dir)


def _config_of(checkpoint_dir: str) -> CheckpointingConfig:
    config = maybe_load_config(checkpoint_dir)
    if config is None:
        raise NotACheckpointError(
            f"{checkpoint_dir} is not a checkpoint: it has no metadata.json. Name the directory of a "
            f"finished one.",
            path=str(checkpoint_dir),
        )
    return config


def adjust_non_strict_load(
    sharded_state_dict: ShardedStateDict, sharded_keys_to_remove: set[str]
) -> ShardedStateDict:
    """Return the sharded state dict without the entities of certain keys; others must be sharded too."""
    kept: ShardedStateDict = extract_matching_values(
        sharded_state_dict, lambda leaf: isinstance(leaf, ShardedBase) and leaf.key in sharded_keys_to_remove
    )[1]
    return kept


def maybe_report_missing_and_unexpected_keys(
    missing_keys: set[str], unexpected_keys: set[str], raise_error: bool = True
) -> None:
    """Raise or log what a comparison of keys found; do nothing if it found nothing. Local.

    Raises:
        MissingKeyError: there is a key of either kind, and raise_error.
    """
    parts = []
    if unexpected_keys:
        parts.append(
            f"{len(unexpected_keys)} keys are asked for and not in the checkpoint: {sorted(unexpected_keys)}."
        )
    if missing_keys:
        parts.append(
            f"{len(missing_keys)} keys are in the checkpoint and not asked for: {sorted(missing_keys)}."
        )
    if not parts:
        return
    if raise_error:
        raise MissingKeyError(" ".join(parts), key=min(unexpected_keys or missing_keys))
    logger.warning(" ".join(parts))


def determine_global_metadata(
    sharded_state_dict: ShardedStateDict, process_group: dist.ProcessGroup | None = None
) -> tuple[list[Any], list[list[Any]]]:
    """Return this rank's entities without data, and those of all ranks of the group, in its order.

    Collective over the group, or over all ranks without one.
    """
    is_single = not (dist.is_available() and dist.is_initialized())
    rank, ranks = (0, 1) if is_single else (dist.get_rank(process_group), dist.get_world_size(process_group))
    flattened = flatten_state(sharded_state_dict, rank=rank, ranks=ranks)
    local = [entity.without_data() for entity in flattened.entities]
    gathered: list[Any] = [local] * ranks
    if not is_single:
        dist.all_gather_object(gathered, local, group=process_group)
    return local, gathered


def validate_sharding_integrity(
    global_metadata: Sequence[Entities], common_state_dict: StateDict | None = None
) -> None:
    """Prove that main replicas cover everything exactly once, and that common state is equal on all ranks.

    Collective over the default group if common state is given, local otherwise. Unlike Megatron-Core's, the
    error is raised on every rank, and common state that differs is one.

    Raises:
        CoverageError: an element has no main replica, or more than one.
        MismatchError: ranks disagree about an array or about common state.
    """
    declared = [describe(entities, rank=rank) for rank, entities in enumerate(global_metadata)]
    check_coverage(merge_declarations(declared))
    if common_state_dict is not None:
        leaves = json.dumps(leaf_digests(common_state_dict), sort_keys=True).encode()
        answers = world_group(timeout_s=600.0).all_gather(leaves)
        check_common_equal([json.loads(answer) for answer in answers])


def validate_sharded_objects_handling(
    sharded_strategy: SaveShardedStrategy | LoadShardedStrategy,
    common_strategy: SaveCommonStrategy | LoadCommonStrategy,
) -> None:
    """Check that one of two strategies moves ShardedObjects.

    Raises:
        DeclarationError: neither does.
    """
    if not (sharded_strategy.can_handle_sharded_objects or common_strategy.can_handle_sharded_objects):
        raise DeclarationError(
            f"Neither {sharded_strategy} nor {common_strategy} can handle ShardedObjects. Use one that can; "
            f"megackpt's own can."
        )
