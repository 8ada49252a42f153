"""The encoded form of a value: a plain JSON tree beside a list of tensors, and the tree as JSON text.

Owns the limits of a tree and the strict reading of its text. What the nodes mean is in `encoder`.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Any, NoReturn, TypeAlias

import torch

from megackpt.errors import FormatError

Json: TypeAlias = "bool | int | float | str | list[Json] | dict[str, Json] | None"

# Deepest nesting of values. Real state dicts use about ten levels; one costs up to four of JSON, whose parser
# is recursive, as this package is, and both have to stay within Python's limit.
MAX_DEPTH = 64
# Integers up to here, positive or negative, are exact in every JSON reader: they fit a 64-bit float.
MAX_PLAIN_INT = 2**53
DAMAGED = "The file is damaged or was not written by megackpt: restore it, or use another checkpoint."

_LONGEST_JSON_INT = 20  # digits of 2**63 and a sign; more would only be work for the parser


@dataclass(frozen=True, slots=True, eq=False)
class Encoded:
    """An encoded value.

    Attributes:
        tree: what `json.dumps` takes; its nodes are described in `megackpt.codec.encoder`.
        tensors: contiguous CPU tensors of dtypes that every safetensors reader knows. The tree refers to
            them by their position, to each exactly once. They may share memory with the value they came
            from.
    """

    tree: Json
    tensors: tuple[torch.Tensor, ...]


def dump_tree(tree: Json) -> str:
    """Return the JSON text of a tree, on one line."""
    return json.dumps(tree, ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def load_tree(text: str, *, where: str) -> Json:
    """Return the tree of a JSON text; `where` names its origin in errors.

    Stricter than `json.loads`: no repeated keys, no NaN or Infinity, no integers beyond 64 bits.

    Raises:
        FormatError: `text` is no such JSON, or nested too deeply.
    """
    try:
        tree: Json = json.loads(
            text,
            object_pairs_hook=object_of,
            parse_int=_integer,
            parse_float=_finite_float,
            parse_constant=_refuse_constant,
        )
    except RecursionError as error:
        raise FormatError(f"{where}: JSON nested too deeply to read. {DAMAGED}", path=where) from error
    except ValueError as error:  # JSONDecodeError, and what the hooks raise
        raise FormatError(f"{where}: not valid JSON: {error}. {DAMAGED}", path=where) from error
    return tree


def object_of(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object as a dict; for `json.loads`.

    Raises:
        ValueError: a key is repeated: readers differ about which of them counts.
    """
    built = dict(pairs)
    if len(built) == len(pairs):
        return built
    seen: set[str] = set()
    for key, _ in pairs:
        if key in seen:
            raise ValueError(f"the key {key!r:.80} is repeated in one object")
        seen.add(key)
    return built


def _integer(text: str) -> int:
    if len(text) > _LONGEST_JSON_INT:
        raise ValueError(f"an integer of {len(text)} digits")
    return int(text)


def _finite_float(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError(f"the number {text[:40]} is infinite as a float")
    return value


def _refuse_constant(text: str) -> NoReturn:
    raise ValueError(f"the constant {text}")
