"""Limits on keys that collide in a hash table, with which a forged file could make a load take hours.

A dict compares a key with all others of the same hash, so a million keys of one hash take a million million
comparisons. Keys of different hashes can collide as well: each looks for a free slot of the table, and keys
can be chosen so that each finds a million slots taken. Hashes of strings and bytes are salted in each
process; those of numbers, and of tuples of numbers, are not, so a file can choose them.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np
import numpy.typing as npt

from megackpt.codec.kinds import REGISTRY

MAX_EQUAL_HASHES = 200
"""So many keys may have the same hash by chance."""
MAX_UNCHECKED_KEYS = 1000
"""So many keys cannot take long, however they collide: 1000 slots for each of them."""
# Rounds of probes that a key takes, on average. Keys with random hashes take less than 3, multiples of a
# large power of 2 up to 14, as the upper bits of a hash are used last.
_MAX_ROUNDS = 64
_SALTED_CLASSES = frozenset((str, bytes))


def check_collisions(keys: Sequence[Hashable]) -> None:
    """Reject keys of a dict, or elements of a set, that collide more often than chance allows.

    Raises:
        ValueError: too many have the same hash, or find the same slots of a hash table taken.
        TypeError: a key cannot be hashed.
    """
    if len(keys) <= MAX_EQUAL_HASHES:
        return
    of_class = REGISTRY.of_class  # registered classes may have any hashes
    chosen = [hash(key) for key in keys if type(key) not in _SALTED_CLASSES and of_class(type(key)) is None]
    hashes = np.array(chosen, np.int64)
    in_order = np.sort(hashes)  # not counted in a dict, where the keys of an attack would collide
    if (in_order[MAX_EQUAL_HASHES:] == in_order[:-MAX_EQUAL_HASHES]).any():
        raise ValueError(
            f"more than {MAX_EQUAL_HASHES} keys have the same hash, perhaps to make loading slow"
        )
    if len(hashes) > MAX_UNCHECKED_KEYS and _are_crowded(hashes.view(np.uint64)):
        raise ValueError("keys collide in a hash table, perhaps to make loading slow")


def _are_crowded(hashes: npt.NDArray[np.uint64]) -> bool:
    """Return whether keys with these hashes make a dict or a set slow, at any size that it has as it grows.

    A table grows when it is two thirds full, to at most eight times the number of its keys.
    """
    sizes = range((8 * len(hashes)).bit_length() - 1, MAX_UNCHECKED_KEYS.bit_length(), -1)
    # A set looks at the nine slots after each one, too, where the table has so many.
    return any(
        _takes_long(hashes[: (2 << bits) // 3], bits=bits, neighbours=neighbours)
        for neighbours in (0, 9)
        for bits in sizes
    )


def _takes_long(hashes: npt.NDArray[np.uint64], *, bits: int, neighbours: int) -> bool:
    """Return whether inserting keys into a table of 2**bits slots takes too many probes.

    All keys take their first probe, then those that found no free slot their second one, and so on. The order
    differs from Python's, which inserts one key after another, but the number of probes is about the same.

    Source: CPython, `lookdict` of dictobject.c and `set_add_entry` of setobject.c.
    """
    # In a round, each key without a slot takes one probe; a look at neighbours counts with it.
    mask, budget = np.uint64((1 << bits) - 1), _MAX_ROUNDS * len(hashes)
    # With room behind the table, as neighbours of its last slots are computed too. They stay free.
    taken = np.zeros((1 << bits) + neighbours, np.bool_)
    owner = np.zeros(len(taken), np.int64)
    slot, perturbation = hashes & mask, hashes
    while len(slot):
        budget -= len(slot)
        if budget < 0:
            return True
        for step in range(neighbours + 1):
            at = slot + np.uint64(step)
            is_free = ~taken[at]
            # CPython looks at neighbours only where all of them are in the table.
            if step:
                is_free &= slot + np.uint64(neighbours) <= mask
            # Several keys may want one free slot. It goes to the key that reads its own number back.
            number = np.arange(len(slot))
            owner[at[is_free]] = number[is_free]  # the last one of several gets the slot
            is_placed = is_free & (owner[at] == number)
            taken[at[is_placed]] = True
            slot, perturbation = slot[~is_placed], perturbation[~is_placed]
        # Bits of the hash above the mask come in, five at a time; integers of 64 bits wrap around as in C.
        perturbation = perturbation >> np.uint64(5)
        slot = (slot * np.uint64(5) + perturbation + np.uint64(1)) & mask
    return False
