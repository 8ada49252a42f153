"""Loads by strategies that a user wrote against Megatron-Core's base classes.

Such a strategy gets the sharded part, with factories built, and reads it as it likes. This module adds common
state, and the checks of keys.
"""

from __future__ import annotations

import copy
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megackpt.comm import Group, errors_on_all_ranks, gather_step, world_group
from megackpt.contrib.megatron.dist_checkpointing.dict_utils import (
    dict_list_map_outplace,
    merge,
    nested_values,
)
from megackpt.contrib.megatron.dist_checkpointing.mapping import apply_factory_merges
from megackpt.contrib.megatron.dist_checkpointing.state_dict_utils import load_preprocess
from megackpt.contrib.megatron.dist_checkpointing.utils import extract_sharded_base
from megackpt.contrib.megatron.dist_checkpointing.validation import (
    adjust_non_strict_load,
    verify_checkpoint_and_load_strategy,
)
from megackpt.contrib.megatron.user_state import keys_of, path_or_url, split_objects, with_our_entities
from megackpt.entities import ShardedStateDict, StateDict
from megackpt.errors import DeclarationError
from megackpt.plans.validation import LoadRules, StrictHandling, check_unexpected_keys
from megackpt.plans.validation.missing import check_missing_keys

_TIMEOUT_S = 600.0  # as in LoadOptions


def load_with(
    strategy: Any,
    common_strategy: Any,
    state: ShardedStateDict,
    checkpoint_dir: str | os.PathLike[str],
    strict: StrictHandling,
    ranks: Group | None = None,
) -> Any:
    """Load with a user's strategies; one of them may be ours. Collective over `ranks`; None: all ranks.

    Returns:
        The result of `load`.

    Raises:
        CheckpointError: the same on every rank.
    """
    group = ranks or world_group(timeout_s=_TIMEOUT_S)
    directory = path_or_url(checkpoint_dir)
    with gather_step(group, f"preparing a load with {type(strategy).__name__}", on_all_ranks=True) as step:
        prepared = _PreparedLoad.of(strategy, common_strategy, state, directory, strict)
        step.data = json.dumps(sorted(prepared.requested)).encode()
    requested = {key for keys in step.results for key in json.loads(keys)}
    missing = prepared.check_missing(requested, strict, directory)
    with errors_on_all_ranks(group, f"loading with {type(strategy).__name__}"):
        loaded = prepared.load(directory)
    if strict.returns_keys:
        return loaded, set(missing), set(prepared.unexpected)
    return loaded


@dataclass(frozen=True, slots=True, kw_only=True)
class _PreparedLoad:
    """What one rank has read and checked before its strategies load.

    Attributes:
        sharded_by: the strategy that loads the sharded part.
        common_by: the strategy that has loaded common state, and loads objects if the other cannot.
        common: common state of the checkpoint, with the request's own objects.
        sharded: copies of the requested entities, after factories.
        factories: the factories of the request.
        requested: keys of the requested entities.
        stored: keys of the checkpoint; empty if the mode does not compare keys.
        unexpected: keys that are requested, and not stored.
    """

    sharded_by: Any
    common_by: Any
    common: StateDict
    sharded: ShardedStateDict
    factories: Any
    requested: set[str]
    stored: set[str]
    unexpected: frozenset[str]

    @classmethod
    def of(
        cls,
        strategy: Any,
        common_strategy: Any,
        state: ShardedStateDict,
        directory: Path | str,
        strict: StrictHandling,
    ) -> _PreparedLoad:
        """Find the strategies of a checkpoint, load common state, and compare keys. Local."""
        sharded_by, common_by = verify_checkpoint_and_load_strategy(str(directory), strategy, common_strategy)
        common = common_by.load_common(directory)
        request, local, factories = load_preprocess(with_our_entities(state))
        merge(common, local)
        sharded, _ = extract_sharded_base(request)
        sharded = dict_list_map_outplace(copy.copy, sharded)
        requested = keys_of(nested_values(sharded))
        stored: set[str] = set()
        unexpected: frozenset[str] = frozenset()
        if strict is not StrictHandling.ASSUME_OK_UNEXPECTED:
            stored = _stored_keys(sharded_by, common_by, directory)
            rules = LoadRules((), strict)
            unexpected = check_unexpected_keys(requested, dict.fromkeys(stored), rules, where=str(directory))
            sharded = adjust_non_strict_load(sharded, set(unexpected))
        return cls(
            sharded_by=sharded_by,
            common_by=common_by,
            common=common,
            sharded=sharded,
            factories=factories,
            requested=requested,
            stored=stored,
            unexpected=unexpected,
        )

    def check_missing(
        self, requested: set[str], strict: StrictHandling, directory: Path | str
    ) -> frozenset[str]:
        """Return the stored keys that no rank requests, or raise an error, as the mode says."""
        if not strict.looks_for_missing_keys:
            return frozenset()
        stored, rules = dict.fromkeys(self.stored), LoadRules((), strict)
        return check_missing_keys(requested, stored, rules, where=str(directory))

    def load(self, directory: Path | str) -> StateDict:
        """Load the entities, and return them with common state, in one state dict."""
        objects, rest = split_objects(self.sharded, self.sharded_by, self.common_by)
        if objects is not None:
            values = self.common_by.load_sharded_objects(objects, directory)
            merge(self.common, _requested_values(objects, values))
        merge(self.common, _requested_values(rest, self.sharded_by.load(rest, directory)))
        loaded: StateDict = apply_factory_merges(self.common, _loaded_factories(self.factories, self.common))
        return loaded


def _stored_keys(strategy: Any, common_strategy: Any, directory: Path | str) -> set[str]:
    stored = keys_of(strategy.load_sharded_metadata(directory).values())
    if not strategy.can_handle_sharded_objects:
        stored |= keys_of(common_strategy.load_sharded_metadata(directory).values())
    return stored


def _requested_values(asked: Any, loaded: Any, path: str = "") -> Any:
    """Return the requested part of a loaded state dict, since our strategies also add common state.

    Raises:
        DeclarationError: the loaded state dict lacks a requested value.
    """
    if not isinstance(asked, dict | list):
        return loaded
    is_right = isinstance(loaded, dict if isinstance(asked, dict) else list)
    steps = list(asked) if isinstance(asked, dict) else range(len(asked))
    for step in steps:
        if not is_right or (step not in loaded if isinstance(loaded, dict) else step >= len(loaded)):
            raise DeclarationError(
                f"{path}[{step!r}] was asked for, and the strategy's load() returned nothing for it. It has "
                f"to return the state dict that it was given with a value in the place of each entity."
            )
    values = [_requested_values(asked[step], loaded[step], f"{path}[{step!r}]") for step in steps]
    return dict(zip(steps, values, strict=True)) if isinstance(asked, dict) else values


def _loaded_factories(factories: Any, loaded: Any) -> Any:
    """Return the factories whose entities were loaded."""
    if not isinstance(factories, dict):
        return factories
    return {
        step: _loaded_factories(inner, loaded[step])
        for step, inner in factories.items()
        if (step in loaded if isinstance(loaded, dict) else isinstance(loaded, list) and step < len(loaded))
    }
