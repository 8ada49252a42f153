"""A `.metadata` for what was saved.

Owns the translation of our chunks into DCP's classes; `described` has the other direction.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
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

from megackpt.errors import DeclarationError
from megackpt.formats.torch_dist import names
from megackpt.formats.torch_dist.metadata_reader import Extents, key_of
from megackpt.formats.torch_dist.values import Value
from megackpt.metadata import OBJECT, ArraySpec, ChunkTable


def unique_key(spec: ArraySpec, start: Extents) -> str:
    """Return the name under which one object of an array is listed.

    Source: Megatron-Core `ShardedObject.unique_key`.
    """
    return f"{spec.key}/shard_{'.'.join(map(str, start))}_{'.'.join(map(str, spec.global_shape))}"


@dataclass(frozen=True, slots=True)
class WrittenItems:
    """Where a save has put the rows of a table: columns of plain numbers, and names of files."""

    table: ChunkTable
    file: list[int]
    files: tuple[str, ...]
    offset_bytes: list[int]
    length: list[int]


def metadata_of(written: WrittenItems, values: Iterable[Value] = (), *, attempt: str) -> Metadata:
    """Return what DCP must know of a checkpoint whose rows are whole boxes.

    values are listed under keys that no array has.

    Raises:
        DeclarationError: two chunks of an array begin at one place, or two keys are the same to DCP.

    Source: torch.distributed.checkpoint `create_default_global_save_plan` and `FileSystemWriter.finish`.
    """
    table = written.table
    entries: dict[str, Any] = {
        a.key: TensorStorageMetadata(_properties(a.dtype), torch.Size(a.global_shape), [])
        for a in table.arrays
        if a.dtype != OBJECT
    }
    storage: dict[MetadataIndex, _StorageInfo] = {}
    starts, shapes = table.start.tolist(), table.shape.tolist()
    for row, number in enumerate(table.array.tolist()):
        spec = table.arrays[number]
        start = tuple(starts[row][: len(spec.global_shape)])
        if spec.dtype == OBJECT:
            name = unique_key(spec, start)
            taken = name in entries
            entries[name] = BytesStorageMetadata()
            index = MetadataIndex(name)
        else:
            chunks = entries[spec.key].chunks
            shape = torch.Size(shapes[row][: len(start)])
            index = MetadataIndex(spec.key, start, len(chunks))
            taken = index in storage
            chunks.append(ChunkStorageMetadata(torch.Size(start), shape))
        if taken:
            raise DeclarationError(
                f"{spec.key!r}: format torch_dist cannot hold two chunks that begin at {start}. Main "
                f"replicas must not overlap, and no key may look like another's object.",
                key=spec.key,
            )
        storage[index] = _StorageInfo(
            written.files[written.file[row]], written.offset_bytes[row], written.length[row]
        )
    paths: dict[str, Any] = {}
    for value in values:
        if value.key in entries:
            continue
        entries[value.key] = BytesStorageMetadata()
        storage[MetadataIndex(value.key)] = _StorageInfo(value.file, value.offset_bytes, value.length)
        if value.path is not None:
            paths[value.key] = value.path
    found = Metadata(entries, planner_data=paths, storage_data=storage)
    found.storage_meta = StorageMeta(save_id=attempt)
    found.version = "1.0.0"
    return found


def _properties(dtype: str) -> TensorProperties:
    return TensorProperties(dtype=getattr(torch, dtype))


def without_keys(metadata: Any, *, key_prefix: str) -> Metadata:
    """Return the same metadata without the arrays whose keys begin with key_prefix.

    Copies of common state stay, as that does.
    """
    copies = {
        index.fqn
        for index, info in metadata.storage_data.items()
        if names.is_values_file(str(getattr(info, "relative_path", None)), kind="state")
    }

    def kept(table: Any) -> dict[Any, Any]:
        named: Mapping[Any, Any] = table if isinstance(table, dict) else {}
        listed = {k: str(getattr(k, "fqn", k)) for k in named}
        return {
            k: v
            for k, v in named.items()
            if listed[k] in copies or not key_of(listed[k]).startswith(key_prefix)
        }

    found = Metadata(
        kept(metadata.state_dict_metadata),
        planner_data=kept(getattr(metadata, "planner_data", None)),
        storage_data=kept(metadata.storage_data),
    )
    found.storage_meta = getattr(metadata, "storage_meta", None)
    found.version = getattr(metadata, "version", None)
    if isinstance(getattr(metadata, "mcore_data", None), dict):
        found.mcore_data = kept(metadata.mcore_data)  # type: ignore[attr-defined]  # Megatron's own addition
    return found


def data_files_of(metadata: Any) -> set[str]:
    """Return the data files that a `.metadata` names."""
    named = (getattr(info, "relative_path", None) for info in metadata.storage_data.values())
    return {name for name in named if isinstance(name, str) and name.endswith(".distcp")}
