"""Pickles written by hand, opcode by opcode, and the zip files that torch.save puts them in.

Writes them; the attacks decide what is wrong with them.
"""

from __future__ import annotations

import io
import struct
import zipfile
from collections.abc import Iterable


def named(module: str, name: str) -> bytes:
    """Opcodes that look up a name in a module."""
    return f"c{module}\n{name}\n".encode()


def text(value: str) -> bytes:
    return b"X" + struct.pack("<I", len(value.encode())) + value.encode()


def binary(value: bytes) -> bytes:
    return b"B" + struct.pack("<I", len(value)) + value


def call(function: bytes, *arguments: bytes | str) -> bytes:
    """Opcodes that call a function; arguments are opcodes, or texts."""
    return function + b"(" + b"".join(text(a) if isinstance(a, str) else a for a in arguments) + b"tR"


def pickled(*opcodes: bytes) -> bytes:
    """A pickle of protocol 2."""
    return b"\x80\x02" + b"".join(opcodes) + b"."


def calls(module: str, name: str, *arguments: bytes | str) -> bytes:
    """A pickle that calls a function of a module."""
    return pickled(call(named(module, name), *arguments))


def zipped(data: bytes, records: dict[str, bytes] | None = None) -> bytes:
    """What torch.save would write of a pickle and some records."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_STORED) as archive:
        archive.writestr("archive/data.pkl", data)
        archive.writestr("archive/byteorder", "little")
        for name, record in (records or {}).items():
            archive.writestr(f"archive/{name}", record)
        archive.writestr("archive/version", "3\n")
    return out.getvalue()


def storage(kind: str, number: str, length: bytes) -> bytes:
    return b"(" + text("storage") + named("torch", kind) + text(number) + text("cpu") + length + b"tQ"


def rebuilt(stored: bytes, offset: bytes, numbers: bytes) -> bytes:
    """Opcodes of a tensor over a storage; numbers are the opcodes of its shape and strides."""
    hooks = named("collections", "OrderedDict") + b")R"
    return call(named("torch._utils", "_rebuild_tensor_v2"), stored, offset, numbers, b"\x89", hooks)


def tensor(
    *,
    numel: int = 4,
    shape: tuple[int, ...] = (4,),
    stride: tuple[int, ...] = (1,),
    offset: int = 0,
    number: str = "0",
) -> bytes:
    """Opcodes of a tensor of float32 that makes these claims; without any, of four numbers."""
    numbers = b"".join(b"(" + b"".join(map(number_of, values)) + b"t" for values in (shape, stride))
    return rebuilt(storage("FloatStorage", number, number_of(numel)), number_of(offset), numbers)


def number_of(number: int) -> bytes:
    return b"\x8a\x08" + number.to_bytes(8, "little", signed=True)


def pair_of(pair: tuple[int, int]) -> bytes:
    return number_of(pair[0]) + number_of(pair[1]) + b"\x86"


def dict_of(keys: Iterable[bytes]) -> bytes:
    """A pickle of a dict with these keys."""
    return pickled(b"}(" + b"".join(key + b"K\x00" for key in keys) + b"u")


def set_of(elements: Iterable[bytes]) -> bytes:
    return pickled(named("builtins", "set") + b"](" + b"".join(elements) + b"e\x85R")


def ordered_of(keys: Iterable[bytes]) -> bytes:
    pairs = b"".join(key + b"K\x00\x86" for key in keys)
    return pickled(named("collections", "OrderedDict") + b"](" + pairs + b"e\x85R")
