"""Encodes Python values as a JSON tree and tensors, without pickle.

Values that JSON has are themselves in the tree. Every other value is an object with a single key, a tag that
begins with "$". docs/format.md, "Values", lists every tag and its payload. Tensors have positions in the
order of the tree, and the tree refers to each once.

Class, value and bits are exact, and so is the order of dicts. Not kept are: identity (an object that occurs
twice is saved twice), memory layout, the device of a tensor, and numpy.longlong where it is as wide as
numpy.int64 (it becomes that).
"""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Callable, Container, Hashable, Iterable, Mapping
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

import torch

from megackpt.codec import arrays, containers, members, standard
from megackpt.codec.kinds import (
    KIND_OF_CLASS,
    REGISTRY,
    Kind,
    RegisteredCodec,
    Step,
    add_kinds,
    base64_of,
    format_path,
)
from megackpt.codec.members import is_class, is_named_tuple
from megackpt.codec.stand_ins import ForeignCodecValue, ForeignMember, ForeignNamedTuple
from megackpt.codec.tree import MAX_DEPTH, MAX_PLAIN_INT, EncodedValue, Json, dump_tree
from megackpt.errors import CheckpointError, UnserializableError

KINDS: tuple[Kind, ...] = (
    *standard.KINDS, *containers.KINDS, *arrays.KINDS, *members.KINDS,
)  # fmt: skip
add_kinds(KINDS)
# Classes that JSON has, and that need no kind.
PLAIN_CLASSES: frozenset[type] = frozenset({type(None), bool, str, list})

# Values that leaf digests have as a pickle has them; see `pickled.as_stand_in`.
_AS_PICKLED = (enum.Enum, tuple, ForeignMember, ForeignNamedTuple)
_FUNCTIONS = (FunctionType, BuiltinFunctionType, MethodType)
# So many bytes or more become a tensor: base64 is a third longer, and readers limit the size of JSON headers.
_MIN_TENSOR_BYTES = 4096
# An object that several others contain is written in each of them: so many times on average, and in small
# values so many more.
_MOST_TIMES = 10
_ALWAYS = 1000


def encode(value: object, *, path: str = "") -> EncodedValue:
    """Encode a value. Local.

    Tensors of the result may share memory with the value: write them before it changes.

    Args:
        value: what to encode.
        path: where the value is inside of a larger one, for errors.

    Raises:
        UnserializableError: a part of it has no codec; the text names its path and type, and what to do.

    >>> encode({"step": 3, "betas": (0.9, 0.95), "mask": {1, 2}}).tree
    {'step': 3, 'betas': {'$tuple': [0.9, 0.95]}, 'mask': {'$set': [1, 2]}}
    """
    encoder = Encoder(path)
    tree = encoder.encode(value)
    return EncodedValue(tree, tuple(encoder.tensors))


