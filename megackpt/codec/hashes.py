"""Keys of dicts and elements of sets whose hashes a file has chosen.

Hashes of strings and bytes are salted in each process; those of numbers, and of tuples of numbers, are not. A
dict compares each key with all others of the same hash, so a file of a million such keys would take hours.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence

from megackpt.codec.registry import REGISTRY

_MOST_EQUAL = 200
_SALTED = frozenset((str, bytes))
_MODULUS = 2**61 - 1  # of the hashes of numbers; Source: sys.hash_info.modulus of 64-bit systems


def refuse_collisions(keys: Sequence[Hashable]) -> None:
    """Refuse keys of which more have one and the same hash than chance allows.

    Raises:
        ValueError: they have.
        TypeError: one cannot be hashed.
    """
    if len(keys) <= _MOST_EQUAL:
        return
    of_class = REGISTRY.of_class  # what users have registered may have any hash
    hashes = Counter(hash(key) for key in keys if type(key) not in _SALTED and of_class(type(key)) is None)
    if hashes and max(hashes.values()) > _MOST_EQUAL:
        raise ValueError(f"more than {_MOST_EQUAL} keys have the same hash, as if to make this slow")


class NumberHashes:
    """Hashes of the large integers of a pickle, which may all become keys of one dict."""

    def __init__(self) -> None:
        self._seen: dict[int, set[int]] = {}

    def collide(self, number: int) -> bool:
        """Take one, and say whether more different ones have its hash than chance allows."""
        if -_MODULUS < number < _MODULUS:
            return False
        alike = self._seen.setdefault(hash(number), set())
        alike.add(number)  # compared with the others here, which are few
        return len(alike) > _MOST_EQUAL
