"""Saves by strategies that a user wrote against Megatron-Core's base classes.

Such a strategy gets the sharded part, with factories built, and writes it as it likes. This module adds the
checks of any save here, common state, and metadata.json, which it writes last: until then the directory is
no checkpoint. The strategy itself must make its files durable.
"""

from __future__ import annotations

import copy
import json
import logging
import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from megackpt.codec import leaf_digests
from megackpt.comm import Group, errors_on_all_ranks, gather_step, world_group
from megackpt.contrib.megatron.deferred_save import EnclosingSave, enclosing_save
from megackpt.contrib.megatron.dist_checkpointing.dict_utils import dict_list_map_outplace, nested_values
from megackpt.contrib.megatron.dist_checkpointing.state_dict_utils import save_preprocess
from megackpt.contrib.megatron.dist_checkpointing.strategies.async_utils import AsyncRequest
from megackpt.contrib.megatron.user_state import path_or_url, split_objects, with_our_entities
from megackpt.engine.checkpoint.manifest import is_committed
from megackpt.engine.checkpoint.removal import files_of_saves
from megackpt.entities import ShardedObject, ShardedStateDict, ShardedTensor, StateDict
from megackpt.entities.describe import describe
from megackpt.errors import CommonStateError, DeclarationError, UnsupportedError
from megackpt.formats.strategy import MANIFEST
from megackpt.plans.metadata import pack_columns, unpack_columns
from megackpt.plans.metadata.merge import decode_declarations, merge_declarations
from megackpt.plans.validation import check_coverage
from megackpt.plans.validation.equality import check_common_equal
from megackpt.storage import opened_store

log = logging.getLogger(__name__)

_TIMEOUT_S = 600.0  # as in SaveOptions
_DCP_METADATA = ".metadata"  # makes a directory a checkpoint without metadata.json


def save_with(
    strategy: Any,
    common_strategy: Any,
    state: ShardedStateDict,
    checkpoint_dir: str | os.PathLike[str],
    *,
    is_async: bool,
    validate: bool,
    common_to_compare: Callable[[StateDict], StateDict] | None,
    content_metadata: Any,
) -> AsyncRequest | None:
    """Save with a user's strategy; with is_async, return its request with the commit at the end. Collective.

    If there is a checkpoint in the directory, it is removed once the declarations are proved right. The
    strategy is called afterwards, because it may write over the files. Common state is written in this call.

    Raises:
        UnsupportedError: an asynchronous save is asked for, and the strategy has no async_save.
        CheckpointError: the same on every rank, naming the one that failed. If the strategy had been called,
            the directory holds no checkpoint.
    """
    group = world_group(timeout_s=_TIMEOUT_S)
    directory = path_or_url(checkpoint_dir)
    if is_async and not callable(getattr(strategy, "async_save", None)):
        raise UnsupportedError(
            f"{strategy} has no async_save, so it cannot save asynchronously. Derive it from "
            f"AsyncSaveShardedStrategy, or save without async_sharded_save."
        )
    sharded, common = _prepare_state(state, group, validate, common_to_compare, content_metadata)
    _remove_old_checkpoint(directory, group)
    enclosing = EnclosingSave(directory=str(directory), common=common)
    request: AsyncRequest | None = None
    doing = "preparing an asynchronous save" if is_async else "saving"
    with errors_on_all_ranks(group, f"{doing} with {type(strategy).__name__}"):
        objects, rest = split_objects(sharded, strategy, common_strategy)
        with enclosing_save(enclosing):
            if is_async:
                request = _as_request(strategy.async_save(rest, directory), strategy)
            else:
                strategy.save(rest, directory)
        if not enclosing.is_taken:
            _save_common(common_strategy, common, objects, directory)
    if enclosing.is_taken:
        return request
    commit = partial(_commit, strategy, common_strategy, directory, group)
    if request is not None:
        # A frozen request is replaced, because the commit must follow it.
        return request._replace(finalize_fns=[*request.finalize_fns, commit])
    commit()
    return None


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
    with gather_step(group, "preparing the save", on_all_ranks=True) as step:
        tree = dict(with_our_entities(state))
        if content_metadata is not None:
            tree["content_metadata"] = content_metadata
        sharded, common = save_preprocess(tree, validate_access_integrity=False)
        sharded = dict_list_map_outplace(copy.copy, sharded)
        entities = [_checked(entity) for entity in nested_values(sharded)]
        if validate:
            compared = common if common_to_compare is None else common_to_compare(common)
            step.data = _description(entities, compared, rank=group.rank)
    if validate:
        _check_descriptions(step.results)
    return sharded, common


