"""Who writes a chunk that several ranks hold.

Owns the balancing. Deterministic: every rank computes the same answer from the same declarations.
"""

from __future__ import annotations

import heapq

import numpy as np

from megackpt.geometry import Ints


def assign_writers(nbytes: Ints, holder_start: Ints, holders: Ints, *, ranks: int) -> Ints:
    """Choose one holder for each chunk, keeping bytes per rank even; returns positions in `holders`, `[n]`.

    Chunk i is held by `holders[holder_start[i] : holder_start[i + 1]]`, ranks in ascending order. Chunks
    with the fewest holders are given out first, since the others can still go where there is room; among
    equals the largest first, each to the holder with the fewest bytes so far, ties to the lowest rank.

    >>> two = assign_writers(np.array([8, 8]), np.array([0, 2, 4]), np.array([0, 1, 0, 1]), ranks=2)
    >>> two.tolist()  # chunk 0 goes to its first holder (rank 0), chunk 1 to its second (rank 1)
    [0, 3]
    """
    choice: Ints = holder_start[:-1].copy()
    counts = np.diff(holder_start)
    load = np.zeros(ranks, np.int64)
    alone = counts == 1
    np.add.at(load, holders[choice[alone]], nbytes[alone])
    shared = np.flatnonzero(~alone)
    order = shared[np.lexsort((shared, -nbytes[shared], counts[shared]))]
    queue: list[tuple[int, int, int]] = []
    queue_of: tuple[int, ...] = ()
    for chunk in order.tolist():
        first = int(holder_start[chunk])
        mine = tuple(holders[first : first + int(counts[chunk])].tolist())
        if (
            mine != queue_of
        ):  # chunks of one model replica have the same holders: keep one queue as long as they last
            queue = [(int(load[rank]), rank, place) for place, rank in enumerate(mine)]
            heapq.heapify(queue)
            queue_of = mine
        bytes_so_far, rank, place = queue[0]
        choice[chunk] = first + place
        total = bytes_so_far + int(nbytes[chunk])
        load[rank] = total
        heapq.heapreplace(queue, (total, rank, place))
    return choice
