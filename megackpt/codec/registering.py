"""How a user gives a class of theirs a codec.

Owns the public call; the table is in `registry`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from megackpt.codec.encoder import KIND_OF_CLASS, PLAIN_CLASSES
from megackpt.codec.registry import REGISTRY, codec_of
from megackpt.errors import DeclarationError

_T = TypeVar("_T")


def register_codec(
    cls: type[_T],
    name: str,
    encode: Callable[[_T], Any] | None = None,
    decode: Callable[[Any], _T] | None = None,
) -> None:
    """Let values of exactly this class be saved and loaded. Call it in every process, before either. Local.

    name is what files call the class; it must be unique and never change. encode returns what is saved
    instead of a value: anything that has a codec. decode makes the value from that; it gets whatever a file
    says, so it must check what it needs to trust. Both can be left out for enums (saved by name, flags by
    value), dataclasses whose fields are all arguments of `__init__` (by fields), and named tuples (by items).

    Raises:
        DeclarationError: the class or name is taken, or functions are missing.

    >>> class Schedule:
    ...     def __init__(self, warmup):
    ...         self.warmup = warmup
    >>> register_codec(Schedule, "docs.Schedule", lambda schedule: schedule.warmup, Schedule)
    """
    codec = codec_of(cls, name, encode, decode)
    if cls in KIND_OF_CLASS or cls in PLAIN_CLASSES:
        raise DeclarationError(
            f"{cls.__name__} has a codec already, so {name!r} cannot be its codec. Register a class of your "
            f"own."
        )
    REGISTRY.add(codec)
