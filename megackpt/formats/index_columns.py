"""Where the columns of an index lie: read from its header, and checked before anything is read by it."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from megackpt.formats.index_layout import CODES, damaged

_MAX_EXTENT = 2**48  # a column without elements may claim any extent, also one that numpy cannot hold


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
