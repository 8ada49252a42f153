"""One tensor of a checkpoint as DCP stores it: a zip file, as `torch.save` writes it.

This module has the bytes around a tensor's own bytes. When an item is written, they are made from dtype and
shape alone, so that a tensor of any size is streamed from its memory, and the length of the item is known
before. When an item is read, the position of the tensor's bytes is found in the first bytes of the item. If
the item is not plainly a row-major tensor, `locate` returns None, and torch reads it.

Source: the zip format, PKWARE APPNOTE 6.3.9 sections 4.3 and 4.5.3; the records of torch.save,
torch/serialization.py `_save`.
"""

from __future__ import annotations

import io
import math
import pickle
import struct
import sys
import zlib
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from megackpt.entities.describe import torch_dtype
from megackpt.formats.pickle_limits import check_opcodes
from megackpt.plans.geometry import row_major_strides
from megackpt.plans.metadata import DTYPES

ALIGNMENT = 64
"""The tensor's bytes begin at a multiple of this in the item, as torch's do."""

HEAD_BYTES = 1024
"""More than torch writes before the tensor's bytes."""

ZIP64_FROM = 0xFFFFFFFF
"""The least size or position that does not fit into a 32-bit field of a zip file."""

_SEE_ZIP64 = 0xFFFFFFFF

_LOCAL = struct.Struct("<4sHHHHHIIIHH")
_CENTRAL = struct.Struct("<4sHHHHHHIIIHHHHHII")
_STREAMED = 0x0008  # flag: checksum and sizes follow the record
_UTF8 = 0x0800
_FOLDER = "archive"  # torch.save uses this name if the stream has none

# The dtypes with a storage class of their own; torch saves others through the untyped storage.
_STORAGE_CLASSES = {
    "float64": "DoubleStorage",
    "float32": "FloatStorage",
    "float16": "HalfStorage",
    "bfloat16": "BFloat16Storage",
    "int64": "LongStorage",
    "int32": "IntStorage",
    "int16": "ShortStorage",
    "int8": "CharStorage",
    "uint8": "ByteStorage",
    "bool": "BoolStorage",
    "complex64": "ComplexFloatStorage",
    "complex128": "ComplexDoubleStorage",
}
_DTYPE_OF_CLASS = {name: dtype for dtype, name in _STORAGE_CLASSES.items()}


@dataclass(frozen=True, slots=True)
class Frame:
    """The bytes around those of one tensor.

    Attributes:
        head: the bytes before the tensor's.
        nbytes: number of bytes of the tensor.
        length: length of the whole item.
        records: the records of the zip file.
    """

    head: bytes
    nbytes: int
    length: int
    records: tuple[_Record, ...]

    def tail(self, crc: int) -> bytes:
        """Return the bytes after the tensor's, which have the CRC-32 crc."""
        return _tail(self.records, self.nbytes, len(self.head), crc)


@dataclass(frozen=True, slots=True)
class _Record:
    """A small record; or the tensor's own, whose content is None."""

    name: bytes
    content: bytes | None
    offset: int


def frame_of(dtype: str, shape: tuple[int, ...]) -> Frame:
    """Return the bytes that torch.save writes around a row-major tensor.

    dtype is a name of `DTYPES`.
    """
    nbytes = math.prod(shape) * DTYPES[dtype].itemsize
    # The description comes before the tensor's bytes: `locate` finds both in the first bytes of the item.
    contents = {"data.pkl": _pickled(dtype, shape), "byteorder": sys.byteorder.encode()}
    head = b""
    records = []
    for name, content in contents.items():
        path = f"{_FOLDER}/{name}".encode()
        records.append(_Record(path, content, len(head)))
        head += _local(path, content, b"") + content
    path = f"{_FOLDER}/data/0".encode()
    records.append(_Record(path, None, len(head)))
    extra = _zip64_extra(0, 0) if nbytes >= ZIP64_FROM else b""
    # 4 bytes are the head of the extra field that fills the gap.
    room = -(len(head) + _LOCAL.size + len(path) + len(extra) + 4) % ALIGNMENT
    # An extra field that nobody reads ("FB", as torch's) fills the gap up to the boundary.
    extra += struct.pack("<2sH", b"FB", room) + b"Z" * room
    head += _local(path, None, extra, is_zip64=nbytes >= ZIP64_FROM)
    frozen = tuple(records)
    return Frame(head, nbytes, len(head) + nbytes + len(_tail(frozen, nbytes, len(head), 0)), frozen)


def stream(frame: Frame, parts: Iterable[memoryview]) -> Iterator[memoryview]:
    """Yield a whole item, given the tensor's bytes in row-major order."""
    yield memoryview(frame.head)
    crc = 0
    for part in parts:
        crc = zlib.crc32(part, crc)
        yield part
    yield memoryview(frame.tail(crc))


