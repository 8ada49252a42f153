"""Codecs of Python's own scalars, as far as JSON has no node for them.

Owns exactness: NaN payloads, signed zeros, integers of any size, bytes of any length.
"""

from __future__ import annotations

import io
import math
import re
import struct

from megackpt.codec.kinds import Kind, Reading, Writing, fields_of, integer_of, list_of, text_of
from megackpt.codec.tree import Json

_HEX = re.compile(r"-?0x[0-9a-f]+")


def _encode_int(value: int, writing: Writing) -> Json:
    # Hexadecimal: Python refuses decimal digits beyond a limit, and converting them takes quadratic time.
    return hex(value)


def _decode_int(tree: Json, reading: Reading) -> int:
    text = text_of(tree)
    if not _HEX.fullmatch(text):
        raise ValueError("a hexadecimal integer is expected")
    return int(text, 16)


def _encode_float(value: float, writing: Writing) -> Json:
    if math.isinf(value):
        return "inf" if value > 0 else "-inf"
    return struct.pack(">d", value).hex()


def _decode_float(tree: Json, reading: Reading) -> float:
    text = text_of(tree)
    if text in ("inf", "-inf"):
        return float(text)
    (value,) = struct.unpack(">d", bytes.fromhex(text)) if len(text) == 16 else (0.0,)
    if not math.isnan(value):
        raise ValueError("'inf', '-inf' or the 16 hexadecimal digits of a NaN are expected")
    return float(value)


def _encode_complex(value: complex, writing: Writing) -> Json:
    return [writing.child("real", value.real), writing.child("imag", value.imag)]


def _decode_complex(tree: Json, reading: Reading) -> complex:
    real, imag = list_of(tree, length=2)
    parts = reading.child("real", real), reading.child("imag", imag)
    if type(parts[0]) is not float or type(parts[1]) is not float:
        raise TypeError("two floats are expected")
    return complex(*parts)


def _encode_bytes(value: bytes | bytearray, writing: Writing) -> Json:
    return writing.octets(value)


def _decode_bytes(tree: Json, reading: Reading) -> bytes:
    return reading.octets(tree)


def _decode_bytearray(tree: Json, reading: Reading) -> bytearray:
    return bytearray(reading.octets(tree))


def _encode_stream(value: io.BytesIO, writing: Writing) -> Json:
    if value.closed:
        raise writing.refusal("The io.BytesIO is closed, so its content is lost. Save it before closing it.")
    return {"data": writing.octets(value.getvalue()), "position": value.tell()}


def _decode_stream(tree: Json, reading: Reading) -> io.BytesIO:
    data, position = fields_of(tree, "data", "position")
    stream = io.BytesIO(reading.octets(data))
    stream.seek(integer_of(position))
    return stream


KINDS = (
    Kind("$int", (int,), _encode_int, _decode_int),
    Kind("$float", (float,), _encode_float, _decode_float),
    Kind("$complex", (complex,), _encode_complex, _decode_complex),
    Kind("$bytes", (bytes,), _encode_bytes, _decode_bytes),
    Kind("$bytearray", (bytearray,), _encode_bytes, _decode_bytearray),
    Kind("$bytesio", (io.BytesIO,), _encode_stream, _decode_stream),
)
