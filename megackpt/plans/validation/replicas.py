"""Replicas that should be equal and are not: which ranks have which bits.

Ranks send a name and a digest for each of their chunks. Chunks with equal names are replicas of each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from megackpt.errors import rank_list

REPLICA_DIGEST = np.dtype([("name", "V16"), ("digest", "V16")])
"""What a rank sends for one chunk: a hash of its key and box, and a digest of its bits."""


@dataclass(frozen=True, slots=True)
class Divergence:
    """Replicas of one chunk that differ.

    Attributes:
        name: hash of the key and box of the chunk.
        groups: the ranks that have equal bits; the group of most ranks first, then of the lowest rank.
    """

    name: bytes
    groups: tuple[tuple[int, ...], ...]

    @property
    def majority(self) -> tuple[int, ...] | None:
        """The ranks with the bits of more than half of all replicas; None if there are no such bits."""
        largest = self.groups[0]
        return largest if 2 * len(largest) > sum(map(len, self.groups)) else None

    def __str__(self) -> str:
        if self.majority is None:
            return f"no majority: {' | '.join(map(_ranks, self.groups))} hold different bits"
        others = " | ".join(map(_ranks, self.groups[1:]))
        is_one = sum(map(len, self.groups[1:])) == 1
        return f"{others} differ{'s' if is_one else ''} from the majority, {_ranks(self.majority)}"


def find_divergences(digests: Sequence[npt.NDArray[np.void]]) -> list[Divergence]:
    """Return the chunks whose replicas differ, sorted by name. Pure.

    Args:
        digests: an array of REPLICA_DIGEST for each rank, `[chunks]`. Names and digests may be shorter than
            in REPLICA_DIGEST, if they are so on all ranks.
    """
    if not digests:
        return []
    sent = np.concatenate(digests)
    rank = np.repeat(np.arange(len(digests)), [len(of_rank) for of_rank in digests])
    # Small numbers in place of names and digests are compared and sorted faster.
    _, name = np.unique(sent["name"], return_inverse=True)
    _, digest = np.unique(sent["digest"], return_inverse=True)
    name, digest = name.reshape(-1), digest.reshape(-1)
    # A name has different digests if its lowest and its highest number of a digest differ.
    lowest = np.full(int(name.max(initial=-1)) + 1, len(sent), np.int64)
    highest = np.full_like(lowest, -1)
    np.minimum.at(lowest, name, digest)
    np.maximum.at(highest, name, digest)
    rows = np.flatnonzero(lowest[name] != highest[name])
    rows = rows[np.lexsort((rank[rows], digest[rows], name[rows]))]
    # Rows are sorted by name, digest and rank, so groups and the ranks in them come in that order.
    ranks_of: dict[int, dict[int, list[int]]] = {}  # name -> digest -> ranks
    for row in rows.tolist():
        ranks_of.setdefault(int(name[row]), {}).setdefault(int(digest[row]), []).append(int(rank[row]))
    first = dict(zip(name[rows].tolist(), rows.tolist(), strict=True))
    return [
        Divergence(
            sent["name"][first[number]].tobytes(),
            tuple(sorted((tuple(ranks) for ranks in groups.values()), key=lambda g: (-len(g), g))),
        )
        for number, groups in ranks_of.items()
    ]


def _ranks(ranks: tuple[int, ...]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {rank_list(ranks)}"
