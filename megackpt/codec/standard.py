"""Codecs of small value types of the standard library: times, paths, numbers, ranges.

Owns that they come back equal and of the same class. Time zones are fixed offsets only: what a zone's name
means depends on the tables of a machine.
"""

from __future__ import annotations

import os
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from fractions import Fraction
from pathlib import PosixPath, PurePath, PurePosixPath, PureWindowsPath, WindowsPath
from typing import Any
from uuid import UUID

from megackpt.codec.kinds import Kind, Reading, Writing, fields_of, integer_of, list_of, text_of
from megackpt.codec.tree import Json

_PATHS: dict[str, type[PurePath]] = {
    cls.__name__: cls for cls in (PurePosixPath, PureWindowsPath, PosixPath, WindowsPath)
}


def _encode_datetime(value: datetime | time, writing: Writing) -> Json:
    return {
        "iso": value.replace(tzinfo=None).isoformat(),
        "fold": value.fold,
        "tz": writing.child("tzinfo", value.tzinfo),
    }


def _decode_datetime(tree: Json, reading: Reading) -> datetime:
    iso, fold, tz = fields_of(tree, "iso", "fold", "tz")
    return datetime.fromisoformat(text_of(iso)).replace(fold=integer_of(fold), tzinfo=_zone(tz, reading))


def _decode_time(tree: Json, reading: Reading) -> time:
    iso, fold, tz = fields_of(tree, "iso", "fold", "tz")
    return time.fromisoformat(text_of(iso)).replace(fold=integer_of(fold), tzinfo=_zone(tz, reading))


def _zone(tree: Json, reading: Reading) -> timezone | None:
    zone = reading.child("tzinfo", tree)
    if zone is not None and type(zone) is not timezone:
        raise TypeError("a timezone is expected")
    return zone


def _encode_date(value: date, writing: Writing) -> Json:
    return value.isoformat()


def _decode_date(tree: Json, reading: Reading) -> date:
    return date.fromisoformat(text_of(tree))


def _encode_timedelta(value: timedelta, writing: Writing) -> Json:
    return [value.days, value.seconds, value.microseconds]


def _decode_timedelta(tree: Json, reading: Reading) -> timedelta:
    days, seconds, microseconds = map(integer_of, list_of(tree, length=3))
    return timedelta(days, seconds, microseconds)


def _encode_timezone(value: timezone, writing: Writing) -> Json:
    offset, *name = value.__getinitargs__()  # type: ignore[attr-defined]  # the only way to tell "no name"
    return {"offset": _encode_timedelta(offset, writing), "name": writing.child("name", *(name or [None]))}


def _decode_timezone(tree: Json, reading: Reading) -> timezone:
    offset, name = fields_of(tree, "offset", "name")
    delta = _decode_timedelta(offset, reading)
    return timezone(delta) if name is None else timezone(delta, text_of(name))


def _encode_path(value: PurePath, writing: Writing) -> Json:
    return {"class": type(value).__name__, "path": writing.child("path", str(value))}


def _decode_path(tree: Json, reading: Reading) -> PurePath:
    name, path = fields_of(tree, "class", "path")
    cls = _PATHS.get(text_of(name))
    if cls is None:
        raise ValueError(f"the class {name!r} is none of {', '.join(_PATHS)}")
    # The concrete class of another system cannot be made here; its pure one can.
    if cls is PosixPath and os.name == "nt":
        cls = PurePosixPath
    if cls is WindowsPath and os.name != "nt":
        cls = PureWindowsPath
    return cls(text_of(path))


def _encode_uuid(value: UUID, writing: Writing) -> Json:
    return str(value)


def _decode_uuid(tree: Json, reading: Reading) -> UUID:
    return UUID(text_of(tree))


def _encode_fraction(value: Fraction, writing: Writing) -> Json:
    return [writing.child("numerator", value.numerator), writing.child("denominator", value.denominator)]


def _decode_fraction(tree: Json, reading: Reading) -> Fraction:
    numerator, denominator = list_of(tree, length=2)
    return Fraction(_whole("numerator", numerator, reading), _whole("denominator", denominator, reading))


def _encode_decimal(value: Decimal, writing: Writing) -> Json:
    return str(value)


def _decode_decimal(tree: Json, reading: Reading) -> Decimal:
    return Decimal(text_of(tree))


def _encode_range(value: range | slice, writing: Writing) -> Json:
    return [writing.child(name, getattr(value, name)) for name in ("start", "stop", "step")]


def _decode_range(tree: Json, reading: Reading) -> range:
    start, stop, step = list_of(tree, length=3)
    return range(
        _whole("start", start, reading), _whole("stop", stop, reading), _whole("step", step, reading)
    )


def _decode_slice(tree: Json, reading: Reading) -> slice:
    start, stop, step = list_of(tree, length=3)
    return slice(reading.child("start", start), reading.child("stop", stop), reading.child("step", step))


def _whole(step: str, tree: Json, reading: Reading) -> int:
    value: Any = reading.child(step, tree)
    if type(value) is not int:
        raise TypeError("an integer is expected")
    return value


KINDS = (
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
