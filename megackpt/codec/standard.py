"""Codecs of small values of Python and its standard library: numbers, bytes, times, paths, ranges.

They load equal and of the same class: NaN payloads, signed zeros, integers of any size and bytes of any
length are exact. Time zones are fixed offsets only: what a zone's name means depends on the tables of a
machine.
"""

from __future__ import annotations

import io
import math
import os
import re
import struct
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from fractions import Fraction
from pathlib import PosixPath, PurePath, PurePosixPath, PureWindowsPath, WindowsPath
from typing import Any
from uuid import UUID

from megackpt.codec.kinds import Kind, ValueDecoder, ValueEncoder, fields_of, integer_of, list_of, text_of
from megackpt.codec.tree import Json

_HEX = re.compile(r"-?0x[0-9a-f]+")
_PATHS: dict[str, type[PurePath]] = {
    cls.__name__: cls for cls in (PurePosixPath, PureWindowsPath, PosixPath, WindowsPath)
}


def _encode_int(value: int, encoder: ValueEncoder) -> Json:
    # Hexadecimal: Python rejects more than a limited number of decimal digits, as they take quadratic time.
    return hex(value)


def _decode_int(tree: Json, decoder: ValueDecoder) -> int:
    text = text_of(tree)
    if not _HEX.fullmatch(text):
        raise ValueError("a hexadecimal integer is expected")
    return int(text, 16)


def _encode_float(value: float, encoder: ValueEncoder) -> Json:
    if math.isinf(value):
        return "inf" if value > 0 else "-inf"
    return struct.pack(">d", value).hex()


def _decode_float(tree: Json, decoder: ValueDecoder) -> float:
    text = text_of(tree)
    if text in ("inf", "-inf"):
        return float(text)
    (value,) = struct.unpack(">d", bytes.fromhex(text)) if len(text) == 16 else (0.0,)
    if not math.isnan(value):
        raise ValueError("'inf', '-inf' or the 16 hexadecimal digits of a NaN are expected")
    return float(value)


def _encode_complex(value: complex, encoder: ValueEncoder) -> Json:
    return [encoder.child("real", value.real), encoder.child("imag", value.imag)]


def _decode_complex(tree: Json, decoder: ValueDecoder) -> complex:
    real, imag = list_of(tree, length=2)
    parts = decoder.child("real", real), decoder.child("imag", imag)
    if type(parts[0]) is not float or type(parts[1]) is not float:
        raise TypeError("two floats are expected")
    return complex(*parts)


def _encode_bytes(value: bytes | bytearray, encoder: ValueEncoder) -> Json:
    return encoder.binary(value)


def _decode_bytes(tree: Json, decoder: ValueDecoder) -> bytes:
    return decoder.binary(tree)


def _decode_bytearray(tree: Json, decoder: ValueDecoder) -> bytearray:
    return bytearray(decoder.binary(tree))


def _encode_stream(value: io.BytesIO, encoder: ValueEncoder) -> Json:
    if value.closed:
        raise encoder.error("The io.BytesIO is closed, so its content is lost. Save it before closing it.")
    return {"data": encoder.binary(value.getvalue()), "position": value.tell()}


def _decode_stream(tree: Json, decoder: ValueDecoder) -> io.BytesIO:
    data, position = fields_of(tree, "data", "position")
    stream = io.BytesIO(decoder.binary(data))
    stream.seek(integer_of(position))
    return stream


def _encode_datetime(value: datetime | time, encoder: ValueEncoder) -> Json:
    return {
        "iso": value.replace(tzinfo=None).isoformat(),
        "fold": value.fold,
        "tz": encoder.child("tzinfo", value.tzinfo),
    }


def _decode_datetime(tree: Json, decoder: ValueDecoder) -> datetime:
    iso, fold, tz = fields_of(tree, "iso", "fold", "tz")
    return datetime.fromisoformat(text_of(iso)).replace(fold=integer_of(fold), tzinfo=_zone(tz, decoder))


def _decode_time(tree: Json, decoder: ValueDecoder) -> time:
    iso, fold, tz = fields_of(tree, "iso", "fold", "tz")
    return time.fromisoformat(text_of(iso)).replace(fold=integer_of(fold), tzinfo=_zone(tz, decoder))


def _zone(tree: Json, decoder: ValueDecoder) -> timezone | None:
    zone = decoder.child("tzinfo", tree)
    if zone is not None and type(zone) is not timezone:
        raise TypeError("a timezone is expected")
    return zone


def _encode_date(value: date, encoder: ValueEncoder) -> Json:
    return value.isoformat()


def _decode_date(tree: Json, decoder: ValueDecoder) -> date:
    return date.fromisoformat(text_of(tree))


