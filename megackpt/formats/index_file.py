"""The whole index of a checkpoint: this module writes it, reads and checks it, and removes arrays from it.

An index is a table with a row for each chunk: its array and box, its file and offset, and the digests of its
blocks. `partial_index` reads only the rows that a rank needs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from megackpt.errors import StorageError
from megackpt.formats.documents import damaged, read_small_file
from megackpt.formats.index_layout import (
    BLOCK_DIGESTS,
    BLOCK_ROWS,
    ROW_COLUMNS,
    aligned_head,
    array_digest_columns,
    bytes_of,
    converted_parts,
    header_of,
    read_array_digests,
)
from megackpt.formats.strategy import MANIFEST, Json
from megackpt.plans.geometry import Ints
from megackpt.plans.metadata import (
    ArraySpec,
    ChunkTable,
    Column,
    StoredChunks,
    block_counts,
    column,
    integers,
    narrow_dtype,
    pack_strings,
    unpack_columns,
    unpack_strings,
)
from megackpt.storage import BufferedWriter, Store, block_digests, check_name, digest_of_parts

_MAX_BYTES = 2**62
"""Bound of offsets and lengths: twice as much still fits into int64, so ends can be computed and compared."""

_PART_BLOCKS = 64
"""Blocks that are converted at once, so that there is never a second copy of the table."""


class StoredIndex(ABC):
    """An opened index."""

    @property
    @abstractmethod
    def arrays(self) -> tuple[ArraySpec, ...]:
        """All arrays of the checkpoint, sorted by key."""

    @property
    @abstractmethod
    def array_digests(self) -> Mapping[str, int]:
        """Stored CRC-64/NVME of the elements of arrays, by key. Arrays without one are left out."""

    @abstractmethod
    def of_keys(self, keys: Iterable[str]) -> StoredChunks:
        """Return all chunks of these arrays, in index order; keys that are not stored are ignored."""

    @abstractmethod
    def of_boxes(self, wanted: Sequence[ChunkTable]) -> StoredChunks:
        """Return, in index order, all chunks that overlap one of these, and possibly others of their arrays.

        All keys of wanted are stored.
        """


class WholeIndex(StoredIndex):
    """An index that was read as a whole."""

    def __init__(self, stored: StoredChunks) -> None:
        self._stored = stored

    @property
    def arrays(self) -> tuple[ArraySpec, ...]:
        """All arrays."""
        return self._stored.table.arrays

    @property
    def array_digests(self) -> Mapping[str, int]:
        """Digests of arrays."""
        return self._stored.array_digests

    def of_keys(self, keys: Iterable[str]) -> StoredChunks:
        """Return the chunks of these arrays."""
        wanted = set(keys)
        chosen = np.array([a.key in wanted for a in self.arrays], np.bool_)
        return self._stored.take(np.flatnonzero(chosen[self._stored.table.array]))

    def of_boxes(self, wanted: Sequence[ChunkTable]) -> StoredChunks:
        """Return the chunks of the same arrays."""
        return self.of_keys(spec.key for table in wanted for spec in table.arrays)


def write_index(
    store: Store,
    name: str,
    stored: StoredChunks,
    *,
    block_rows: int = BLOCK_ROWS,
    block_digests: int = BLOCK_DIGESTS,
) -> Json:
    """Write an index; return its entry, which also describes its head.

    The content is durable when this returns, the name after `store.sync()`.

    Args:
        store: where it is written.
        name: its file name.
        stored: the chunks, with digests in the order of the rows; see `compact`.
        block_rows: rows in a block with a digest for each column.
        block_digests: digests of chunks in a block with a digest of its own.
    """
    assert stored.digests is not None
    columns = _row_columns(stored)
    dtypes = {n: narrow_dtype(c) for n, c in columns.items()}
    # The widest columns first, so that each begins at a multiple of its item size.
    rows = {n: columns[n] for n in sorted(columns, key=lambda n: -dtypes[n].itemsize)}
    head = aligned_head(
        {
            **{n: c.astype(narrow_dtype(c)) for n, c in _arrays_and_files(stored).items()},
            **_row_blocks(stored, rows, dtypes, block_rows),
            "digest.xxh3": _digests_of_blocks(stored.digests, stored.digests.dtype, block_digests),
        }
    )
    header = header_of(head, {n: (dtypes[n], c.shape) for n, c in rows.items()})
    head_parts = [memoryview(header), *map(bytes_of, head.values())]
    head_nbytes = sum(part.nbytes for part in head_parts)
    nbytes = head_nbytes + sum(c.size * dtypes[n].itemsize for n, c in rows.items())

    with store.open_writer(name, nbytes) as writer:
        buffered = BufferedWriter(writer)

        # One pass over the columns: each part is written and digested, and then its memory is given back.
        def written() -> Iterator[memoryview]:
            for part in (*head_parts, *_row_parts(rows, dtypes, block_rows * _PART_BLOCKS)):
                buffered.write(part)
                yield part

        digest = digest_of_parts(written())
        buffered.flush()
    return {
        "file": name,
        "nbytes": nbytes,
        "xxh3_128": digest,
        "head": {
            "nbytes": head_nbytes,
            "xxh3_128": digest_of_parts(head_parts),
            "block_rows": block_rows,
            "block_digests": block_digests,
        },
    }


def _row_columns(stored: StoredChunks) -> dict[str, Column]:
    table = stored.table
    return {
        "digest": stored.digests if stored.digests is not None else np.zeros(0, np.uint64),
        "array": table.array,
        "start": table.start,
        "shape": table.shape,
        "flat_start": table.flat_start,
        "flat_stop": table.flat_stop,
        "nbytes": table.nbytes,
        "file": stored.file,
        "offset_bytes": stored.offset_bytes,
    }


def _arrays_and_files(stored: StoredChunks) -> dict[str, Column]:
    """Return the columns of the head about arrays and files."""
    table = stored.table
    # The largest extent of an array's chunks along dim 0 bounds how far before a box an overlapping chunk
    # can begin: with it, a reader finds such chunks by their start alone.
    reach = np.zeros(len(table.arrays), np.int64)
    np.maximum.at(reach, table.array, table.shape[:, 0])
    per_row = {n for n in _row_columns(stored) if n != "digest"}
    return {
        **{n: c for n, c in table.to_columns().items() if n not in per_row},
        **pack_strings("file_name", stored.files),
        **array_digest_columns(table.arrays, stored.array_digests),
        "array.rows": np.bincount(table.array, minlength=len(table.arrays)).astype(np.int64),
        "array.reach": reach,
    }


def _row_blocks(
    stored: StoredChunks,
    rows: Mapping[str, Column],
    dtypes: Mapping[str, np.dtype[np.integer[Any]]],
    block_rows: int,
) -> dict[str, Column]:
    """Return the columns of the head about blocks of rows: where each begins, and its digest per column."""
    counts = block_counts(stored.table.nbytes)
    # The digests before each block of rows; one entry more, for the end, is all of them.
    first_digest = (np.cumsum(counts) - counts)[::block_rows]
    start = np.ascontiguousarray(stored.table.start[::block_rows, 0])
    digest_start = np.append(first_digest, counts.sum())
    digests = [_digests_of_blocks(rows[n], dtypes[n], block_rows) for n in ROW_COLUMNS]
    return {
        "block.start": start.astype(narrow_dtype(start)),
        "block.digest_start": digest_start.astype(narrow_dtype(digest_start)),
        "block.xxh3": np.stack(digests, axis=1),
    }


def _digests_of_blocks(values: Column, dtype: np.dtype[np.integer[Any]], block_rows: int) -> Column:
    """Return the digest of each block of a column, over its bytes as they are stored."""
    row_nbytes = dtype.itemsize * int(np.prod(values.shape[1:], dtype=np.int64))
    parts = converted_parts(values, dtype, block_rows * _PART_BLOCKS)
    digests = [block_digests(bytes_of(part), block_rows * row_nbytes) for part in parts]
    # An index without chunks has no parts, and `concatenate` needs one.
    return np.concatenate([np.zeros(0, np.uint64), *digests])


def _row_parts(
    rows: Mapping[str, Column], dtypes: Mapping[str, np.dtype[np.integer[Any]]], part_rows: int
) -> Iterator[memoryview]:
    for name, values in rows.items():
        for part in converted_parts(values, dtypes[name], part_rows):
            yield bytes_of(part)


def read_index(store: Store, document: Json, *, document_name: str = MANIFEST) -> StoredChunks:
    """Return all of the index that the entry `index` of a document names, checked.

    Raises:
        FormatError, IntegrityError: the index is not what the format, or the entry, says.
    """
    data, where = read_small_file(store, document, "index", document_name=document_name)
    columns = unpack_columns(data, where=where)
    table = ChunkTable.from_columns(columns, where=where)
    files = unpack_strings(columns, "file_name", where=where)
    file = integers(columns, "file", where=where, length=len(table))
    offset = integers(columns, "offset_bytes", where=where, length=len(table))
    # Before lengths are used to count digests: negative or huge ones would overflow the count.
    if np.any(table.nbytes < 0) or np.any(table.nbytes > _MAX_BYTES):
        raise damaged("a chunk has an impossible length", where)
    blocks = block_counts(table.nbytes)
    digests = column(columns, "digest", where=where, length=int(blocks.sum())).astype(np.uint64, copy=False)
    for name in files:
        check_name(name, location=store.location)
    check_locations(table, file, offset, files=len(files), where=where)
    array_digests = read_array_digests(columns, table.arrays, where=where)
    return StoredChunks(table, file, offset, np.cumsum(blocks) - blocks, digests, tuple(files), array_digests)


def check_locations(table: ChunkTable, file: Ints, offset: Ints, *, files: int, where: str) -> None:
    """Check that chunks lie in one of so many files, and that no two share bytes.

    file and offset are those of each chunk, `[n]`.

    Raises:
        FormatError: they do not; where is the path of the index.
    """
    outside = (file < 0) | (file >= files)
    outside |= (offset < 0) | (offset > _MAX_BYTES) | (table.nbytes < 0) | (table.nbytes > _MAX_BYTES)
    if outside.any():
        raise damaged("a chunk lies in no file", where)
    # In the order of files and offsets, a chunk that shares bytes with any other shares some with the next.
    some = np.flatnonzero(table.nbytes)
    order = some[np.lexsort((offset[some], file[some]))]
    overlaps = (np.diff(file[order]) == 0) & (np.diff(offset[order]) < table.nbytes[order[:-1]])
    if overlaps.any():
        first, second = order[int(overlaps.argmax()) :][:2].tolist()
        keys = [table.arrays[int(table.array[row])].key for row in (first, second)]
        chunks = f"{keys[0]!r} {table.describe(first)} and {keys[1]!r} {table.describe(second)}"
        raise damaged(f"{chunks} lie on the same bytes of a file", where, key=keys[0])


def check_files_exist(store: Store, stored: StoredChunks, *, prefix: str = "") -> None:
    """Check, before an index is written, that its files exist; their names begin with prefix.

    Raises:
        StorageError: another job has removed what this save has written.
    """
    missing = set(stored.files) - set(store.names(prefix))
    if missing:
        raise StorageError(
            f"{store.location}: {min(missing)!r}, which this save has written, is gone. Do all ranks see one "
            f"directory? On several nodes it must be in a file system that they share. Or another job saves "
            f"to the same directory, or something cleans it up; give each its own.",
            path=store.location,
        )


def without_arrays(index: StoredChunks, *, key_prefix: str) -> StoredChunks:
    """Return an index without the arrays whose keys begin with key_prefix, and what only they need."""
    kept = [i for i, a in enumerate(index.table.arrays) if not a.key.startswith(key_prefix)]
    # By the old number of an array: its new number, or -1 if the array goes.
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
    """Return the same chunks without digests and files that no row uses, and the digests in row order."""
    assert stored.digests is not None  # an index without digests is never written again
    used = np.unique(stored.file)
    blocks = block_counts(stored.table.nbytes)
    start = np.cumsum(blocks) - blocks
    # The usual case, at each save. Only digests behind those of the last row are left out.
    if len(used) == len(stored.files) and np.array_equal(start, stored.digest_start):
        return replace(stored, digests=stored.digests[: int(blocks.sum())])
    # The number of each block within its chunk, added to the old start of the chunk, is its old position.
    block = np.arange(int(blocks.sum())) - np.repeat(start, blocks)
    return replace(
        stored,
        file=np.searchsorted(used, stored.file),
        digest_start=start,
        digests=stored.digests[np.repeat(stored.digest_start, blocks) + block],
        files=tuple(stored.files[i] for i in used.tolist()),
    )
