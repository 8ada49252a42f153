"""Reads and checks the head of an index, before any of its rows is read.

The head lists the arrays and files. It also shows which blocks of rows have the chunks of an array.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from megackpt.errors import FormatError, IntegrityError
from megackpt.formats.documents import damaged
from megackpt.formats.index_layout import (
    ARRAY_DIGEST,
    CODES,
    HAS_ARRAY_DIGEST,
    ROW_COLUMNS,
    read_array_digests,
)
from megackpt.formats.safetensors_encoding import LENGTH_BYTES
from megackpt.formats.safetensors_header import parse_header
from megackpt.formats.strategy import Json
from megackpt.plans.geometry import Ints, position_bases
from megackpt.plans.metadata import ArraySpec, ChunkTable, Column, DecodedArrays, decode_arrays
from megackpt.storage import Store, digest_of_parts

Marks = npt.NDArray[np.bool_]
"""Marks some blocks of an index, `[blocks]`."""

_INTEGER = ("U32", "I64")
_COLUMNS: dict[str, tuple[tuple[str, ...], int]] = {  # dtypes and number of dims
    "key.utf8": (("U8",), 1),
    "key.ends": (_INTEGER, 1),
    "dtype.utf8": (("U8",), 1),
    "dtype.ends": (_INTEGER, 1),
    "ndim": (("U8",), 1),
    "global_shape": (_INTEGER, 2),
    "file_name.utf8": (("U8",), 1),
    "file_name.ends": (_INTEGER, 1),
    "array.rows": (_INTEGER, 1),
    "array.reach": (_INTEGER, 1),
    "block.start": (_INTEGER, 1),
    "block.digest_start": (_INTEGER, 1),
    "block.xxh3": (("U64",), 2),
    "digest.xxh3": (("U64",), 1),
}
_OPTIONAL = {ARRAY_DIGEST: (("U64",), 1), HAS_ARRAY_DIGEST: (("U8",), 1)}
_MAX_BLOCK = 2**32  # rows or digests in a block
_MAX_EXTENT = 2**48


# Where the columns of a stored index lie.


@dataclass(frozen=True, slots=True)
class StoredColumn:
    """Where a column lies in the file.

    Attributes:
        code: dtype, as safetensors names it.
        shape: extents.
        offset_bytes: first byte, counted from the beginning of the file.
        nbytes: length.
    """

    code: str
    shape: tuple[int, ...]
    offset_bytes: int
    nbytes: int

    @property
    def dtype(self) -> np.dtype[np.integer[Any]]:
        """The dtype of its elements."""
        return CODES[self.code]

    @property
    def row_nbytes(self) -> int:
        """Size of a row."""
        return self.dtype.itemsize * math.prod(self.shape[1:])


def read_columns(head: memoryview, *, file_nbytes: int, where: str) -> dict[str, StoredColumn]:
    """Return where the columns lie, checked: they fill the file, one after the other.

    Raises:
        FormatError: head does not begin with the header of a safetensors file of this size.
    """
    length = int.from_bytes(head[:LENGTH_BYTES], "little")
    if not 2 <= length <= len(head) - LENGTH_BYTES:
        raise damaged(f"its header has {length} bytes, which the head cannot hold", where)
    data_start = LENGTH_BYTES + length
    text = bytes(head[LENGTH_BYTES:data_start])
    # No byte is outside of all columns or in two of them, so there is none that no check covers.
    header = parse_header(text, data_nbytes=file_nbytes - data_start, where=where)
    return {
        column.name: StoredColumn(
            column.dtype, column.shape, data_start + column.start, column.stop - column.start
        )
        for column in header.entries
    }


def require(
    columns: Mapping[str, StoredColumn], name: str, codes: tuple[str, ...], shape: tuple[int, ...], where: str
) -> StoredColumn:
    """Return where a column lies that has one of these dtypes and this shape; -1 stands for any extent.

    Raises:
        FormatError: there is no such column.
    """
    stored = columns.get(name)
    if stored is None:
        raise damaged(f"column {name!r} is missing", where)
    # A column without elements may claim any extent, also one that numpy cannot hold.
    fits = len(stored.shape) == len(shape) and all(
        0 <= extent < _MAX_EXTENT and expected in (-1, extent)
        for extent, expected in zip(stored.shape, shape, strict=True)
    )
    if not fits or stored.code not in codes:
        raise damaged(
            f"column {name!r} is {stored.code} {list(stored.shape)} instead of "
            f"{' or '.join(codes)} {list(shape)}",
            where,
        )
    return stored


def column_in(
    head: memoryview, stored: StoredColumn, where: str
) -> npt.NDArray[np.int64] | npt.NDArray[np.uint64]:
    """Return a column of the head: digests as uint64, anything else as int64.

    Raises:
        FormatError: the column is not in the head.
    """
    stop = stored.offset_bytes + stored.nbytes
    if stop > len(head):
        raise damaged(f"a column at byte {stored.offset_bytes} is not in the head", where)
    # Columns are stored in narrow dtypes. Sums and products of them must not overflow.
    values = np.frombuffer(head[stored.offset_bytes : stop], stored.dtype).reshape(stored.shape)
    return values.astype(np.uint64) if stored.code == "U64" else values.astype(np.int64)


# The head.


@dataclass(frozen=True, slots=True, eq=False)
class IndexHead:
    """The content of a head, for a arrays, n rows in m blocks, f files and b digests.

    Attributes:
        name: file name of the index.
        where: path of the index, for messages.
        decoded: the arrays.
        number: the number of each array, by key.
        file_text: names of all files, one after the other, in UTF-8.
        file_ends: where each name ends in file_text, `[f]`.
        first_row: the first row of each array, and n at the end, `[a + 1]`.
        reach: the largest extent along dim 0 of a chunk of each array, `[a]`.
        block_rows: rows in a block; the last block may have fewer.
        block_start: `start[0]` of the first row in each block, `[m]`.
        block_digest_start: number of digests before those of each block, and b at the end, `[m + 1]`.
        row_digests: digest of each block in each of `ROW_COLUMNS`, `[m, len(ROW_COLUMNS)]`.
        block_digests: digests in a block; the last block may have fewer.
        digest_digests: digest of each block of digests.
        rows: where the columns of rows lie, and `digest`.
        array_digests: CRC-64/NVME of the elements of arrays, by key, for those of which one is stored.
    """

    name: str
    where: str
    decoded: DecodedArrays
    number: Mapping[str, int]
    file_text: bytes
    file_ends: Ints
    first_row: Ints
    reach: Ints
    block_rows: int
    block_start: Ints
    block_digest_start: Ints
    row_digests: npt.NDArray[np.uint64]
    block_digests: int
    digest_digests: npt.NDArray[np.uint64]
    rows: Mapping[str, StoredColumn]
    array_digests: Mapping[str, int]

    @property
    def arrays(self) -> tuple[ArraySpec, ...]:
        """All arrays."""
        return self.decoded.arrays

    def file_names(self, chosen: Ints) -> tuple[str, ...]:
        """Return the names of the files with these numbers.

        Raises:
            FormatError: a name is not UTF-8.
        """
        ends = self.file_ends[chosen].tolist()
        # Name i is between the ends i - 1 and i. For name 0, the value at index -1 is not used.
        starts = np.where(chosen > 0, self.file_ends[chosen - 1], 0).tolist() if len(chosen) else []
        try:
            return tuple(self.file_text[a:b].decode() for a, b in zip(starts, ends, strict=True))
        except UnicodeDecodeError as error:
            raise damaged("a name of a file is not UTF-8", self.where) from error

    def blocks_of_keys(self, keys: Iterable[str]) -> Marks:
        """Mark the blocks with rows of these arrays, `[m]`; keys that are not stored are ignored."""
        array = np.array([self.number[key] for key in keys if key in self.number], np.int64)
        return marked_ranges(*self._blocks_of_arrays(array), len(self.block_start))

    def blocks_overlapping(self, wanted: Sequence[ChunkTable]) -> Marks:
        """Mark the blocks that may have rows which overlap one of these boxes along dim 0, `[m]`."""
        # Rows are sorted by array, then by `start[0]`. A base for each array, added to `start[0]`, makes one
        # ascending number of the two, so a binary search finds the first rows of blocks.
        bases, bound = position_bases(self.decoded.whole[:, 0])
        of_block = np.searchsorted(self.first_row, self.first_rows_of_blocks(), side="right") - 1
        position = bases[of_block] + np.minimum(self.block_start, bound)
        marked = np.zeros(len(self.block_start), np.bool_)
        for table in wanted:
            array = self.numbers_of(table)[table.array] if len(table) else table.array
            # A chunk that overlaps a box begins at most `reach - 1` before it, and before it ends.
            lowest = np.clip(table.start[:, 0] - self.reach[array] + 1, 0, bound)
            highest = np.minimum(table.start[:, 0] + table.shape[:, 0], bound + 1)
            low, high = self._blocks_of_arrays(array)
            # The last block that begins before them may also have such rows.
            low = np.maximum(low, np.searchsorted(position, bases[array] + lowest, side="left") - 1)
            high = np.minimum(high, np.searchsorted(position, bases[array] + highest, side="left"))
            marked |= marked_ranges(low, high, len(self.block_start))
        return marked

    def numbers_of(self, table: ChunkTable) -> Ints:
        """Return the number in this index of each array of a table; all of its keys are stored."""
        return np.array([self.number[spec.key] for spec in table.arrays], np.int64)

    def first_rows_of_blocks(self) -> Ints:
        """Return the first row of each block, `[m]`."""
        return np.arange(len(self.block_start), dtype=np.int64) * self.block_rows

    def _blocks_of_arrays(self, array: Ints) -> tuple[Ints, Ints]:
        """Return the first block of rows of each of these arrays and one past the last."""
        # An array without rows gets a range that ends at 0, before it begins.
        low, stop = self.first_row[array], self.first_row[array + 1]
        return low // self.block_rows, np.where(stop > low, -(-stop // self.block_rows), 0)


def marked_ranges(low: Ints, high: Ints, blocks: int) -> Marks:
    """Mark the blocks of these ranges, `[low, high)` each; a range that ends before it begins is empty."""
    # Count ranges that begin at each block less those that end there: the sum so far is how many cover it.
    steps = np.zeros(blocks + 1, np.int64)
    some = high > low
    np.add.at(steps, low[some], 1)
    np.add.at(steps, high[some], -1)
    marked: Marks = np.cumsum(steps)[:-1] > 0
    return marked


def read_head(store: Store, entry: Json, where: str) -> IndexHead:
    """Read the head of the index that an entry names.

    Raises:
        FormatError: the head is not what the format says.
        IntegrityError: the index does not have the size, or its head not the digest, of the entry.
    """
    head_entry = _head_entry(entry, where)
    # The digest is compared before anything is decoded. What passes may still be forged, so each column is
    # checked as well.
    data = _read_unchanged(store, entry, head_entry, where)
    stored = read_columns(data, file_nbytes=entry["nbytes"], where=where)
    columns = _head_columns(data, stored, where)
    decoded = decode_arrays(columns, where=where)
    head = IndexHead(
        name=entry["file"],
        where=where,
        decoded=decoded,
        number={spec.key: i for i, spec in enumerate(decoded.arrays)},
        file_text=columns["file_name.utf8"].astype(np.uint8).tobytes(),
        file_ends=columns["file_name.ends"].astype(np.int64),
        # Rows are sorted by array, so the counts of rows add up to the first row of each array.
        first_row=np.concatenate(([0], np.cumsum(columns["array.rows"].astype(np.int64)))),
        reach=columns["array.reach"].astype(np.int64),
        block_rows=head_entry["block_rows"],
        block_start=columns["block.start"].astype(np.int64),
        block_digest_start=columns["block.digest_start"].astype(np.int64),
        row_digests=columns["block.xxh3"].astype(np.uint64),
        block_digests=head_entry["block_digests"],
        digest_digests=columns["digest.xxh3"].astype(np.uint64),
        rows=_row_columns(stored, decoded, where),
        array_digests=read_array_digests(columns, decoded.arrays, where=where),
    )
    _check(head, columns["array.rows"].astype(np.int64))
    return head


def _head_entry(entry: Json, where: str) -> dict[str, Any]:
    """Return the part of an index's entry that describes the head, checked."""
    head = entry["head"]
    sizes = ("nbytes", "block_rows", "block_digests")
    if not isinstance(head, dict) or not all(type(head.get(n)) is int and head[n] > 0 for n in sizes):
        raise damaged("its entry does not say how large the head and blocks are", where)
    if not isinstance(head.get("xxh3_128"), str):
        raise damaged("its entry has no digest of the head", where)
    largest_block = max(head["block_rows"], head["block_digests"])
    if not 8 <= head["nbytes"] <= entry["nbytes"] or largest_block >= _MAX_BLOCK:
        raise damaged(
            f"its entry says that of {entry['nbytes']} bytes {head['nbytes']} are the head, in blocks of "
            f"{head['block_rows']} rows and {head['block_digests']} digests",
            where,
        )
    return head


