"""The chunk table: chunks of global arrays in columns, as declarations, plans and the index share them.

One row is one chunk. Rows are padded with trailing extents of 1 to the number of dims of the widest array, so
that every column is one numpy array; trailing 1s do not change the row-major order. No torch, no I/O.

Here are also the dtypes that a checkpoint can hold, and `StoredChunks`: the chunk table with the file,
offset and digests of every chunk. That is the decoded index. Its encoding on disk belongs to the formats.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import chain
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from megackpt.errors import FormatError
from megackpt.plans.geometry import Ints, lexicographic_keys
from megackpt.plans.metadata.columns import Column, column, integers, pack_strings, unpack_strings


class DtypeInfo(NamedTuple):
    """Size of an element in bytes and the dtype string in a safetensors header."""

    itemsize: int
    safetensors: str


DTYPES: dict[str, DtypeInfo] = {
    "float64": DtypeInfo(8, "F64"),
    "float32": DtypeInfo(4, "F32"),
    "float16": DtypeInfo(2, "F16"),
    "bfloat16": DtypeInfo(2, "BF16"),
    "float8_e4m3fn": DtypeInfo(1, "F8_E4M3"),
    "float8_e5m2": DtypeInfo(1, "F8_E5M2"),
    "float8_e4m3fnuz": DtypeInfo(1, "U8"),
    "float8_e5m2fnuz": DtypeInfo(1, "U8"),
    "float8_e8m0fnu": DtypeInfo(1, "U8"),
    "int64": DtypeInfo(8, "I64"),
    "int32": DtypeInfo(4, "I32"),
    "int16": DtypeInfo(2, "I16"),
    "int8": DtypeInfo(1, "I8"),
    "uint64": DtypeInfo(8, "U64"),
    "uint32": DtypeInfo(4, "U32"),
    "uint16": DtypeInfo(2, "U16"),
    "uint8": DtypeInfo(1, "U8"),
    "bool": DtypeInfo(1, "BOOL"),
    "complex64": DtypeInfo(8, "U8"),
    "complex128": DtypeInfo(16, "U8"),
}
"""Every dtype by its torch name without the `torch.` prefix.

