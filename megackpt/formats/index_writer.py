"""Writing an index.

Owns what a head says of rows and digests, and writing column by column, some rows at a time: there is never
a second copy of the table.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from megackpt.formats.index_digests import digest_columns
from megackpt.formats.index_layout import (
    BLOCK_DIGESTS,
    BLOCK_ROWS,
    ROW_COLUMNS,
    aligned_head,
    bytes_of,
    header_of,
    pieces_of,
)
from megackpt.formats.joined import Joined
from megackpt.formats.strategy import Json
from megackpt.metadata import Column, StoredChunks, block_counts, narrow_dtype, pack_strings
from megackpt.storage import Store, block_digests, digest_of_parts

_PIECE_BLOCKS = 64
"""Blocks that are converted at once."""


def write_index(
    store: Store,
    name: str,
    stored: StoredChunks,
    *,
    block_rows: int = BLOCK_ROWS,
    block_digests: int = BLOCK_DIGESTS,
) -> Json:
    """Write an index with digests; return its entry.

    Its content is durable when this returns, its name after `store.sync()`. stored is compact: digests are in
    the order of rows.
    """
    assert stored.digests is not None
    columns = _row_columns(stored)
    dtypes = {n: narrow_dtype(c) for n, c in columns.items()}
    rows = {n: columns[n] for n in sorted(columns, key=lambda n: -dtypes[n].itemsize)}
    head = aligned_head(
        {
            **{n: c.astype(narrow_dtype(c)) for n, c in _arrays_and_files(stored).items()},
            **_row_blocks(stored, rows, dtypes, block_rows),
            "digest.xxh3": _digests_of(stored.digests, stored.digests.dtype, block_digests),
        }
    )
    header = header_of(head, {n: (dtypes[n], c.shape) for n, c in rows.items()})
    in_front = [memoryview(header), *map(bytes_of, head.values())]
    head_nbytes = sum(piece.nbytes for piece in in_front)
    nbytes = head_nbytes + sum(c.size * dtypes[n].itemsize for n, c in rows.items())

    with store.open_writer(name, nbytes) as writer:
        joined = Joined(writer)

        def written() -> Iterator[memoryview]:
            for piece in (*in_front, *_all_pieces(rows, dtypes, block_rows * _PIECE_BLOCKS)):
                joined.write(piece)
                yield piece

        digest = digest_of_parts(written())
        joined.flush()
    said = {"nbytes": head_nbytes, "xxh3_128": digest_of_parts(in_front)}
    return {
        "file": name,
        "nbytes": nbytes,
        "xxh3_128": digest,
        "head": {**said, "block_rows": block_rows, "block_digests": block_digests},
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
    """Return what the head says of arrays: how many chunks each has, and how far these reach, too."""
    table = stored.table
    reach = np.zeros(len(table.arrays), np.int64)
    np.maximum.at(reach, table.array, table.shape[:, 0])
    per_row = {n for n in _row_columns(stored) if n != "digest"}
    return {
        **{n: c for n, c in table.to_columns().items() if n not in per_row},
        **pack_strings("file_name", stored.files),
        **digest_columns(table.arrays, stored.array_digests),
        "array.rows": np.bincount(table.array, minlength=len(table.arrays)).astype(np.int64),
        "array.reach": reach,
    }


def _row_blocks(
    stored: StoredChunks,
    rows: Mapping[str, Column],
    dtypes: Mapping[str, np.dtype[np.integer[Any]]],
    block_rows: int,
) -> dict[str, Column]:
    """Return what the head says of blocks of rows: where they begin, and their digests in each column."""
    counts = block_counts(stored.table.nbytes)
    begin = (np.cumsum(counts) - counts)[::block_rows]
    start = np.ascontiguousarray(stored.table.start[::block_rows, 0])
    digest_start = np.append(begin, counts.sum())
    digests = [_digests_of(rows[n], dtypes[n], block_rows) for n in ROW_COLUMNS]
    return {
        "block.start": start.astype(narrow_dtype(start)),
        "block.digest_start": digest_start.astype(narrow_dtype(digest_start)),
        "block.xxh3": np.stack(digests, axis=1),
    }


def _digests_of(values: Column, dtype: np.dtype[np.integer[Any]], block_rows: int) -> Column:
    row_nbytes = dtype.itemsize * int(np.prod(values.shape[1:], dtype=np.int64))
    pieces = pieces_of(values, dtype, block_rows * _PIECE_BLOCKS)
    found = [block_digests(bytes_of(piece), block_rows * row_nbytes) for piece in pieces]
    return np.concatenate([np.zeros(0, np.uint64), *found])


def _all_pieces(
    rows: Mapping[str, Column], dtypes: Mapping[str, np.dtype[np.integer[Any]]], at_a_time: int
) -> Iterator[memoryview]:
    for name, values in rows.items():
        for piece in pieces_of(values, dtypes[name], at_a_time):
            yield bytes_of(piece)