def _read_unchanged(store: Store, entry: Json, head_entry: Json, where: str) -> memoryview:
    """Read the bytes of the head, and compare them with the digest of the entry.

    Raises:
        FormatError: the file is longer than the entry says.
        IntegrityError: it is shorter, or the bytes are not those that were saved.
    """
    name, nbytes = entry["file"], entry["nbytes"]
    actual_nbytes = store.size(name)
    if actual_nbytes != nbytes:
        raise (FormatError if actual_nbytes > nbytes else IntegrityError)(
            f"{where}: the file has {actual_nbytes} bytes instead of {nbytes}. It is damaged; load another "
            f"checkpoint.",
            path=where,
        )
    data = memoryview(bytearray(head_entry["nbytes"]))
    store.read_into(name, 0, data)
    if digest_of_parts([data]) != head_entry["xxh3_128"]:
        raise changed_bytes(where, 0, head_entry["nbytes"])
    return data


def changed_bytes(where: str, start: int, stop: int) -> IntegrityError:
    """Return the error for a range of bytes of an index that has another digest; where is its path."""
    return IntegrityError(
        f"{where}: the bytes {start}:{stop} are not those that were saved (their digest differs). The file "
        f"is damaged; load another checkpoint.",
        path=where,
    )


def _head_columns(data: memoryview, stored: Mapping[str, StoredColumn], where: str) -> dict[str, Column]:
    """Return the columns of the head, each with the dtype and the number of dims that it must have."""
    columns: dict[str, Column] = {
        column: column_in(data, require(stored, column, codes, (-1,) * ndim, where), where)
        for column, (codes, ndim) in (_COLUMNS | _OPTIONAL).items()
        if column in _COLUMNS or column in stored
    }
    # `column_in` returns int64, but text and flags are decoded from bytes.
    as_bytes = [n for n in columns if n.endswith("utf8") or n == HAS_ARRAY_DIGEST]
    return columns | {n: columns[n].astype(np.uint8) for n in as_bytes}


