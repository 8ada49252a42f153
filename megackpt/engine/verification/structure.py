"""Checks the structure of a checkpoint: that files exist, hold their chunks, and that chunks cover arrays.

No bytes of chunks are read.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import numpy.typing as npt

from megackpt.errors import CheckpointError
from megackpt.formats.contents import Chunks, FileRanges
from megackpt.formats.damage import Damage, why_not_found
from megackpt.plans.geometry import Ints
from megackpt.plans.validation import coverage_faults
from megackpt.storage import Store

_MAX_SHOWN_KEYS = 3

Mask = npt.NDArray[np.bool_]


def check_files(store: Store, chunks: Chunks) -> tuple[Mask, list[Damage]]:
    """Check that the files of chunks exist, have the right length, and that each chunk lies in its file.

    Returns:
        Which chunks can be read, `[n]`, and the damage.
    """
    readable = np.ones(len(chunks.table), np.bool_)
    ranges = chunks.file_ranges()
    if ranges is None:
        return readable, []
    sizes, damages = _file_sizes(store, chunks, ranges)
    # size_of_chunk[r] is the length of the file of row r, or -1 without such a file.
    size_of_chunk = sizes[ranges.file] if len(ranges.file) else sizes[:0]
    is_cut = (size_of_chunk >= 0) & (ranges.stop > size_of_chunk)
    for row in np.flatnonzero(is_cut).tolist():
        what = f"the file ends at byte {size_of_chunk[row]:,}"
        damages.append(_chunk_damage(chunks, ranges, row, what))
    damages += _overlaps(chunks, ranges)
    return readable & (size_of_chunk >= 0) & ~is_cut, damages


def check_coverage(chunks: Chunks, keys: Collection[str]) -> list[Damage]:
    """Check that each element of these arrays is in exactly one chunk."""
    damages = []
    for fault in coverage_faults(chunks.table, keys):
        box = ", ".join(f"{start}:{stop}" for start, stop in zip(fault.start, fault.stop, strict=True))
        texts = {0: "no chunk has it", -1: "much of it is in no chunk, or in several"}
        what = texts.get(fault.count, f"{fault.count} chunks have it")
        damages.append(Damage(key=fault.spec.key, box=f"[{box}]", what=what))
    return damages


def _file_sizes(store: Store, chunks: Chunks, ranges: FileRanges) -> tuple[Ints, list[Damage]]:
    """Return the length of each file, -1 for one without a length, and files with another length."""
    sizes = np.zeros(len(ranges.files), np.int64)
    damages = []
    for number, name in enumerate(ranges.files):
        what = ""
        try:
            sizes[number] = store.size(name)
        except CheckpointError as error:
            sizes[number] = -1
            what = why_not_found(store, name, error)
        else:
            if ranges.nbytes[number] not in (-1, sizes[number]):
                what = f"it has {sizes[number]:,} bytes instead of {ranges.nbytes[number]:,}"
        if what:
            rows = np.flatnonzero(ranges.file == number)
            damages.append(Damage(file=name, what=f"{what}; {_describe_chunks(chunks, rows)}"))
    return sizes, damages


def _overlaps(chunks: Chunks, ranges: FileRanges) -> list[Damage]:
    """Return chunks that begin inside the one before them in the same file."""
    if chunks.raw_ranges() is None:
        return []
    # Sorted by position, an overlap is between neighbours. Empty chunks overlap nothing.
    order = np.lexsort((ranges.stop, ranges.start, ranges.file))
    file, start, stop = ranges.file[order], ranges.start[order], ranges.stop[order]
    overlaps = (file[1:] == file[:-1]) & (start[1:] < stop[:-1]) & (stop[1:] > start[1:])
    table = chunks.table
    damages = []
    for at in np.flatnonzero(overlaps).tolist():
        before, row = int(order[at]), int(order[at + 1])
        other = table.arrays[int(table.array[before])].key
        what = f"it begins inside {other!r} {table.describe(before)}"
        damages.append(_chunk_damage(chunks, ranges, row, what))
    return damages


def _chunk_damage(chunks: Chunks, ranges: FileRanges, row: int, what: str) -> Damage:
    table = chunks.table
    return Damage(
        file=ranges.files[int(ranges.file[row])],
        key=table.arrays[int(table.array[row])].key,
        box=table.describe(row),
        start=int(ranges.start[row]),
        stop=int(ranges.stop[row]),
        what=what,
    )


def _describe_chunks(chunks: Chunks, rows: Ints) -> str:
    """Return which chunks are in a file, as text."""
    table = chunks.table
    keys = [table.arrays[number].key for number in np.unique(table.array[rows]).tolist()]
    more = f" and {len(keys) - _MAX_SHOWN_KEYS} more" if len(keys) > _MAX_SHOWN_KEYS else ""
    shown = ", ".join(map(repr, keys[:_MAX_SHOWN_KEYS]))
    return f"{len(rows)} chunks of {shown}{more} lie in it"
