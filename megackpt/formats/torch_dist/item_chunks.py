"""Chunks of a checkpoint that DCP or Megatron-Core wrote.

For an ordinary item, one small read finds where the bytes of its tensor begin. Any other item is loaded as a
whole by torch, and its bytes are returned in row-major order.
"""

from __future__ import annotations

import json
import math
import threading
from collections import OrderedDict
from functools import cached_property
from typing import Any

import numpy as np
import torch

from megackpt.errors import FormatError, StorageError
from megackpt.formats.contents import Chunks, FileRanges
from megackpt.formats.documents import damaged
from megackpt.formats.safe_pickle import load_value
from megackpt.formats.torch_dist.item import HEAD_BYTES, locate
from megackpt.formats.torch_dist.metadata_reader import Item
from megackpt.plans.geometry import Ints
from megackpt.plans.metadata import DTYPES, OBJECT, ChunkTable
from megackpt.storage import Store

LONG_HEAD_BYTES = 64 * 1024
"""Size of the second try, for an item with a longer description or longer names than torch writes."""

SAFETENSORS_HEAD_BYTES = 100 * 1000 * 1000
"""Source: the safetensors format bounds its header."""

PLAIN_OBJECT = 0
LISTED_OBJECT = 1
"""First byte of an object's chunk: whether its item is the object, or a list with the object alone."""

_REPEATED_BYTES = 64 * 1024 * 1024
"""Limit of a tensor's size if its strides repeat fewer elements."""

KEPT_ITEMS = 4
"""Items loaded as a whole that are kept: as many as are usually read at once."""


