"""Where redundant data lies: the nodes that keep copies for a rank, and the files that share parity. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megackpt.geometry import Ints


@dataclass(frozen=True, slots=True)
class Nodes:
    """The nodes of a job, numbered by their lowest rank.

    Attributes:
        of_rank: number of the node of each rank, `[ranks]`.
    """

    of_rank: tuple[int, ...]

    @classmethod
    def of_labels(cls, labels: Sequence[str]) -> Nodes:
        """Return the nodes of ranks that say where they are: equal labels, one node.

        >>> Nodes.of_labels(["b", "b", "a", "a"]).of_rank
        (0, 0, 1, 1)
        """
        number = {label: i for i, label in enumerate(dict.fromkeys(labels))}
        return cls(tuple(number[label] for label in labels))

    @property
    def count(self) -> int:
        """How many there are."""
        return max(self.of_rank) + 1

    def members(self) -> list[tuple[int, ...]]:
        """Return the ranks of each node, ascending."""
        found: list[list[int]] = [[] for _ in range(self.count)]
        for rank, node in enumerate(self.of_rank):
            found[node].append(rank)
        return [tuple(ranks) for ranks in found]

    def leaders(self) -> tuple[int, ...]:
        """Return the lowest rank of each node."""
        return tuple(ranks[0] for ranks in self.members())

    def keepers(self, *, copies: int, jump: int) -> tuple[tuple[int, ...], ...]:
        """Return for each rank the ranks that keep a copy for it: one on each of `copies - 1` other nodes.

        The next copy is `jump` nodes further, or where that has one already, on the next node that has none.
        With fewer nodes than copies, every node has one.

        >>> Nodes((0, 0, 1, 1, 2, 2)).keepers(copies=2, jump=1)
        ((2,), (3,), (4,), (5,), (0,), (1,))
        """
        members = self.members()
        found: list[tuple[int, ...]] = [()] * len(self.of_rank)
        for node, ranks in enumerate(members):
            others = [members[n] for n in _steps_from(node, self.count, copies=copies, jump=jump)]
            for local, rank in enumerate(ranks):
                found[rank] = tuple(other[local % len(other)] for other in others)
        return tuple(found)


def _steps_from(node: int, count: int, *, copies: int, jump: int) -> list[int]:
    taken = [node]
    while len(taken) < min(copies, count):
        other = (taken[-1] + jump) % count
        while other in taken:
            other = (other + 1) % count
        taken.append(other)
    return taken[1:]


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
