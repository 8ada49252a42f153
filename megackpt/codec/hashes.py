"""Limits on keys with equal hashes, with which a forged file could make a load take hours.

A dict compares a key with all others of the same hash, so a million keys of one hash take a million million
comparisons. Hashes of strings and bytes are salted in each process; those of numbers, and of tuples of
numbers, are not, so a file can choose them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence

from megackpt.codec.registry import REGISTRY

_MAX_EQUAL_HASHES = 200
_SALTED_CLASSES = frozenset((str, bytes))
_MODULUS = 2**61 - 1  # of the hashes of numbers; Source: sys.hash_info.modulus of 64-bit systems


def check_collisions(keys: Sequence[Hashable]) -> None:
    """Reject keys of a dict, or elements of a set, more of which have one hash than chance allows.

    Raises:
        ValueError: too many have the same hash.
        TypeError: a key cannot be hashed.
    """
    if len(keys) <= _MAX_EQUAL_HASHES:
        return
    of_class = REGISTRY.of_class  # registered classes may have any hashes
    hashes = Counter(
        hash(key) for key in keys if type(key) not in _SALTED_CLASSES and of_class(type(key)) is None
    )
    if hashes and max(hashes.values()) > _MAX_EQUAL_HASHES:
        raise ValueError(
            f"more than {_MAX_EQUAL_HASHES} keys have the same hash, perhaps to make loading slow"
        )


class NumberHashes:
    """Counts hashes of the large integers of a pickle, which may all become keys of one dict."""

    def __init__(self) -> None:
        self._numbers: dict[int, set[int]] = {}  # by hash

    def add(self, number: int) -> bool:
        """Add a number; return whether more different numbers have its hash than chance allows."""
        if -_MODULUS < number < _MODULUS:  # its hash is the number itself
            return False
        same_hash = self._numbers.setdefault(hash(number), set())
        same_hash.add(number)  # the set stays small, so its comparisons are few
        return len(same_hash) > _MAX_EQUAL_HASHES
