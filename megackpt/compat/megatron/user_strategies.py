"""Saves and loads by strategies that a user wrote against Megatron-Core's base classes.

Such a strategy gets the sharded part, with factories built, and moves it as it likes. This module adds the
checks of any save here, common state, and metadata.json, which it writes last: until then the directory is
no checkpoint. The strategy itself must make its files durable.
"""

from __future__ import annotations

import copy
import json
import logging
import os
from collections.abc import Callable, Iterable
from contextlib import closing
from pathlib import Path
from typing import Any

from megackpt.codec import leaf_digests
from megackpt.comm import Group, run_on_all_ranks, world_group
from megackpt.compat.megatron.dist_checkpointing.dict_utils import (
    dict_list_map_outplace,
    extract_matching_values,
    merge,
    nested_values,
)
from megackpt.compat.megatron.dist_checkpointing.mapping import apply_factory_merges
from megackpt.compat.megatron.dist_checkpointing.state_dict_utils import load_preprocess, save_preprocess
from megackpt.compat.megatron.dist_checkpointing.strategies.async_utils import AsyncRequest
from megackpt.compat.megatron.dist_checkpointing.utils import extract_sharded_base
from megackpt.compat.megatron.dist_checkpointing.validation import (
    adjust_non_strict_load,
    validate_sharded_objects_handling,
    verify_checkpoint_and_load_strategy,
)
from megackpt.compat.megatron.enclosing_save import EnclosingSave, enclosing_save
from megackpt.engine.checkpoint.manifest import files_of_saves, is_committed
from megackpt.errors import CommonStateError, DeclarationError, UnsupportedError
from megackpt.formats.strategy import MANIFEST
from megackpt.mapping import (
    LocalNonpersistentObject,
    ShardedBase,
    ShardedObject,
    ShardedStateDict,
    ShardedTensor,
    StateDict,
)
from megackpt.mapping.describe import describe
from megackpt.mapping.megatron_entities import adopt_megatron_entities
from megackpt.mapping.tree import leaf_types
from megackpt.metadata import decode_declarations, merge_declarations, pack_columns, unpack_columns
from megackpt.storage import is_url, open_store
from megackpt.validation import (
    LoadRules,
    StrictHandling,
    check_coverage,
    check_missing_keys,
    check_unexpected_keys,
)
from megackpt.validation.common import check_common_equal

log = logging.getLogger(__name__)

_TIMEOUT_S = 600.0  # as in SaveOptions
_DCP_METADATA = ".metadata"  # makes a directory a checkpoint without metadata.json


def save_with(
    strategy: Any,
    common_strategy: Any,
    state: ShardedStateDict,
    checkpoint_dir: str | os.PathLike[str],
    *,
    validate: bool,
    common_to_compare: Callable[[StateDict], StateDict] | None,
    content_metadata: Any,
) -> None:
    """Save by a user's strategy. Collective.

    A checkpoint that is in the directory is removed when the declarations are proved right, before the
    strategy is called: it may write over its files.

    Raises:
        CheckpointError: the same on every rank, naming the one that failed. If the strategy had been called,
            the directory holds no checkpoint.
    """
    group = world_group(timeout_s=_TIMEOUT_S)
    directory = _path_or_url(checkpoint_dir)
    sharded, common = _prepare_state(state, group, validate, common_to_compare, content_metadata)
    _remove_old_checkpoint(directory, group)
    enclosing = EnclosingSave(directory=str(directory), common=common)

    def move() -> bytes:
        objects, rest = _split_objects(sharded, strategy, common_strategy)
        with enclosing_save(enclosing):
            strategy.save(rest, directory)
        if not enclosing.is_taken:
            common_strategy.save_common(common, directory)
            if objects is not None:
                common_strategy.save_sharded_objects(objects, directory)
        return b""

    run_on_all_ranks(group, move, doing=f"saving with {type(strategy).__name__}")
    if not enclosing.is_taken:
        _commit(strategy, common_strategy, directory, group)


