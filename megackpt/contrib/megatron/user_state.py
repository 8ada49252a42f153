"""The state dict for a user's strategies: our entities, with objects split off where they must be."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from megackpt.contrib.megatron.dist_checkpointing.dict_utils import extract_matching_values
from megackpt.contrib.megatron.dist_checkpointing.validation import validate_sharded_objects_handling
from megackpt.entities import LocalNonpersistentObject, ShardedBase, ShardedObject, ShardedStateDict
from megackpt.entities.megatron_entities import adopt_megatron_entities
from megackpt.errors import DeclarationError
from megackpt.storage import is_url


def with_our_entities(state: ShardedStateDict) -> ShardedStateDict:
    """Return the state dict with entities of Megatron-Core as ours.

    Raises:
        DeclarationError: it is not a dict, or it has a list that cannot be split and rejoined.
    """
    if not isinstance(state, dict):
        raise DeclarationError(
            f"A sharded state dict is a dict; this is a {type(state).__name__}. Give what "
            f"sharded_state_dict() of the model returns."
        )
    adopted: ShardedStateDict = adopt_megatron_entities(state)
    _kinds_in(adopted, "")
    return adopted


def _kinds_in(tree: Any, path: str) -> set[str]:
    """Return which kinds of leaves a tree has. Each kind is saved and loaded separately.

    Raises:
        DeclarationError: a list has several kinds of leaves, which would lose their positions.
    """
    if not isinstance(tree, dict | list) or not tree:
        is_local = isinstance(tree, LocalNonpersistentObject)
        return {"local" if is_local else "sharded" if isinstance(tree, ShardedBase) else "common"}
    steps = tree.items() if isinstance(tree, dict) else enumerate(tree)
    kinds = [_kinds_in(value, f"{path}[{step!r}]") for step, value in steps]
    if isinstance(tree, list) and any(kind != kinds[0] for kind in kinds):
        raise DeclarationError(
            f"{path}: some elements of this list are sharded and some are not, or in part. A strategy is "
            f"handed the sharded ones in a list of their own, and their positions would be lost. Use a dict, "
            f" or save without a strategy."
        )
    return set().union(*kinds)


def split_objects(
    sharded: ShardedStateDict, strategy: Any, common_strategy: Any
) -> tuple[ShardedStateDict | None, ShardedStateDict]:
    """Return the objects, which the common strategy saves, and the rest.

    If the strategy takes objects, too: None and the whole.

    Raises:
        DeclarationError: neither strategy can handle objects.
    """
    if strategy.can_handle_sharded_objects:
        return None, sharded
    validate_sharded_objects_handling(strategy, common_strategy)
    objects, rest = extract_matching_values(sharded, lambda leaf: isinstance(leaf, ShardedObject))
    return objects, rest


def keys_of(entities: Iterable[Any]) -> set[str]:
    """Return the keys of entities."""
    return {entity.key for entity in entities if isinstance(entity, ShardedBase)}


def path_or_url(checkpoint_dir: str | os.PathLike[str]) -> Path | str:
    """Return the directory in the form that strategies of Megatron-Core expect."""
    text = os.fspath(checkpoint_dir)
    return text if is_url(text) else Path(text)