One that stock safetensors lacks is stored as raw bytes (`U8`). Its true name is in the index.
"""

OBJECT = "object"
"""The dtype name of an array of encoded Python objects. Each element has a length of its own."""


Rows = npt.NDArray[np.int64] | npt.NDArray[np.bool_]

MAX_NUMEL = 2**60
"""An array of more elements is taken for a damaged file. Positions in smaller ones fit into 64 bits."""


@dataclass(frozen=True, slots=True)
class ArraySpec:
    """A global array or array of objects, without its chunks.

    Attributes:
        key: unique name.
        dtype: a name of `DTYPES`, or `OBJECT`.
        global_shape: in elements (in objects for `OBJECT`).
    """

    key: str
    dtype: str
    global_shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.global_shape)

    @property
    def nbytes(self) -> int:
        """Size in bytes; 0 for objects, whose sizes are those of their chunks."""
        return 0 if self.dtype == OBJECT else self.numel * DTYPES[self.dtype].itemsize


@dataclass(frozen=True, slots=True, eq=False)
class ChunkTable:
    """Chunks of global arrays. Row i is a flat range of a box: `nbytes[i]` bytes in row-major order.

    Attributes:
        arrays: the arrays, sorted by key.
        array: index into `arrays`, `[n]`.
        start: first element of the box, `[n, dims]`.
        shape: extents of the box, `[n, dims]`.
        flat_start: first element of the chunk in the flattened box, `[n]`.
        flat_stop: one past its last, `[n]`; the whole box where it is `prod(shape)` and flat_start is 0.
        nbytes: length of the chunk, `[n]`.
    """

    arrays: tuple[ArraySpec, ...]
    array: Ints
    start: Ints
    shape: Ints
    flat_start: Ints
    flat_stop: Ints
    nbytes: Ints

    def __len__(self) -> int:
        return len(self.array)

    @property
    def dims(self) -> int:
        """Number of dims that rows are padded to; at least 1."""
        return int(self.start.shape[1])

    def take(self, rows: Rows) -> ChunkTable:
        """Return the chosen rows, given as indices or as a mask; the list of arrays stays."""
        columns = {f.name: getattr(self, f.name)[rows] for f in fields(self) if f.name != "arrays"}
        return replace(self, **columns)

    def start_keys(self) -> Ints:
        """Return integers that sort and compare the rows as `(array, start)` does, `[n]`.

        One column is sorted many times faster than `1 + dims` columns.
        """
        # An empty chunk may start at the end of its array, so there is one start more than elements.
        return lexicographic_keys(self.array, self.start, self.padded_global_shape() + 1)

    def shape_keys(self) -> Ints:
        """Return integers that sort and compare the rows as `(array, shape)` does, `[n]`."""
        return lexicographic_keys(self.array, self.shape, self.padded_global_shape() + 1)

    def are_objects(self) -> npt.NDArray[np.bool_]:
        """Return which rows are encoded objects, `[n]`."""
        return np.array([a.dtype == OBJECT for a in self.arrays], np.bool_)[self.array]

    def widths(self) -> Ints:
        """Return the bytes per element of each row; 0 for objects, `[n]`."""
        return itemsizes(self.arrays)[self.array]

    def padded_to(self, dims: int) -> ChunkTable:
        """Return the same chunks with columns of `dims` dims, at least as many as they have."""
        return replace(self, start=widen(self.start, dims, fill=0), shape=widen(self.shape, dims, fill=1))

    def describe(self, row: int) -> str:
        """Return one chunk as text: `[0:4, 2:6]`, followed by `flat a:b` if it is a flat range of the box."""
        spec = self.arrays[int(self.array[row])]
        dims = len(spec.global_shape)
        start, shape = self.start[row, :dims].tolist(), self.shape[row, :dims].tolist()
        return region_text(start, shape, int(self.flat_start[row]), int(self.flat_stop[row]))

    def padded_global_shape(self) -> Ints:
        """Return the global shapes of `arrays`, padded like the rows, `[len(arrays), dims]`."""
        return pad_shapes([a.global_shape for a in self.arrays], self.dims, fill=1)

    def to_columns(self) -> dict[str, Column]:
        """Encode for `pack_columns`."""
        return {
            **pack_strings("key", [a.key for a in self.arrays]),
            **pack_strings("dtype", [a.dtype for a in self.arrays]),
            "ndim": np.array([len(a.global_shape) for a in self.arrays], np.uint8),
            "global_shape": self.padded_global_shape(),
            "array": self.array,
            "start": self.start,
            "shape": self.shape,
            "flat_start": self.flat_start,
            "flat_stop": self.flat_stop,
            "nbytes": self.nbytes,
        }

    @classmethod
    def from_columns(
        cls, columns: Mapping[str, Column], *, where: str, known: KnownArrays | None = None
    ) -> ChunkTable:
        """Decode and check a table. Later steps may rely on every table being well-formed.

        Args:
            columns: as `to_columns` returns them.
            where: the file or message, for errors.
            known: lists of arrays decoded by earlier calls; tables with equal lists then share one tuple.

        Raises:
            FormatError: a column is missing or has the wrong size, or a chunk does not lie in its array.
        """
        # The other columns are measured by this one.
        rows = len(column(columns, "array", where=where))
        per_row = {
            name: integers(columns, name, where=where, length=rows, dims=dims)
            for name, dims in _ROW_DIMS.items()
        }
        encoded = [column(columns, name, where=where) for name in _ARRAY_COLUMNS]
        # The shape of the column global_shape belongs to the identity: its bytes are equal for [2, 3] and
        # [3, 2].
        identity = (repr(encoded[-1].shape).encode(), *(c.tobytes() for c in encoded))
        known = {} if known is None else known
        if identity not in known:
            known[identity] = decode_arrays(columns, where=where)
        return cls.of_rows(known[identity], per_row, where=where)

    @classmethod
    def of_rows(cls, decoded: DecodedArrays, per_row: Mapping[str, Ints], *, where: str) -> ChunkTable:
        """Return the checked table of these arrays; per_row has a column for each other attribute.

        Raises:
            FormatError: a chunk does not lie in its array.
        """
        table = cls(decoded.arrays, **per_row)
        table.check(decoded, where)
        return table

    def check(self, decoded: DecodedArrays, where: str) -> None:
        """Check that every chunk lies in its array.

        Args:
            decoded: the arrays of this table, with their shapes and element sizes as columns.
            where: the file or message, for errors.

        Raises:
            FormatError: a chunk does not lie in its array.
        """
        fit = self.start.ndim == 2 and self.start.shape == self.shape.shape == (
            len(self),
            decoded.whole.shape[1],
        )
        if not fit or self.dims < 1 or np.any(self.array < 0) or np.any(self.array >= len(self.arrays)):
            raise FormatError(f"{where}: rows and arrays do not fit. The file is damaged.", path=where)
        # Written without start + shape, which could overflow in a forged file.
        outside = (self.start < 0) | (self.shape < 0) | (self.shape > decoded.whole[self.array] - self.start)
        bad = outside.any(axis=1)
        # Where this overflows, the shape exceeds its array, so the row is bad already.
        numel = self.shape.prod(axis=1)
        bad |= (self.flat_start < 0) | (self.flat_stop < self.flat_start) | (self.flat_stop > numel)
        # Objects have an itemsize of 0 here, and any length.
        itemsize = decoded.itemsize[self.array]
        bad |= (itemsize > 0) & (self.nbytes != (self.flat_stop - self.flat_start) * itemsize)
        if np.any(bad):
            row = int(np.flatnonzero(bad)[0])
            key = self.arrays[int(self.array[row])].key
            raise FormatError(
                f"{where}: chunk {row} of {key!r} does not lie in its array.", key=key, path=where
            )


@dataclass(frozen=True, slots=True, eq=False)
class DecodedArrays:
    """A list of arrays, and the same as columns.

    Attributes:
        arrays: sorted by key.
        whole: global shapes, padded, `[len(arrays), dims]`.
        itemsize: bytes per element; 0 for objects, `[len(arrays)]`.
    """

    arrays: tuple[ArraySpec, ...]
    whole: Ints
    itemsize: Ints


KnownArrays = dict[tuple[bytes, ...], DecodedArrays]
"""Lists of arrays decoded so far, by the bytes of the columns from which they were decoded."""

_ROW_DIMS = {"array": 1, "start": 2, "shape": 2, "flat_start": 1, "flat_stop": 1, "nbytes": 1}

_ARRAY_COLUMNS = ("key.utf8", "key.ends", "dtype.utf8", "dtype.ends", "ndim", "global_shape")


def decode_arrays(columns: Mapping[str, Column], *, where: str) -> DecodedArrays:
    """Decode and check a list of arrays.

    Raises:
        FormatError: a column is missing or has the wrong size, keys are not sorted, or a dtype or shape is
            not valid.
    """
    keys = unpack_strings(columns, "key", where=where)
    dtypes = unpack_strings(columns, "dtype", where=where)
    whole = integers(columns, "global_shape", where=where, length=len(keys), dims=2)
    ndim = integers(columns, "ndim", where=where, length=len(keys))
    if len(dtypes) != len(keys) or whole.ndim != 2 or np.any(ndim > whole.shape[1]):
        raise FormatError(f"{where}: the arrays' dtypes or shapes do not fit their keys.", path=where)
    # The columns are padded; specs have the shapes without padding.
    arrays = tuple(
        ArraySpec(key, dtype, tuple(shape[:n]))
        for key, dtype, shape, n in zip(keys, dtypes, whole.tolist(), ndim.tolist(), strict=True)
    )
    if any(map(operator.ge, keys, keys[1:])):
        raise FormatError(f"{where}: keys are not sorted, or one stands twice.", path=where)
    unknown = sorted(set(dtypes) - set(DTYPES) - {OBJECT})
    if unknown:
        raise FormatError(f"{where}: unknown dtypes {unknown}. Update megackpt.", path=where)
    # Products of floats do not overflow, and the bound need not be exact. Padding has to be 1.
    impossible = ((whole < 0) | (whole > MAX_NUMEL)).any(axis=1) | (
        whole.prod(axis=1, dtype=float) > MAX_NUMEL
    )
    impossible |= ((whole != 1) & (np.arange(whole.shape[1]) >= ndim[:, None])).any(axis=1)
    if impossible.any():
        key = keys[int(impossible.argmax())]
        raise FormatError(
            f"{where}: {key!r} has a shape that no array can have. The file is damaged.", key=key, path=where
        )
    return DecodedArrays(arrays, whole, itemsizes(arrays))


def itemsizes(arrays: Sequence[ArraySpec]) -> Ints:
    """Return the bytes per element of each array; 0 for objects, `[len(arrays)]`."""
    return np.array([DTYPES[a.dtype].itemsize if a.dtype != OBJECT else 0 for a in arrays], np.int64)


def pad_shapes(shapes: Sequence[Sequence[int]], dims: int, *, fill: int) -> Ints:
    """Stack shapes of different lengths into `[len(shapes), dims]`; fill is put after the last extent."""
    # The mask selects the extents that exist, row by row, which is the order of the chained shapes.
    padded = np.full((len(shapes), dims), fill, np.int64)
    ndim = np.fromiter(map(len, shapes), np.int64, len(shapes))
    padded[np.arange(dims) < ndim[:, None]] = np.fromiter(chain.from_iterable(shapes), np.int64)
    return padded


def region_text(start: Sequence[int], shape: Sequence[int], flat_start: int, flat_stop: int) -> str:
    """Return the text of `ChunkTable.describe` for numbers without padding.

    >>> region_text([0, 2], [4, 3], 0, 12), region_text([0, 2], [4, 3], 1, 5)
    ('[0:4, 2:5]', '[0:4, 2:5] flat 1:5')
    """
    text = "[" + ", ".join([f"{a}:{a + n}" for a, n in zip(start, shape, strict=True)]) + "]"
    is_whole_box = (flat_start, flat_stop) == (0, math.prod(shape))
    return text if is_whole_box else f"{text} flat {flat_start}:{flat_stop}"


def widen(values: Ints, dims: int, *, fill: int) -> Ints:
    """Append columns to `[n, d]` up to `[n, dims]`."""
    if values.shape[1] == dims:
        return values
    return np.pad(values, ((0, 0), (0, dims - values.shape[1])), constant_values=fill)


DIGEST_BLOCK_BYTES = 256 * 1024
"""Bytes of a chunk under one digest. Small enough that a resharded read, which must read whole blocks to
check them, reads little more than it needs; large enough that the index stays under 100 bytes a chunk for
ordinary chunks, and that hashing releases the interpreter's lock. No file stores it: another value needs
another version of the format."""

_DIGEST_BLOCK_BITS = DIGEST_BLOCK_BYTES.bit_length() - 1


@dataclass(frozen=True, slots=True, eq=False)
class StoredChunks:
    """Chunks in files.

    Attributes:
        table: the chunks, sorted by array, start and flat range.
        file: index into `files`, `[n]`.
        offset_bytes: where the chunk begins in its file, `[n]`.
        digest_start: where its block digests begin in `digests`, `[n]`.
        digests: xxh3-64 of each block of `DIGEST_BLOCK_BYTES` of each chunk, the last block shorter; None
            where none were stored.
        files: names in the checkpoint.
        array_digests: CRC-64/NVME of the elements of arrays, by key, where stored.
    """

    table: ChunkTable
    file: Ints
    offset_bytes: Ints
    digest_start: Ints
    digests: npt.NDArray[np.uint64] | None
    files: tuple[str, ...]
    array_digests: Mapping[str, int] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.table)

    def take(self, rows: Rows) -> StoredChunks:
        """Return the chosen rows; digests and files are shared with this table."""
        return replace(
            self,
            table=self.table.take(rows),
            file=self.file[rows],
            offset_bytes=self.offset_bytes[rows],
            # `digest_start` points into all digests, so they need not be copied for a few rows.
            digest_start=self.digest_start[rows],
        )


def block_counts(nbytes: Ints) -> Ints:
    """Return the number of digest blocks of chunks of these lengths in bytes, `[n]`."""
    counts: Ints = -(-nbytes >> _DIGEST_BLOCK_BITS)  # rounded up; a shift is much faster than a division
    return counts