def _encode_timedelta(value: timedelta, encoder: ValueEncoder) -> Json:
    return [value.days, value.seconds, value.microseconds]


def _decode_timedelta(tree: Json, decoder: ValueDecoder) -> timedelta:
    days, seconds, microseconds = map(integer_of, list_of(tree, length=3))
    return timedelta(days, seconds, microseconds)


def _encode_timezone(value: timezone, encoder: ValueEncoder) -> Json:
    offset, *name = value.__getinitargs__()  # type: ignore[attr-defined]  # the only way to see that it has no name
    return {"offset": _encode_timedelta(offset, encoder), "name": encoder.child("name", *(name or [None]))}


def _decode_timezone(tree: Json, decoder: ValueDecoder) -> timezone:
    offset, name = fields_of(tree, "offset", "name")
    delta = _decode_timedelta(offset, decoder)
    return timezone(delta) if name is None else timezone(delta, text_of(name))


def _encode_path(value: PurePath, encoder: ValueEncoder) -> Json:
    return {"class": type(value).__name__, "path": encoder.child("path", str(value))}


def _decode_path(tree: Json, decoder: ValueDecoder) -> PurePath:
    name, path = fields_of(tree, "class", "path")
    cls = _PATHS.get(text_of(name))
    if cls is None:
        raise ValueError(f"the class {name!r} is not one of {', '.join(_PATHS)}")
    # The concrete class of another system cannot be made on this one; its pure class can.
    if cls is PosixPath and os.name == "nt":
        cls = PurePosixPath
    if cls is WindowsPath and os.name != "nt":
        cls = PureWindowsPath
    return cls(text_of(path))


def _encode_uuid(value: UUID, encoder: ValueEncoder) -> Json:
    return str(value)


def _decode_uuid(tree: Json, decoder: ValueDecoder) -> UUID:
    return UUID(text_of(tree))


def _encode_fraction(value: Fraction, encoder: ValueEncoder) -> Json:
    return [encoder.child("numerator", value.numerator), encoder.child("denominator", value.denominator)]


def _decode_fraction(tree: Json, decoder: ValueDecoder) -> Fraction:
    numerator, denominator = list_of(tree, length=2)
    return Fraction(
        _decode_integer("numerator", numerator, decoder), _decode_integer("denominator", denominator, decoder)
    )


def _encode_decimal(value: Decimal, encoder: ValueEncoder) -> Json:
    return str(value)


def _decode_decimal(tree: Json, decoder: ValueDecoder) -> Decimal:
    return Decimal(text_of(tree))


def _encode_range(value: range | slice, encoder: ValueEncoder) -> Json:
    return [encoder.child(name, getattr(value, name)) for name in ("start", "stop", "step")]


def _decode_range(tree: Json, decoder: ValueDecoder) -> range:
    start, stop, step = list_of(tree, length=3)
    return range(
        _decode_integer("start", start, decoder),
        _decode_integer("stop", stop, decoder),
        _decode_integer("step", step, decoder),
    )


def _decode_slice(tree: Json, decoder: ValueDecoder) -> slice:
    start, stop, step = list_of(tree, length=3)
    return slice(decoder.child("start", start), decoder.child("stop", stop), decoder.child("step", step))


def _decode_integer(step: str, tree: Json, decoder: ValueDecoder) -> int:
    value: Any = decoder.child(step, tree)
    if type(value) is not int:
        raise TypeError("an integer is expected")
    return value


KINDS = (
    Kind("$int", (int,), _encode_int, _decode_int),
    Kind("$float", (float,), _encode_float, _decode_float),
    Kind("$complex", (complex,), _encode_complex, _decode_complex),
    Kind("$bytes", (bytes,), _encode_bytes, _decode_bytes),
    Kind("$bytearray", (bytearray,), _encode_bytes, _decode_bytearray),
    Kind("$bytesio", (io.BytesIO,), _encode_stream, _decode_stream),
    Kind("$datetime", (datetime,), _encode_datetime, _decode_datetime),
    Kind("$time", (time,), _encode_datetime, _decode_time),
    Kind("$date", (date,), _encode_date, _decode_date),
    Kind("$timedelta", (timedelta,), _encode_timedelta, _decode_timedelta),
    Kind("$timezone", (timezone,), _encode_timezone, _decode_timezone),
    Kind("$path", tuple(_PATHS.values()), _encode_path, _decode_path),
    Kind("$uuid", (UUID,), _encode_uuid, _decode_uuid),
    Kind("$fraction", (Fraction,), _encode_fraction, _decode_fraction),
    Kind("$decimal", (Decimal,), _encode_decimal, _decode_decimal),
    Kind("$range", (range,), _encode_range, _decode_range),
    Kind("$slice", (slice,), _encode_range, _decode_slice),
)
