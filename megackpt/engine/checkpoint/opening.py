"""A stored checkpoint, opened: of any known format, checked as far as its commit and common state tell.

Owns what loads, verification, comparison and conversion begin with. What is asked for, and whether that fits,
is up to them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

import numpy as np

from megackpt.engine.checkpoint.common_arrays import with_tensors
from megackpt.engine.checkpoint.manifest import read_manifest
from megackpt.errors import FormatError, truncated_list
from megackpt.formats.contents import Chunks, Contents
from megackpt.formats.registry import load_strategy
from megackpt.storage import Store
from megackpt.validation import coverage_faults


def open_checkpoint(store: Store, *, allow_unsafe_pickle: bool = False) -> Contents:
    """Open a committed checkpoint of any known format. Local.

    Raises:
        NotACheckpointError, FormatError, IntegrityError: it is not one, or is damaged.
    """
    manifest = read_manifest(store)
    strategy = load_strategy(manifest, where=store.location)
    return strategy.open(store, manifest, allow_unsafe_pickle=allow_unsafe_pickle)


def read_common(contents: Contents, *, where: str) -> tuple[Any, Any]:
    """Return the common state dict and the content metadata of a checkpoint, without what is in arrays.

    Raises:
        FormatError: the common state is not what a save writes.
    """
    common, content = read_common_and_references(contents, where=where)
    return with_tensors(common, {}), content


def read_common_and_references(contents: Contents, *, where: str) -> tuple[Any, Any]:
    """Return the same with a `ArrayReference` in the place of each tensor that is stored as an array.

    Raises:
        FormatError: the common state is not what a save writes.
    """
    common = contents.common()
    if not isinstance(common, dict) or not {"state_dict", "content_metadata"} <= set(common):
        raise FormatError(f"{where}: the common state is malformed. The checkpoint is damaged.", path=where)
    return common["state_dict"], common["content_metadata"]


def check_readable(keys: Iterable[str], unreadable: Mapping[str, str], *, where: str) -> None:
    """Refuse keys that are stored as what cannot be loaded; unreadable is that of `Contents`.

    Raises:
        FormatError: there are such.
    """
    found = sorted(set(keys) & set(unreadable))
    if found:
        lines = truncated_list([f"{key!r} {unreadable[key]}" for key in found])
        raise FormatError(f"{where}: not all of it can be loaded:\n{lines}", key=found[0], path=where)


def check_arrays_complete(store: Store, chunks: Chunks, keys: Collection[str]) -> None:
    """Refuse arrays that chunks do not cover, and chunks that end behind their files. Local; reads no chunk.

    keys are those of the arrays; chunks are all of theirs.

    Raises:
        FormatError: there are such.
    """
    table = chunks.table
    for fault in coverage_faults(table, keys):
        place = ", ".join(f"{a}:{b}" for a, b in zip(fault.start, fault.stop, strict=True))
        raise FormatError(
            f"{store.location}: {fault.spec.key!r} {fault.spec.global_shape}: [{place}] is not in exactly "
            f"one chunk. The checkpoint is damaged; load another one.",
            key=fault.spec.key,
            path=store.location,
        )
    ranges = chunks.file_ranges()
    if ranges is None:
        return
    sizes = np.array([store.size(name) for name in ranges.files], np.int64)
    beyond = np.flatnonzero(ranges.stop > sizes[ranges.file]) if len(table) else ()
    for row in beyond:
        spec, name = table.arrays[int(table.array[row])], ranges.files[int(ranges.file[row])]
        raise FormatError(
            f"{spec.key!r} {table.describe(int(row))}: {store.location}/{name} ends at byte "
            f"{sizes[ranges.file[row]]:,}, before this chunk does at {ranges.stop[row]:,}. It was cut short; "
            f"load another checkpoint.",
            key=spec.key,
            path=f"{store.location}/{name}",
        )
