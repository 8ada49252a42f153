"""Registers codecs of users' classes. Safe for many threads."""

from __future__ import annotations

import dataclasses
import enum
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from megackpt.codec.encoder import PLAIN_CLASSES
from megackpt.codec.kinds import KIND_OF_CLASS, REGISTRY, RegisteredCodec
from megackpt.codec.members import is_named_tuple
from megackpt.errors import DeclarationError

_T = TypeVar("_T")

_lock = threading.Lock()


def register_codec(
    cls: type[_T],
    name: str,
    encode: Callable[[_T], Any] | None = None,
    decode: Callable[[Any], _T] | None = None,
) -> None:
    """Register how values of a class are saved and loaded. Call it in every process before both. Local.

    Both functions can be left out for enums (saved by name, flags by value), dataclasses whose fields are all
    arguments of `__init__` (by fields), and named tuples (by items).

    Args:
        cls: exactly this class, not its subclasses.
        name: what files call the codec; it must be unique and never change.
        encode: returns what is saved instead of a value: anything that has a codec.
        decode: returns the value for what `encode` returned. A file may contain anything, so it must check
            its argument as far as it relies on it.

    Raises:
        DeclarationError: the class or the name is taken, or a function is missing.

    >>> class Schedule:
    ...     def __init__(self, warmup):
    ...         self.warmup = warmup
    >>> register_codec(Schedule, "docs.Schedule", lambda schedule: schedule.warmup, Schedule)
    """
    codec = _codec_of(cls, name, encode, decode)
    if cls in KIND_OF_CLASS or cls in PLAIN_CLASSES:
        raise DeclarationError(
            f"{cls.__name__} has a codec already, so {name!r} cannot be its codec. Register a class of your "
            f"own."
        )
    with _lock:
        _check_name(codec)
        REGISTRY.add(codec)


def _codec_of(
    cls: type[_T],
    name: str,
    encode: Callable[[_T], Any] | None,
    decode: Callable[[Any], _T] | None,
) -> RegisteredCodec:
    if not isinstance(cls, type):
        raise DeclarationError(
            f"register_codec got {cls!r}, which is not a class. Give the class of the values."
        )
    if not isinstance(name, str) or not name:
        raise DeclarationError(
            f"register_codec of {full_name(cls)} got the name {name!r}. Give a text that will never "
            f"change, such as {full_name(cls)!r}."
        )
    if encode is None and decode is None:
        encode, decode = _default_functions(cls)
    if encode is None or decode is None:
        raise DeclarationError(
            f"register_codec of {full_name(cls)} needs encode and decode: only enums, dataclasses whose "
            f"fields are all arguments of __init__, and named tuples have defaults. Give both functions."
        )
    return RegisteredCodec(cls=cls, name=name, encode=encode, decode=decode)


def _check_name(codec: RegisteredCodec) -> None:
    """Check that class and name belong to each other.

    A class may be registered again under its name, also after its module was reloaded.

    Raises:
        DeclarationError: the name belongs to another class, or the class has another name.
    """
    owner = REGISTRY.of_name(codec.name)
    if owner is not None and full_name(owner.cls) != full_name(codec.cls):
        raise DeclarationError(
            f"The codec name {codec.name!r} already belongs to {full_name(owner.cls)}, so it cannot be given "
            f"to {full_name(codec.cls)}. Choose a name that is unique, such as 'package.Class'."
        )
    known = REGISTRY.of_class(codec.cls)
    if known is not None and known.name != codec.name:
        raise DeclarationError(
            f"{full_name(codec.cls)} is already registered as {known.name!r}; values saved under that name "
            f"could not be loaded as {codec.name!r}. Register a class once, under one name."
        )


def _default_functions(cls: type) -> tuple[Callable[[Any], Any] | None, Callable[[Any], Any] | None]:
    if issubclass(cls, enum.Flag):  # combinations have a value but not always a name
        return (lambda member: member.value), cls
    if issubclass(cls, enum.Enum):
        return (lambda member: member.name), (lambda name: cls[name])
    if dataclasses.is_dataclass(cls):
        names = [field.name for field in dataclasses.fields(cls) if field.init]
        if len(names) == len(dataclasses.fields(cls)):
            return (lambda value: {name: getattr(value, name) for name in names}), (
                lambda saved: cls(**saved)
            )
    if is_named_tuple(cls):
        return tuple, (lambda items: cls(*items))
    return None, None


def full_name(cls: type) -> str:
    """Return the name of a class with its module."""
    return f"{cls.__module__}.{cls.__qualname__}"
