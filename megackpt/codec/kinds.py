"""What the codec of one kind of value consists of, and what encoder and decoder offer to it.

Owns the shape of the table that `scalars`, `containers`, `arrays` and `standard` fill, one `Kind` per tag.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from megackpt.codec.tree import Json
from megackpt.errors import UnserializableError

Step = Hashable  # a dict key, an attribute name or a position


class Writing(Protocol):
    """What an encoder does for the kinds: recursion with the path kept, and the list of tensors."""

    def child(self, step: Step, value: object) -> Json:
        """Encode a part of the value, which `step` leads to."""
        ...

    def items(self, mapping: Mapping[Any, Any]) -> list[Json]:
        """Encode a mapping as `[key, value]` pairs, whose order does not matter to equality."""
        ...

    def ordered_items(self, mapping: Mapping[Any, Any]) -> list[Json]:
        """Encode a mapping as `[key, value]` pairs, whose order does."""
        ...

    def mapping(self, mapping: Mapping[Any, Any]) -> Json:
        """Encode a mapping as a dict is encoded."""
        ...

    def elements(self, values: Iterable[Hashable]) -> list[Json]:
        """Encode values without an order, in an order that depends on nothing but them."""
        ...

    def octets(self, data: bytes | bytearray | memoryview) -> Json:
        """Encode bytes: base64 text, or the position of a tensor if they are many."""
        ...

    def add(self, tensor: torch.Tensor) -> int:
        """Put a contiguous CPU tensor of a portable dtype on the list; return its position."""
        ...

    def refusal(self, reason: str) -> UnserializableError:
        """Return the error that says where the refused value is; `reason` says how to fix it."""
        ...


class Reading(Protocol):
    """What a decoder does for the kinds.

    A kind reports an unfit payload by any ValueError, TypeError, ArithmeticError, LookupError or
    RuntimeError.
    """

    def child(self, step: Step, tree: Json) -> Any:
        """Decode a part of the value."""
        ...

    def items(self, tree: Json) -> list[tuple[Any, Any]]:
        """Decode what `Writing.items` made."""
        ...

    def mapping(self, tree: Json) -> dict[Any, Any]:
        """Decode what `Writing.mapping` made."""
        ...

    def elements(self, tree: Json) -> list[Any]:
        """Decode what `Writing.elements` made."""
        ...

    def octets(self, tree: Json) -> bytes:
        """Decode what `Writing.octets` made."""
        ...

    def take(self, position: Json) -> torch.Tensor:
        """Return the tensor at a position of the list. Each can be had once."""
        ...


@dataclass(frozen=True, slots=True)
class Kind:
    """How values of some classes are encoded: as `{tag: encode(value, encoder)}`.

    Attributes:
        tag: begins with '$'.
        classes: exactly these, not their subclasses.
        encode: returns the payload.
        decode: returns a value of the same class from the payload.
    """

    tag: str
    classes: tuple[type, ...]
    encode: Callable[[Any, Writing], Json]
    decode: Callable[[Json, Reading], Any]


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
