"""The index of a checkpoint as a whole, and the small files beside it.

Owns what formats share that describe their chunks in a table of columns: the columns of places and digests,
the entry that names a small file with its size and digest, and its check when it is read. Reading parts of an
index is `index_reader`'s.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from megackpt.errors import FormatError, IntegrityError, StorageError
from megackpt.formats.index_digests import digests_in
from megackpt.formats.strategy import MANIFEST, Json
from megackpt.geometry import Ints
from megackpt.metadata import (
    ChunkTable,
    StoredChunks,
    block_counts,
    column,
    integers,
    unpack_columns,
    unpack_strings,
)
from megackpt.storage import Store, check_name, digest_of

_MOST_BYTES = 2**62


def write_small(store: Store, name: str, data: bytes) -> Json:
    """Write a small file; return the entry that names it with its size and digest.

    Its content is durable when this returns, its name after `store.sync()`.
    """
    store.write(name, data)
    return {"file": name, "nbytes": len(data), "xxh3_128": digest_of(data)}


def entry_of(store: Store, said: Json, entry: str, *, holder: str = MANIFEST) -> tuple[Json, str]:
    """Return the entry of said that names a file, and what to call that file in messages.

    holder is the file that said comes from.

    Raises:
        FormatError: there is no such entry, or it is malformed.
    """
    named = said.get(entry)
    holder = f"{store.location}/{holder}"
    if not isinstance(named, dict) or not {"file", "nbytes", "xxh3_128"} <= set(named):
        raise FormatError(
            f"{holder} does not say where the {entry} is. The file is damaged or foreign.", path=holder
        )
    if not isinstance(named["file"], str) or not isinstance(named["nbytes"], int):
        raise FormatError(f"{holder}: entry {entry!r} is malformed.", path=holder)
    return named, f"{store.location}/{named['file']}"


def read_small(store: Store, said: Json, entry: str, *, holder: str = MANIFEST) -> tuple[bytes, str]:
    """Return the file that an entry of said names, checked, and what to call it in messages.

    Raises:
        FormatError: there is no such entry, or it is malformed.
        IntegrityError: the file does not have the size and digest given there.
    """
    named, where = entry_of(store, said, entry, holder=holder)
    data = store.read(named["file"], max_bytes=named["nbytes"])
    if len(data) != named["nbytes"] or digest_of(data) != named["xxh3_128"]:
        raise IntegrityError(
            f"{where}: the content differs from what was saved ({len(data)} bytes, {named['nbytes']} "
            f"expected; the digest does not match). The file is damaged; load another checkpoint.",
            path=where,
        )
    return data, where


def read_index(store: Store, said: Json, *, holder: str = MANIFEST) -> StoredChunks:
    """Return the whole index that the entry `index` of said names, checked.

    Raises:
        FormatError, IntegrityError: it is not what the format, or the entry, says.
    """
    data, where = read_small(store, said, "index", holder=holder)
    columns = unpack_columns(data, where=where)
    table = ChunkTable.from_columns(columns, where=where)
    files = unpack_strings(columns, "file_name", where=where)
    file = integers(columns, "file", where=where, length=len(table))
    offset = integers(columns, "offset_bytes", where=where, length=len(table))
    if np.any(table.nbytes < 0) or np.any(table.nbytes > _MOST_BYTES):
        raise FormatError(f"{where}: a chunk has an impossible length. The index is damaged.", path=where)
    blocks = block_counts(table.nbytes)
    digests = column(columns, "digest", where=where, length=int(blocks.sum())).astype(np.uint64, copy=False)
    for name in files:
        check_name(name, location=store.location)
    check_places(table, file, offset, files=len(files), where=where)
    of_arrays = digests_in(columns, table.arrays, where=where)
    return StoredChunks(table, file, offset, np.cumsum(blocks) - blocks, digests, tuple(files), of_arrays)


def check_places(table: ChunkTable, file: Ints, offset: Ints, *, files: int, where: str) -> None:
    """Refuse chunks that lie in none of so many files, or on each other.

    file and offset are those of each chunk, `[n]`.

    Raises:
        FormatError: there are such; where names the index.
    """
    outside = (file < 0) | (file >= files)
    # Twice this fits, so that ends can be compared.
    outside |= (offset < 0) | (offset > _MOST_BYTES) | (table.nbytes < 0) | (table.nbytes > _MOST_BYTES)
    if outside.any():
        raise FormatError(f"{where}: a chunk lies in no file. The index is damaged.", path=where)
    some = np.flatnonzero(table.nbytes)
    order = some[np.lexsort((offset[some], file[some]))]
    overlaps = (np.diff(file[order]) == 0) & (np.diff(offset[order]) < table.nbytes[order[:-1]])
    if overlaps.any():
        first, second = order[int(overlaps.argmax()) :][:2].tolist()
        keys = [table.arrays[int(table.array[row])].key for row in (first, second)]
        raise FormatError(
            f"{where}: {keys[0]!r} {table.describe(first)} and {keys[1]!r} {table.describe(second)} lie on "
            f"the same bytes of a file. The index is damaged; load another checkpoint.",
            key=keys[0],
            path=where,
        )


def check_files(store: Store, stored: StoredChunks, *, prefix: str = "") -> None:
    """Refuse an index of files that are gone; their names begin with prefix.

    Raises:
        StorageError: another job has removed what this save has written.
    """
    gone = set(stored.files) - set(store.names(prefix))
    if gone:
        raise StorageError(
            f"{store.location}: {min(gone)!r}, which this save has written, is gone. Another job saves to "
            f"the same directory, or something cleans it up; give each its own.",
            path=store.location,
        )


def without_arrays(index: StoredChunks, *, key_prefix: str) -> StoredChunks:
    """Return an index without the arrays whose keys begin with key_prefix, nor what only they need."""
    kept = [i for i, a in enumerate(index.table.arrays) if not a.key.startswith(key_prefix)]
    new_number = np.full(len(index.table.arrays), -1, np.int64)
    new_number[kept] = np.arange(len(kept))
    remaining = index.take(np.flatnonzero(new_number[index.table.array] >= 0))
    table = replace(
        remaining.table,
        arrays=tuple(index.table.arrays[i] for i in kept),
        array=new_number[remaining.table.array],
    )
    return compact(replace(remaining, table=table))


def compact(stored: StoredChunks) -> StoredChunks:
    """Leave out digests and files that no row refers to, as an index has those of its rows in their order."""
    assert stored.digests is not None  # what has none is never written again
    used = np.unique(stored.file)
    blocks = block_counts(stored.table.nbytes)
    start = np.cumsum(blocks) - blocks
    if len(used) == len(stored.files) and np.array_equal(start, stored.digest_start):
        return replace(stored, digests=stored.digests[: int(blocks.sum())])
    block = np.arange(int(blocks.sum())) - np.repeat(start, blocks)
    return replace(
        stored,
        file=np.searchsorted(used, stored.file),
        digest_start=start,
        digests=stored.digests[np.repeat(stored.digest_start, blocks) + block],
        files=tuple(stored.files[i] for i in used.tolist()),
    )
