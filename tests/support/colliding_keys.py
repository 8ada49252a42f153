"""Keys that collide in a hash table of Python, which a file can choose: integers, and tuples of integers."""

from __future__ import annotations

import numpy as np

P = 2**61 - 1
"""Integers that differ by multiples of it have one hash. Source: sys.hash_info.modulus."""

_P1, _P2, _P5 = 11400714785074694791, 14029467366897019727, 2870177450012600261
_WORD = 2**64


def tuples_of_one_hash(count: int) -> list[tuple[int, int]]:
    """Return pairs of small integers with one hash.

    Source: CPython, `tuplehash` of tupleobject.c.
    """
    wanted, inverse = 12345, pow(_P2, -1, _WORD)
    pairs: list[tuple[int, int]] = []
    first = 0
    while len(pairs) < count:
        first += 1
        state = (_P5 + first * _P2) % _WORD
        state = (state << 31 | state >> 33) * _P1 % _WORD
        second = (wanted - state) * inverse % _WORD
        second -= _WORD if second >= _WORD // 2 else 0
        if abs(second) < P and second not in (-1, -2):
            pairs.append((first, second))
    return pairs


def integers_that_crowd_a_table(count: int) -> list[int]:
    """Return different integers, half of which find hundreds of slots taken by the others.

    The first half are the slots that Python tries one after another, when a key has no other bits left; the
    second half come into that sequence near its start.

    Source: CPython, `lookdict` of dictobject.c.
    """
    size = _table_size(count)
    sequence = [1]
    while len(sequence) < count // 2:
        sequence.append((sequence[-1] * 5 + 1) % size)
    taken, is_early = np.zeros(size, np.bool_), np.zeros(size, np.bool_)
    taken[sequence] = True
    is_early[sequence[: count // 6]] = True
    later: list[int] = []
    multiple = 0
    while len(later) < count - len(sequence):
        multiple += 1
        hashes = np.array(sequence, np.uint64) + np.uint64(multiple * size)
        slot, rest = hashes % size, hashes.copy()
        is_taken = taken[slot]
        while rest.any():
            rest >>= np.uint64(5)
            slot = (slot * np.uint64(5) + rest + np.uint64(1)) % np.uint64(size)
            is_taken &= taken[slot]
        later += hashes[is_taken & is_early[slot]].tolist()
    return sequence + later[: count - len(sequence)]


def _table_size(count: int) -> int:
    """Return the size of a dict to which so many keys were added."""
    size = 8
    while size * 2 // 3 < count:
        size = 1 << (size * 2 // 3 * 3 - 1).bit_length()
    return size
