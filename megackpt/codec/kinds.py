"""The interface between encoder and decoder and the codecs of single kinds of values.

`standard`, `containers`, `arrays` and `members` each have a table `KINDS`, with one `Kind` per tag.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from megackpt.codec.stand_ins import ForeignObject
from megackpt.codec.tree import Json
from megackpt.errors import UnserializableError

Step = Hashable  # a dict key, an attribute name or a position


class ValueEncoder(Protocol):
    """What an encoder offers to a kind: it encodes parts of the value, and collects tensors.

    Attributes:
        enclosing: the stand-ins whose attributes are being encoded, one inside the other.
    """

    enclosing: list[ForeignObject]

    def child(self, step: Step, value: object) -> Json:
        """Encode a part of the value; `step` leads to it and becomes a part of its path in errors."""
        ...

    def items(self, mapping: Mapping[Any, Any]) -> list[Json]:
        """Encode a mapping as `[key, value]` pairs, for classes where order does not matter to equality."""
        ...

    def ordered_items(self, mapping: Mapping[Any, Any]) -> list[Json]:
        """Encode a mapping as `[key, value]` pairs, for classes where order matters to equality."""
        ...

    def mapping(self, mapping: Mapping[Any, Any]) -> Json:
        """Encode a mapping as dicts are encoded."""
        ...

    def elements(self, values: Iterable[Hashable]) -> list[Json]:
        """Encode values that have no order, in an order that depends on the values only."""
        ...

    def binary(self, data: bytes | bytearray | memoryview) -> Json:
        """Encode bytes: as base64 text, or many of them as the position of a tensor."""
        ...

    def add(self, tensor: torch.Tensor) -> int:
        """Append a contiguous CPU tensor of a portable dtype to the tensors; return its position."""
        ...

    def error(self, reason: str) -> UnserializableError:
        """Return the error for the value at the current path; `reason` says why and how to fix it."""
        ...


class ValueDecoder(Protocol):
    """What a decoder offers to a kind.

    A kind may raise ValueError, TypeError, ArithmeticError, LookupError or RuntimeError for an invalid
    payload.

    Attributes:
        enclosing: the stand-ins whose attributes are being decoded, one inside the other.
    """

    enclosing: list[ForeignObject]

    def child(self, step: Step, tree: Json) -> Any:
        """Decode a part of the value; `step` leads to it and becomes a part of its path in errors."""
        ...

    def items(self, tree: Json) -> list[tuple[Any, Any]]:
        """Decode what `ValueEncoder.items` returned."""
        ...

    def mapping(self, tree: Json) -> dict[Any, Any]:
        """Decode what `ValueEncoder.mapping` returned."""
        ...

    def elements(self, tree: Json) -> list[Any]:
        """Decode what `ValueEncoder.elements` returned."""
        ...

    def binary(self, tree: Json) -> bytes:
        """Decode what `ValueEncoder.binary` returned."""
        ...

    def take(self, position: Json) -> torch.Tensor:
        """Return the tensor at a position. Each tensor can be taken once."""
        ...


@dataclass(frozen=True, slots=True)
class Kind:
    """How values of some classes are encoded: as `{tag: encode(value, encoder)}`.

    Attributes:
        tag: begins with '$'.
        classes: exactly these, not their subclasses.
        encode: returns the payload of a value.
        decode: returns the value of a payload, of the same class.
    """

    tag: str
    classes: tuple[type, ...]
    encode: Callable[[Any, ValueEncoder], Json]
    decode: Callable[[Json, ValueDecoder], Any]


def text_of(tree: Json) -> str:
    """Return a payload that must be a string."""
    if type(tree) is not str:
        raise TypeError("a string is expected")
    return tree


def integer_of(tree: Json) -> int:
    """Return a payload that must be a plain integer."""
    if type(tree) is not int:
        raise TypeError("an integer is expected")
    return tree


def list_of(tree: Json, *, length: int | None = None) -> list[Json]:
    """Return a payload that must be a list, of this length if one is given."""
    if type(tree) is not list or length not in (None, len(tree)):
        raise TypeError("a list is expected" if length is None else f"a list of {length} is expected")
    return tree


def fields_of(tree: Json, *names: str) -> list[Json]:
    """Return the values of a payload that must be an object with exactly these keys, in this order."""
    if type(tree) is not dict or set(tree) != set(names):
        raise TypeError(f"an object with the keys {', '.join(names)} is expected")
    return [tree[name] for name in names]


def base64_of(data: bytes | bytearray | memoryview) -> str:
    """Return bytes as base64 text."""
    return base64.b64encode(data).decode("ascii")
