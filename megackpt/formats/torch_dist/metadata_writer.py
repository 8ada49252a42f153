"""Making a `.metadata`: our chunks as the classes of DCP. `metadata_reader` has the other direction."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from megackpt.entities.describe import torch_dtype
from megackpt.errors import DeclarationError
from megackpt.formats.torch_dist import names
from megackpt.formats.torch_dist.metadata_reader import Extents, key_of
from megackpt.formats.torch_dist.values import Value
from megackpt.plans.metadata import OBJECT, ArraySpec, ChunkTable


def unique_key(spec: ArraySpec, start: Extents) -> str:
    """Return the name under which one object of an array is listed.

    Source: Megatron-Core `ShardedObject.unique_key`.
    """
    return f"{spec.key}/shard_{'.'.join(map(str, start))}_{'.'.join(map(str, spec.global_shape))}"


@dataclass(frozen=True, slots=True)
class WrittenItems:
    """Where the items of a save lie: a row of the table each, with columns of plain numbers."""

    table: ChunkTable
    file: list[int]
    files: tuple[str, ...]
    offset_bytes: list[int]
    length: list[int]


def metadata_of(written: WrittenItems, values: Iterable[Value] = (), *, attempt: str) -> Metadata:
    """Return the metadata of a checkpoint whose rows are whole boxes, as DCP needs it.

    values are listed as well, under keys that no array has.

    Raises:
        DeclarationError: two chunks of an array begin at the same offset, or DCP takes two keys for one.

    Source: torch.distributed.checkpoint `create_default_global_save_plan` and `FileSystemWriter.finish`.
    """
    entries, storage = _listed(written)
    paths: dict[str, Any] = {}
    for value in values:
        # An array or object of this name stays: DCP can list a name once.
        if value.key in entries:
            continue
        entries[value.key] = BytesStorageMetadata()
        storage[MetadataIndex(value.key)] = _StorageInfo(value.file, value.offset_bytes, value.length)
        if value.path is not None:
            paths[value.key] = value.path
    metadata = Metadata(entries, planner_data=paths, storage_data=storage)
    metadata.storage_meta = StorageMeta(save_id=attempt)
    metadata.version = "1.0.0"
    return metadata


def _listed(written: WrittenItems) -> tuple[dict[str, Any], dict[MetadataIndex, _StorageInfo]]:
    """Return the entries of all arrays and objects, and where each item lies."""
    table = written.table
    entries: dict[str, Any] = {
        a.key: TensorStorageMetadata(
            TensorProperties(dtype=torch_dtype(a.dtype)), torch.Size(a.global_shape), []
        )
        for a in table.arrays
        if a.dtype != OBJECT
    }
    storage: dict[MetadataIndex, _StorageInfo] = {}
    starts, shapes = table.start.tolist(), table.shape.tolist()
    for row, number in enumerate(table.array.tolist()):
        spec = table.arrays[number]
        start = tuple(starts[row][: len(spec.global_shape)])
        if spec.dtype == OBJECT:
            index = MetadataIndex(unique_key(spec, start))
            is_taken = index.fqn in entries
            entries[index.fqn] = BytesStorageMetadata()
        else:
            chunks = entries[spec.key].chunks
            # DCP compares key and offset only (the number is a hint), so chunks that begin together are one
            # to it.
            index = MetadataIndex(spec.key, start, len(chunks))
            is_taken = index in storage
            chunks.append(ChunkStorageMetadata(torch.Size(start), torch.Size(shapes[row][: len(start)])))
        if is_taken:
            raise _taken(spec.key, start)
        storage[index] = _StorageInfo(
            written.files[written.file[row]], written.offset_bytes[row], written.length[row]
        )
    return entries, storage


def _taken(key: str, start: Extents) -> DeclarationError:
    return DeclarationError(
        f"{key!r}: format torch_dist cannot hold two chunks that begin at {start}. Main replicas must not "
        f"overlap, and no key may look like another's object.",
        key=key,
    )


def without_keys(metadata: Any, *, key_prefix: str) -> Metadata:
    """Return the same metadata without the arrays whose keys begin with key_prefix.

    Copies of common state stay, as common state itself does.
    """
    copies = {
        index.fqn
        for index, info in metadata.storage_data.items()
        if names.is_values_file(str(getattr(info, "relative_path", None)), kind="state")
    }

    kept = partial(_kept_entries, copies=copies, key_prefix=key_prefix)
    remaining = Metadata(
        kept(metadata.state_dict_metadata),
        planner_data=kept(getattr(metadata, "planner_data", None)),
        storage_data=kept(metadata.storage_data),
    )
    remaining.storage_meta = getattr(metadata, "storage_meta", None)
    remaining.version = getattr(metadata, "version", None)
    if isinstance(getattr(metadata, "mcore_data", None), dict):
        remaining.mcore_data = kept(metadata.mcore_data)  # type: ignore[attr-defined]  # Megatron's own addition
    return remaining


def _kept_entries(table: Any, *, copies: Set[str], key_prefix: str) -> dict[Any, Any]:
    """Return a table of `.metadata` without the arrays whose keys begin with key_prefix."""
    entries: Mapping[Any, Any] = table if isinstance(table, dict) else {}
    # A table has names as keys, or objects with the name in an attribute.
    fqns = {k: str(getattr(k, "fqn", k)) for k in entries}
    return {
        k: v for k, v in entries.items() if fqns[k] in copies or not key_of(fqns[k]).startswith(key_prefix)
    }


def data_files_of(metadata: Any) -> set[str]:
    """Return the data files that a `.metadata` names."""
    files = (getattr(info, "relative_path", None) for info in metadata.storage_data.values())
    return {name for name in files if isinstance(name, str) and name.endswith(".distcp")}
