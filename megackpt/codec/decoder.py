"""Decodes a JSON tree and tensors to the Python value.

The tree may come from anywhere. Every node is checked. Nothing is imported; a name is looked up in the
registry and among a few kinds of classes that are imported already, and nowhere else. No number in a
tree decides how much memory is allocated. `encoder` describes the encoding.
"""

from __future__ import annotations

import base64
from typing import Any

import torch

import megackpt.codec.encoder  # noqa: F401 - adds kinds
from megackpt.codec import arrays
from megackpt.codec.containers import check_collisions
from megackpt.codec.kinds import (
    KIND_OF_TAG,
    REGISTRY,
    Step,
    fields_of,
    format_path,
    integer_of,
    list_of,
    text_of,
)
from megackpt.codec.stand_ins import ForeignCodecValue, keeps_unknown_values
from megackpt.codec.tree import DAMAGED, MAX_DEPTH, EncodedValue, Json
from megackpt.errors import CheckpointError, FormatError, UnknownClassError

_TAGS_OF_PICKLED = ("$enclosing", "$foreign")


def decode(encoded: EncodedValue, *, where: str = "encoded value") -> Any:
    """Return the value; its tensors are those of `encoded`, on the CPU. Local.

    Args:
        encoded: what `encode` returned.
        where: what errors call the file or object.

    Raises:
        FormatError: the tree is not one that `encode` makes.
        UnknownClassError: the tree names a codec that is not registered.
    """
    decoder = _Decoder(encoded.tensors, where)
    value = decoder.decode(encoded.tree)
    decoder.check_all_taken()
    return value


class _Decoder:
    """Decodes one tree. A `ValueDecoder`; see there for what the methods do."""

    def __init__(self, tensors: tuple[torch.Tensor, ...], where: str) -> None:
        self._tensors: list[torch.Tensor | None] = list(tensors)
        self._where = where
        self._steps: list[Step] = []
        self._depth = 0
        self.enclosing: list[Any] = []

    def decode(self, tree: Json) -> Any:
        if tree is None or type(tree) in (bool, int, float):
            return tree
        if type(tree) is str:
            return self._text(tree)
        if self._depth >= MAX_DEPTH:
            raise self._error(f"values are nested more than {MAX_DEPTH} levels deep")
        self._depth += 1
        value = self._node(tree)
        self._depth -= 1
        return value

    def child(self, step: Step, tree: Json) -> Any:
        self._steps.append(step)
        value = self.decode(tree)
        self._steps.pop()
        return value

    def items(self, tree: Json) -> list[tuple[Any, Any]]:
        pairs = []
        for position, pair in enumerate(list_of(tree)):
            key_tree, item = list_of(pair, length=2)
            key = self.child(position, key_tree)
            pairs.append((key, self.child(key, item)))
        check_collisions([key for key, _ in pairs])
        if len(dict(pairs)) != len(pairs):
            raise ValueError("a key is repeated")
        return pairs

    def mapping(self, tree: Json) -> dict[Any, Any]:
        if type(tree) is not dict:
            raise TypeError("an object is expected")
        if list(tree) == ["$dict"]:
            return dict(self.items(tree["$dict"]))
        if any(key.startswith("$") for key in tree):
            raise ValueError(f"an object with the keys {sorted(tree)[:5]} is neither a dict nor tagged")
        return {self._text(key): self.child(key, item) for key, item in tree.items()}

    def elements(self, tree: Json) -> list[Any]:
        return [self.child(position, item) for position, item in enumerate(list_of(tree))]

    def binary(self, tree: Json) -> bytes:
        if type(tree) is int:
            return bytes(arrays.bytes_of(arrays.take_bytes(tree, self)))
        return base64.b64decode(text_of(tree), validate=True)

    def take(self, position: Json) -> torch.Tensor:
        index = integer_of(position)
        if not 0 <= index < len(self._tensors):
            raise ValueError(f"there is no tensor {index}, only {len(self._tensors)}")
        tensor = self._tensors[index]
        if tensor is None:
            raise ValueError(f"tensor {index} is referred to twice")
        self._tensors[index] = None
        return tensor

    def check_all_taken(self) -> None:
        unused = [index for index, tensor in enumerate(self._tensors) if tensor is not None]
        if unused:
            raise self._error(
                f"nothing refers to {len(unused)} of {len(self._tensors)} tensors: {unused[:10]}"
            )

    def _node(self, tree: Json) -> Any:
        try:
            if type(tree) is list:
                return [self.child(index, item) for index, item in enumerate(tree)]
            if type(tree) is not dict:
                raise TypeError(f"a {type(tree).__name__} is not JSON")
            (tag,) = tree if len(tree) == 1 else ("",)
            if not tag.startswith("$") or tag == "$dict":
                return self.mapping(tree)
            if tag == "$registered":
                return self._registered(tree[tag])
            if tag in _TAGS_OF_PICKLED:
                import megackpt.codec.pickled  # noqa: F401 - adds these kinds
            if tag not in KIND_OF_TAG:
                raise ValueError("there is no such tag; perhaps a newer megackpt wrote it")
            return KIND_OF_TAG[tag].decode(tree[tag], self)
        except CheckpointError:
            raise
        # What constructors raise for invalid payloads: ArithmeticError covers Decimal and Fraction,
        # RuntimeError covers torch.
        except (ValueError, TypeError, ArithmeticError, LookupError, RuntimeError) as error:
            raise self._error(f"{_shortened(tree)} cannot be decoded: {error}") from error

    def _registered(self, payload: Json) -> Any:
        name, tree = fields_of(payload, "name", "value")
        codec = REGISTRY.of_name(text_of(name))
        if codec is None and keeps_unknown_values():
            return ForeignCodecValue(name=text_of(name), value=self.decode(tree))
        if codec is None:
            path = format_path("", self._steps)
            raise UnknownClassError(
                f"{self._where}: {path}: saved with the codec {name!r}, which is not registered in this "
                f"process. Import the module that registers it, or call megackpt.register_codec(cls, "
                f"{name!r}, ...) before loading.",
                path=self._where,
            )
        encoded = self.decode(tree)
        try:
            return codec.decode(encoded)
        except Exception as error:
            path = format_path("", self._steps)
            raise FormatError(
                f"{self._where}: {path}: the decode function of codec {name!r} raised {error!r}. If the "
                f"class changed since it was saved, let that function accept both forms.",
                path=self._where,
            ) from error

    def _text(self, text: str) -> str:
        if not text.isascii():
            try:
                text.encode()
            except UnicodeEncodeError as error:
                raise self._error(f"the string {text[:40]!r} contains a lone surrogate") from error
        return text

    def _error(self, reason: str) -> FormatError:
        path = format_path("", self._steps)
        return FormatError(f"{self._where}: {path}: {reason}. {DAMAGED}", path=self._where)


def _shortened(tree: Json) -> str:
    text = repr(tree)
    return text if len(text) <= 80 else f"{text[:77]}..."
