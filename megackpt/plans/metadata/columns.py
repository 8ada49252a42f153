"""Tables of columns as bytes, without pickle: the encoding of messages between ranks and of index files.

A table is a safetensors blob of numpy arrays. A list of strings is two columns: the UTF-8 text of all
strings, and where each one ends. A column of int64 is stored in 32 bits if all of its values fit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError
from safetensors.numpy import load as load_safetensors
from safetensors.numpy import save as save_safetensors

from megackpt.errors import FormatError

Column = npt.NDArray[Any]  # of any integer or bool dtype


def pack_columns(columns: Mapping[str, Column]) -> bytes:
    """Encode named columns; int64 columns whose values all fit become uint32."""
    return save_safetensors({name: np.ascontiguousarray(c, narrow_dtype(c)) for name, c in columns.items()})


def unpack_columns(data: bytes, *, where: str) -> dict[str, Column]:
    """Decode what `pack_columns` wrote, whole numbers as int64 again (uint64 digests stay).

    Raises:
        FormatError: data is no such table; the text names `where`.
    """
    try:
        # Safetensors checks that columns fill the data without overlap, so a forged one takes no more memory
        # than its size.
        columns = load_safetensors(data)
    except (SafetensorError, ValueError, KeyError, TypeError, AttributeError, MemoryError) as error:
        raise FormatError(
            f"{where}: not a table of columns ({error}). The file is damaged.", path=where
        ) from error
    return {name: c.astype(np.int64) if c.dtype == np.uint32 else c for name, c in columns.items()}


def pack_strings(name: str, values: Sequence[str]) -> dict[str, Column]:
    """Return the two columns that hold a list of strings."""
    text = "".join(values)
    # ASCII text has as many bytes as characters, which spares encoding each string.
    counts = map(len, values) if text.isascii() else (len(v.encode()) for v in values)
    ends = np.cumsum(np.fromiter(counts, np.int64, len(values)))
    return {f"{name}.utf8": np.frombuffer(text.encode(), np.uint8), f"{name}.ends": ends}


def unpack_strings(columns: Mapping[str, Column], name: str, *, where: str) -> list[str]:
    """Return the list of strings that two columns hold.

    Raises:
        FormatError: the columns are missing or do not fit each other, or the bytes are not UTF-8.
    """
    text = column(columns, f"{name}.utf8", where=where)
    ends = integers(columns, f"{name}.ends", where=where)
    if text.dtype != np.uint8 or text.ndim != 1:
        raise FormatError(f"{where}: {name!r} is no text. The file is damaged.", path=where)
    blob = text.tobytes()
    # Ends that ascend up to the length of the text leave no string outside of it.
    if len(ends) and (np.any(np.diff(ends, prepend=0) < 0) or ends[-1] != len(blob)):
        raise FormatError(
            f"{where}: the ends of {name!r} do not fit its text. The file is damaged.", path=where
        )
    bounds = list(pairwise([0, *ends.tolist()]))
    try:
        if blob.isascii():  # an index into the bytes is an index into the text
            joined = blob.decode()
            return [joined[a:b] for a, b in bounds]
        return [blob[a:b].decode() for a, b in bounds]
    except UnicodeDecodeError as error:
        raise FormatError(f"{where}: {name!r} is not UTF-8. The file is damaged.", path=where) from error


def column(columns: Mapping[str, Column], name: str, *, where: str, length: int | None = None) -> Column:
    """Return one column.

    Raises:
        FormatError: it is missing or has another length.
    """
    if name not in columns:
        raise FormatError(f"{where}: column {name!r} is missing. The file is damaged.", path=where)
    values = columns[name]
    if not values.ndim or values.dtype.kind not in "biu":
        raise FormatError(
            f"{where}: column {name!r} holds no rows of integers. The file is damaged.", path=where
        )
    if length is not None and len(values) != length:
        raise FormatError(
            f"{where}: column {name!r} has {len(values)} rows instead of {length}. The file is damaged.",
            path=where,
        )
    return values


def integers(
    columns: Mapping[str, Column], name: str, *, where: str, length: int | None = None, dims: int = 1
) -> npt.NDArray[np.int64]:
    """Return one column of `dims` dims as int64.

    Raises:
        FormatError: it is missing, has another length or number of dims, or its dtype does not fit into
            int64.
    """
    values = column(columns, name, where=where, length=length)
    if values.ndim != dims or values.dtype.kind == "b" or values.dtype == np.uint64:
        raise FormatError(
            f"{where}: column {name!r} is {values.dtype} in {values.ndim} dims instead of integers in "
            f"{dims}. The file is damaged.",
            path=where,
        )
    return values.astype(np.int64, copy=False)


def narrow_dtype(values: Column) -> np.dtype[Any]:
    """Return the dtype of a stored column: uint32 for int64 if all values fit, else its own."""
    if values.dtype != np.int64:
        return values.dtype
    fits = not values.size or (int(values.min()) >= 0 and int(values.max()) < 2**32)
    return np.dtype(np.uint32) if fits else values.dtype
