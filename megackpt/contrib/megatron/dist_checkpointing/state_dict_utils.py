"""A state dict before it is saved or loaded. Source: Megatron-Core `dist_checkpointing.state_dict_utils`.

`save` and `load` flatten a state dict themselves (`megackpt.entities.flatten`); these functions are for
programs that do it by hand. None of them changes the dict that it is given.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megackpt.contrib.megatron.dist_checkpointing.dict_utils import (
    dict_list_map_inplace,
    dict_list_map_outplace,
    extract_matching_values,
)
from megackpt.contrib.megatron.dist_checkpointing.utils import (
    _clean_metadata_for_serialization,
    extract_nonpersistent,
    extract_sharded_base,
)
from megackpt.contrib.megatron.dist_checkpointing.validation import (
    determine_global_metadata,
    validate_sharding_integrity,
)
from megackpt.entities import ShardedStateDict, ShardedTensor, ShardedTensorFactory, StateDict


def save_preprocess(
    sharded_state_dict: ShardedStateDict,
    validate_access_integrity: bool = True,
    preprocess_common_before_consistancy_check: Callable[[StateDict], StateDict] | None = None,
) -> tuple[ShardedStateDict, StateDict]:
    """Return the sharded entities with factories built, and the common state.

    Collective if validate_access_integrity, which proves both as `save` does.

    Raises:
        CoverageError, MismatchError: the proof failed; on every rank.
    """
    built = _build(sharded_state_dict)
    _, stored = extract_nonpersistent(built)
    sharded, common = extract_sharded_base(stored)
    sharded = filter_out_empty_flatten_tensor(sharded)
    if "content_metadata" in common:
        common["content_metadata"] = _clean_metadata_for_serialization(common["content_metadata"])
    if validate_access_integrity:
        prune = preprocess_common_before_consistancy_check or (lambda state: state)
        validate_sharding_integrity(determine_global_metadata(sharded)[1], prune(common))
    return sharded, common


def load_preprocess(
    sharded_state_dict: ShardedStateDict,
) -> tuple[ShardedStateDict, StateDict, ShardedStateDict]:
    """Return what is to be loaded with factories built, the non-persistent values, and the factories.

    The factories are without data, and lists of them are dicts by position. Local.
    """
    wanted = filter_out_empty_flatten_tensor(sharded_state_dict)
    factories, _ = extract_matching_values(wanted, lambda x: isinstance(x, ShardedTensorFactory), True)
    local, others = extract_nonpersistent(_build(wanted))
    dict_list_map_inplace(lambda x: x.unwrap(), local)
    return others, local, dict_list_map_outplace(lambda x: x.without_data(), factories)


def filter_out_empty_flatten_tensor(sharded_state_dict: Any) -> Any:
    """Return the dict or list without flat shards that hold no element. Our own `save` does not mind them."""

    def holds_something(leaf: Any) -> bool:
        flat = leaf.flattened_range if isinstance(leaf, ShardedTensor) else None
        return flat is None or flat.start != flat.stop

    return extract_matching_values(sharded_state_dict, holds_something)[0]


def _build(sharded_state_dict: ShardedStateDict) -> ShardedStateDict:
    built: ShardedStateDict = dict_list_map_outplace(
        lambda x: x.build() if isinstance(x, ShardedTensorFactory) else x, sharded_state_dict
    )
    return built
