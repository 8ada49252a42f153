"""Who writes a chunk that several ranks hold.

Owns the balancing. Deterministic: every rank computes the same answer from the same declarations. The rule is
greedy, one chunk after the other; where many chunks have one set of holders and few different sizes, as those
of data-parallel replicas do, its outcome is computed for all chunks of a size at once.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from megackpt.geometry import Ints, joined_ranges

FEW = 16
"""So many equal chunks are given out one by one faster than together."""


def assign_writers(
    nbytes: Ints, holder_start: Ints, holders: Ints, *, ranks: int, set_of: Ints | None = None
) -> Ints:
    """Choose one holder for each chunk, keeping bytes per rank even; returns positions in `holders`, `[n]`.

    Chunk i is held by set i of ranks, or by set `set_of[i]`, as several chunks may be. Set s is
    `holders[holder_start[s] : holder_start[s + 1]]`, ranks in ascending order. Chunks with the fewest holders
    are given out first, since the others can still go where there is room; among equals the largest first,
    each to the holder with the fewest bytes so far, ties to the lowest rank.

    >>> two = assign_writers(np.array([8, 8]), np.array([0, 2, 4]), np.array([0, 1, 0, 1]), ranks=2)
    >>> two.tolist()  # chunk 0 goes to its first holder (rank 0), chunk 1 to its second (rank 1)
    [0, 3]
    """
    sets = np.arange(len(nbytes)) if set_of is None else set_of
    choice: Ints = holder_start[sets]
    counts = np.diff(holder_start)[sets]
    load = np.zeros(ranks, np.int64)
    alone = counts == 1
    np.add.at(load, holders[choice[alone]], nbytes[alone])
    for count in np.unique(counts[~alone]).tolist():
        chunks = np.flatnonzero(counts == count)
        used, own = np.unique(sets[chunks], return_inverse=True)
        held_by = holders[holder_start[used, None] + np.arange(count)]  # [sets, count]
        groups = _independent_groups(held_by, ranks)
        for (_, is_one_set), members in zip(groups, _members(groups, own), strict=True):
            order = members[np.argsort(-nbytes[chunks[members]], kind="stable")]
            sizes = nbytes[chunks[order]]
            if is_one_set:
                place = _spread_over_one_set(sizes, held_by[own[order[0]]], load)
            else:
                place = _spread_over_many_sets(sizes, held_by[own[order]], load)
            choice[chunks[order]] += place
    return choice


def _members(groups: list[tuple[Ints, bool]], set_of: Ints) -> list[Ints]:
    """Return the chunks of each group of sets, ascending."""
    lengths = [len(group) for group, _ in groups]
    number = np.empty(sum(lengths), np.int64)
    number[np.concatenate([group for group, _ in groups])] = np.repeat(np.arange(len(groups)), lengths)
    of_chunk = number[set_of]
    return np.split(
        np.argsort(of_chunk, kind="stable"), np.cumsum(np.bincount(of_chunk, minlength=len(groups)))[:-1]
    )


def _independent_groups(held_by: Ints, ranks: int) -> list[tuple[Ints, bool]]:
    """Split sets, rows of `[n, holders]`, into groups without a common holder.

    A group is either all rows of one set of holders (True), or all those whose sets overlap others (False).
    """
    order = np.argsort(_mixed(held_by), kind="stable")
    begins = np.ones(len(order), np.bool_)
    # Equal sets have equal mixed values and so stand together; where different sets share a value they are
    # told apart here, and at worst one set falls into several groups, which then overlap.
    begins[1:] = (held_by[order[1:]] != held_by[order[:-1]]).any(axis=1)
    first = np.flatnonzero(begins)
    sets = held_by[order[first]]
    overlaps = (np.bincount(sets.ravel(), minlength=ranks)[sets] > 1).any(axis=1)
    members = np.split(order, first[1:])
    groups = [(members[i], True) for i in np.flatnonzero(~overlaps).tolist()]
    if overlaps.any():
        groups.append((np.concatenate([members[i] for i in np.flatnonzero(overlaps).tolist()]), False))
    return groups


def _mixed(held_by: Ints) -> npt.NDArray[np.uint64]:
    """One number for each row that is the same for equal rows and seldom for others."""
    mixed = np.zeros(len(held_by), np.uint64)
    for column in held_by.T:
        mixed = (mixed ^ column.astype(np.uint64)) * np.uint64(0x9E3779B97F4A7C15)
        mixed ^= mixed >> np.uint64(29)
    return mixed


def _spread_over_one_set(sizes: Ints, holders: Ints, load: Ints) -> Ints:
    """Give chunks, largest first, to one set of holders; returns places in `holders` and adds to `load`."""
    place = np.empty(len(sizes), np.int64)
    starts = np.flatnonzero(np.diff(sizes, prepend=-1))
    stops = np.append(starts[1:], len(sizes))
    queue: list[tuple[int, int]] = []  # (bytes so far, place): kept while chunks are given out one by one
    for start, stop in zip(starts.tolist(), stops.tolist(), strict=True):
        size = int(sizes[start])
        if stop - start > FEW:
            _empty(queue, holders, load)
            place[start:stop] = _next_places(load[holders], size, stop - start)
            load[holders] += size * np.bincount(place[start:stop], minlength=len(holders))
            continue
        if not queue:
            queue = [(total, at) for at, total in enumerate(load[holders].tolist())]
            heapq.heapify(queue)
        for chunk in range(start, stop):
            total, at = queue[0]
            place[chunk] = at
            heapq.heapreplace(queue, (total + size, at))
    _empty(queue, holders, load)
    return place


def _empty(queue: list[tuple[int, int]], holders: Ints, load: Ints) -> None:
    for total, at in queue:
        load[holders[at]] = total
    queue.clear()


def _next_places(load: Ints, size: int, count: int) -> Ints:
    """Who gets each of `count` chunks of one size: always who has least so far, ties to the first.

    A holder that gets a chunk has `load`, `load + size`, `load + 2 size`, ... before its first, second, third
    one. So the greedy rule visits these numbers of all holders in ascending order.
    """
    if size == 0:
        return np.full(count, int(load.argmin()), np.int64)
    by_load = np.sort(load)
    # Water over steps: the level to which the a lowest holders fill up, for the largest a that lie under it.
    levels = -(-(np.cumsum(by_load) + count * size) // np.arange(1, len(load) + 1))
    level = int(levels[np.flatnonzero(levels > by_load)[-1]])
    turns = np.where(load <= level, (level - load) // size + 1, 0)  # at least `count` in all
    place = np.repeat(np.arange(len(load)), turns)
    nth = joined_ranges(0, turns)
    return place[np.lexsort((place, load[place] + nth * size))[:count]]


def _spread_over_many_sets(sizes: Ints, held_by: Ints, load: Ints) -> Ints:
    """Give chunks, largest first, each to one of its own holders; returns places and adds to `load`."""
    totals: list[int] = load.tolist()
    place = np.empty(len(sizes), np.int64)
    for chunk, (size, mine) in enumerate(zip(sizes.tolist(), held_by.tolist(), strict=True)):
        rank = min(mine, key=totals.__getitem__)  # of equals the first, so the lowest rank
        place[chunk] = mine.index(rank)
        totals[rank] += size
    load[:] = totals
    return place


@dataclass(frozen=True, slots=True, eq=False)
class Readers:
    """Which ranks can read which stored chunks, where not every rank can read all.

    Attributes:
        of: number of the set of ranks that can read each stored chunk, `[n]`.
        first: where each set begins in ranks, `[sets + 1]`.
        ranks: the ranks, ascending in each set; no set is empty.
    """

    of: Ints
    first: Ints
    ranks: Ints


def assign_readers(
    nbytes: Ints, first: Ints, needing: Ints, chunk: Ints, *, readers: Readers | None, ranks: int
) -> Ints:
    """Choose the rank that reads each part, keeping bytes per rank even, `[u]`.

    Part i, a part of stored chunk `chunk[i]`, is needed by the ranks `needing[first[i] : first[i + 1]]`. One
    of these reads it, which saves sending it there; where none of them can, another one that can.
    """
    if readers is None:
        return needing[assign_writers(nbytes, first, needing, ranks=ranks)]
    set_of = readers.of[chunk]
    part = np.repeat(np.arange(len(chunk)), np.diff(first))
    sets = np.repeat(np.arange(len(readers.first) - 1), np.diff(readers.first))
    can = np.isin(set_of[part] * ranks + needing, sets * ranks + readers.ranks)
    near = np.bincount(part[can], minlength=len(chunk))
    far = np.flatnonzero(near == 0)
    begin, counts = readers.first[set_of[far]], np.diff(readers.first)[set_of[far]]
    ends = np.cumsum(counts)
    from_sets = np.repeat(begin - ends + counts, counts) + np.arange(int(counts.sum()))
    parts = np.concatenate([part[can], np.repeat(far, counts)])
    candidates = np.concatenate([needing[can], readers.ranks[from_sets]])[np.argsort(parts, kind="stable")]
    start = np.append(0, np.cumsum(np.bincount(parts, minlength=len(chunk))))
    return candidates[assign_writers(nbytes, start, candidates, ranks=ranks)]
