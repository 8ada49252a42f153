"""One value as one self-contained blob of bytes: a valid safetensors file.

The JSON tree is text under "tree" in the file's `__metadata__`. The tensors are named "0", "1", ... by
position and follow each other in this order without gaps. A reader checks all of it.

Source: the safetensors format, https://github.com/huggingface/safetensors#format.
"""

from __future__ import annotations

import json
import math
import struct
from typing import TypeGuard

import torch

from megackpt.codec.arrays import MAX_DIMS, PORTABLE_DTYPES, bytes_of, tensor_of_bytes
from megackpt.codec.decoder import decode
from megackpt.codec.encoder import encode
from megackpt.codec.kinds import format_path
from megackpt.codec.tree import DAMAGED, EncodedValue, Json, dump_tree, load_tree
from megackpt.errors import FormatError, UnserializableError

FORMAT = "megackpt.codec"
VERSION = "1"

_MAX_HEADER_BYTES = 100_000_000  # no safetensors reader takes more
_LENGTH = struct.Struct("<Q")  # of the header, at the beginning of the file
_ALIGNMENT = 8  # of the data that follows the header
_DTYPES = {name: dtype for dtype, name in PORTABLE_DTYPES.items()}


def pack(value: object, *, path: str = "") -> bytes:
    """Return a value as a blob, from which `unpack` makes an equal value. Local.

    Args:
        value: anything that `encode` takes.
        path: where the value is inside of a larger one, for errors.

    Raises:
        UnserializableError: a part of it has no codec, or all but tensors and bytes exceeds 100 MB.
    """
    encoded = encode(value, path=path)
    header: dict[str, object] = {
        "__metadata__": {"format": FORMAT, "version": VERSION, "tree": dump_tree(encoded.tree)}
    }
    end = 0
    for position, tensor in enumerate(encoded.tensors):
        start, end = end, end + tensor.nbytes
        dtype = PORTABLE_DTYPES[tensor.dtype]
        header[str(position)] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    if len(text) > _MAX_HEADER_BYTES:
        where = format_path(path, ())
        raise UnserializableError(
            f"{where}: everything but tensors and bytes takes {len(text):,} bytes, more than the "
            f"{_MAX_HEADER_BYTES:,} that fit. Keep large data in tensors, arrays or bytes.",
            path=where,
        )
    return b"".join([_LENGTH.pack(len(text)), text, *map(bytes_of, encoded.tensors)])


def unpack(blob: bytes | memoryview, *, where: str) -> object:
    """Return the value of a blob; its tensors are copies, on the CPU. Local.

    Safe for any bytes: the memory that it allocates is bounded by their number.

    Args:
        blob: what `pack` returned.
        where: what errors call the file or object.

    Raises:
        FormatError: the bytes are not a blob of `pack`.
        UnknownClassError: the blob names a codec that is not registered.
    """
    return decode(_read(memoryview(blob).cast("B"), where), where=where)


def _read(blob: memoryview, where: str) -> EncodedValue:
    header, data = _split(blob, where)
    metadata = header.pop("__metadata__", None)
    if type(metadata) is not dict or metadata.get("format") != FORMAT:
        raise _failure(where, f"its metadata does not say format {FORMAT!r}")
    if metadata.get("version") != VERSION:
        raise FormatError(
            f"{where}: written in version {metadata.get('version')!r} of the encoding, but this megackpt "
            f"reads {VERSION!r}. Use a newer megackpt.",
            path=where,
        )
    text = metadata.get("tree")
    if type(text) is not str:
        raise _failure(where, "its metadata has no tree")
    return EncodedValue(load_tree(text, where=where), _tensors(header, data, where))


def _split(blob: memoryview, where: str) -> tuple[dict[str, Json], memoryview]:
    if len(blob) < _LENGTH.size:
        raise _failure(where, f"{len(blob)} bytes are too few for a safetensors file")
    (length,) = _LENGTH.unpack(blob[: _LENGTH.size])
    rest = blob[_LENGTH.size :]
    if length > min(len(rest), _MAX_HEADER_BYTES):
        raise _failure(where, f"its header claims {length:,} bytes, but only {len(rest):,} follow")
    try:
        text = str(rest[:length], "utf-8")
    except UnicodeDecodeError as error:
        raise _failure(where, "its header is not UTF-8 text") from error
    header = load_tree(text, where=where)
    if type(header) is not dict:
        raise _failure(where, "its header is not a JSON object")
    return header, rest[length:]


def _tensors(header: dict[str, Json], data: memoryview, where: str) -> tuple[torch.Tensor, ...]:
    tensors = []
    offset = 0
    for position in range(len(header)):
        dtype, shape, start, end = _entry(header.get(str(position)), position, where)
        nbytes = math.prod(shape) * dtype.itemsize
        if start != offset or end - start != nbytes or end > len(data):
            raise _failure(
                where,
                f"tensor {position} of {nbytes:,} bytes ({dtype}, shape {shape[:64]}) claims bytes "
                f"[{start:,}:{end:,}), but [{offset:,}:{offset + nbytes:,}) of {len(data):,} are expected",
            )
        tensors.append(tensor_of_bytes(data[start:end]).view(dtype).reshape(shape))
        offset = end
    if offset != len(data):
        raise _failure(where, f"{len(data) - offset:,} bytes at its end belong to no tensor")
    return tuple(tensors)


def _entry(entry: Json, position: int, where: str) -> tuple[torch.dtype, list[int], int, int]:
    fields = entry if type(entry) is dict and set(entry) == {"dtype", "shape", "data_offsets"} else None
    if fields is None:
        raise _failure(
            where, f"its header does not describe tensor {position} with dtype, shape and data_offsets"
        )
    name, shape, offsets = fields["dtype"], fields["shape"], fields["data_offsets"]
    if type(name) is not str or name not in _DTYPES:
        raise _failure(where, f"tensor {position} has the unknown dtype {name!r}")
    if not _are_sizes(shape) or len(shape) > MAX_DIMS:
        raise _failure(where, f"tensor {position} has the shape {str(shape)[:80]}")
    if not _are_sizes(offsets) or len(offsets) != 2:
        raise _failure(where, f"tensor {position} has the data_offsets {str(offsets)[:80]}")
    return _DTYPES[name], shape, offsets[0], offsets[1]


def _are_sizes(tree: Json) -> TypeGuard[list[int]]:
    return type(tree) is list and all(type(size) is int and 0 <= size < 1 << 63 for size in tree)


def _failure(where: str, reason: str) -> FormatError:
    return FormatError(f"{where}: {reason}. {DAMAGED}", path=where)
