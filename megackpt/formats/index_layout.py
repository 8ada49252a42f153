"""The layout of an index file: safetensors, its first part, the head, enough to find and check any row.

Owns names and order of its columns, the blocks that they are cut into, and the header, which is checked when
it is read. Writing is `index_writer`'s, reading `index_reader`'s and, of a whole index, `index_file`'s.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from megackpt.errors import FormatError
from megackpt.metadata import Column

ROW_COLUMNS = ("start", "shape", "flat_start", "flat_stop", "nbytes", "file", "offset_bytes")
"""Columns with a row for each chunk, in the order in which the head has their digests. `array` is not among
them: it follows from the number of chunks of each array, which the head has."""

BLOCK_ROWS = 1024
"""Rows under one digest for each column: few enough that a rank which needs a few rows in many places reads
little, many enough that the head stays below a percent of the index."""

BLOCK_DIGESTS = 2048
"""Digests of chunks under one digest. An index of large chunks is mostly these."""

_CODES: dict[str, np.dtype[np.integer[Any]]] = {
    "U8": np.dtype(np.uint8),
    "U32": np.dtype(np.uint32),
    "I64": np.dtype(np.int64),
    "U64": np.dtype(np.uint64),
}
_NAMES = {dtype: code for code, dtype in _CODES.items()}
_MOST = 2**48  # bound of an extent: a column without elements may claim any, which numpy cannot hold
_ALIGNMENT = 64
_HEADER_ALIGNMENT = 8


@dataclass(frozen=True, slots=True)
class Span:
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
        return _CODES[self.code]

    @property
    def row_nbytes(self) -> int:
        """Size of a row."""
        return self.dtype.itemsize * math.prod(self.shape[1:])


def header_of(
    head: Mapping[str, Column], rows: Mapping[str, tuple[np.dtype[np.integer[Any]], tuple[int, ...]]]
) -> bytes:
    """Return the header of a file of these columns in this order; of rows, dtypes and shapes are given.

    Source: the safetensors format, https://huggingface.co/docs/safetensors.
    """
    entries: dict[str, object] = {}
    position = 0
    described = {name: (c.dtype, c.shape) for name, c in head.items()}
    for name, (dtype, shape) in {**described, **rows}.items():
        end = position + dtype.itemsize * math.prod(shape)
        entries[name] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [position, end]}
        position = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    padded = -(-len(text) // _HEADER_ALIGNMENT) * _HEADER_ALIGNMENT
    return padded.to_bytes(8, "little") + text.ljust(padded)


def aligned_head(columns: Mapping[str, Column]) -> dict[str, Column]:
    """Put the columns of a head into their order, and behind them what aligns the rows that follow."""
    ordered = {name: c for name, c in sorted(columns.items(), key=lambda item: -item[1].dtype.itemsize)}
    missing = -sum(c.nbytes for c in ordered.values()) % _ALIGNMENT
    return {**ordered, "padding": np.zeros(missing, np.uint8)}


def bytes_of(column: Column) -> memoryview:
    """Return the bytes of a C-contiguous column."""
    return column.reshape(-1).view(np.uint8).data


def pieces_of(values: Column, dtype: np.dtype[np.integer[Any]], rows: int) -> Iterator[Column]:
    """Convert a column to the dtype that it is stored in, so many rows at a time."""
    for start in range(0, len(values), rows):
        yield np.ascontiguousarray(values[start : start + rows], dtype)


def parse_header(head: memoryview, *, file_nbytes: int, where: str) -> dict[str, Span]:
    """Return where columns lie, checked: they fill the file one after the other.

    Raises:
        FormatError: head does not begin with such a header.
    """
    length = int.from_bytes(head[:8], "little")
    if not 2 <= length <= len(head) - 8:
        raise damaged(f"its header has {length} bytes, which the head cannot hold", where)
    try:
        entries = json.loads(bytes(head[8 : 8 + length]))
        entries.pop("__metadata__", None)
        spans = {name: _span(entry, 8 + length) for name, entry in entries.items()}
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise damaged(f"its header is malformed ({error})", where) from error
    position = 8 + length
    for span in sorted(spans.values(), key=lambda s: (s.offset_bytes, s.nbytes)):
        if span.offset_bytes != position or span.nbytes < 0:
            raise damaged(f"columns overlap or leave gaps at byte {position}", where)
        position += span.nbytes
    if position != file_nbytes:
        raise damaged(f"its columns end at byte {position} of {file_nbytes}", where)
    return spans


def require(
    spans: Mapping[str, Span], name: str, codes: tuple[str, ...], shape: tuple[int, ...], where: str
) -> Span:
    """Return a column that has one of these dtypes, and this shape; -1 stands for any extent.

    Raises:
        FormatError: there is none.
    """
    span = spans.get(name)
    if span is None:
        raise damaged(f"column {name!r} is missing", where)
    fits = len(span.shape) == len(shape) and all(
        0 <= found < _MOST and wanted in (-1, found) for found, wanted in zip(span.shape, shape, strict=True)
    )
    if not fits or span.code not in codes or span.nbytes != span.row_nbytes * span.shape[0]:
        raise damaged(
            f"column {name!r} is {span.code} {list(span.shape)} in {span.nbytes} bytes instead of "
            f"{' or '.join(codes)} {list(shape)}",
            where,
        )
    return span


def column_in(head: memoryview, span: Span, where: str) -> npt.NDArray[np.int64] | npt.NDArray[np.uint64]:
    """Return a column of the head: digests as they are, anything else as int64.

    Raises:
        FormatError: it lies outside.
    """
    stop = span.offset_bytes + span.nbytes
    if stop > len(head):
        raise damaged(f"a column at byte {span.offset_bytes} is not in the head", where)
    values = np.frombuffer(head[span.offset_bytes : stop], span.dtype).reshape(span.shape)
    return values.astype(np.uint64 if span.code == "U64" else np.int64)


def _span(entry: Mapping[str, list[int]], data: int) -> Span:
    begin, end = entry["data_offsets"]
    shape = tuple(entry["shape"])
    if not all(type(n) is int for n in (begin, end, *shape)):
        raise ValueError("numbers that are no integers")
    return Span(str(entry["dtype"]), shape, data + begin, end - begin)


def damaged(reason: str, where: str) -> FormatError:
    """Return the error for an index that is not what the format says; where names it."""
    return FormatError(f"{where}: {reason}. The index is damaged; load another checkpoint.", path=where)
