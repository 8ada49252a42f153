"""The public functions that one process calls: they read what a checkpoint contains, or remove arrays of it.

They need no request of a model. Their names are those of Megatron-Core's `dist_checkpointing.serialization`.
"""

from __future__ import annotations

import logging
from typing import Any

import torch

from megackpt.comm import SingleProcess
from megackpt.engine.checkpoint.common_reading import read_whole_common
from megackpt.engine.checkpoint.inline_arrays import check_repeated, with_inline_arrays
from megackpt.engine.checkpoint.manifest import is_committed, read_manifest
from megackpt.engine.checkpoint.opening import (
    check_arrays_complete,
    check_readable,
    open_checkpoint,
    read_common,
)
from megackpt.engine.checkpoint.removal import remove_arrays
from megackpt.engine.loading.prepare import matches_any
from megackpt.entities import ShardedBase, ShardedObject, ShardedTensor, StateDict
from megackpt.entities.describe import torch_dtype
from megackpt.errors import truncated_list
from megackpt.formats.contents import Contents
from megackpt.formats.registry import save_strategy
from megackpt.ground.notices import notice
from megackpt.options import LoadOptions
from megackpt.plans.metadata import OBJECT
from megackpt.run.collective import load, options_or_default
from megackpt.storage import Location, opened_store

log = logging.getLogger(__name__)


def load_common_state_dict(checkpoint_dir: Location, *, allow_unsafe_pickle: bool = False) -> StateDict:
    """Return the common state of a checkpoint. Local.

    A list that also had sharded entities is returned as a dict by position. allow_unsafe_pickle is as in
    `LoadOptions`.

    Raises:
        NotACheckpointError: there is no committed checkpoint in this directory.
        FormatError, IntegrityError: the common state cannot be read.

    Source: Megatron-Core `dist_checkpointing.load_common_state_dict`.
    """
    with opened_store(checkpoint_dir) as store:
        contents = open_checkpoint(store, allow_unsafe_pickle=allow_unsafe_pickle)
        common: StateDict = read_whole_common(contents, store)[0]
        return common


def load_content_metadata(checkpoint_dir: Location, *, allow_unsafe_pickle: bool = False) -> Any:
    """Return the `content_metadata` that was given to `save`, or None. Local.

    allow_unsafe_pickle is as in `LoadOptions`.

    Raises:
        NotACheckpointError: there is no committed checkpoint in this directory.
        FormatError, IntegrityError: the common state cannot be read.

    Source: Megatron-Core `dist_checkpointing.load_content_metadata`.
    """
    with opened_store(checkpoint_dir) as store:
        contents = open_checkpoint(store, allow_unsafe_pickle=allow_unsafe_pickle)
        return read_common(contents, where=store.location)[1]


def load_sharded_metadata(
    checkpoint_dir: Location, *, allow_unsafe_pickle: bool = False
) -> dict[str, ShardedBase]:
    """Return the arrays and objects of a checkpoint, without data. Local.

    Each global array is one ShardedTensor of the whole array, under its key. Each object is a ShardedObject,
    under its `unique_key`. Dense tensors of common state are among the arrays, also those that are stored in
    common state itself. allow_unsafe_pickle is as in `LoadOptions`.

    Raises:
        NotACheckpointError: there is no committed checkpoint in this directory.
        FormatError, IntegrityError: the index or common state cannot be read.

    Source: Megatron-Core `dist_checkpointing.load_sharded_metadata`.
    """
    with opened_store(checkpoint_dir) as store:
        contents = open_checkpoint(store, allow_unsafe_pickle=allow_unsafe_pickle)
        return stored_entities(with_inline_arrays(contents, where=store.location))


def stored_entities(contents: Contents) -> dict[str, ShardedBase]:
    """Return the arrays and objects of an opened checkpoint, without data; see `load_sharded_metadata`."""
    entities: dict[str, ShardedBase] = {}
    objects = [key for key, spec in contents.arrays.items() if spec.dtype == OBJECT]
    # The rows of all keys at once, since a format may read them now.
    offsets = contents.chunks(objects).object_rows() if objects else ()
    for key, offset in offsets:
        entity = ShardedObject(key, None, contents.arrays[key].global_shape, offset)
        entities[entity.unique_key] = entity
    for key, spec in contents.arrays.items():
        if spec.dtype != OBJECT:
            shape, dtype = spec.global_shape, torch_dtype(spec.dtype)
            origin, ones = (0,) * len(shape), (1,) * len(shape)
            entities[key] = ShardedTensor(key, None, dtype, shape, shape, origin, ones)
    return entities


