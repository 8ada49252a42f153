"""The encoded form of a value: a JSON tree and a list of tensors; and the tree as JSON text.

Parses the text strictly and limits the size of a tree. `encoder` describes what the nodes mean.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Any, NoReturn, TypeAlias

import torch

from megackpt.errors import FormatError

Json: TypeAlias = "bool | int | float | str | list[Json] | dict[str, Json] | None"

# Deepest nesting of values. Real state dicts use about ten levels. A level of values takes up to four levels
# of JSON; the JSON parser and this package are recursive, and must stay within Python's recursion limit.
MAX_DEPTH = 64
# Integers up to here, positive or negative, are exact in every JSON reader: they fit a 64-bit float.
MAX_PLAIN_INT = 2**53
DAMAGED = "The file is damaged or was not written by megackpt: restore it, or use another checkpoint."

_MAX_JSON_INT_LENGTH = 20  # digits of 2**63 and a sign; longer ones would only cost time


@dataclass(frozen=True, slots=True, eq=False)
class EncodedValue:
    """An encoded value.

    Attributes:
        tree: JSON, as `json.dumps` takes it; `megackpt.codec.encoder` describes its nodes.
        tensors: contiguous CPU tensors of dtypes that every safetensors reader knows. The tree refers to
            each by its position, exactly once. They may share memory with the original value.
    """

    tree: Json
    tensors: tuple[torch.Tensor, ...]


def dump_tree(tree: Json) -> str:
    """Return the JSON text of a tree, on one line."""
    return json.dumps(tree, ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def load_tree(text: str, *, where: str) -> Json:
    """Parse a JSON text more strictly than `json.loads`.

    Rejects repeated keys, NaN and Infinity, and integers beyond 64 bits.

    Args:
        text: the JSON text.
        where: what errors call the file or object.

    Raises:
        FormatError: `text` is not such JSON, or nested too deeply.
    """
    try:
        tree: Json = json.loads(
            text,
            object_pairs_hook=object_of,
            parse_int=_integer,
            parse_float=_finite_float,
            parse_constant=_reject_constant,
        )
    except RecursionError as error:
        raise FormatError(f"{where}: JSON nested too deeply to read. {DAMAGED}", path=where) from error
    except ValueError as error:  # JSONDecodeError, and what the hooks raise
        raise FormatError(f"{where}: not valid JSON: {error}. {DAMAGED}", path=where) from error
    return tree


def object_of(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object as a dict; a hook for `json.loads`.

    Raises:
        ValueError: a key is repeated: readers differ about which value counts.
    """
    members = dict(pairs)
    if len(members) == len(pairs):
        return members
    seen: set[str] = set()
    for key, _ in pairs:
        if key in seen:
            raise ValueError(f"the key {key!r:.80} is repeated in one object")
        seen.add(key)
    return members


def _integer(text: str) -> int:
    if len(text) > _MAX_JSON_INT_LENGTH:
        raise ValueError(f"an integer of {len(text)} digits")
    return int(text)


def _finite_float(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError(f"the number {text[:40]} is infinite as a float")
    return value


def _reject_constant(text: str) -> NoReturn:
    raise ValueError(f"the constant {text}")
