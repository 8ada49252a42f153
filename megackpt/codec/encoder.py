"""Python values to a JSON tree and tensors, without pickle.

Owns the walk through a value. Values that JSON has, too, stand for themselves; everything else is an object
with a single key, a tag that begins with "$". docs/format.md, "Values", lists every tag and its payload.

Positions count the tensors in the order of the tree; each is referred to once. What is exact: class, value
and bits, the order of dicts. What is not kept: that two places held the same object (each gets its own
copy), memory layout, the device of a tensor, and numpy.longlong where it is as wide as numpy.int64 (it
becomes that).
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Any

import torch

from megackpt.codec import arrays, containers, foreign, reference, scalars, standard
from megackpt.codec.advice import name_of, why_not
from megackpt.codec.kinds import Kind, Step, base64_of
from megackpt.codec.paths import format_path
from megackpt.codec.registry import REGISTRY, Registered, is_named_tuple
from megackpt.codec.tree import MAX_DEPTH, MAX_PLAIN_INT, Encoded, Json, dump_tree
from megackpt.errors import CheckpointError, UnserializableError

KINDS: tuple[Kind, ...] = (
    *scalars.KINDS, *containers.KINDS, *arrays.KINDS, *standard.KINDS, *foreign.KINDS,
    *reference.KINDS,
)  # fmt: skip
KIND_OF_CLASS: Mapping[type, Kind] = {cls: kind for kind in KINDS for cls in kind.classes}
# The classes of JSON that have no kind of their own.
PLAIN_CLASSES: frozenset[type] = frozenset({type(None), bool, str, list})

# From here on bytes are a tensor: base64 is a third longer, and readers limit the size of JSON headers.
_LONG_DATA_BYTES = 4096


def encode(value: object, *, path: str = "") -> Encoded:
    """Encode a value. Tensors of the result may share memory with it, so write them before it changes. Local.

    path is where the value stands in a larger one, for errors.

    Raises:
        UnserializableError: something in it has no codec; the text names its path and type, and how to give
            it one.

    >>> encode({"step": 3, "betas": (0.9, 0.95), "mask": {1, 2}}).tree
    {'step': 3, 'betas': {'$tuple': [0.9, 0.95]}, 'mask': {'$set': [1, 2]}}
    """
    encoder = Encoder(path)
    tree = encoder.encode(value)
    return Encoded(tree, tuple(encoder.tensors))


class Encoder:
    """One walk through one value.

    path and steps lead to the value, for errors. sort_items, if given, replaces the order of mappings
    without one. members_by_value encodes members of enumerations and named tuples as a pickle has
    them, which knows no names of members and fields.

    Attributes:
        tensors: the tensors so far.
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
        self._open: set[int] = set()  # ids of the values that are being encoded: one inside the other
        self._hashing = 0  # how many keys and set elements we are inside

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
        self._enter(value)
        tree = self._node(value)
        self._open.discard(id(value))
        return tree

    def child(self, step: Step, value: object) -> Json:
        """See Writing."""
        # Not undone when an error is raised: it is raised at the path that it names.
        self._steps.append(step)
        tree = self.encode(value)
        self._steps.pop()
        return tree

    def items(self, mapping: Mapping[Any, Any]) -> list[Json]:
        """See Writing."""
        keyed = [(self._hashable(key), (key, item)) for key, item in mapping.items()]
        return [[tree, self.child(key, item)] for tree, (key, item) in self._sort_items(keyed)]

    def ordered_items(self, mapping: Mapping[Any, Any]) -> list[Json]:
        """See Writing."""
        return [[self._hashable(key), self.child(key, item)] for key, item in mapping.items()]

    def mapping(self, mapping: Mapping[Any, Any]) -> Json:
        """See Writing."""
        if not all(type(key) is str and not key.startswith("$") for key in mapping):
            return {"$dict": self.items(mapping)}
        keyed = self._sort_items([(self._hashable(key), item) for key, item in mapping.items()])
        return {str(key): self.child(key, item) for key, item in keyed}  # type: ignore[arg-type]

    def elements(self, values: Iterable[Hashable]) -> list[Json]:
        """See Writing."""
        return sorted((self._hashable(value) for value in values), key=dump_tree)

    def octets(self, data: bytes | bytearray | memoryview) -> Json:
        """See Writing."""
        if self._hashing or len(data) < _LONG_DATA_BYTES:
            return base64_of(data)
        return self.add(arrays.tensor_of_octets(data))

    def add(self, tensor: torch.Tensor) -> int:
        """See Writing."""
        if self._hashing:
            raise self.refusal(
                "A key of a dict, or an element of a set, cannot hold tensors or arrays: they are equal "
                "only to themselves, so the copy that is loaded would never be found. Use a str, number or "
                "tuple instead."
            )
        self.tensors.append(tensor)
        return len(self.tensors) - 1

    def refusal(self, reason: str) -> UnserializableError:
        """See Writing."""
        path = format_path(self._path, self._steps)
        return UnserializableError(f"{path}: {reason}", path=path)

    def _enter(self, value: object) -> None:
        if id(value) in self._open:
            raise self.refusal(
                f"This {name_of(type(value))} contains itself, so saving it would never end. Save it "
                "without the reference back."
            )
        if len(self._open) >= MAX_DEPTH:
            raise self.refusal(
                f"Values are nested more than {MAX_DEPTH} levels deep. Save something flatter, such as a "
                "list of the parts."
            )
        self._open.add(id(value))

    def _node(self, value: object) -> Json:
        if type(value) is list:
            return [self.child(index, item) for index, item in enumerate(value)]
        if type(value) is dict:
            return self.mapping(value)
        if self._members_by_value and not self._is_registered_tuple(value):
            value = foreign.as_pickled(value, self)
        kind = KIND_OF_CLASS.get(type(value))
        if kind is not None:
            return {kind.tag: kind.encode(value, self)}
        codec = REGISTRY.of_class(type(value))
        if codec is None and isinstance(value, enum.Enum):
            return {foreign.MEMBER.tag: foreign.MEMBER.encode(value, self)}
        if codec is None and is_named_tuple(type(value)):
            return {foreign.NAMED_TUPLE.tag: foreign.NAMED_TUPLE.encode(value, self)}
        if isinstance(value, foreign.ForeignRegistered):
            return {"$registered": {"name": self._text(value.name), "value": self.encode(value.value)}}
        if codec is None:
            raise self.refusal(why_not(value, known=KIND_OF_CLASS.keys() | PLAIN_CLASSES))
        return {
            "$registered": {
                "name": self._text(codec.name),
                "value": self.encode(self._stand_in(codec, value)),
            }
        }

    @staticmethod
    def _is_registered_tuple(value: object) -> bool:
        return isinstance(value, tuple) and REGISTRY.of_class(type(value)) is not None

    def _stand_in(self, codec: Registered, value: object) -> object:
        try:
            return codec.encode(value)
        except CheckpointError:
            raise
        except Exception as error:
            raise self.refusal(
                f"The encode function of codec {codec.name!r} raised {error!r} for this "
                f"{name_of(type(value))}. Correct that function or the value."
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
                raise self.refusal(
                    f"The str {value[:40]!r} contains a lone surrogate, which no text file can hold. If it "
                    "stands for bytes, save value.encode('utf-8', 'surrogateescape')."
                ) from error
        return value