def load_tensors_metadata(
    checkpoint_dir: Location, *, allow_unsafe_pickle: bool = False
) -> dict[str, ShardedTensor]:
    """Return the global arrays of a checkpoint, without data: `load_sharded_metadata` without objects. Local.

    Source: Megatron-Core `dist_checkpointing.load_tensors_metadata`.
    """
    entities = load_sharded_metadata(checkpoint_dir, allow_unsafe_pickle=allow_unsafe_pickle)
    return {key: entity for key, entity in entities.items() if isinstance(entity, ShardedTensor)}


def load_plain_tensors(
    checkpoint_dir: Location, *, options: LoadOptions | None = None
) -> dict[str, torch.Tensor]:
    """Return every global array of a checkpoint as a whole tensor, by key. Local.

    The tensors are in host memory, with the shapes and dtypes of the arrays: it needs memory for all of them.
    Dense tensors of common state are among them. `LoadOptions.exclude` leaves arrays out.

    Raises:
        NotACheckpointError: there is no committed checkpoint in this directory.
        FormatError: an array is stored in a form that cannot be loaded, or a tensor of common state repeats
            its elements so often that it would need far more memory than is stored.
        IntegrityError: stored bytes are damaged.

    Source: Megatron-Core `dist_checkpointing.load_plain_tensors`.
    """
    chosen = options_or_default(options, LoadOptions)
    with opened_store(checkpoint_dir) as store:
        contents = open_checkpoint(store, allow_unsafe_pickle=chosen.allow_unsafe_pickle)
        wanted = [key for key in contents.unreadable if not matches_any(key, chosen.exclude)]
        check_readable(wanted, contents.unreadable, where=store.location)
        keys = [
            key
            for key, spec in contents.arrays.items()
            if spec.dtype != OBJECT and not matches_any(key, chosen.exclude)
        ]
        check_arrays_complete(store, contents.chunks(keys), keys)
        contents = with_inline_arrays(contents, where=store.location)
        check_repeated(contents, where=store.location)
        entities = stored_entities(contents)
    arrays = {
        key: entity
        for key, entity in entities.items()
        if isinstance(entity, ShardedTensor) and not matches_any(key, chosen.exclude)
    }
    for entity in arrays.values():
        entity.init_data()
    load({"arrays": arrays}, checkpoint_dir, options=options, group=SingleProcess())
    return {key: entity.data for key, entity in arrays.items() if entity.data is not None}


def remove_sharded_tensors(checkpoint_dir: Location, key_prefix: str) -> None:
    """Remove every array and object whose key begins with key_prefix from a checkpoint, atomically.

    Local: one process calls it. Tensors of common state that are stored as arrays are removed as well; a
    load then returns common state without them; tensors that are stored in common state itself stay, and a
    warning names them. A file is deleted if nothing else in it is in use; in other
    files the bytes stay, but can no longer be loaded.

    Raises:
        NotACheckpointError: there is no committed checkpoint in this directory.
        DeclarationError: the format can only be read.

    Source: Megatron-Core `dist_checkpointing.remove_sharded_tensors`.
    """
    with opened_store(checkpoint_dir) as store:
        manifest = read_manifest(store)
        backend, version = manifest.get("sharded_backend"), manifest.get("sharded_backend_version", 0)
        strategy = save_strategy((str(backend), int(version)))
        remove_arrays(store, key_prefix=key_prefix, strategy=strategy)
        contents = with_inline_arrays(open_checkpoint(store), where=store.location)
    stay = sorted(key for key in contents.inline if key.startswith(key_prefix))
    if stay:
        notice(
            log,
            f"{checkpoint_dir}: {len(stay)} tensors below {key_prefix!r} are stored in common state itself "
            f"and stay:\n{truncated_list(stay)}",
        )


def check_is_distributed_checkpoint(checkpoint_dir: Location) -> bool:
    """Return whether a directory has a committed checkpoint of any format. Local.

    Source: Megatron-Core `dist_checkpointing.check_is_distributed_checkpoint`.
    """
    with opened_store(checkpoint_dir) as store:
        return is_committed(store)
