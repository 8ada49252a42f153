"""A digest of each leaf of a value, with which ranks find out where their values differ.

This module defines what a leaf is, and when two leaves are equal.
"""

from __future__ import annotations

import argparse
import hashlib
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

from megackpt.codec.arrays import bytes_of
from megackpt.codec.encoder import Encoder
from megackpt.codec.kinds import Step, format_path
from megackpt.codec.tree import MAX_DEPTH, Json, dump_tree
from megackpt.errors import UnserializableError

_DIGEST_BYTES = 16


def leaf_digests(
    value: object, *, path: str = "", left_out: Callable[[Sequence[Step]], bool] | None = None
) -> dict[str, str]:
    """Return the digest (32 hexadecimal digits) of every leaf, by its path in the value. Local.

    Dicts with plain keys, lists and namespaces are branches unless empty; everything else is a leaf. Two
    values have the same digests exactly if they would load as the same classes with the same bits. The order
    of dict keys does not matter, that of an OrderedDict does.

    Args:
        value: anything that `encode` takes.
        path: where the value is inside of a larger one.
        left_out: returns whether the leaf at some steps gets no digest; None for no such leaf.

    Raises:
        UnserializableError: a part of it has no codec.

    >>> first, second = leaf_digests({"lr": 0.1, "steps": [1, 2]}), leaf_digests({"steps": [1, 3], "lr": 0.1})
    >>> [path for path in first if first[path] != second[path]]
    ['steps[1]']
    """
    return {
        format_path(path, steps): _digest(leaf, path, steps, context)
        for steps, leaf, context in _leaves(value, path, [], "")
        if left_out is None or not left_out(steps)
    }


def leaves(value: object) -> dict[str, Any]:
    """Return every leaf, by the same paths as `leaf_digests`. Local.

    Raises:
        UnserializableError: the value is nested too deep.

    >>> leaves({"lr": 0.1, "steps": [1, 2]})
    {'lr': 0.1, 'steps[0]': 1, 'steps[1]': 2}
    """
    return {format_path("", steps): leaf for steps, leaf, _ in _leaves(value, "", [], "")}


def _leaves(
    value: object, path: str, steps: list[Step], context: str
) -> Iterator[tuple[list[Step], object, str]]:
    """Yield the steps to each leaf, the leaf, and letters for the classes of the branches above it."""
    branch = _branch_of(value)
    if branch is None:
        yield steps, value, context
        return
    if len(steps) >= MAX_DEPTH:
        leaf_path = format_path(path, steps)
        raise UnserializableError(
            f"{leaf_path}: Values are nested more than {MAX_DEPTH} levels deep, or contain themselves. Save "
            f"something flatter, such as a list of the parts.",
            path=leaf_path,
        )
    letter, parts = branch
    for step, part in parts:
        yield from _leaves(part, path, [*steps, step], context + letter)


def _branch_of(value: object) -> tuple[str, list[tuple[Step, Any]]] | None:
    """Return a letter for the class of a branch and its parts; None for a leaf."""
    if type(value) is list and value:
        return "l", list(enumerate(value))
    if (
        type(value) is dict
        and value
        and all(type(key) in (str, int, float, bool, bytes, type(None)) for key in value)
    ):
        return "d", list(value.items())
    if type(value) is argparse.Namespace and vars(value):
        return "n", list(vars(value).items())
    if type(value) is SimpleNamespace and vars(value):
        return "s", list(vars(value).items())
    return None


def _digest(value: object, path: str, steps: list[Step], context: str) -> str:
    encoder = Encoder(path, steps=steps, sort_items=_sorted_by_key, members_by_value=True)
    tree = encoder.encode(value)
    # The context tells {"a": 1} from a namespace with a = 1, whose leaves have the same paths.
    digest = hashlib.blake2b(f"{context}\n{dump_tree(tree)}\n".encode(), digest_size=_DIGEST_BYTES)
    for tensor in encoder.tensors:
        digest.update(f"{tensor.dtype}{list(tensor.shape)}\n".encode())
        digest.update(bytes_of(tensor))
    return digest.hexdigest()


def _sorted_by_key(items: list[tuple[Json, Any]]) -> list[tuple[Json, Any]]:
    return sorted(items, key=lambda item: dump_tree(item[0]))
