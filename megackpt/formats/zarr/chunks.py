"""Chunks of stored zarr arrays, and reading ranges of them.

Uncompressed chunks are read through the store, all others through tensorstore. If an array has shards, the
chunks are those inside the shards.
"""

from __future__ import annotations

import math
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
import numpy.typing as npt

from megackpt.errors import FormatError, IntegrityError, StorageError
from megackpt.formats.contents import Chunks, FileRanges
from megackpt.formats.zarr.array_codec import ArrayCodec, Elements, decoding_error, open_array, tensorstore
from megackpt.formats.zarr.array_documents import ZarrArray
from megackpt.formats.zarr.expansion_limits import (
    ENTRY_BYTES,
    LARGE_BYTES,
    ChunkEncoding,
    check_file,
    encoding_of,
)
from megackpt.formats.zarr.rounds import grid_extents
from megackpt.plans.geometry import Ints, rectangles_of
from megackpt.plans.metadata import DTYPES, ArraySpec, ChunkTable
from megackpt.plans.metadata.chunk_table import widen
from megackpt.storage import LocalStore, Store

CACHE_BYTES = 16 * 1024 * 1024
"""Memory of tensorstore for decoded chunks and shard indices, so that reads of one chunk decode it once.
Resident memory was measured to grow by up to three times as much."""

MAX_CHUNKS = 1 << 22
"""Limit of an array's chunks, those in shards included: a document may claim any number, and each takes a row
of a table. With chunks of a megabyte this is an array of 4 TiB."""

_OPEN_FILES = 8  # files of stores other than directories, each as a whole in memory


@dataclass(frozen=True, slots=True)
class StoredObjects:
    """An array of objects.

    Attributes:
        spec: its key and shape.
        files: the file of each object by its offset, sorted.
        is_checked: whether each object has a digest.
    """

    spec: ArraySpec
    files: Mapping[tuple[int, ...], str]
    is_checked: bool = False