def _local(name: bytes, content: bytes | None, extra: bytes, *, is_zip64: bool = False) -> bytes:
    crc = size = 0
    flags = _UTF8 | _STREAMED
    if content is not None:
        crc, size, flags = zlib.crc32(content), len(content), _UTF8
    elif is_zip64:
        size = _SEE_ZIP64
    # The version of the zip format that a reader needs: 4.5 for 64-bit sizes, else 2.0. The date, 0x21, is
    # the first that the format has, 1980-01-01, so that equal tensors give equal items.
    version = 45 if is_zip64 else 20
    return (
        _LOCAL.pack(b"PK\3\4", version, flags, 0, 0, 0x21, crc, size, size, len(name), len(extra))
        + name
        + extra
    )


def _zip64_extra(*values: int) -> bytes:
    return struct.pack(f"<HH{len(values)}Q", 1, 8 * len(values), *values)


def _tail(records: tuple[_Record, ...], nbytes: int, data_start: int, crc: int) -> bytes:
    """Return sizes and checksum of the tensor's bytes, the version record, the directory and its end."""
    # Behind a record whose local header has no sizes: signature, checksum, and the size twice, as it is
    # stored and as it is without compression.
    sizes = "<4sIQQ" if nbytes >= ZIP64_FROM else "<4sIII"
    tail = struct.pack(sizes, b"PK\7\10", crc, nbytes, nbytes)
    version = _Record(f"{_FOLDER}/version".encode(), b"3\n", data_start + nbytes + len(tail))
    tail += _local(version.name, version.content, b"") + b"3\n"
    start = data_start + nbytes + len(tail)
    directory = b"".join(_central(r, nbytes, crc) for r in (*records, version))
    tail += directory
    count = len(records) + 1
    # The position of the directory needs 64 bits, so a 64-bit end record has it, and a locator says where
    # that record is.
    if start >= ZIP64_FROM:
        end = start + len(directory)
        tail += struct.pack("<4sQHHIIQQQQ", b"PK\6\6", 44, 45, 45, 0, 0, count, count, len(directory), start)
        tail += struct.pack("<4sIQI", b"PK\6\7", 0, end, 1)
    return tail + struct.pack(
        "<4sHHHHIIH",
        b"PK\5\6",
        0,
        0,
        count,
        count,
        len(directory),
        start if start < ZIP64_FROM else _SEE_ZIP64,
        0,
    )


def _central(record: _Record, nbytes: int, crc: int) -> bytes:
    flags, size = _UTF8 | _STREAMED, nbytes
    if record.content is not None:
        flags, size, crc = _UTF8, len(record.content), zlib.crc32(record.content)
    # In the order of the format, and only those whose 32-bit field says that the value is elsewhere.
    large = [v for v in (size, size, record.offset) if v >= ZIP64_FROM]
    extra = _zip64_extra(*large) if large else b""
    shown = size if size < ZIP64_FROM else _SEE_ZIP64
    version = 45 if large else 20
    fixed = _CENTRAL.pack(
        b"PK\1\2", version, version, flags, 0, 0, 0x21, crc, shown, shown,
        len(record.name), len(extra), 0, 0, 0, 0, record.offset if record.offset < ZIP64_FROM else _SEE_ZIP64,
    )  # fmt: skip
    return fixed + record.name + extra


class _Placeholder:
    """Replaces the storage while a tensor's description is pickled."""

    def __init__(self, storage_class: Any, numel: int) -> None:
        self.persistent_id = ("storage", storage_class, "0", "cpu", numel)


class _PickledTensor:
    """Is pickled as a tensor is."""

    def __init__(self, *reduced: Any) -> None:
        self._reduced = reduced

    def __reduce__(self) -> Any:
        return self._reduced


class _Pickler(pickle.Pickler):
    def persistent_id(self, obj: Any) -> Any:
        return obj.persistent_id if isinstance(obj, _Placeholder) else None


def _pickled(dtype: str, shape: tuple[int, ...]) -> bytes:
    """Return the pickle of a tensor's description, as torch.save writes it: the storage is a number."""
    numel = math.prod(shape)
    arguments: list[Any] = [0, shape, row_major_strides(shape), False, OrderedDict()]
    if dtype in _STORAGE_CLASSES:
        rebuild: Any = torch._utils._rebuild_tensor_v2
        storage = _Placeholder(getattr(torch, _STORAGE_CLASSES[dtype]), numel)
    else:
        rebuild = torch._utils._rebuild_tensor_v3
        storage = _Placeholder(torch.storage.UntypedStorage, numel * DTYPES[dtype].itemsize)
        arguments.append(torch_dtype(dtype))
    out = io.BytesIO()
    # Protocol 2, as torch.save uses, so that equal tensors give equal items in both.
    _Pickler(out, 2).dump(_PickledTensor(rebuild, (storage, *arguments)))
    return out.getvalue()


