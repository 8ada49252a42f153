"""The layout of an index file: safetensors, whose first part, the head, tells how to find and check any row.

This module has the names and the order of the columns, and the sizes of their blocks. It makes the header. It
also reads the header, and checks it before anything is read by it. It has the two columns of the head with
digests of arrays. `index_file` writes and reads an index as a whole, and `partial_index` reads a few rows.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from megackpt.formats.documents import damaged
from megackpt.formats.safetensors_encoding import encode_header
from megackpt.plans.metadata import OBJECT, ArraySpec, Column

ROW_COLUMNS = ("start", "shape", "flat_start", "flat_stop", "nbytes", "file", "offset_bytes")
"""Columns with a row for each chunk, in the order of their digests in the head. `array` is not here:
it follows from the number of chunks of each array, which is in the head."""

ARRAY_DIGEST, HAS_ARRAY_DIGEST = "array.crc64nvme", "array.has_crc64nvme"
"""Columns of the head with a row for each array. An index without digests of arrays lacks both, and
readers that do not know them ignore them."""

BLOCK_ROWS = 1024
"""Rows in a block; each column of a block has a digest. Few enough that a rank that needs rows in many
places reads little, many enough that the head stays below a percent of the index."""

BLOCK_DIGESTS = 2048
"""Digests of chunks in a block, which has a digest itself. An index of large chunks is mostly these."""

CODES: dict[str, np.dtype[np.integer[Any]]] = {
    "U8": np.dtype(np.uint8),
    "U32": np.dtype(np.uint32),
    "I64": np.dtype(np.int64),
    "U64": np.dtype(np.uint64),
}
_NAMES = {dtype: code for code, dtype in CODES.items()}
_ALIGNMENT = 64
_HEADER_ALIGNMENT = 8  # that of columns of 8-byte integers in the file
_MAX_EXTENT = 2**48  # a column without elements may claim any extent, also one that numpy cannot hold


def header_of(
    head: Mapping[str, Column], rows: Mapping[str, tuple[np.dtype[np.integer[Any]], tuple[int, ...]]]
) -> bytes:
    """Return the header of a file with these columns, in this order.

    Args:
        head: the columns of the head.
        rows: dtypes and shapes of the columns that follow.
    """
    columns = {**{name: (c.dtype, c.shape) for name, c in head.items()}, **rows}
    return encode_header(
        (
            (name, _NAMES[dtype], shape, dtype.itemsize * math.prod(shape))
            for name, (dtype, shape) in columns.items()
        ),
        metadata={},
        alignment=_HEADER_ALIGNMENT,
    )


def aligned_head(columns: Mapping[str, Column]) -> dict[str, Column]:
    """Return the columns of a head in their order, with padding at the end that aligns the rows."""
    # From the widest dtype to the narrowest, each column begins at a multiple of its own item size.
    ordered = {name: c for name, c in sorted(columns.items(), key=lambda item: -item[1].dtype.itemsize)}
    missing = -sum(c.nbytes for c in ordered.values()) % _ALIGNMENT
    return {**ordered, "padding": np.zeros(missing, np.uint8)}


def bytes_of(column: Column) -> memoryview:
    """Return the bytes of a C-contiguous column."""
    return column.reshape(-1).view(np.uint8).data


def converted_parts(values: Column, dtype: np.dtype[np.integer[Any]], rows: int) -> Iterator[Column]:
    """Yield a column in the dtype that it is stored in, at most `rows` rows at a time."""
    for start in range(0, len(values), rows):
        yield np.ascontiguousarray(values[start : start + rows], dtype)


def array_digest_columns(arrays: Sequence[ArraySpec], digests: Mapping[str, int]) -> dict[str, Column]:
    """Return the columns that store the digests of arrays by key; none if there are no digests."""
    if not digests:
        return {}
    return {
        ARRAY_DIGEST: np.array([digests.get(spec.key, 0) for spec in arrays], np.uint64),
        HAS_ARRAY_DIGEST: np.array([spec.key in digests for spec in arrays], np.uint8),
    }


def read_array_digests(
    columns: Mapping[str, Column], arrays: Sequence[ArraySpec], *, where: str
) -> dict[str, int]:
    """Return the digests of arrays by key, of those that have one.

    Raises:
        FormatError: the columns are not what the format says; where is the path of the index.
    """
    if ARRAY_DIGEST not in columns and HAS_ARRAY_DIGEST not in columns:
        return {}
    for name, dtype in ((ARRAY_DIGEST, np.uint64), (HAS_ARRAY_DIGEST, np.uint8)):
        column = columns.get(name)
        if column is None or column.dtype != dtype or column.shape != (len(arrays),):
            actual = "missing" if column is None else f"{column.dtype} {list(column.shape)}"
            raise damaged(f"column {name!r} is {actual} instead of {np.dtype(dtype)} [{len(arrays)}]", where)
    # 0 is a possible digest, so the second column tells whether there is one.
    value, has_digest = columns[ARRAY_DIGEST], columns[HAS_ARRAY_DIGEST]
    if np.any(has_digest > 1) or np.any(value[has_digest == 0] != 0):
        raise damaged("digests of arrays are neither there nor left out", where)
    digests = {arrays[i].key: int(value[i]) for i in np.flatnonzero(has_digest).tolist()}
    objects = sorted(spec.key for spec in arrays if spec.dtype == OBJECT and spec.key in digests)
    if objects:
        raise damaged(f"{objects[0]!r} has the digest of an array and holds objects", where)
    return digests


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


def parse_header(head: memoryview, *, file_nbytes: int, where: str) -> dict[str, StoredColumn]:
    """Return where the columns lie, checked: they fill the file, one after the other.

    Raises:
        FormatError: head does not begin with such a header.
    """
    length = int.from_bytes(head[:8], "little")
    if not 2 <= length <= len(head) - 8:
        raise damaged(f"its header has {length} bytes, which the head cannot hold", where)
    try:
        entries = json.loads(bytes(head[8 : 8 + length]))
        entries.pop("__metadata__", None)
        columns = {name: _stored_column(entry, 8 + length) for name, entry in entries.items()}
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise damaged(f"its header is malformed ({error})", where) from error
    # No byte is outside of all columns or in two of them, so there is none that no check covers.
    position = 8 + length
    for column in sorted(columns.values(), key=lambda c: (c.offset_bytes, c.nbytes)):
        if column.offset_bytes != position or column.nbytes < 0:
            raise damaged(f"columns overlap or leave gaps at byte {position}", where)
        position += column.nbytes
    if position != file_nbytes:
        raise damaged(f"its columns end at byte {position} of {file_nbytes}", where)
    return columns


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
    # Extents are bounded before any product is taken of them.
    fits = len(stored.shape) == len(shape) and all(
        0 <= extent < _MAX_EXTENT and expected in (-1, extent)
        for extent, expected in zip(stored.shape, shape, strict=True)
    )
    if not fits or stored.code not in codes or stored.nbytes != stored.row_nbytes * stored.shape[0]:
        raise damaged(
            f"column {name!r} is {stored.code} {list(stored.shape)} in {stored.nbytes} bytes instead of "
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


def _stored_column(entry: Mapping[str, list[int]], data: int) -> StoredColumn:
    begin, end = entry["data_offsets"]
    shape = tuple(entry["shape"])
    if not all(type(n) is int for n in (begin, end, *shape)):
        raise ValueError("numbers that are no integers")
    return StoredColumn(str(entry["dtype"]), shape, data + begin, end - begin)
