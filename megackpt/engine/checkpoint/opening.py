"""Opening a checkpoint of any known format, its common state, and checks before arrays are read.

Loads, verification, comparison and conversion begin with these functions.
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
from megackpt.plans.validation import coverage_faults, globs_for
from megackpt.storage import Store


def open_checkpoint(store: Store, *, allow_unsafe_pickle: bool = False) -> Contents:
    """Open a committed checkpoint of any known format. Local.

    Raises:
        NotACheckpointError: nothing was committed in the store.
        FormatError, IntegrityError: the checkpoint is damaged, or of an unknown format.
    """
    manifest = read_manifest(store)
    strategy = load_strategy(manifest, where=store.location)
    return strategy.open(store, manifest, allow_unsafe_pickle=allow_unsafe_pickle)


def read_common(contents: Contents, *, where: str) -> tuple[Any, Any]:
    """Return common state and content metadata. Tensors that are stored as arrays are left out. Local.

    Raises:
        FormatError: the common state does not have the form in which a save writes it.
    """
    common, content = read_common_and_references(contents, where=where)
    return with_tensors(common, {}), content


def read_common_and_references(contents: Contents, *, where: str) -> tuple[Any, Any]:
    """Return common state and content metadata, with an `ArrayReference` for each tensor stored as an array.

    Raises:
        FormatError: the common state does not have the form in which a save writes it.
    """
    common = contents.common()
    if not isinstance(common, dict) or not {"state_dict", "content_metadata"} <= set(common):
        raise FormatError(
            f"{where}: the common state is malformed. The checkpoint is damaged; load another one.",
            path=where,
        )
    return common["state_dict"], common["content_metadata"]


def check_readable(keys: Iterable[str], unreadable: Mapping[str, str], *, where: str) -> None:
    """Check that no requested key is stored in a form that cannot be loaded.

    Args:
        keys: the requested keys.
        unreadable: keys that cannot be loaded, with the reason; see `Contents.unreadable`.
        where: location of the checkpoint, for the error.

    Raises:
        FormatError: some of the keys cannot be loaded.
    """
    faults = sorted(set(keys) & set(unreadable))
    if faults:
        lines = truncated_list([f"{key!r} {unreadable[key]}" for key in faults])
        raise FormatError(
            f"{where}: not all of it can be loaded:\n{lines}\nLoad without these keys: "
            f"LoadOptions(exclude={tuple(globs_for(faults))!r}).",
            key=faults[0],
            path=where,
        )


def check_arrays_complete(store: Store, chunks: Chunks, keys: Collection[str]) -> None:
    """Check that files hold every element of some arrays, before memory is allocated for these. Local.

    No chunk is read. A load into given tensors needs no such check, since it allocates nothing.

    Args:
        store: the store of the checkpoint.
        chunks: all chunks of the arrays.
        keys: keys of the arrays.

    Raises:
        FormatError: an element is in no chunk or in several, or a chunk ends beyond its file.
    """
    table = chunks.table
    for fault in coverage_faults(table, keys):
        region = ", ".join(f"{a}:{b}" for a, b in zip(fault.start, fault.stop, strict=True))
        raise FormatError(
            f"{store.location}: {fault.spec.key!r} {fault.spec.global_shape}: [{region}] is not in exactly "
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