def _description(entities: Sequence[ShardedTensor | ShardedObject], common: Any, *, rank: int) -> bytes:
    """Return what other ranks compare: digests of common state, behind their length, and declarations."""
    declared = pack_columns(describe(entities, rank=rank).to_columns())
    leaves = json.dumps(leaf_digests(common), sort_keys=True).encode()
    return len(leaves).to_bytes(8, "little") + leaves + declared


def _check_descriptions(descriptions: Sequence[bytes]) -> None:
    """Check the declarations of all ranks, and log a warning if their common state differs. Pure.

    Raises:
        CheckpointError: an element has no main replica or several, or declarations differ.
    """
    leaves, columns = [], []
    for rank, description in enumerate(descriptions):
        declared_at = 8 + int.from_bytes(description[:8], "little")
        leaves.append(json.loads(description[8:declared_at]))
        columns.append(unpack_columns(description[declared_at:], where=f"declarations of rank {rank}"))
    check_coverage(merge_declarations(decode_declarations(columns)))
    try:
        check_common_equal(leaves)
    except CommonStateError as error:
        log.warning("%s Rank 0's is stored, as Megatron-Core does.", error)


def _checked(entity: Any) -> ShardedTensor | ShardedObject:
    """Return the entity, if strategies written for Megatron-Core can save it.

    Raises:
        DeclarationError: it is of another class, or a tensor without data.
    """
    if not isinstance(entity, ShardedTensor | ShardedObject):
        raise DeclarationError(
            f"{getattr(entity, 'key', entity)!r} is a {type(entity).__name__}, which strategies written for "
            f"Megatron-Core do not know. Use ShardedTensor or ShardedObject, or save without a strategy."
        )
    if isinstance(entity, ShardedTensor) and entity.data is None:
        raise DeclarationError(
            f"{entity.key!r} has no data to save. Declare it with its tensor.", key=entity.key
        )
    return entity


def _remove_old_checkpoint(directory: Path | str, group: Group) -> None:
    """Create the directory. Remove a checkpoint in it, the commit first. Collective."""
    with errors_on_all_ranks(group, "preparing the directory"):
        if group.rank != 0:
            return
        with opened_store(directory) as store:
            store.create()
            if is_committed(store):
                log.warning("%s holds a checkpoint, which is removed before it is saved over.", directory)
                stale = files_of_saves(store)
                store.delete([name for name in (MANIFEST, _DCP_METADATA) if store.exists(name)])
                store.sync()
                store.delete([name for name in stale if store.exists(name)])
                store.sync()


def _commit(strategy: Any, common_strategy: Any, directory: Path | str, group: Group) -> None:
    """Write metadata.json, as Megatron-Core does. Collective."""
    manifest = {
        "sharded_backend": strategy.backend,
        "sharded_backend_version": strategy.version,
        "common_backend": common_strategy.backend,
        "common_backend_version": common_strategy.version,
    }
    with errors_on_all_ranks(group, "committing the checkpoint"):
        if group.rank == 0:
            with opened_store(directory) as store:
                store.sync()
                store.replace(MANIFEST, json.dumps(manifest, indent=1, sort_keys=True).encode())


def _save_common(common_strategy: Any, common: StateDict, objects: Any, directory: Path | str) -> None:
    """Save common state, and the objects that the strategy of the sharded part does not take."""
    common_strategy.save_common(common, directory)
    if objects is not None:
        common_strategy.save_sharded_objects(objects, directory)


def _as_request(returned: Any, strategy: Any) -> AsyncRequest:
    if isinstance(returned, AsyncRequest):
        return returned
    if hasattr(returned, "_asdict"):  # one of Megatron-Core's own, which may lack fields
        return AsyncRequest(**returned._asdict())
    raise DeclarationError(
        f"async_save of {type(strategy).__name__} returned a {type(returned).__name__}. It has to return an "
        f"AsyncRequest."
    )