class ItemChunks(Chunks):
    """Chunks in items. There are no digests.

    The first byte of an object's chunk says how the item contains it; the item follows.
    """

    def __init__(self, store: Store, table: ChunkTable, items: list[Item], *, allow_unsafe: bool) -> None:
        self._store = store
        self._items = items
        self._allow_unsafe = allow_unsafe
        # By row: where the bytes of its tensor begin in the file; None if the item has to be loaded.
        self._tensor_start: dict[int, int | None] = {}
        self._loaded: OrderedDict[int, memoryview] = OrderedDict()
        self._lock = threading.Lock()
        self.table = table
        sizes: dict[str, int] = {}
        for item in items:
            if item.dtype == OBJECT:  # it is read as a whole, so its length is checked first
                self._check_inside(item, sizes)

    @cached_property
    def position(self) -> Ints:  # type: ignore[override]  # computed when it is first needed
        """Position of each chunk by file and offset."""
        order = sorted(
            range(len(self._items)), key=lambda i: (self._items[i].file, self._items[i].offset_bytes)
        )
        return np.argsort(order)  # the inverse of the order: the position of each row

    def describe(self, row: int) -> str:
        """Return the file and the item of a chunk."""
        item = self._items[row]
        return (
            f"item {item.name!r} (bytes {item.offset_bytes}:{item.offset_bytes + item.nbytes}) of "
            f"{self._store.location}/{item.file}"
        )

    def file_ranges(self) -> FileRanges:
        """Return where the items lie, with the bytes around their tensors."""
        files, file = np.unique([item.file for item in self._items], return_inverse=True)
        start = np.array([item.offset_bytes for item in self._items], np.int64)
        nbytes = np.array([item.nbytes for item in self._items], np.int64)
        return FileRanges(
            tuple(files.tolist()),
            np.full(len(files), -1, np.int64),
            file,
            start,
            start + nbytes,
            np.zeros(len(start), np.bool_),
        )

    def read_into(self, row: int, start: int, out: memoryview, *, verify: bool) -> None:
        """Read a range of a tensor or object."""
        item = self._items[row]
        if item.dtype == OBJECT:
            self._read_object(item, start, out)
            return
        # Without a lock: two threads may look for the same tensor, and find the same position.
        if row not in self._tensor_start:
            self._tensor_start[row] = self._locate(item)
        tensor_start = self._tensor_start[row]
        if tensor_start is not None:
            self._store.read_into(item.file, tensor_start + start, out)
        else:
            data = self._load(row)
            out[:] = data[start : start + len(out)]

    def _read_object(self, item: Item, start: int, out: memoryview) -> None:
        if start == 0 and len(out):
            out[0] = LISTED_OBJECT if item.is_listed else PLAIN_OBJECT
            start, out = 1, out[1:]
        if len(out):
            self._store.read_into(item.file, item.offset_bytes + start - 1, out)

    def _locate(self, item: Item) -> int | None:
        """Return where in the file the bytes of a row-major tensor begin."""
        for nbytes in (HEAD_BYTES, LONG_HEAD_BYTES):
            head = self._head(item, nbytes)
            if head[:4] != b"PK\3\4":
                return self._locate_in_safetensors(item, head)
            begin = locate(head, length=item.nbytes, dtype=item.dtype, shape=item.shape)
            if begin is not None:
                return item.offset_bytes + begin
            # The head was the whole item, so a longer one has nothing more.
            if len(head) == item.nbytes:
                break
        return None

    def _head(self, item: Item, nbytes: int) -> bytes:
        head = bytearray(min(nbytes, item.nbytes))
        self._store.read_into(item.file, item.offset_bytes, memoryview(head))
        return bytes(head)

    def _locate_in_safetensors(self, item: Item, head: bytes) -> int | None:
        """Find a tensor in the safetensors file that DCP, if asked to, writes behind the objects of a file.

        The item's offset is then that of the safetensors file, and its length that of the tensor alone.

        Source: torch.distributed.checkpoint `FileSystemWriter(serialization_format=SAFETENSORS)`.
        """
        prefix = bytearray(8)
        self._store.read_into(item.file, item.offset_bytes, memoryview(prefix))
        nbytes = int.from_bytes(prefix, "little")
        if not 2 <= nbytes <= min(SAFETENSORS_HEAD_BYTES, self._store.size(item.file)):
            return None
        text = bytearray(nbytes)
        self._store.read_into(item.file, item.offset_bytes + 8, memoryview(text))
        try:
            header = json.loads(text)
            entry = header[item.name]
            offsets = json.loads(header["__metadata__"]["DCP_SHARDING_INFO"])[item.name]["saved_offsets"]
            begin, end = entry["data_offsets"]
            # A tensor of this name may be another chunk of the array: shape and offsets tell.
            fits = tuple(entry["shape"]) == item.shape and tuple(offsets) == item.offsets
        except (ValueError, KeyError, TypeError, RecursionError):
            return None
        expected = math.prod(item.shape) * DTYPES[item.dtype].itemsize
        if not fits or type(begin) is not int or begin < 0 or end != begin + expected:
            return None
        return item.offset_bytes + 8 + nbytes + begin

    def _load(self, row: int) -> memoryview:
        """Load an item that is not plainly a row-major tensor; return its bytes in row-major order."""
        with self._lock:  # one at a time: each takes memory for a whole item
            if row in self._loaded:
                self._loaded.move_to_end(row)
                return self._loaded[row]
            item = self._items[row]
            # Before memory is allocated: the length of an item comes from a file that may be damaged.
            self._check_inside(item, {})
            data = bytearray(item.nbytes)
            self._store.read_into(item.file, item.offset_bytes, memoryview(data))
            where = f"{self._store.location}: {self.describe(row)}"
            value = load_value(memoryview(data), where=where, allow_unsafe=self._allow_unsafe)
            self._loaded[row] = _row_major(value, item, where)
            while len(self._loaded) > KEPT_ITEMS:
                self._loaded.popitem(last=False)
            return self._loaded[row]

    def _check_inside(self, item: Item, sizes: dict[str, int]) -> None:
        if item.file not in sizes:
            try:
                sizes[item.file] = self._store.size(item.file)
            except StorageError as error:
                raise FormatError(
                    f"{self._store.location}/{item.file}, which holds {item.name!r}, cannot be read: {error}",
                    key=item.name,
                    path=item.file,
                ) from error
        if item.offset_bytes + item.nbytes > sizes[item.file]:
            end = f"{item.name!r} at {item.offset_bytes + item.nbytes}"
            raise damaged(
                f"it ends at {sizes[item.file]}, before the end of {end}",
                f"{self._store.location}/{item.file}",
                key=item.name,
            )


def _row_major(value: Any, item: Item, where: str) -> memoryview:
    """Return the bytes of a tensor in row-major order, after checking that it is the one of the item."""
    fits = isinstance(value, torch.Tensor) and value.layout == torch.strided and not value.is_quantized
    if not fits or tuple(value.shape) != item.shape or str(value.dtype) != f"torch.{item.dtype}":
        actual = f"{tuple(value.shape)} of {value.dtype}" if isinstance(value, torch.Tensor) else type(value)
        raise FormatError(
            f"{where}: it holds {actual}, not a dense tensor {item.shape} of torch.{item.dtype}. The "
            f"checkpoint is damaged.",
            key=item.name,
            path=item.file,
        )
    # With strides of 0 a few bytes are a tensor of any size, and contiguous() would allocate all of it.
    nbytes = math.prod(item.shape) * DTYPES[item.dtype].itemsize
    if nbytes > max(_REPEATED_BYTES, 2 * item.nbytes):
        raise FormatError(
            f"{where}: it repeats its {item.nbytes:,} bytes over {nbytes:,}. The checkpoint is damaged.",
            key=item.name,
            path=item.file,
        )
    plain = value.detach().resolve_conj().resolve_neg().contiguous()
    # One dim, as a tensor without dims cannot be viewed as bytes.
    return memoryview(plain.as_strided((plain.numel(),), (1,)).view(torch.uint8).numpy())