def locate(head: bytes, *, length: int, dtype: str, shape: tuple[int, ...]) -> int | None:
    """Return where the bytes of a row-major tensor begin in an item; head is the beginning of the item.

    None if head is too short to say, or the item is not a plain row-major tensor of this dtype and shape in
    this machine's byte order. length is that of the item.
    """
    nbytes = math.prod(shape) * DTYPES[dtype].itemsize
    position = 0
    tensor: _TensorDescription | None = None
    while position + _LOCAL.size <= len(head):
        record = _record_at(head, position)
        if record is None:
            return None
        name, start, size = record
        inner = name.partition(b"/")[2]
        if inner == b"data/0":
            if tensor is None or not _is_filled(head, position, start) or not tensor.is_plain(dtype, shape):
                return None
            first = start + tensor.offset * DTYPES[dtype].itemsize
            return first if first + nbytes <= length else None
        size = _size_of(head, start) if size is None else size
        if size is None or start + size > len(head):
            return None
        content = head[start : start + size]
        if inner == b"byteorder" and content != sys.byteorder.encode():
            return None
        if inner == b"data.pkl":
            tensor = _decode_description(content)
        # Sizes behind a record take 16 bytes: `_size_of` finds no 64-bit ones, which no small record needs.
        position = start + size + (16 if _is_streamed(head, position) else 0)
    return None


def _is_filled(head: bytes, position: int, start: int) -> bool:
    """Return whether the gap before a record's content is as torch fills it: other bytes have come in."""
    extra = head[position + _LOCAL.size : start]
    field, filled = extra.rstrip(b"Z")[-4:], len(extra) - len(extra.rstrip(b"Z"))
    return not filled or field == struct.pack("<2sH", b"FB", filled)


def _is_streamed(head: bytes, position: int) -> bool:
    return bool(_LOCAL.unpack_from(head, position)[2] & _STREAMED)


def _record_at(head: bytes, position: int) -> tuple[bytes, int, int | None] | None:
    """Return name, start and size of a record's content; size None if it follows the content."""
    magic, _, flags, method, _, _, _, packed, size, name, extra = _LOCAL.unpack_from(head, position)
    start = position + _LOCAL.size + name + extra
    if magic != b"PK\3\4" or method or flags & ~(_STREAMED | _UTF8) or packed != size or start > len(head):
        return None
    text = head[position + _LOCAL.size : position + _LOCAL.size + name]
    return text, start, None if flags & _STREAMED else size


def _size_of(head: bytes, start: int) -> int | None:
    """Return the size of a small record's content that its size and checksum follow; None if not found."""
    # The content may contain the signature by chance, so size and checksum decide.
    end = head.find(b"PK\7\10", start)
    while end >= 0 and end + 16 <= len(head):
        crc, packed, size = map(int, struct.unpack_from("<III", head, end + 4))
        if packed == size == end - start and crc == zlib.crc32(head[start:end]):
            return size
        end = head.find(b"PK\7\10", end + 1)
    return None


@dataclass(frozen=True, slots=True)
class _TensorDescription:
    """A tensor's dtype, the number of elements of its storage, and its part of them."""

    dtype: str | None
    numel: int
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    def is_plain(self, dtype: str, shape: tuple[int, ...]) -> bool:
        if self.dtype != dtype or self.shape != shape or len(self.stride) != len(shape):
            return False
        if not 0 <= self.offset <= self.numel - math.prod(shape):
            return False
        # The stride of an axis with one element is never used, and that of an empty tensor neither.
        expected = row_major_strides(shape)
        used = (s == e for s, e, n in zip(self.stride, expected, shape, strict=True) if n != 1)
        return math.prod(shape) == 0 or all(used)


def _decode_description(content: bytes) -> _TensorDescription | None:
    """Return a tensor's description; None if it is not an ordinary one."""
    try:
        check_opcodes(content)
        tensor = _Unpickler(io.BytesIO(content)).load()
    except Exception:  # noqa: BLE001 - torch reads items that are not understood here
        return None
    return tensor if isinstance(tensor, _TensorDescription) else None


class _Unpickler(pickle.Unpickler):
    """Decodes a tensor's description into plain values; classes of other objects are errors."""

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch._utils" and name in ("_rebuild_tensor_v2", "_rebuild_tensor_v3"):
            return _rebuild
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        if module == "torch" and name in _DTYPE_OF_CLASS:
            return _DTYPE_OF_CLASS[name]
        if (module, name) == ("torch.storage", "UntypedStorage"):
            return "untyped"
        if module == "torch" and name in DTYPES:
            return name
        raise pickle.UnpicklingError(f"{module}.{name}")

    def persistent_load(self, pid: Any) -> Any:
        kind, dtype, number, _, numel = pid
        if kind != "storage" or number != "0" or not isinstance(numel, int):
            raise pickle.UnpicklingError("not a storage")
        return dtype, numel


def _rebuild(
    storage: tuple[str, int], offset: int, size: Any, stride: Any, requires_grad: Any, hooks: Any, *rest: Any
) -> _TensorDescription | None:
    dtype, numel = storage
    if dtype == "untyped":
        if not rest or rest[0] not in DTYPES:
            return None
        dtype, rest = rest[0], rest[1:]
        # An untyped storage counts bytes.
        numel //= DTYPES[dtype].itemsize
    numbers = (numel, offset, *size, *stride)
    if hooks or any(r is not None for r in rest) or not all(type(n) is int for n in numbers):
        return None  # hooks, or a lazy conjugate or negative
    return _TensorDescription(dtype, numel, offset, tuple(size), tuple(stride))
