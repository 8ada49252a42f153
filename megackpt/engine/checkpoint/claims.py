"""What a checkpoint says it holds, compared with what is there, before memory is taken for it.

Owns the refusal of arrays that no file could fill. A load into given tensors needs none: its memory is the
caller's.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from megackpt.errors import FormatError
from megackpt.formats.contents import Chunks, NamesFiles
from megackpt.storage import Store
from megackpt.validation import coverage_faults


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
    if not isinstance(chunks, NamesFiles):
        return
    ranges = chunks.file_ranges()
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