class Encoder:
    """Encodes one value. A `ValueEncoder`; see there for what the methods do.

    Args:
        path: where the value is inside of a larger one, for errors.
        steps: from that path to the value, for errors.
        sort_items: chooses the order of the items of mappings whose order does not matter to equality.
        members_by_value: encode members of enumerations and named tuples as a pickle has them, without names
            of members and fields.

    Attributes:
        tensors: the tensors so far.
        enclosing: objects whose attributes are being encoded, one inside the other.
    """

    def __init__(
        self,
        path: str,
        *,
        steps: Iterable[Step] = (),
        sort_items: Callable[[list[tuple[Json, Any]]], list[tuple[Json, Any]]] = list,
        members_by_value: bool = False,
    ) -> None:
        self.tensors: list[torch.Tensor] = []
        self._path = path
        self._steps: list[Step] = list(steps)
        self._sort_items = sort_items
        self._members_by_value = members_by_value
        self._open: set[int] = set()  # ids of the values that are being encoded, one inside the other
        self.enclosing: list[Any] = []
        self._counted: set[int] = set()  # ids of the values that were counted
        self._written = 0  # how often they were written
        self._hashing = 0  # how many keys and set elements the current value is inside of

    def encode(self, value: object) -> Json:
        """Encode the value at the current path."""
        if value is None or value is True or value is False:
            return value
        if type(value) is str:
            return self._text(value)
        if type(value) is int and -MAX_PLAIN_INT <= value <= MAX_PLAIN_INT:
            return value
        if type(value) is float and math.isfinite(value):
            return value
        if self.enclosing:
            for level, enclosing in enumerate(reversed(self.enclosing), 1):
                if value is enclosing:  # such as a link to its parent
                    return {"$enclosing": level}
        self._enter(value)
        tree = self._node(value)
        self._open.discard(id(value))
        return tree

    def child(self, step: Step, value: object) -> Json:
        """See ValueEncoder."""
        # Not undone when an error is raised: the error needs the path.
        self._steps.append(step)
        tree = self.encode(value)
        self._steps.pop()
        return tree

    def items(self, mapping: Mapping[Any, Any]) -> list[Json]:
        """See ValueEncoder."""
        encoded_keys = [(self._hashable(key), (key, item)) for key, item in mapping.items()]
        return [[tree, self.child(key, item)] for tree, (key, item) in self._sort_items(encoded_keys)]

    def ordered_items(self, mapping: Mapping[Any, Any]) -> list[Json]:
        """See ValueEncoder."""
        return [[self._hashable(key), self.child(key, item)] for key, item in mapping.items()]

    def mapping(self, mapping: Mapping[Any, Any]) -> Json:
        """See ValueEncoder."""
        if not all(type(key) is str and not key.startswith("$") for key in mapping):
            return {"$dict": self.items(mapping)}
        items = self._sort_items([(self._hashable(key), item) for key, item in mapping.items()])
        return {str(key): self.child(key, item) for key, item in items}  # type: ignore[arg-type]

    def elements(self, values: Iterable[Hashable]) -> list[Json]:
        """See ValueEncoder."""
        return sorted((self._hashable(value) for value in values), key=dump_tree)

    def binary(self, data: bytes | bytearray | memoryview) -> Json:
        """See ValueEncoder."""
        if self._hashing or len(data) < _MIN_TENSOR_BYTES:
            return base64_of(data)
        return self.add(arrays.tensor_of_bytes(data))

    def add(self, tensor: torch.Tensor) -> int:
        """See ValueEncoder."""
        if self._hashing:
            raise self.error(
                "A key of a dict, or an element of a set, cannot contain tensors or arrays: they are equal "
                "only to themselves, so the loaded copy would never be found. Use a str, number or tuple "
                "instead."
            )
        self.tensors.append(tensor)
        return len(self.tensors) - 1

    def error(self, reason: str) -> UnserializableError:
        """See ValueEncoder."""
        path = format_path(self._path, self._steps)
        return UnserializableError(f"{path}: {reason}", path=path)

    def count(self, value: object, name: str) -> None:
        """See ValueEncoder."""
        # Of n objects that all refer to each other there are n! paths to one.
        self._counted.add(id(value))
        self._written += 1
        if self._written > _MOST_TIMES * len(self._counted) + _ALWAYS:
            raise self.error(
                f"Objects of unknown classes, such as {name}, refer to each other in too many ways to be "
                f"written one inside the other. Leave them out."
            )

    def _enter(self, value: object) -> None:
        if id(value) in self._open:
            raise self.error(
                f"This {_name_of(type(value))} contains itself, so saving it would never end. Save it "
                "without the reference to itself."
            )
        if len(self._open) >= MAX_DEPTH:
            raise self.error(
                f"Values are nested more than {MAX_DEPTH} levels deep. Save something flatter, such as a "
                "list of the parts."
            )
        self._open.add(id(value))

    def _node(self, value: object) -> Json:
        if type(value) is list:
            return [self.child(index, item) for index, item in enumerate(value)]
        if type(value) is dict:
            return self.mapping(value)
        if self._members_by_value and isinstance(value, _AS_PICKLED) and type(value) is not tuple:
            value = self._as_pickled(value)
        kind = KIND_OF_CLASS.get(type(value))
        if kind is not None:
            return {kind.tag: kind.encode(value, self)}
        codec = REGISTRY.of_class(type(value))
        if codec is None and isinstance(value, enum.Enum):
            return {members.MEMBER.tag: members.MEMBER.encode(value, self)}
        if codec is None and is_named_tuple(type(value)):
            return {members.NAMED_TUPLE.tag: members.NAMED_TUPLE.encode(value, self)}
        if codec is None and is_class(value):
            return {members.NAME.tag: members.NAME.encode(value, self)}
        if isinstance(value, ForeignCodecValue):
            return {"$registered": {"name": self._text(value.name), "value": self.encode(value.value)}}
        if codec is None:
            raise self.error(_no_codec_advice(value, known=KIND_OF_CLASS.keys() | PLAIN_CLASSES))
        return {
            "$registered": {
                "name": self._text(codec.name),
                "value": self.encode(self._encoded_by(codec, value)),
            }
        }

    def _as_pickled(self, value: object) -> object:
        if isinstance(value, tuple) and REGISTRY.of_class(type(value)) is not None:
            return value
        from megackpt.codec.pickled import as_stand_in

        return as_stand_in(value, self)

    def _encoded_by(self, codec: RegisteredCodec, value: object) -> object:
        try:
            return codec.encode(value)
        except CheckpointError:
            raise
        except Exception as error:
            raise self.error(
                f"The encode function of codec {codec.name!r} raised {error!r} for this "
                f"{_name_of(type(value))}. Correct that function or the value."
            ) from error

    def _hashable(self, value: object) -> Json:
        self._hashing += 1
        tree = self.child(value, value)
        self._hashing -= 1
        return tree

    def _text(self, value: str) -> str:
        if not value.isascii():
            try:
                value.encode()
            except UnicodeEncodeError as error:
                raise self.error(
                    f"The str {value[:40]!r} contains a lone surrogate, which UTF-8 cannot encode. If it "
                    "stands for bytes, save value.encode('utf-8', 'surrogateescape')."
                ) from error
        return value


