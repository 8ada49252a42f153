"""The layout of an index file: safetensors, whose first part, the head, tells how to find and check any row.

This module has the names and the order of the columns, and the sizes of their blocks. It makes the header,
and has the two columns of the head with digests of arrays. `index_file` writes and reads an index as a whole,
`index_head` reads the head, and `partial_index` reads a few rows.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

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
