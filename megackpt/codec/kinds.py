"""The interface between encoder and decoder and the codecs of single kinds of values, and users' codecs.

`standard`, `containers`, `arrays`, `members` and `pickled` each have a table `KINDS`, with one `Kind` per
tag.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from megackpt.codec.tree import Json
from megackpt.errors import UnserializableError

Step = Hashable  # a dict key, an attribute name or a position


class ValueEncoder(Protocol):
    """What an encoder offers to a kind: it encodes parts of the value, and collects tensors.

    Attributes:
        enclosing: objects whose attributes are being encoded, one inside the other. A reference to one of
            them is encoded as such.
    """

    enclosing: list[Any]

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

    def count(self, value: object, name: str) -> None:
        """Count a value that is encoded wherever it occurs; `name` is what an error calls it.

        Raises:
            UnserializableError: such values are encoded again and again.
        """
        ...

    def error(self, reason: str) -> UnserializableError:
        """Return the error for the value at the current path; `reason` says why and how to fix it."""
        ...


class ValueDecoder(Protocol):
    """What a decoder offers to a kind.

    A kind may raise ValueError, TypeError, ArithmeticError, LookupError or RuntimeError for an invalid
    payload.

    Attributes:
        enclosing: objects whose attributes are being decoded, one inside the other.
    """

    enclosing: list[Any]

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


KIND_OF_CLASS: dict[type, Kind] = {}
KIND_OF_TAG: dict[str, Kind] = {}
"""The kinds that encoder and decoder know."""


def add_kinds(kinds: Iterable[Kind]) -> None:
    """Add kinds to those that encoder and decoder know; a module that defines some does so when imported."""
    for kind in kinds:
        KIND_OF_TAG[kind.tag] = kind
        KIND_OF_CLASS.update(dict.fromkeys(kind.classes, kind))


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
    """Users' codecs by class and by name; `registration` adds them.

    The name of a codec in a file is looked up here and nowhere else: nothing is imported.
    """

    def __init__(self) -> None:
        self._by_class: dict[type, RegisteredCodec] = {}
        self._by_name: dict[str, RegisteredCodec] = {}

    def of_class(self, cls: type) -> RegisteredCodec | None:
        """Return the codec of exactly this class."""
        return self._by_class.get(cls)

    def of_name(self, name: str) -> RegisteredCodec | None:
        """Return the codec of this name."""
        return self._by_name.get(name)

    def add(self, codec: RegisteredCodec) -> None:
        """Add a codec, in place of the one with its name."""
        replaced = self._by_name.get(codec.name)
        if replaced is not None:
            self._by_class.pop(replaced.cls, None)
        self._by_class[codec.cls] = self._by_name[codec.name] = codec


# Users register at import time, before there is any other object.
REGISTRY = Registry()


def text_of(tree: Json) -> str:
    """Return a payload that must be a string."""
    if type(tree) is not str:
        raise TypeError("a string is expected")
    return tree


def is_dotted(name: str) -> bool:
    """Return whether a name consists of identifiers and dots between them."""
    return all(part.isidentifier() for part in name.split("."))


def dotted_of(tree: Json) -> str:
    """Return a payload that must be the name of a module or class."""
    name = text_of(tree)
    if not is_dotted(name):
        raise ValueError(f"{name[:80]!r} is not the name of a module or class")
    return name


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


def format_path(prefix: str, steps: Sequence[Step]) -> str:
    """Return the path of the value that the steps (keys, attribute names, list positions) lead to.

    Different values have different paths, as long as keys have different `repr`s.

    >>> format_path("", ["args", "layers.0", 3, "lr"])
    "args['layers.0'][3].lr"
    >>> format_path("", [])
    '(top level)'
    """
    path = prefix
    for step in steps:
        if isinstance(step, str) and step.isidentifier():
            path += f".{step}" if path else step
        else:
            path += f"[{step!r}]"
    return path or "(top level)"
