"""Which files are protected together, and which rank computes what protects them. Pure."""

from __future__ import annotations

from megackpt.geometry import Ints


def parity_groups(files: Ints, *, most: int) -> list[Ints]:
    """Put files, `[f]` ranks that wrote one each, ascending, into as few groups of at most `most` as can be.

    Groups differ by at most one file. Ranks of a group lie as far apart as they can: those of one machine,
    which have neighbouring numbers, are then in different groups, and are lost one from each.

    >>> import numpy as np
    >>> [group.tolist() for group in parity_groups(np.array([0, 1, 2, 4, 5]), most=2)]
    [[0, 4], [1, 5], [2]]
    """
    count = -(-len(files) // most)
    return [files[number::count] for number in range(count)]


def parity_writer(group: Ints, number: int) -> int:
    """Return the rank that writes the parity of a group, the number-th: one of those that wrote its files."""
    return int(group[number % len(group)])
