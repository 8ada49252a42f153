"""Codecs of users' classes, by the name they were registered under.

Owns the one table of them. A name in a file is only ever looked up here: nothing is imported, and no class
is found by its own name.
"""

from __future__ import annotations

import dataclasses
import enum
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from megackpt.errors import DeclarationError

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Registered:
    """A user's codec.

    Attributes:
        cls: exactly this class, not its subclasses.
        name: what files call it.
        encode: returns what is saved instead of a value of the class: anything that has a codec itself.
        decode: makes the value from that again.
    """

    cls: type
    name: str
    # Any: these are the user's own types.
    encode: Callable[[Any], Any]
    decode: Callable[[Any], Any]


class Registry:
    """User's codecs by class and by name. Safe for many threads."""

    def __init__(self) -> None:
        self._by_class: dict[type, Registered] = {}
        self._by_name: dict[str, Registered] = {}
        self._lock = threading.Lock()

    def add(self, codec: Registered) -> None:
        """Add a codec; the same class may be registered again, also after its module was reloaded.

        Raises:
            DeclarationError: the name belongs to another class, or the class has another name.
        """
        with self._lock:
            owner = self._by_name.get(codec.name)
            if owner is not None and _full_name(owner.cls) != _full_name(codec.cls):
                raise DeclarationError(
                    f"The codec name {codec.name!r} already belongs to {_full_name(owner.cls)}, so it "
                    f"cannot be given to {_full_name(codec.cls)}. Choose a name that is unique, such as "
                    f"'package.Class'."
                )
            known = self._by_class.get(codec.cls)
            if known is not None and known.name != codec.name:
                raise DeclarationError(
                    f"{_full_name(codec.cls)} is already registered as {known.name!r}; what was saved under "
                    f"that name would not be found as {codec.name!r}. Register a class once, under one name."
                )
            if owner is not None:
                self._by_class.pop(owner.cls, None)
            self._by_class[codec.cls] = self._by_name[codec.name] = codec

    def of_class(self, cls: type) -> Registered | None:
        """Return the codec of exactly this class."""
        return self._by_class.get(cls)

    def of_name(self, name: str) -> Registered | None:
        """Return the codec of this name."""
        return self._by_name.get(name)


# The one mutable state of this package: decorators and import-time calls need a place to register at.
REGISTRY = Registry()


def codec_of(
    cls: type[_T],
    name: str,
    encode: Callable[[_T], Any] | None,
    decode: Callable[[Any], _T] | None,
) -> Registered:
    """Return the codec for a class, with the obvious functions for enums, dataclasses and named tuples.

    Raises:
        DeclarationError: a function is missing and there is no obvious one, or `name` is empty.
    """
    if not isinstance(cls, type):
        raise DeclarationError(
            f"register_codec got {cls!r}, which is no class. Give the class of the values."
        )
    if not isinstance(name, str) or not name:
        raise DeclarationError(
            f"register_codec of {_full_name(cls)} got the name {name!r}. Give a text that will never "
            f"change, such as {_full_name(cls)!r}."
        )
    if encode is None and decode is None:
        encode, decode = _obvious_functions(cls)
    if encode is None or decode is None:
        raise DeclarationError(
            f"register_codec of {_full_name(cls)} needs encode and decode: only enums, dataclasses whose "
            f"fields are all arguments of __init__, and named tuples can do without. Give both functions."
        )
    return Registered(cls=cls, name=name, encode=encode, decode=decode)


def _obvious_functions(cls: type) -> tuple[Callable[[Any], Any] | None, Callable[[Any], Any] | None]:
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


def is_named_tuple(cls: type) -> bool:
    """Tell whether a class was made by `collections.namedtuple` or `typing.NamedTuple`."""
    return issubclass(cls, tuple) and hasattr(cls, "_fields")


def _full_name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"
