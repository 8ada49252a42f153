"""The head of an index, read and checked: what arrays and files there are, and where rows of which array lie.

Owns everything that is known of an index before a row of it is read.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from megackpt.errors import FormatError, IntegrityError
from megackpt.formats.index_digests import KNOWN, VALUE, digests_in
from megackpt.formats.index_layout import ROW_COLUMNS, Span, column_in, damaged, parse_header, require
from megackpt.formats.strategy import Json
from megackpt.geometry import Ints, position_bases
from megackpt.metadata import ArraySpec, ChunkTable, Column, DecodedArrays, decode_arrays
from megackpt.storage import Store, digest_of_parts

Marks = npt.NDArray[np.bool_]
"""Which of some blocks are meant."""

_WHOLE = ("U32", "I64")
_COLUMNS: dict[str, tuple[tuple[str, ...], int]] = {  # dtypes and number of dims
    "key.utf8": (("U8",), 1),
    "key.ends": (_WHOLE, 1),
    "dtype.utf8": (("U8",), 1),
    "dtype.ends": (_WHOLE, 1),
    "ndim": (("U8",), 1),
    "global_shape": (_WHOLE, 2),
    "file_name.utf8": (("U8",), 1),
    "file_name.ends": (_WHOLE, 1),
    "array.rows": (_WHOLE, 1),
    "array.reach": (_WHOLE, 1),
    "block.start": (_WHOLE, 1),
    "block.digest_start": (_WHOLE, 1),
    "block.xxh3": (("U64",), 2),
    "digest.xxh3": (("U64",), 1),
}
_OPTIONAL = {VALUE: (("U64",), 1), KNOWN: (("U8",), 1)}
_LIMIT = 2**32  # of rows and digests in a block


@dataclass(frozen=True, slots=True, eq=False)
class IndexHead:
    """What the head of an index says; there are a arrays, n rows in m blocks, f files and b digests.

    Attributes:
        name: file name of the index.
        where: what to call it in messages.
        decoded: the arrays.
        number: of each array, by key.
        file_text: names of files, one after the other, in UTF-8.
        file_ends: end of each in that, `[f]`.
        first_row: of each array, and n, `[a + 1]`.
        reach: the largest extent along dim 0 of a chunk of each array, `[a]`.
        block_rows: rows in a block, the last one shorter.
        block_start: `start[0]` of the first row in each block, `[m]`.
        block_digest_start: number of digests before those of each block, and b, `[m + 1]`.
        row_digests: of each block in each of `ROW_COLUMNS`, `[m, len(ROW_COLUMNS)]`.
        block_digests: digests in a block, the last one shorter.
        digest_digests: of each block of digests.
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
    rows: Mapping[str, Span]
    array_digests: Mapping[str, int]

    @property
    def arrays(self) -> tuple[ArraySpec, ...]:
        """All arrays."""
        return self.decoded.arrays

    def file_names(self, chosen: Ints) -> tuple[str, ...]:
        """Return the names of some files.

        Raises:
            FormatError: one is not UTF-8.
        """
        ends = self.file_ends[chosen].tolist()
        starts = np.where(chosen > 0, self.file_ends[chosen - 1], 0).tolist() if len(chosen) else []
        try:
            return tuple(self.file_text[a:b].decode() for a, b in zip(starts, ends, strict=True))
        except UnicodeDecodeError as error:
            raise damaged("a name of a file is not UTF-8", self.where) from error

    def blocks_of_keys(self, keys: Iterable[str]) -> Marks:
        """Say which blocks have rows of these arrays, `[m]`; keys that are none are passed over."""
        array = np.array([self.number[key] for key in keys if key in self.number], np.int64)
        return marked_ranges(*self._blocks_of_arrays(array), len(self.block_start))

    def blocks_meeting(self, wanted: Sequence[ChunkTable]) -> Marks:
        """Say which blocks may have rows that meet one of these boxes along dim 0, `[m]`."""
        bases, bound = position_bases(self.decoded.whole[:, 0])
        of_block = np.searchsorted(self.first_row, self.first_rows_of_blocks(), side="right") - 1
        place = bases[of_block] + np.minimum(self.block_start, bound)
        marked = np.zeros(len(self.block_start), np.bool_)
        for table in wanted:
            array = self.numbers_of(table)[table.array] if len(table) else table.array
            lowest = np.clip(table.start[:, 0] - self.reach[array] + 1, 0, bound)
            highest = np.minimum(table.start[:, 0] + table.shape[:, 0], bound + 1)
            low, high = self._blocks_of_arrays(array)
            # Rows that begin where a block begins may begin in the one before it.
            low = np.maximum(low, np.searchsorted(place, bases[array] + lowest, side="left") - 1)
            high = np.minimum(high, np.searchsorted(place, bases[array] + highest, side="left"))
            marked |= marked_ranges(low, high, len(self.block_start))
        return marked

    def numbers_of(self, table: ChunkTable) -> Ints:
        """Return the number here of each array of a table; all of its keys are stored."""
        return np.array([self.number[spec.key] for spec in table.arrays], np.int64)

    def first_rows_of_blocks(self) -> Ints:
        """Return the first row of each block, `[m]`."""
        return np.arange(len(self.block_start), dtype=np.int64) * self.block_rows

    def _blocks_of_arrays(self, array: Ints) -> tuple[Ints, Ints]:
        """Return the first block of rows of each of these arrays and one past the last."""
        low, stop = self.first_row[array], self.first_row[array + 1]
        return low // self.block_rows, np.where(stop > low, -(-stop // self.block_rows), 0)


