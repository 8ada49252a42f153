"""Where redundant data lies: the nodes that keep copies for a rank, and the files that share parity. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megackpt.plans.geometry import Ints


@dataclass(frozen=True, slots=True)
class Nodes:
    """The nodes of a job, numbered by their lowest rank.

    Attributes:
        of_rank: number of the node of each rank, `[ranks]`.
    """

    of_rank: tuple[int, ...]

    @classmethod
    def of_labels(cls, labels: Sequence[str]) -> Nodes:
        """Return the nodes of ranks from one label for each rank; ranks with equal labels share a node.

        >>> Nodes.of_labels(["b", "b", "a", "a"]).of_rank
        (0, 0, 1, 1)
        """
        number = {label: i for i, label in enumerate(dict.fromkeys(labels))}
        return cls(tuple(number[label] for label in labels))

    @property
    def count(self) -> int:
        """Number of nodes."""
        return max(self.of_rank) + 1

    def members(self) -> list[tuple[int, ...]]:
        """Return the ranks of each node, ascending."""
        ranks_of_node: list[list[int]] = [[] for _ in range(self.count)]
        for rank, node in enumerate(self.of_rank):
            ranks_of_node[node].append(rank)
        return [tuple(ranks) for ranks in ranks_of_node]

    def leaders(self) -> tuple[int, ...]:
        """Return the lowest rank of each node."""
        return tuple(ranks[0] for ranks in self.members())

    def keepers(self, *, copies: int, jump: int) -> tuple[tuple[int, ...], ...]:
        """Return the ranks that keep copies of each rank's files: one on each of `copies - 1` other nodes.

        The next copy is `jump` nodes further, or on the next node without a copy. If there are fewer nodes
        than copies, every node has one.

        >>> Nodes((0, 0, 1, 1, 2, 2)).keepers(copies=2, jump=1)
        ((2,), (3,), (4,), (5,), (0,), (1,))
        """
        members = self.members()
        keepers: list[tuple[int, ...]] = [()] * len(self.of_rank)
        for node, ranks in enumerate(members):
            others = [members[n] for n in _nodes_with_copies(node, self.count, copies=copies, jump=jump)]
            # Ranks of one node choose different ranks of the other node, as far as it has them.
            for local, rank in enumerate(ranks):
                keepers[rank] = tuple(other[local % len(other)] for other in others)
        return tuple(keepers)


def _nodes_with_copies(node: int, count: int, *, copies: int, jump: int) -> list[int]:
    taken = [node]
    while len(taken) < min(copies, count):
        # If `jump` and the number of nodes have a common divisor, the walk returns to a node that has a copy.
        other = (taken[-1] + jump) % count
        while other in taken:
            other = (other + 1) % count
        taken.append(other)
    return taken[1:]


def parity_groups(files: Ints, *, most: int) -> list[Ints]:
    """Divide files into the fewest groups of at most `most` files that share parity.

    Groups differ by at most one file. The ranks of a group are as far apart as possible: ranks of one machine
    have neighbouring numbers, so a lost machine costs each group as few files as possible.

    Args:
        files: the ranks that wrote one file each, ascending, `[f]`.
        most: files in a group.

    >>> import numpy as np
    >>> [group.tolist() for group in parity_groups(np.array([0, 1, 2, 4, 5]), most=2)]
    [[0, 4], [1, 5], [2]]
    """
    count = -(-len(files) // most)
    return [files[number::count] for number in range(count)]


def parity_writer(group: Ints, number: int) -> int:
    """Return the rank that writes parity file `number` of a group: a rank that wrote one of its files."""
    return int(group[number % len(group)])