def request_with(
    strategy: Any,
    common_strategy: Any,
    state: ShardedStateDict,
    checkpoint_dir: str | os.PathLike[str],
    *,
    validate: bool,
    common_to_compare: Callable[[StateDict], StateDict] | None,
    content_metadata: Any,
) -> AsyncRequest:
    """Return a user's request for a save, to whose end the commit is added. Collective.

    Common state is written now, and a checkpoint that is in the directory is removed now, as in `save_with`.

    Raises:
        UnsupportedError: the strategy has no async_save.
        CheckpointError: as `save_with`.
    """
    group = world_group(timeout_s=_TIMEOUT_S)
    directory = _path_or_url(checkpoint_dir)
    if not callable(getattr(strategy, "async_save", None)):
        raise UnsupportedError(
            f"{strategy} has no async_save, so it cannot save asynchronously. Derive it from "
            f"AsyncSaveShardedStrategy, or save without async_sharded_save."
        )
    sharded, common = _prepare_state(state, group, validate, common_to_compare, content_metadata)
    _remove_old_checkpoint(directory, group)
    enclosing = EnclosingSave(directory=str(directory), common=common)
    requests: list[AsyncRequest] = []

    def begin() -> bytes:
        objects, rest = _split_objects(sharded, strategy, common_strategy)
        with enclosing_save(enclosing):
            requests.append(_as_request(strategy.async_save(rest, directory), strategy))
        if not enclosing.is_taken:
            common_strategy.save_common(common, directory)
            if objects is not None:
                common_strategy.save_sharded_objects(objects, directory)
        return b""

    run_on_all_ranks(group, begin, doing=f"preparing an asynchronous save with {type(strategy).__name__}")
    (request,) = requests
    if not enclosing.is_taken:
        # A frozen request is replaced, because the commit must follow it.
        commit = [*request.finalize_fns, lambda: _commit(strategy, common_strategy, directory, group)]
        request = request._replace(finalize_fns=commit)
    return request


def load_with(
    strategy: Any,
    common_strategy: Any,
    state: ShardedStateDict,
    checkpoint_dir: str | os.PathLike[str],
    strict: StrictHandling,
    ranks: Group | None = None,
) -> Any:
    """Load by a user's strategies, or one of ours and one of a user's. Collective over ranks, None for all.

    Returns what `load` returns.

    Raises:
        CheckpointError: the same on every rank.
    """
    group = ranks or world_group(timeout_s=_TIMEOUT_S)
    directory = _path_or_url(checkpoint_dir)
    loaded: list[StateDict] = []
    unexpected: frozenset[str] = frozenset()
    prepared: list[Any] = []

    def prepare() -> bytes:
        nonlocal unexpected
        sharded_by, common_by = verify_checkpoint_and_load_strategy(str(directory), strategy, common_strategy)
        common = common_by.load_common(directory)
        tree = _with_our_entities(state)
        request, local, factories = load_preprocess(tree)
        merge(common, local)
        sharded, _ = extract_sharded_base(request)
        sharded = dict_list_map_outplace(copy.copy, sharded)
        asked = _keys(nested_values(sharded))
        stored: set[str] = set()
        if strict is not StrictHandling.ASSUME_OK_UNEXPECTED:
            stored = _stored_keys(sharded_by, common_by, directory)
            rules = LoadRules((), strict)
            unexpected = check_unexpected_keys(asked, dict.fromkeys(stored), rules, where=str(directory))
            sharded = adjust_non_strict_load(sharded, set(unexpected))
        prepared.append((sharded_by, common_by, common, sharded, factories, stored))
        return json.dumps(sorted(asked)).encode()

    answers = run_on_all_ranks(group, prepare, doing=f"preparing a load with {type(strategy).__name__}")
    sharded_by, common_by, common, sharded, factories, stored = prepared[0]
    missing: frozenset[str] = frozenset()
    if strict.looks_for_missing_keys:
        everything = {key for answer in answers for key in json.loads(answer)}
        missing = check_missing_keys(
            everything, dict.fromkeys(stored), LoadRules((), strict), where=str(directory)
        )

    def move() -> bytes:
        objects, rest = _split_objects(sharded, sharded_by, common_by)
        if objects is not None:
            merge(common, _requested_values(objects, common_by.load_sharded_objects(objects, directory)))
        merge(common, _requested_values(rest, sharded_by.load(rest, directory)))
        loaded.append(apply_factory_merges(common, _loaded_factories(factories, common)))
        return b""

    run_on_all_ranks(group, move, doing=f"loading with {type(strategy).__name__}")
    if strict.returns_keys:
        return loaded[0], set(missing), set(unexpected)
    return loaded[0]


