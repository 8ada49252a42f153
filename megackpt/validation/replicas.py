"""Copies that should be equal and are not: who holds which bits.

Owns the comparison and its words. What is a copy of what, and the digests, come from the ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from megackpt.errors import rank_list

REPLICA_DIGEST = np.dtype([("name", "V16"), ("digest", "V16")])
"""What a rank says of a chunk that it holds: what stands for its key and box, and for its bits."""


@dataclass(frozen=True, slots=True)
class Divergence:
    """Copies of one chunk that differ.

    Attributes:
        name: what stands for its key and box, bytes.
        camps: the ranks that hold equal bits, most ranks first, then the lowest rank.
    """

    name: bytes
    camps: tuple[tuple[int, ...], ...]

    @property
    def majority(self) -> tuple[int, ...] | None:
        """The ranks of more than half of all copies; None if no bits are held by so many."""
        largest = self.camps[0]
        return largest if 2 * len(largest) > sum(map(len, self.camps)) else None

    def __str__(self) -> str:
        if self.majority is None:
            return f"no majority: {' | '.join(_ranks(camp) for camp in self.camps)} hold different bits"
        others = " | ".join(_ranks(camp) for camp in self.camps[1:])
        is_one = sum(map(len, self.camps[1:])) == 1
        return f"{others} differ{'s' if is_one else ''} from the majority, {_ranks(self.majority)}"


def find_divergences(said: Sequence[npt.NDArray[np.void]]) -> list[Divergence]:
    """Compare what ranks say, an array of CLAIM of each, `[chunks]`; return what differs, by name. Pure.

    Names and digests may be shorter than those of CLAIM, and are as long on all ranks.
    """
    if not said:
        return []
    claims = np.concatenate(said)
    rank = np.repeat(np.arange(len(said)), [len(of_rank) for of_rank in said])
    _, name = np.unique(claims["name"], return_inverse=True)
    _, digest = np.unique(claims["digest"], return_inverse=True)
    name, digest = name.reshape(-1), digest.reshape(-1)
    lowest = np.full(int(name.max(initial=-1)) + 1, len(claims), np.int64)
    highest = np.full_like(lowest, -1)
    np.minimum.at(lowest, name, digest)
    np.maximum.at(highest, name, digest)
    rows = np.flatnonzero(lowest[name] != highest[name])
    rows = rows[np.lexsort((rank[rows], digest[rows], name[rows]))]
    found: dict[int, dict[int, list[int]]] = {}
    for row in rows.tolist():
        found.setdefault(int(name[row]), {}).setdefault(int(digest[row]), []).append(int(rank[row]))
    first = dict(zip(name[rows].tolist(), rows.tolist(), strict=True))
    return [
        Divergence(
            claims["name"][first[number]].tobytes(),
            tuple(sorted((tuple(c) for c in camps.values()), key=lambda c: (-len(c), c))),
        )
        for number, camps in found.items()
    ]


def _ranks(ranks: tuple[int, ...]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {rank_list(ranks)}"