def _row_columns(
    stored: Mapping[str, StoredColumn], decoded: DecodedArrays, where: str
) -> dict[str, StoredColumn]:
    """Return where the columns of rows lie, and that all have the same number of rows."""
    rows = require(stored, "array", _INTEGER, (-1,), where).shape[0]
    dims = decoded.whole.shape[1]
    columns = {
        name: require(stored, name, _INTEGER, (rows, dims) if name in ("start", "shape") else (rows,), where)
        for name in ROW_COLUMNS
    }
    return {**columns, "digest": require(stored, "digest", ("U64",), (-1,), where)}


def _check(head: IndexHead, counts: Ints) -> None:
    """Check that the columns of a head fit each other, before anything is read by them.

    counts is how many chunks each array has, as the head says.

    Raises:
        FormatError: they do not.
    """
    rows, digests = head.rows["nbytes"].shape[0], head.rows["digest"].shape[0]
    blocks = -(-rows // head.block_rows)
    arrays = len(head.arrays)
    ends = head.block_digest_start
    lengths_fit = (
        len(counts) == len(head.reach) == arrays
        and len(head.block_start) == blocks
        and len(ends) == blocks + 1
        and head.row_digests.shape == (blocks, len(ROW_COLUMNS))
        and len(head.digest_digests) == -(-digests // head.block_digests)
        and head.decoded.whole.shape[1] >= 1
    )
    if not lengths_fit:
        raise damaged("the number of blocks does not fit that of rows, digests or arrays", head.where)
    # Each count is checked by itself: their sum could overflow.
    if np.any(counts < 0) or np.any(counts > rows) or int(counts.sum()) != rows:
        raise damaged(f"its arrays do not have its {rows} chunks", head.where)
    is_outside = (ends < 0) | (ends > digests)  # of those inside, differences cannot overflow
    if ends[0] != 0 or ends[-1] != digests or np.any(is_outside) or np.any(np.diff(ends) < 0):
        raise damaged("blocks of rows have no digests of their own", head.where)
    files = np.diff(head.file_ends, prepend=0)
    if np.any(files < 0) or (len(files) and head.file_ends[-1] != len(head.file_text)):
        raise damaged("the ends of 'file_name' do not fit its text", head.where)
    # The search for overlapping blocks relies on first rows that lie in their arrays, in ascending order.
    of_block = np.searchsorted(head.first_row, head.first_rows_of_blocks(), side="right") - 1
    whole = head.decoded.whole[of_block, 0]
    backwards = (np.diff(head.block_start) < 0) & (np.diff(of_block) == 0)
    if (
        np.any(head.block_start < 0)
        or np.any(head.block_start > whole)
        or np.any(backwards)
        or np.any(head.reach < 0)
    ):
        raise damaged("blocks of rows begin outside of their arrays, or not in their order", head.where)