def _prepare_state(
    state: ShardedStateDict,
    group: Group,
    validate: bool,
    common_to_compare: Callable[[StateDict], StateDict] | None,
    content_metadata: Any,
) -> tuple[ShardedStateDict, StateDict]:
    """Return the sharded part and common state, proved right as for any save. Collective.

    Entities are copies, so that a strategy may change them.

    Raises:
        CheckpointError: the same on every rank; nothing was written.
    """
    states: list[tuple[ShardedStateDict, StateDict]] = []

    def describe_own() -> bytes:
        tree = dict(_with_our_entities(state))
        if content_metadata is not None:
            tree["content_metadata"] = content_metadata
        sharded, common = save_preprocess(tree, validate_access_integrity=False)
        sharded = dict_list_map_outplace(copy.copy, sharded)
        entities = [_checked(entity) for entity in nested_values(sharded)]
        states.append((sharded, common))
        if not validate:
            return b""
        declared = pack_columns(describe(entities, rank=group.rank).to_columns())
        compared = common if common_to_compare is None else common_to_compare(common)
        leaves = json.dumps(leaf_digests(compared), sort_keys=True).encode()
        return len(leaves).to_bytes(8, "little") + leaves + declared

    answers = run_on_all_ranks(group, describe_own, doing="preparing the save")
    if validate:
        lengths = [int.from_bytes(answer[:8], "little") for answer in answers]
        pairs = list(zip(answers, lengths, strict=True))
        columns = [
            unpack_columns(answer[8 + length :], where=f"declarations of rank {rank}")
            for rank, (answer, length) in enumerate(pairs)
        ]
        check_coverage(merge_declarations(decode_declarations(columns)))
        try:
            check_common_equal([json.loads(answer[8 : 8 + length]) for answer, length in pairs])
        except CommonStateError as error:
            log.warning("%s Rank 0's is stored, as Megatron-Core does.", error)
    return states[0]


def _with_our_entities(state: ShardedStateDict) -> ShardedStateDict:
    """Return the state dict with entities of Megatron-Core as ours.

    Raises:
        DeclarationError: it is no dict, or a list in it cannot be taken apart and put together again.
    """
    if not isinstance(state, dict):
        raise DeclarationError(f"A sharded state dict must be a dict, not {type(state).__name__}.")
    adopted: ShardedStateDict = adopt_megatron_entities(state, leaf_types(state))
    _kinds_in(adopted, "")
    return adopted


