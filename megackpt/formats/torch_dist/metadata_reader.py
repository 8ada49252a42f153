"""Reading a `.metadata`: the classes of DCP as arrays and chunks. `metadata_writer` has the other direction.

Everything in the unpickled object is checked where it is used.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    MetadataIndex,
    TensorStorageMetadata,
)

from megackpt.codec.containers import check_collisions
from megackpt.errors import FormatError
from megackpt.formats.documents import damaged
from megackpt.formats.torch_dist import names
from megackpt.ground.notices import notice
from megackpt.plans.metadata import DTYPES, OBJECT, ArraySpec, ChunkTable, itemsizes, pad_shapes
from megackpt.plans.metadata.chunk_table import MAX_NUMEL
from megackpt.storage import check_name

log = logging.getLogger(__name__)

Extents = tuple[int, ...]

_MAX_DIMS = 64  # those of numpy, through which bytes are read

COMMON_STATE = "common_state"
"""Key of the object that has the common state in newer versions of Megatron-Core."""

# A ShardedObject of Megatron-Core: one element of an array of objects.
_UNIQUE_KEY = re.compile(r"(?P<key>.+)/shard_(?P<offset>[\d.]*)_(?P<shape>[\d.]*)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Item:
    """One stored item: a tensor or an object, as torch.save wrote it.

    Attributes:
        name: its key in `.metadata`.
        file: the file that contains it.
        offset_bytes: where it begins in the file.
        nbytes: its length.
        dtype: dtype of the tensor, or OBJECT.
        offsets: start of the tensor in the array, as DCP sees the array.
        shape: shape of the tensor.
        is_listed: whether an object is stored as a list with one element, as Megatron-Core does.
    """

    name: str
    file: str
    offset_bytes: int
    nbytes: int
    dtype: str
    offsets: Extents = ()
    shape: Extents = ()
    is_listed: bool = False


@dataclass(frozen=True, slots=True, order=True)
class _Row:
    array: int
    start: Extents
    shape: Extents
    flat_start: int
    flat_stop: int


_Objects = dict[str, tuple[Extents, dict[Extents, tuple[str, bool]]]]
"""Arrays of objects: key -> (shape, {offset: (name in `.metadata`, is_listed)})."""


class DcpMetadata:
    """A `.metadata` that another library, or another version, may have written."""

    def __init__(self, metadata: Any, *, location: str) -> None:
        self._location = location
        self._where = f"{location}/.metadata"
        entries = getattr(metadata, "state_dict_metadata", None)
        storage = getattr(metadata, "storage_data", None)
        if not isinstance(entries, dict) or not isinstance(storage, dict):
            raise damaged("it has no tables of keys and of storage", self._where)
        self._entries: dict[str, Any] = entries
        self._storage: dict[Any, Any] = storage
        # Older versions of Megatron-Core save a subclass of DCP's class, with this attribute.
        reformulated = getattr(metadata, "mcore_data", None)
        self.is_of_megatron = hasattr(metadata, "mcore_data")
        self._reformulated = reformulated if isinstance(reformulated, dict) else {}
        self._boxes: dict[int, list[tuple[Extents, Extents]]] = {}  # by the identity of a list of chunks
        self._objects = self._find_objects()
        self.arrays: dict[str, ArraySpec] = {}
        self.unreadable: dict[str, str] = {}  # as in Contents
        for key in sorted(k for k, v in entries.items() if isinstance(v, TensorStorageMetadata)):
            spec = self._tensor_spec(key)
            if spec is not None:
                self.arrays[key] = spec
        for key, (shape, _) in self._objects.items():
            self.arrays[key] = ArraySpec(key, OBJECT, shape)

    def has_object(self, name: str) -> bool:
        """Return whether an object of this name is listed."""
        return isinstance(self._entries.get(name), BytesStorageMetadata)

    def object_item(self, name: str, *, is_listed: bool) -> Item:
        """Return where the object with this name in `.metadata` lies."""
        return self._item(name, None, OBJECT, (), is_listed=is_listed)

    def chunks(self, keys: Iterable[str]) -> tuple[ChunkTable, list[Item]]:
        """Return the chunks of some arrays, sorted as in an index, and the item of each.

        An object has one byte more than its item, which `ItemChunks` adds.

        Raises:
            FormatError: what `.metadata` says about an array is impossible.
        """
        wanted = sorted(set(keys) & set(self.arrays))
        arrays = tuple(self.arrays[key] for key in wanted)
        pairs: list[tuple[_Row, Item]] = []
        for number, spec in enumerate(arrays):
            pairs += self._objects_of(number, spec) if spec.dtype == OBJECT else self._chunks_of(number, spec)
        # Only rows are compared, as items have no order.
        pairs.sort(key=lambda pair: pair[0])
        rows = [row for row, _ in pairs]
        items = [item for _, item in pairs]
        dims = max([len(a.global_shape) for a in arrays], default=1) or 1
        array = np.array([r.array for r in rows], np.int64)
        flat_start, flat_stop = (
            np.array([getattr(r, name) for r in rows], np.int64) for name in ("flat_start", "flat_stop")
        )
        nbytes = (flat_stop - flat_start) * (itemsizes(arrays)[array] if arrays else 1)
        is_object = np.array([item.dtype == OBJECT for item in items], np.bool_)
        nbytes[is_object] = [item.nbytes + 1 for item in items if item.dtype == OBJECT]
        table = ChunkTable(
            arrays,
            array,
            pad_shapes([r.start for r in rows], dims, fill=0),
            pad_shapes([r.shape for r in rows], dims, fill=1),
            flat_start,
            flat_stop,
            nbytes,
        )
        # Through columns, so that this table passes the same checks as one from an index.
        return ChunkTable.from_columns(table.to_columns(), where=self._where), items

    def _find_objects(self) -> _Objects:
        """Return the arrays of objects."""
        plain: list[str] = []
        sharded: dict[str, dict[str, tuple[Extents, Extents]]] = {}
        for name, entry in self._entries.items():
            # A printable text has no halves of characters. The question is quicker than encoding a key.
            if not isinstance(name, str) or not name.isprintable():
                _check_unicode(name, self._where)
            if isinstance(entry, TensorStorageMetadata):
                continue
            if not isinstance(entry, BytesStorageMetadata):
                raise self._damaged(name, f"it is a {type(entry).__name__}, neither a tensor nor an object")
            # Copies of values for DCP are stored elsewhere as well, and read from there.
            if self._is_copy(name):
                continue
            match = _UNIQUE_KEY.fullmatch(name)
            location = _offset_and_shape(match["offset"], match["shape"]) if match else None
            if match and location:
                sharded.setdefault(match["key"], {})[name] = location
            else:
                plain.append(name)
        return self._arrays_of_objects(sharded) | {name: ((1,), {(0,): (name, False)}) for name in plain}

    def _arrays_of_objects(self, sharded: Mapping[str, Mapping[str, tuple[Extents, Extents]]]) -> _Objects:
        """Put objects into arrays; of each key, their names with the offset and shape that these say."""
        objects: _Objects = {}
        for key, members in sharded.items():
            try:
                check_collisions([offset for offset, _ in members.values()])
            except ValueError as error:
                raise self._damaged(key, f"offsets of objects: {error}") from error
            shape = _common_shape(list(members.values()))
            if shape is None or (key in self._entries and not self._is_copy(key)):
                # Shapes contradict each other, or a tensor has the same name: each is an array of its own.
                for name in members:
                    objects[name] = ((1,), {(0,): (name, True)})
            else:
                objects[key] = (shape, {offset: (name, True) for name, (offset, _) in members.items()})
        return objects

    def _is_copy(self, name: str) -> bool:
        """Return whether an entry is a copy, for DCP, of a value in common.pt or of an object."""
        info = self._storage.get(MetadataIndex(name))
        return names.is_values_file(str(getattr(info, "relative_path", None)))

    def _tensor_spec(self, key: str) -> ArraySpec | None:
        entry = self._entries[key]
        dtype = str(getattr(getattr(entry, "properties", None), "dtype", None)).removeprefix("torch.")
        if dtype not in DTYPES:
            notice(log, f"{self._where}: {key!r} has dtype {dtype}, which cannot be loaded.")
            self.unreadable[key] = f"is stored as {dtype}, which cannot be loaded"
            return None
        shape = self._original_shape(key) or self._extents(key, getattr(entry, "size", None))
        if any(n > MAX_NUMEL for n in shape) or math.prod(shape) > MAX_NUMEL:
            raise self._damaged(key, f"no array can have the shape {shape}")
        return ArraySpec(key, dtype, shape)

    def _original_shape(self, key: str) -> Extents | None:
        """Return the shape of an array that Megatron-Core (up to 0.15) stored in another one; else None."""
        entry = self._reformulated.get(key)
        original = entry.get("nd_reformulated_orig_global_shape") if isinstance(entry, dict) else None
        return None if original is None else self._extents(key, original)

    def _chunks_of(self, number: int, spec: ArraySpec) -> list[tuple[_Row, Item]]:
        key, entry = spec.key, self._entries[spec.key]
        fragments = self._fragments(spec, entry) if self._original_shape(key) is not None else None
        pairs: list[tuple[_Row, Item]] = []
        total = 0
        for offsets, shape in self._boxes_of(key, getattr(entry, "chunks", None) or ()):
            numel = math.prod(shape)
            if fragments is None:
                row = _Row(number, offsets, shape, 0, numel)
            else:
                row = self._reformulated_row(number, spec, fragments, offsets, shape)
            pairs.append((row, self._item(key, offsets, spec.dtype, shape)))
            total += numel
        # Too many elements are an overlap for certain; gaps are found when a load is planned.
        if total > spec.numel:
            raise self._damaged(key, f"chunks overlap ({total} elements of an array of {spec.numel})")
        return pairs

    def _boxes_of(self, key: str, chunks: Any) -> list[tuple[Extents, Extents]]:
        """Return the offsets and shapes of a list of chunks, each once, without empty ones.

        Many keys of a crafted file may have the same list. It is read once. The chunks that remain take space
        in the file for each key, as each of them has to be stored.
        """
        known = self._boxes.get(id(chunks))  # the lists live as long as the entries
        if known is not None:
            return known
        by_offsets: dict[str, tuple[Extents, Extents]] = {}  # by their text, whose hash a file cannot choose
        for chunk in chunks:
            offsets = self._extents(key, getattr(chunk, "offsets", None))
            shape = self._extents(key, getattr(chunk, "sizes", None))
            # DCP finds items by offsets: the chunk is listed twice, or `.metadata` is damaged.
            if math.prod(shape) and by_offsets.setdefault(str(offsets), (offsets, shape))[1] != shape:
                raise self._damaged(key, f"two chunks begin at {offsets}")
        return self._boxes.setdefault(id(chunks), list(by_offsets.values()))

    def _fragments(self, spec: ArraySpec, entry: Any) -> Extents:
        """Return how many boxes the array has along each dim; each is flattened into the last dim stored."""
        *fragments, numel = self._extents(spec.key, getattr(entry, "size", None)) or (0,)
        fits = len(fragments) == len(spec.global_shape) and all(
            f > 0 and n % f == 0 for n, f in zip(spec.global_shape, fragments, strict=True)
        )
        if not fits or math.prod(spec.global_shape) != math.prod(fragments) * numel:
            raise self._damaged(
                spec.key, f"an array of shape {spec.global_shape} cannot be stored as {(*fragments, numel)}"
            )
        return tuple(fragments)

    def _reformulated_row(
        self, number: int, spec: ArraySpec, fragments: Extents, offsets: Extents, shape: Extents
    ) -> _Row:
        """Return the flat range of a fragment's box that is stored as a range of the last dim.

        Source: Megatron-Core 0.8 to 0.15, `sharded_tensor_to_torch_sharded_tensor`: an array [X, Y] in boxes
        [x, y] is stored as [X/x, Y/y, x*y].
        """
        box = tuple(n // f for n, f in zip(spec.global_shape, fragments, strict=True))
        dims = len(box)
        fits = len(offsets) == len(shape) == dims + 1 and all(n == 1 for n in shape[:-1])
        if not fits:
            raise self._damaged(spec.key, f"chunk {offsets}, {shape} is no range of one fragment")
        # The last of the offsets counts elements in the flattened box, the others count boxes.
        start = tuple(i * n for i, n in zip(offsets, box, strict=False))
        return _Row(number, start, box, offsets[-1], offsets[-1] + shape[-1])

    def _objects_of(self, number: int, spec: ArraySpec) -> list[tuple[_Row, Item]]:
        _, by_offset = self._objects[spec.key]
        single = (1,) * len(spec.global_shape)
        return [
            (_Row(number, offset, single, 0, 1), self.object_item(name, is_listed=is_listed))
            for offset, (name, is_listed) in by_offset.items()
        ]

    def _item(
        self, name: str, offsets: Extents | None, dtype: str, shape: Extents, *, is_listed: bool = False
    ) -> Item:
        info = self._storage.get(MetadataIndex(name, offsets))
        if info is None:
            at = "" if offsets is None else f" at {offsets}"
            raise self._damaged(name, f"no file is named for what begins{at}" if at else "no file is named")
        file, offset, nbytes = (getattr(info, a, None) for a in ("relative_path", "offset", "length"))
        if not isinstance(file, str) or type(offset) is not int or type(nbytes) is not int:
            raise self._damaged(name, "its position in a file is malformed")
        if offset < 0 or nbytes < 0 or offset + nbytes > MAX_NUMEL:
            raise self._damaged(name, f"no file has {nbytes} bytes at {offset}")
        check_name(file, location=self._location)
        transforms = getattr(info, "transform_descriptors", None)
        if transforms:
            raise FormatError(
                f"{self._where}: {name!r} went through {transforms!r:.100} when it was stored, which is not "
                f"undone here. Load it with torch.distributed.checkpoint and the same extensions.",
                key=name,
                path=self._where,
            )
        return Item(name, file, offset, nbytes, dtype, offsets or (), shape, is_listed)

    def _extents(self, key: str, value: Any) -> Extents:
        fits = isinstance(value, tuple | list) and len(value) <= _MAX_DIMS
        if not fits or not all(type(n) is int and 0 <= n <= MAX_NUMEL for n in value):
            raise self._damaged(key, "a shape or offset in it is none")
        return tuple(value)

    def _damaged(self, key: str, what: str) -> FormatError:
        return damaged(f"{key!r}: {what}", self._where, key=key)


def _check_unicode(name: Any, where: str) -> None:
    try:
        name.encode()
    except (AttributeError, UnicodeEncodeError) as error:
        raise damaged(f"{name!r:.100} is no key", where) from error


def _offset_and_shape(offset: str, shape: str) -> tuple[Extents, Extents] | None:
    """Decode the end of a unique key; None if it is another text. Old keys lack the last extent, here -1."""
    try:
        start, extents = (tuple(int(n) for n in t.split(".")) if t else () for t in (offset, shape))
    except ValueError:
        return None
    if len(start) == len(extents) + 1:
        extents = (*extents, -1)
    fits = len(start) == len(extents) and all(
        a < n <= MAX_NUMEL or n == -1 for a, n in zip(start, extents, strict=True)
    )
    return (start, extents) if fits and math.prod(abs(n) for n in extents) <= MAX_NUMEL else None


def _common_shape(locations: list[tuple[Extents, Extents]]) -> Extents | None:
    """Return the shape that all objects give; None if there are several, or two objects have one offset.

    If the last extent is not known, it follows from the offsets.
    """
    shapes = {shape for _, shape in locations}
    if len(shapes) > 1 or len({offset for offset, _ in locations}) < len(locations):
        return None
    (shape,) = shapes
    if shape[-1:] == (-1,):
        return (*shape[:-1], 1 + max(offset[-1] for offset, _ in locations))
    return shape


def key_of(name: str) -> str:
    """Return the key of the array that a name in `.metadata` belongs to."""
    match = _UNIQUE_KEY.fullmatch(name)
    return match["key"] if match and _offset_and_shape(match["offset"], match["shape"]) else name
