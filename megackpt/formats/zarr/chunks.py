"""Chunks of stored zarr arrays, and the way to their bytes.

Owns which chunks there are, and reading ranges of them: what lies raw in files through the store, everything
else through tensorstore. Chunks are those inside of shards where arrays have any.
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
from megackpt.formats.zarr.array_codec import ArrayCodec, Elements, unreadable
from megackpt.formats.zarr.array_documents import ZarrArray
from megackpt.formats.zarr.expansion_limits import LARGE_BYTES, ChunkEncoding, check_file, encoding_of
from megackpt.formats.zarr.library import open_array, tensorstore
from megackpt.geometry import Ints, rectangles_of
from megackpt.metadata import DTYPES, ArraySpec, ChunkTable
from megackpt.metadata.chunk_table import widen
from megackpt.storage import LocalStore, Store

CACHE_BYTES = 16 * 1024 * 1024
"""Decoded chunks and shard indices that tensorstore keeps, so that reads of one chunk decode it once.
Resident memory was seen to grow by up to three times this."""

MOST_CHUNKS = 1 << 22
"""Chunks of one array, those in shards counted: their number is a document's claim, and each takes a row of a
table. Of chunks of a megabyte it is an array of 4 TiB."""

_OPEN_FILES = 8  # of stores other than directories, whose files are held in memory whole
_INDEX_ENTRY_BYTES = 16  # of a shard, for each chunk in it


@dataclass(frozen=True, slots=True)
class StoredObjects:
    """An array of objects.

    Attributes:
        spec: its key and shape.
        files: the file of each object by its offset, sorted.
        is_checked: whether a digest stands with each.
    """

    spec: ArraySpec
    files: Mapping[tuple[int, ...], str]
    is_checked: bool = False


class ZarrChunks(Chunks):
    """Chunks of some arrays and objects; see `Chunks` for what its methods do.

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
        held: dict[str, ZarrArray | StoredObjects] = {a.spec.key: a for a in arrays}
        held |= {o.spec.key: o for o in objects}
        self._held = [held[key] for key in sorted(held)]
        for array in arrays:
            _check_files(store, array, files)
        self.table = _table(store, self._held)
        self.position = self._positions()
        self._reader: _ArrayReader | None = None
        self._lock = threading.Lock()
        self._seen: set[tuple[str, int]] = set()  # files, and numbers of chunks in them
        self._packings: dict[int, ChunkEncoding] = {}  # by number of the array
        for row, number in enumerate(self.table.array.tolist()):
            held_array = self._held[number]
            is_packed = isinstance(held_array, ZarrArray) and not held_array.is_raw
            if is_packed and self._packing(row).chunk_nbytes > LARGE_BYTES:  # refused before it is planned
                self._look_at(held_array, self._name(row), row)

    def describe(self, row: int) -> str:
        """Name the file."""
        return f"{self._store.location}/{self._name(row)}"

    def file_ranges(self) -> FileRanges:
        """Return the files; chunks in shards, or compressed, have no bytes of their own."""
        number: dict[str, int] = {}
        nbytes: list[int] = []  # of each file
        file: list[int] = []
        is_checked: list[bool] = []
        for row, array in enumerate(self.table.array.tolist()):
            held, name = self._held[array], self._name(row)
            if name not in number:
                number[name] = len(number)
                nbytes.append(
                    held.file_nbytes if isinstance(held, ZarrArray) else int(self.table.nbytes[row])
                )
            file.append(number[name])
            is_checked.append(held.is_checked)
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
        """Fill out. Checksums are checked with or without verify, where an array has them."""
        held = self._held[int(self.table.array[row])]
        name = self._name(row)
        try:
            if isinstance(held, StoredObjects):
                self._store.read_into(name, start, out)
                return
            self._look_at(held, name, row)
            if held.is_raw and self._is_prefix(held, row):
                self._store.read_into(name, start, out)
            else:
                self._decode_into(held, row, start, out)
        except (StorageError, FormatError, IntegrityError) as error:
            if error.key is None:
                error.key = held.spec.key
            raise

    def _look_at(self, array: ZarrArray, name: str, row: int) -> None:
        """Make sure, once, that a file is a regular one, and expands to no more than it may."""
        chunk = self._number_in_file(array, row)
        with self._lock:
            if (name, chunk) in self._seen:
                return
        try:
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
            check_file(self._store, array, self._packing(row), name, chunk)
        with self._lock:
            self._seen.add((name, chunk))

    def _packing(self, row: int) -> ChunkEncoding:
        number = int(self.table.array[row])
        if number not in self._packings:
            array = self._held[number]
            assert isinstance(array, ZarrArray)
            self._packings[number] = encoding_of(array)
        return self._packings[number]

    def _number_in_file(self, array: ZarrArray, row: int) -> int:
        """Return which chunk of its file a chunk is, counted row-major."""
        number = 0
        for start, chunk, inner in zip(
            self.table.start[row].tolist(), array.grid.chunk, array.grid.inner, strict=False
        ):
            number = number * (chunk // inner) + start % chunk // inner
        return number

    def _is_prefix(self, array: ZarrArray, row: int) -> bool:
        """Say whether the elements of a clipped chunk lie together at the beginning of its file."""
        dims = len(array.spec.global_shape)
        return tuple(self.table.shape[row, 1:dims].tolist()) == array.grid.chunk[1:]

    def _decode_into(self, array: ZarrArray, row: int, start: int, out: memoryview) -> None:
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
        octets = np.concatenate([_octets(part) for part in parts]) if len(parts) > 1 else _octets(parts[0])
        begin = start - first * width
        np.frombuffer(out, np.uint8)[:] = octets[begin : begin + out.nbytes]

    def _open(self, array: ZarrArray) -> _ArrayFiles:
        with self._lock:
            if self._reader is None:
                self._reader = _ArrayReader(self._store)
        return self._reader.open(array)

    def _cell(self, array: ZarrArray, row: int) -> tuple[int, ...]:
        start = self.table.start[row].tolist()
        return tuple(a // c for a, c in zip(start, array.grid.chunk, strict=False))

    def _name(self, row: int) -> str:
        held = self._held[int(self.table.array[row])]
        if isinstance(held, StoredObjects):
            return held.files[tuple(self.table.start[row, : len(held.spec.global_shape)].tolist())]
        return held.path + held.leaf(self._cell(held, row))

    def _positions(self) -> Ints:
        """Return the position of each chunk, by array, file and start."""
        table = self.table
        chunk = np.ones((len(self._held), table.dims), np.int64)
        for i, held in enumerate(self._held):
            if isinstance(held, ZarrArray):
                chunk[i, : len(held.grid.chunk)] = held.grid.chunk
        cells = table.start // chunk[table.array] if len(table) else table.start
        order = np.lexsort((*table.start.T[::-1], *cells.T[::-1], table.array))
        position = np.empty(len(table), np.int64)
        position[order] = np.arange(len(table))
        return position


class _ArrayFiles:
    """The files of one array, ready to be decoded."""

    def __init__(self, store: Store, array: ZarrArray, context: Any) -> None:
        self._store = store
        self._array = array
        self._handle: Any = None
        if isinstance(store, LocalStore):
            path = f"{store.location}/{array.path}"
            self._handle = open_array(array, {"driver": "file", "path": path}, context=context)
        self._codecs: OrderedDict[tuple[int, ...], Any] = OrderedDict()
        self._lock = threading.Lock()

    def read(self, cell: tuple[int, ...], regions: Sequence[tuple[slice, ...]]) -> list[Elements]:
        """Return regions of the array that lie in the file of a cell."""
        handle = self._handle if self._handle is not None else self._in_memory(cell)
        leaf = self._array.leaf(cell)
        try:
            return [future.result() for future in [handle[region].read() for region in regions]]
        except ValueError as error:
            raise _unreadable(self._store, self._array, leaf, error) from error

    def _in_memory(self, cell: tuple[int, ...]) -> Any:
        with self._lock:
            if cell not in self._codecs:
                name = self._array.path + self._array.leaf(cell)
                data = self._store.read(name, max_bytes=self._store.size(name))
                self._codecs[cell] = ArrayCodec(self._array).holding(cell, data)
            self._codecs.move_to_end(cell)
            while len(self._codecs) > _OPEN_FILES:
                self._codecs.popitem(last=False)
            return self._codecs[cell]


class _ArrayReader:
    """Opens arrays, each once, with one cache."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._context = tensorstore().Context({"cache_pool": {"total_bytes_limit": CACHE_BYTES}})
        self._open: dict[str, _ArrayFiles] = {}
        self._lock = threading.Lock()

    def open(self, array: ZarrArray) -> _ArrayFiles:
        with self._lock:
            if array.path not in self._open:
                self._open[array.path] = _ArrayFiles(self._store, array, self._context)
            return self._open[array.path]


def _octets(elements: Elements) -> npt.NDArray[np.uint8]:
    return np.ascontiguousarray(elements).reshape(-1).view(np.uint8)


def _unreadable(store: Store, array: ZarrArray, leaf: str, error: Exception) -> FormatError | IntegrityError:
    found = unreadable(array, leaf, error)
    where = f"{store.location}/{array.path}{leaf}"
    kind = IntegrityError if "checksum" in str(error) else FormatError
    return kind(found.message, key=array.spec.key, path=where)


def _missing(store: Store, array: ZarrArray, name: str) -> FormatError:
    leaf = name.removeprefix(array.path)
    return FormatError(
        f"{array.spec.key!r}: chunk {leaf!r} of {store.location}/{array.path} is missing, or is no regular "
        f"file. The "
        f"checkpoint is incomplete: restore it, or load another one. (Writers of zarr may leave out chunks "
        f"that hold "
        f"nothing but the fill value; write them, with write_empty_chunks=True in zarr.)",
        key=array.spec.key,
        path=f"{store.location}/{name}",
    )


def _check_files(store: Store, array: ZarrArray, files: Set[str]) -> None:
    """Refuse an array with a file missing, before its chunks are counted: their number is anybody's claim."""
    cells, inside = math.prod(array.file_extents), _chunks_in_file(array)
    if cells * inside > MOST_CHUNKS:
        where = f"{store.location}/{array.path}"
        raise FormatError(
            f"{array.spec.key!r}: {where} says that it has {cells * inside:,} chunks, more than the "
            f"{MOST_CHUNKS:,} that an array may have. Its document is damaged; or store it in larger chunks.",
            key=array.spec.key,
            path=where,
        )
    if not cells:  # `product` would still make lists of the other extents
        return
    first = None
    for cell in product(*map(range, array.file_extents)):
        name = array.path + array.leaf(cell)
        if name not in files:
            raise _missing(store, array, name)
        first = first or name
    if first is not None and inside > 1 and store.size(first) < inside * _INDEX_ENTRY_BYTES:
        raise FormatError(
            f"{array.spec.key!r}: {store.location}/{first} is too short to hold {inside:,} chunks. It was "
            f"cut short; "
            f"restore it, or load another checkpoint.",
            key=array.spec.key,
            path=f"{store.location}/{first}",
        )


def _chunks_in_file(array: ZarrArray) -> int:
    return math.prod(c // i for c, i in zip(array.grid.chunk, array.grid.inner, strict=True))


def _table(store: Store, held: Sequence[ZarrArray | StoredObjects]) -> ChunkTable:
    specs = tuple(h.spec for h in held)
    dims = max([1, *(len(s.global_shape) for s in specs)])
    array, start, shape, nbytes = [], [], [], []
    for i, one in enumerate(held):
        if isinstance(one, StoredObjects):
            at = np.array(list(one.files), np.int64).reshape(len(one.files), len(one.spec.global_shape))
            extent = np.ones_like(at)
            size = np.array([store.size(name) for name in one.files.values()], np.int64)
        else:
            at, extent = _chunks_of(one)
            size = extent.prod(axis=1) * DTYPES[one.spec.dtype].itemsize
        array.append(np.full(len(at), i, np.int64))
        start.append(widen(at, dims, fill=0))
        shape.append(widen(extent, dims, fill=1))
        nbytes.append(size)
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
    counts = [-(-n // i) for n, i in zip(array.spec.global_shape, array.grid.inner, strict=True)]
    total = math.prod(counts)
    places = np.indices(counts).reshape(len(counts), total) if counts else np.zeros((0, 1), np.int64)
    start = places.T.astype(np.int64) * inner
    return start, np.minimum(inner, whole - start)