def marked_ranges(low: Ints, high: Ints, blocks: int) -> Marks:
    """Mark the blocks from low to high of each of these ranges; one that ends before it begins is empty."""
    steps = np.zeros(blocks + 1, np.int64)
    some = high > low
    np.add.at(steps, low[some], 1)
    np.add.at(steps, high[some], -1)
    marked: Marks = np.cumsum(steps)[:-1] > 0
    return marked


def read_head(store: Store, entry: Json, where: str) -> IndexHead:
    """Read the head that an entry of an index names.

    Raises:
        FormatError: it is not what the format says.
        IntegrityError: the index does not have the size, or its head not the digest, given there.
    """
    name, nbytes, said = entry["file"], entry["nbytes"], _said(entry, where)
    found = store.size(name)
    if found != nbytes:
        raise (FormatError if found > nbytes else IntegrityError)(
            f"{where}: the file has {found} bytes instead of {nbytes}. It is damaged; load another "
            f"checkpoint.",
            path=where,
        )
    head = memoryview(bytearray(said["nbytes"]))
    store.read_into(name, 0, head)
    if digest_of_parts([head]) != said["xxh3_128"]:
        raise IntegrityError(
            f"{where}: the bytes 0:{said['nbytes']} are not those that were saved (their digest differs). "
            f"The file is damaged; load another checkpoint.",
            path=where,
        )
    spans = parse_header(head, file_nbytes=nbytes, where=where)
    columns: dict[str, Column] = {
        column: column_in(head, require(spans, column, codes, (-1,) * ndim, where), where)
        for column, (codes, ndim) in (_COLUMNS | _OPTIONAL).items()
        if column in _COLUMNS or column in spans
    }
    # Text stays text for who decodes it.
    columns |= {n: columns[n].astype(np.uint8) for n in columns if n.endswith("utf8") or n == KNOWN}
    decoded = decode_arrays(columns, where=where)
    rows = _row_spans(spans, decoded, where)
    head_of = IndexHead(
        name=name,
        where=where,
        decoded=decoded,
        number={spec.key: i for i, spec in enumerate(decoded.arrays)},
        file_text=columns["file_name.utf8"].astype(np.uint8).tobytes(),
        file_ends=columns["file_name.ends"].astype(np.int64),
        first_row=np.concatenate(([0], np.cumsum(columns["array.rows"].astype(np.int64)))),
        reach=columns["array.reach"].astype(np.int64),
        block_rows=said["block_rows"],
        block_start=columns["block.start"].astype(np.int64),
        block_digest_start=columns["block.digest_start"].astype(np.int64),
        row_digests=columns["block.xxh3"].astype(np.uint64),
        block_digests=said["block_digests"],
        digest_digests=columns["digest.xxh3"].astype(np.uint64),
        rows=rows,
        array_digests=digests_in(columns, decoded.arrays, where=where),
    )
    _check(head_of, columns["array.rows"].astype(np.int64))
    return head_of


def _said(entry: Json, where: str) -> dict[str, Any]:
    """Return what an entry says of the head."""
    said = entry["head"]
    wanted = ("nbytes", "block_rows", "block_digests")
    if not isinstance(said, dict) or not all(type(said.get(n)) is int and said[n] > 0 for n in wanted):
        raise damaged("its entry does not say how large the head and blocks are", where)
    if not isinstance(said.get("xxh3_128"), str):
        raise damaged("its entry has no digest of the head", where)
    if not 8 <= said["nbytes"] <= entry["nbytes"] or max(said["block_rows"], said["block_digests"]) >= _LIMIT:
        raise damaged(
            f"its entry says that of {entry['nbytes']} bytes {said['nbytes']} are the head, in blocks of "
            f"{said['block_rows']} rows and {said['block_digests']} digests",
            where,
        )
    return said


def _row_spans(spans: Mapping[str, Span], decoded: DecodedArrays, where: str) -> dict[str, Span]:
    rows = require(spans, "array", _WHOLE, (-1,), where).shape[0]
    dims = decoded.whole.shape[1]
    found = {
        name: require(spans, name, _WHOLE, (rows, dims) if name in ("start", "shape") else (rows,), where)
        for name in ROW_COLUMNS
    }
    return {**found, "digest": require(spans, "digest", ("U64",), (-1,), where)}


def _check(head: IndexHead, counts: Ints) -> None:
    """Refuse a head whose parts do not fit each other, before anything is read by it."""
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
    if np.any(counts < 0) or np.any(counts > rows) or int(counts.sum()) != rows:
        raise damaged(f"its arrays do not have its {rows} chunks", head.where)
    is_outside = (ends < 0) | (ends > digests)  # differences of others cannot overflow
    if ends[0] != 0 or ends[-1] != digests or np.any(is_outside) or np.any(np.diff(ends) < 0):
        raise damaged("blocks of rows have no digests of their own", head.where)
    files = np.diff(head.file_ends, prepend=0)
    if np.any(files < 0) or (len(files) and head.file_ends[-1] != len(head.file_text)):
        raise damaged("the ends of 'file_name' do not fit its text", head.where)
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