def _kinds_in(tree: Any, path: str) -> set[str]:
    """Return which kinds of leaves a tree has: these are moved apart from each other.

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
            f"handed what is sharded in a list of its own, in which their positions would be lost. Use a "
            f"dict, or save without a strategy."
        )
    return set().union(*kinds)


def _checked(entity: Any) -> ShardedTensor | ShardedObject:
    """Return an entity that a strategy of Megatron-Core's kind knows.

    Raises:
        DeclarationError: it is of another kind, or a tensor without data.
    """
    if not isinstance(entity, ShardedTensor | ShardedObject):
        raise DeclarationError(
            f"{getattr(entity, 'key', entity)!r} is a {type(entity).__name__}, which strategies written for "
            f"Megatron-Core do not know. Use ShardedTensor or ShardedObject, or save without a strategy."
        )
    if isinstance(entity, ShardedTensor) and entity.data is None:
        raise DeclarationError(f"{entity.key!r} has no data to save.", key=entity.key)
    return entity


def _remove_old_checkpoint(directory: Path | str, group: Group) -> None:
    """Make the directory, and remove a checkpoint that is in it: its commit first. Collective."""

    def step() -> bytes:
        if group.rank != 0:
            return b""
        with closing(open_store(directory)) as store:
            store.create()
            if is_committed(store):
                log.warning("%s holds a checkpoint, which is removed before it is saved over.", directory)
                stale = files_of_saves(store)
                store.delete([name for name in (MANIFEST, _DCP_METADATA) if store.exists(name)])
                store.sync()
                store.delete([name for name in stale if store.exists(name)])
                store.sync()
        return b""

    run_on_all_ranks(group, step, doing="preparing the directory")


def _commit(strategy: Any, common_strategy: Any, directory: Path | str, group: Group) -> None:
    """Write metadata.json, as Megatron-Core does. Collective."""

    def step() -> bytes:
        if group.rank == 0:
            manifest = {
                "sharded_backend": strategy.backend,
                "sharded_backend_version": strategy.version,
                "common_backend": common_strategy.backend,
                "common_backend_version": common_strategy.version,
            }
            with closing(open_store(directory)) as store:
                store.sync()
                store.replace(MANIFEST, json.dumps(manifest, indent=1, sort_keys=True).encode())
        return b""

    run_on_all_ranks(group, step, doing="committing the checkpoint")


def _split_objects(
    sharded: ShardedStateDict, strategy: Any, common_strategy: Any
) -> tuple[ShardedStateDict | None, ShardedStateDict]:
    """Return the objects, for the common strategy, and the rest; None and all where the strategy takes both.

    Raises:
        DeclarationError: neither strategy can handle objects.
    """
    if strategy.can_handle_sharded_objects:
        return None, sharded
    validate_sharded_objects_handling(strategy, common_strategy)
    objects, rest = extract_matching_values(sharded, lambda leaf: isinstance(leaf, ShardedObject))
    return objects, rest


def _as_request(returned: Any, strategy: Any) -> AsyncRequest:
    if isinstance(returned, AsyncRequest):
        return returned
    if hasattr(returned, "_asdict"):  # one of Megatron-Core's own, which may lack fields
        return AsyncRequest(**returned._asdict())
    raise DeclarationError(
        f"async_save of {type(strategy).__name__} returned a {type(returned).__name__}. It has to return an "
        f"AsyncRequest."
    )


def _keys(entities: Iterable[Any]) -> set[str]:
    return {entity.key for entity in entities if isinstance(entity, ShardedBase)}


def _stored_keys(strategy: Any, common_strategy: Any, directory: Path | str) -> set[str]:
    stored = _keys(strategy.load_sharded_metadata(directory).values())
    if not strategy.can_handle_sharded_objects:
        stored |= _keys(common_strategy.load_sharded_metadata(directory).values())
    return stored


def _requested_values(asked: Any, loaded: Any, path: str = "") -> Any:
    """Return what was asked for of what a strategy has loaded: one of ours adds common state.

    Raises:
        DeclarationError: it lacks something.
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
    """Return the factories for which something was loaded."""
    if not isinstance(factories, dict):
        return factories
    return {
        step: _loaded_factories(inner, loaded[step])
        for step, inner in factories.items()
        if (step in loaded if isinstance(loaded, dict) else isinstance(loaded, list) and step < len(loaded))
    }


def _path_or_url(checkpoint_dir: str | os.PathLike[str]) -> Path | str:
    """Return the directory as strategies of Megatron-Core are given it."""
    text = os.fspath(checkpoint_dir)
    return text if is_url(text) else Path(text)
