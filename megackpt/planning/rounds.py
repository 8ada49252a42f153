"""Rounds of an exchange: which parts go together, so that no rank holds too much at a time.

Pure and greedy: in each round readers take turns, and each puts in its next parts while they fit.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from megackpt.geometry import Ints


@dataclass(frozen=True, slots=True, eq=False)
class PartLoads:
    """Bytes that parts put on ranks.

    Attributes:
        reader: who reads each part, `[u]`.
        given: what the reader holds for it, `[u]`.
        first: where its row of takers begins, `[u + 1]`.
        taker: ranks that take something of it, `[t]`.
        taken: how much each of these holds for it, `[t]`.
        size: number of ranks.
    """

    reader: Ints
    given: Ints
    first: Ints
    taker: Ints
    taken: Ints
    size: int


def assign_rounds(loads: PartLoads, *, order: Ints, give: int, take: int) -> Ints:
    """Return the round of each part, `[u]`; a reader's parts are exchanged in the given order.

    In a round no reader gives more than `give` bytes and no rank takes more than `take`, except that a single
    part may exceed either.
    """
    rounds = np.zeros(len(loads.reader), np.int64)
    queues: list[list[int]] = [[] for _ in range(loads.size)]
    for part in order[::-1].tolist():
        queues[int(loads.reader[part])].append(part)
    given, first = loads.given.tolist(), loads.first.tolist()
    number = 0
    while any(queues):
        taken = np.zeros(loads.size, np.int64)
        for turn in range(loads.size):  # another rank begins each round, so that none always comes last
            queue = queues[(number + turn) % loads.size]
            held = 0
            while queue:
                part = queue[-1]
                rows = slice(first[part], first[part + 1])
                takers = loads.taker[rows]
                before = taken[takers]
                after = before + loads.taken[rows]
                if (held and held + given[part] > give) or bool(((after > take) & (before > 0)).any()):
                    break
                taken[takers] = after
                held += given[part]
                rounds[part] = number
                queue.pop()
        number += 1
    return rounds