class ZarrChunks(Chunks):
    """Chunks of some arrays and objects.

    files are the names in the store.

    Raises:
        FormatError: the file of a chunk is missing.
    """

    def __init__(
        self,
        store: Store,
        arrays: Sequence[ZarrArray],
        objects: Sequence[StoredObjects],
        files: Set[str],
    ) -> None:
        self._store = store
        by_key: dict[str, ZarrArray | StoredObjects] = {a.spec.key: a for a in arrays}
        by_key |= {o.spec.key: o for o in objects}
        self._arrays = [by_key[key] for key in sorted(by_key)]
        for array in arrays:
            _check_files(store, array, files)
        self.table = _table(store, self._arrays)
        self.position = self._positions()
        self._context: Any = None  # of tensorstore: all arrays share one cache
        self._opened: dict[str, _ArrayFiles] = {}  # by path of the array
        self._lock = threading.Lock()
        self._checked: set[tuple[str, int]] = set()  # files, and numbers of chunks in them
        self._encodings: dict[int, ChunkEncoding] = {}  # by number of the array
        for row, number in enumerate(self.table.array.tolist()):
            array = self._arrays[number]
            # Chunks that may be too large are checked before a load plans to read them.
            is_encoded = isinstance(array, ZarrArray) and not array.is_raw
            if is_encoded and self._encoding(row).chunk_nbytes > LARGE_BYTES:
                self._check_once(array, self._name(row), row)

    def describe(self, row: int) -> str:
        """Return the file of a chunk."""
        return f"{self._store.location}/{self._name(row)}"

    def file_ranges(self) -> FileRanges:
        """Return the files. A chunk in a shard, or a compressed one, has the range of its whole file."""
        number: dict[str, int] = {}
        nbytes: list[int] = []  # of each file
        file: list[int] = []
        is_checked: list[bool] = []
        for row, array_number in enumerate(self.table.array.tolist()):
            stored, name = self._arrays[array_number], self._name(row)
            if name not in number:
                number[name] = len(number)
                nbytes.append(
                    stored.file_nbytes if isinstance(stored, ZarrArray) else int(self.table.nbytes[row])
                )
            file.append(number[name])
            is_checked.append(stored.is_checked)
        of_file, chunk_file = np.array(nbytes, np.int64), np.array(file, np.int64)
        return FileRanges(
            files=tuple(number),
            nbytes=of_file,
            file=chunk_file,
            start=np.zeros(len(file), np.int64),
            stop=of_file[chunk_file],
            is_checked=np.array(is_checked, np.bool_),
        )

    def read_into(self, row: int, start: int, out: memoryview, *, verify: bool) -> None:
        """Fill out with bytes of a chunk. Checksums of an array are always checked, also without verify."""
        stored = self._arrays[int(self.table.array[row])]
        name = self._name(row)
        try:
            if isinstance(stored, StoredObjects):
                self._store.read_into(name, start, out)
                return
            self._check_once(stored, name, row)
            if stored.is_raw and self._is_prefix(stored, row):
                self._store.read_into(name, start, out)
            else:
                self._decode_into(stored, row, start, out)
        except (StorageError, FormatError, IntegrityError) as error:
            if error.key is None:
                error.key = stored.spec.key
            raise

    def _check_once(self, array: ZarrArray, name: str, row: int) -> None:
        """Check, once, that the file of a chunk is regular, and that the chunk does not expand to too much.

        Raises:
            FormatError: one of these is not so.
        """
        chunk = self._number_in_file(array, row)
        with self._lock:
            if (name, chunk) in self._checked:
                return
        try:
            # Outside of the lock: two threads that check one chunk twice cost less than threads that wait.
            nbytes = self._store.size(name)
        except StorageError as error:
            raise _missing(self._store, array, name) from error
        expected = array.file_nbytes
        if array.is_raw and nbytes != expected:
            raise FormatError(
                f"{array.spec.key!r}: chunk file {self._store.location}/{name} has {nbytes:,} bytes instead "
                f"of {expected:,}. It was cut short or replaced; restore it, or load another checkpoint.",
                key=array.spec.key,
                path=f"{self._store.location}/{name}",
            )
        if not array.is_raw:
            check_file(self._store, array, self._encoding(row), name, chunk)
        with self._lock:
            self._checked.add((name, chunk))

    def _encoding(self, row: int) -> ChunkEncoding:
        number = int(self.table.array[row])
        if number not in self._encodings:
            array = self._arrays[number]
            assert isinstance(array, ZarrArray)
            self._encodings[number] = encoding_of(array)
        return self._encodings[number]

    def _number_in_file(self, array: ZarrArray, row: int) -> int:
        """Return the row-major number of a chunk in its file."""
        number = 0
        # The cell of the chunk within its file, as one number. Rows are padded to the dims of the widest
        # array, and the grid is not, so the lengths may differ.
        for start, chunk, inner in zip(
            self.table.start[row].tolist(), array.grid.chunk, array.grid.inner, strict=False
        ):
            number = number * (chunk // inner) + start % chunk // inner
        return number

    def _is_prefix(self, array: ZarrArray, row: int) -> bool:
        """Return whether the elements of a chunk, which may be clipped, are at the beginning of its file."""
        # A file at the edge of the array has the full extents of a chunk. If it is clipped along dim 0 alone,
        # its padding comes after all elements; otherwise it lies between rows.
        dims = len(array.spec.global_shape)
        return tuple(self.table.shape[row, 1:dims].tolist()) == array.grid.chunk[1:]

    def _decode_into(self, array: ZarrArray, row: int, start: int, out: memoryview) -> None:
        # The rectangles that contain the elements of the byte range, each decoded as a region of the array.
        width = DTYPES[array.spec.dtype].itemsize
        first, last = start // width, -(-(start + out.nbytes) // width)
        dims = len(array.spec.global_shape)
        cut = rectangles_of(self.table.shape[[row]], np.array([first]), np.array([last]))
        low = cut.start + self.table.start[row]
        regions = [
            tuple(slice(a, a + n) for a, n in zip(at[:dims], shape[:dims], strict=True))
            for at, shape in zip(low.tolist(), cut.shape.tolist(), strict=True)
        ]
        parts = self._open(array).read(self._cell(array, row), regions)
        data = np.concatenate([_bytes_of(part) for part in parts]) if len(parts) > 1 else _bytes_of(parts[0])
        # The byte range may begin and end inside of an element; the rectangles have whole ones.
        begin = start - first * width
        np.frombuffer(out, np.uint8)[:] = data[begin : begin + out.nbytes]

    def _open(self, array: ZarrArray) -> _ArrayFiles:
        with self._lock:
            if self._context is None:
                self._context = tensorstore().Context({"cache_pool": {"total_bytes_limit": CACHE_BYTES}})
            if array.path not in self._opened:
                self._opened[array.path] = _ArrayFiles(self._store, array, self._context)
            return self._opened[array.path]

    def _cell(self, array: ZarrArray, row: int) -> tuple[int, ...]:
        start = self.table.start[row].tolist()
        return tuple(a // c for a, c in zip(start, array.grid.chunk, strict=False))

    def _name(self, row: int) -> str:
        stored = self._arrays[int(self.table.array[row])]
        if isinstance(stored, StoredObjects):
            return stored.files[tuple(self.table.start[row, : len(stored.spec.global_shape)].tolist())]
        return stored.path + stored.leaf(self._cell(stored, row))

    def _positions(self) -> Ints:
        """Return the position of each chunk, by array, file and start."""
        table = self.table
        chunk = np.ones((len(self._arrays), table.dims), np.int64)
        for i, stored in enumerate(self._arrays):
            if isinstance(stored, ZarrArray):
                chunk[i, : len(stored.grid.chunk)] = stored.grid.chunk
        cells = table.start // chunk[table.array] if len(table) else table.start
        # lexsort has the primary key last: the array, then the file, then the start in it.
        order = np.lexsort((*table.start.T[::-1], *cells.T[::-1], table.array))
        return np.argsort(order)  # the inverse of the order: the position of each row


class _ArrayFiles:
    """The files of one array, ready to be decoded."""

    def __init__(self, store: Store, array: ZarrArray, context: Any) -> None:
        self._store = store
        self._array = array
        self._handle: Any = None
        # tensorstore reads directories itself. Of other stores it gets whole files; see `_in_memory`.
        if isinstance(store, LocalStore):
            path = f"{store.location}/{array.path}"
            self._handle = open_array(array, {"driver": "file", "path": path}, context=context)
        self._codecs: OrderedDict[tuple[int, ...], Any] = OrderedDict()
        self._lock = threading.Lock()

    def read(self, cell: tuple[int, ...], regions: Sequence[tuple[slice, ...]]) -> list[Elements]:
        """Return regions of the array, all in the file of one cell."""
        handle = self._handle if self._handle is not None else self._in_memory(cell)
        leaf = self._array.leaf(cell)
        try:
            # All reads are started before the first one is waited for.
            return [future.result() for future in [handle[region].read() for region in regions]]
        except ValueError as error:
            raise _read_error(self._store, self._array, leaf, error) from error

    def _in_memory(self, cell: tuple[int, ...]) -> Any:
        with self._lock:
            if cell not in self._codecs:
                name = self._array.path + self._array.leaf(cell)
                data = self._store.read(name, max_bytes=self._store.size(name))
                self._codecs[cell] = ArrayCodec(self._array).handle_of(cell, data)
            self._codecs.move_to_end(cell)
            # A handle that is dropped here stays valid for threads that have it.
            while len(self._codecs) > _OPEN_FILES:
                self._codecs.popitem(last=False)
            return self._codecs[cell]


def _bytes_of(elements: Elements) -> npt.NDArray[np.uint8]:
    return np.ascontiguousarray(elements).reshape(-1).view(np.uint8)


def _read_error(store: Store, array: ZarrArray, leaf: str, error: Exception) -> FormatError | IntegrityError:
    details = decoding_error(array, leaf, error)
    where = f"{store.location}/{array.path}{leaf}"
    kind = IntegrityError if "checksum" in str(error) else FormatError
    return kind(details.message, key=array.spec.key, path=where)


def _missing(store: Store, array: ZarrArray, name: str) -> FormatError:
    leaf = name.removeprefix(array.path)
    return FormatError(
        f"{array.spec.key!r}: chunk {leaf!r} of {store.location}/{array.path} is missing, or is no regular "
        f"file. The checkpoint is incomplete: restore it, or load another one. (Writers of zarr may leave "
        f"out chunks with nothing but the fill value; write them, with write_empty_chunks=True in zarr.)",
        key=array.spec.key,
        path=f"{store.location}/{name}",
    )


def _check_files(store: Store, array: ZarrArray, files: Set[str]) -> None:
    """Check that all files of an array exist, before memory is taken for its chunks.

    Raises:
        FormatError: one is missing, or the document claims too many chunks.
    """
    cells = math.prod(array.file_extents)
    inside = math.prod(grid_extents(array.grid.chunk, array.grid.inner))
    if cells * inside > MAX_CHUNKS:
        where = f"{store.location}/{array.path}"
        raise FormatError(
            f"{array.spec.key!r}: {where} says that it has {cells * inside:,} chunks, more than the "
            f"{MAX_CHUNKS:,} that an array may have. Its document is damaged; or store it in larger chunks.",
            key=array.spec.key,
            path=where,
        )
    if not cells:  # `product` would still make lists for the other extents
        return
    first = None
    for cell in product(*map(range, array.file_extents)):
        name = array.path + array.leaf(cell)
        if name not in files:
            raise _missing(store, array, name)
        first = first or name
    # One file is enough: a document that claims too many chunks claims as many of every file.
    if first is not None and inside > 1 and store.size(first) < inside * ENTRY_BYTES:
        raise FormatError(
            f"{array.spec.key!r}: {store.location}/{first} is too short to hold {inside:,} chunks. It was "
            f"cut short; restore it, or load another checkpoint.",
            key=array.spec.key,
            path=f"{store.location}/{first}",
        )


def _table(store: Store, stored: Sequence[ZarrArray | StoredObjects]) -> ChunkTable:
    specs = tuple(item.spec for item in stored)
    dims = max([1, *(len(s.global_shape) for s in specs)])
    array, start, shape, nbytes = [], [], [], []
    for i, item in enumerate(stored):
        if isinstance(item, StoredObjects):
            begin = np.array(list(item.files), np.int64).reshape(len(item.files), len(item.spec.global_shape))
            extent = np.ones_like(begin)
            # No document has the length of an object, so it is that of its file.
            size = np.array([store.size(name) for name in item.files.values()], np.int64)
        else:
            begin, extent = _chunks_of(item)
            size = extent.prod(axis=1) * DTYPES[item.spec.dtype].itemsize
        array.append(np.full(len(begin), i, np.int64))
        start.append(widen(begin, dims, fill=0))
        shape.append(widen(extent, dims, fill=1))
        nbytes.append(size)
    # The empty columns give dtype and dims to a table without chunks.
    none = np.zeros(0, np.int64)
    shapes = np.concatenate([np.zeros((0, dims), np.int64), *shape])
    return ChunkTable(
        arrays=specs,
        array=np.concatenate([none, *array]),
        start=np.concatenate([np.zeros((0, dims), np.int64), *start]),
        shape=shapes,
        flat_start=np.zeros(len(shapes), np.int64),
        flat_stop=shapes.prod(axis=1),
        nbytes=np.concatenate([none, *nbytes]),
    )


def _chunks_of(array: ZarrArray) -> tuple[Ints, Ints]:
    """Return start and shape of each chunk, clipped to the array, `[n, dims]`, in row-major order."""
    if not array.spec.numel:
        none = np.zeros((0, len(array.spec.global_shape)), np.int64)
        return none, none
    whole = np.array(array.spec.global_shape, np.int64)
    inner = np.array(array.grid.inner, np.int64)
    counts = grid_extents(array.spec.global_shape, array.grid.inner)
    total = math.prod(counts)
    # An array without dims has one cell, without coordinates.
    cells = np.indices(counts).reshape(len(counts), total) if counts else np.zeros((0, 1), np.int64)
    start = cells.T.astype(np.int64) * inner
    return start, np.minimum(inner, whole - start)