def _no_codec_advice(value: object, *, known: Container[type]) -> str:
    """Return why a value has no codec, and what to do; `known` are the classes that have one."""
    cls = type(value)
    name = _name_of(cls)
    call = f"megackpt.register_codec({cls.__name__}, {name!r}"
    register = f"register it before saving and before loading: {call}, encode, decode)"
    if isinstance(value, torch.Tensor):
        return (
            f"A {name} is not a plain tensor. Save value.detach() if that is one, or declare it as sharded."
        )
    if dataclasses.is_dataclass(value):
        return (
            f"{name} is a dataclass that is not registered. A load would have to run its __init__ and "
            f"__post_init__, or skip what they check and derive. Save plain values, or "
            f"register it before saving and before loading: {call})."
        )
    base = next((base for base in cls.__mro__[1:] if base in known), None)
    if base is not None:
        return (
            f"{name} is a subclass of {base.__name__}, and would lose its class if saved as that. Save "
            f"{base.__name__}(value), or {register}."
        )
    if callable(value):
        code = f"{value!r} is code (a {name}), which is never saved. Leave it out and create it again after"
        named = getattr(value, "__qualname__", "<") if isinstance(value, _FUNCTIONS) else None
        if named is None:  # an object of a class that has a public name
            return f"{code} loading, or {register}."
        # A lambda, and what a function defines, have no name that leads to them.
        return f"{code} loading." if "<" in named else f"{code} loading, or save its name, {named!r}."
    return (
        f"A value of type {name} has no codec, and nothing is ever pickled. Save plain values instead, or "
        f"{register}."
    )


def _name_of(cls: type) -> str:
    """Return the name of a class as a user writes it."""
    return cls.__qualname__ if cls.__module__ == "builtins" else f"{cls.__module__}.{cls.__qualname__}"
