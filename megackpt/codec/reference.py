"""A reference to a global array in common state, in the place of a tensor that is stored there.

Such references are made by a save and replaced by a load; no user sees one.
"""

from __future__ import annotations

from dataclasses import dataclass

from megackpt.codec.kinds import Kind, Reading, Writing, text_of
from megackpt.codec.tree import Json


@dataclass(frozen=True, slots=True)
class ArrayReference:
    """Stands for a tensor of common state that is stored as a global array.

    Attributes:
        key: the key of the array.
    """

    key: str


def _encode_reference(value: ArrayReference, writing: Writing) -> Json:
    return value.key


def _decode_reference(tree: Json, reading: Reading) -> ArrayReference:
    return ArrayReference(text_of(tree))


KINDS = (Kind("$array", (ArrayReference,), _encode_reference, _decode_reference),)
