"""The table of codecs that users have registered, by class and by name.

The name of a codec in a file is looked up here and nowhere else: nothing is imported.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from megackpt.errors import DeclarationError


@dataclass(frozen=True, slots=True, kw_only=True)
class RegisteredCodec:
    """A user's codec.

    Attributes:
        cls: exactly this class, not its subclasses.
        name: what files call the codec.
        encode: returns what is saved instead of a value of the class: anything that has a codec.
        decode: returns the value for what `encode` returned.
    """

    cls: type
    name: str
    # Any: these are the user's own types.
    encode: Callable[[Any], Any]
    decode: Callable[[Any], Any]


class Registry:
    """Users' codecs by class and by name. Safe for many threads."""

    def __init__(self) -> None:
        self._by_class: dict[type, RegisteredCodec] = {}
        self._by_name: dict[str, RegisteredCodec] = {}
        self._lock = threading.Lock()

    def add(self, codec: RegisteredCodec) -> None:
        """Add a codec. A class may be registered again under its name, also after its module was reloaded.

        Raises:
            DeclarationError: the name belongs to another class, or the class has another name.
        """
        with self._lock:
            owner = self._by_name.get(codec.name)
            if owner is not None and full_name(owner.cls) != full_name(codec.cls):
                raise DeclarationError(
                    f"The codec name {codec.name!r} already belongs to {full_name(owner.cls)}, so it "
                    f"cannot be given to {full_name(codec.cls)}. Choose a name that is unique, such as "
                    f"'package.Class'."
                )
            known = self._by_class.get(codec.cls)
            if known is not None and known.name != codec.name:
                raise DeclarationError(
                    f"{full_name(codec.cls)} is already registered as {known.name!r}; values saved under "
                    f"that name could not be loaded as {codec.name!r}. Register a class once, under one name."
                )
            if owner is not None:
                self._by_class.pop(owner.cls, None)
            self._by_class[codec.cls] = self._by_name[codec.name] = codec

    def of_class(self, cls: type) -> RegisteredCodec | None:
        """Return the codec of exactly this class."""
        return self._by_class.get(cls)

    def of_name(self, name: str) -> RegisteredCodec | None:
        """Return the codec of this name."""
        return self._by_name.get(name)


# The only mutable state of `megackpt.codec`: users register at import time, before there is any other object.
REGISTRY = Registry()


def full_name(cls: type) -> str:
    """Return the name of a class with its module."""
    return f"{cls.__module__}.{cls.__qualname__}"
