"""Which rank writes a chunk that several ranks declare.

Pure and deterministic: every rank computes the same answer from the same input. The rule is greedy, one chunk
after the other. Where many chunks have the same owners and few different sizes, as those of data-parallel
replicas, its result is computed for all chunks of a size at once.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt

from megackpt.plans.geometry import Ints, joined_ranges
from megackpt.plans.metadata import ChunkTable, itemsizes
from megackpt.plans.metadata.chunk_table import Rows

FEW = 16
"""Up to so many chunks of one size are assigned one by one, which is faster than all at once."""


def assign_writers(
    nbytes: Ints, owner_start: Ints, owners: Ints, *, ranks: int, set_of: Ints | None = None
) -> Ints:
    """Choose one owner for each chunk, keeping bytes per rank even; returns indices into `owners`, `[n]`.

    Chunks with the fewest owners are assigned first, since the others can still go to ranks with fewer bytes.
    Among chunks with equally many owners the largest is first. Each goes to the owner with the fewest bytes
    so far, ties to the lowest rank.

    Args:
        nbytes: length of each chunk, `[n]`.
        owner_start: where each set of owners begins in owners, and the end of the last, `[sets + 1]`.
        owners: ranks, ascending in each set.
        ranks: number of ranks.
        set_of: the set of each chunk, `[n]`; None if chunk i has set i.

    >>> two = assign_writers(np.array([8, 8]), np.array([0, 2, 4]), np.array([0, 1, 0, 1]), ranks=2)
    >>> two.tolist()  # chunk 0 goes to its first owner (rank 0), chunk 1 to its second (rank 1)
    [0, 3]
    """
    sets = np.arange(len(nbytes)) if set_of is None else set_of
    choice: Ints = owner_start[sets]
    counts = np.diff(owner_start)[sets]
    # A single owner is no choice; its bytes count for the choices that follow.
    load = np.zeros(ranks, np.int64)
    is_single = counts == 1
    np.add.at(load, owners[choice[is_single]], nbytes[is_single])
    for count in np.unique(counts[~is_single]).tolist():
        chunks = np.flatnonzero(counts == count)
        used, own = np.unique(sets[chunks], return_inverse=True)
        rank_sets = owners[owner_start[used, None] + np.arange(count)]  # [sets, count]
        # Groups have no rank in common, so the order between groups does not change the result.
        groups = _independent_groups(rank_sets, ranks)
        for (_, is_one_set), members in zip(groups, _chunks_of_groups(groups, own), strict=True):
            order = members[np.argsort(-nbytes[chunks[members]], kind="stable")]
            sizes = nbytes[chunks[order]]
            if is_one_set:
                chosen = _spread_over_one_set(sizes, rank_sets[own[order[0]]], load)
            else:
                chosen = _spread_over_many_sets(sizes, rank_sets[own[order]], load)
            choice[chunks[order]] += chosen
    return choice


def _chunks_of_groups(groups: list[tuple[Ints, bool]], set_of: Ints) -> list[Ints]:
    """Return the chunks of each group of sets, ascending."""
    lengths = [len(group) for group, _ in groups]
    # Each set is in one group: number[s] is the group of set s.
    number = np.empty(sum(lengths), np.int64)
    number[np.concatenate([group for group, _ in groups])] = np.repeat(np.arange(len(groups)), lengths)
    of_chunk = number[set_of]
    # A stable sort keeps the chunks of a group ascending. Groups end at sums of counts; the last is no cut.
    return np.split(
        np.argsort(of_chunk, kind="stable"), np.cumsum(np.bincount(of_chunk, minlength=len(groups)))[:-1]
    )


def _independent_groups(rank_sets: Ints, ranks: int) -> list[tuple[Ints, bool]]:
    """Split sets of ranks, rows of `[n, count]`, into groups without a common rank.

    A group is either all rows of one set (True), or all rows whose sets overlap others (False).
    """
    # After sorting by hash, equal sets are neighbours. If different sets share a hash, a set may fall into
    # several groups; these overlap then, which is slower but right.
    order = np.argsort(_hashes(rank_sets), kind="stable")
    begins = np.ones(len(order), np.bool_)
    begins[1:] = (rank_sets[order[1:]] != rank_sets[order[:-1]]).any(axis=1)
    first = np.flatnonzero(begins)
    sets = rank_sets[order[first]]
    overlaps = (np.bincount(sets.ravel(), minlength=ranks)[sets] > 1).any(axis=1)
    members = np.split(order, first[1:])
    groups = [(members[i], True) for i in np.flatnonzero(~overlaps).tolist()]
    if overlaps.any():
        groups.append((np.concatenate([members[i] for i in np.flatnonzero(overlaps).tolist()]), False))
    return groups


def _hashes(rank_sets: Ints) -> npt.NDArray[np.uint64]:
    """Return one hash for each row, `[n]`."""
    mixed = np.zeros(len(rank_sets), np.uint64)
    for column in rank_sets.T:
        mixed = (mixed ^ column.astype(np.uint64)) * np.uint64(0x9E3779B97F4A7C15)
        mixed ^= mixed >> np.uint64(29)
    return mixed


def _spread_over_one_set(sizes: Ints, owners: Ints, load: Ints) -> Ints:
    """Assign chunks, largest first, to one set of owners; returns indices in `owners` and adds to `load`."""
    chosen = np.empty(len(sizes), np.int64)
    starts = np.flatnonzero(np.diff(sizes, prepend=-1))
    stops = np.append(starts[1:], len(sizes))
    # (bytes so far, index) of every owner. The queue is kept while chunks are assigned one by one, and
    # written back to `load` before chunks are assigned all at once.
    queue: list[tuple[int, int]] = []
    for start, stop in zip(starts.tolist(), stops.tolist(), strict=True):
        size = int(sizes[start])
        if stop - start > FEW:
            _write_back(queue, owners, load)
            chosen[start:stop] = _next_owners(load[owners], size, stop - start)
            load[owners] += size * np.bincount(chosen[start:stop], minlength=len(owners))
            continue
        if not queue:
            queue = [(total, at) for at, total in enumerate(load[owners].tolist())]
            heapq.heapify(queue)
        for chunk in range(start, stop):
            total, at = queue[0]
            chosen[chunk] = at
            heapq.heapreplace(queue, (total + size, at))
    _write_back(queue, owners, load)
    return chosen


def _write_back(queue: list[tuple[int, int]], owners: Ints, load: Ints) -> None:
    for total, at in queue:
        load[owners[at]] = total
    queue.clear()


def _next_owners(load: Ints, size: int, count: int) -> Ints:
    """Return the owner of each of `count` chunks of one size: the one with the least load, ties to the first.

    Before its first, second, third chunk an owner has `load`, `load + size`, `load + 2 size`, ... So the
    greedy rule visits these numbers of all owners in ascending order.
    """
    if size == 0:
        return np.full(count, int(load.argmin()), np.int64)
    by_load = np.sort(load)
    # All owners are filled up to one level. If only the a lowest take part, the level is their bytes plus
    # those of the chunks, divided by a; the right a is the largest whose members lie below its level.
    levels = -(-(np.cumsum(by_load) + count * size) // np.arange(1, len(load) + 1))
    level = int(levels[np.flatnonzero(levels > by_load)[-1]])
    # Every number up to the level is listed. There are at least `count`; the smallest are taken.
    turns = np.where(load <= level, (level - load) // size + 1, 0)
    owner = np.repeat(np.arange(len(load)), turns)
    nth = joined_ranges(0, turns)
    return owner[np.lexsort((owner, load[owner] + nth * size))[:count]]


def _spread_over_many_sets(sizes: Ints, rank_sets: Ints, load: Ints) -> Ints:
    """Assign chunks, largest first, each to one rank of its own set; returns indices and adds to `load`."""
    totals: list[int] = load.tolist()
    chosen = np.empty(len(sizes), np.int64)
    for chunk, (size, ranks) in enumerate(zip(sizes.tolist(), rank_sets.tolist(), strict=True)):
        rank = min(ranks, key=totals.__getitem__)  # of equals the first, so the lowest rank
        chosen[chunk] = ranks.index(rank)
        totals[rank] += size
    load[:] = totals
    return chosen


# Long chunks split into shorter ones, each of them a contiguous range of the long one's bytes. Pure.
#
# If the chunks of an array form a grid, the shorter ones do so as well.


def split_long_chunks(
    table: ChunkTable, *, most: int, only: Rows | None = None
) -> tuple[ChunkTable, Ints, Ints]:
    """Split chunks of more than `most` bytes along their outermost dims; objects stay whole.

    A whole box is split into boxes, and a flat range of a box into flat ranges of the same box.

    Args:
        table: the chunks.
        most: bytes; a row along the last dim is never split further, so one of more bytes stays.
        only: mask of the chunks that may be split, `[n]`; None for all.

    Returns:
        The new chunks, not sorted; the row that each comes from, `[n]`; and where it begins in the bytes of
        that row, `[n]`.
    """
    long = (table.nbytes > most) & ~table.are_objects()
    if only is not None:
        long &= only.astype(np.bool_)
    if not long.any():
        return table, np.arange(len(table)), np.zeros(len(table), np.int64)
    # Chunks of one array and shape are split in the same way, so they are handled together.
    rows = np.flatnonzero(long)
    widths = itemsizes(table.arrays)
    grids = _grid_steps(table, np.unique(table.array[rows]))
    _, kind = np.unique(table.take(rows).shape_keys(), return_inverse=True)
    by_kind = np.split(rows[np.argsort(kind, kind="stable")], np.cumsum(np.bincount(kind))[:-1])
    cut = _joined([_split_kind(table, of_kind, most, widths, grids) for of_kind in by_kind])
    width = widths[table.array[cut.of]]
    # The result is the chunks that stay, then those that were split.
    kept = np.flatnonzero(~long)
    of = np.concatenate([kept, cut.of])
    changed = {"start": cut.start, "shape": cut.shape, "flat_start": cut.low, "flat_stop": cut.high}
    changed["nbytes"] = (cut.high - cut.low) * width
    columns = {name: np.concatenate([getattr(table, name)[kept], new]) for name, new in changed.items()}
    first = np.concatenate([np.zeros(len(kept), np.int64), cut.first * width])
    return ChunkTable(arrays=table.arrays, array=table.array[of], **columns), of, first


@dataclass(frozen=True, slots=True, eq=False)
class _Cut:
    """New chunks: the row that each is cut from, start, shape, flat range and first element in the row."""

    of: Ints
    start: Ints
    shape: Ints
    low: Ints
    high: Ints
    first: Ints


def _joined(cuts: Sequence[_Cut]) -> _Cut:
    return _Cut(*(np.concatenate([getattr(cut, f.name) for cut in cuts]) for f in fields(_Cut)))


def _grid_steps(table: ChunkTable, arrays: Ints) -> dict[int, list[int]]:
    """Return the step of the grid on which all ends of an array's chunks lie, for each dim; 0 for no ends.

    An end at the edge of the array does not count. `arrays` are ascending.
    """
    rows = np.flatnonzero(np.isin(table.array, arrays))
    rows = rows[np.argsort(table.array[rows], kind="stable")]  # the chunks of each array follow each other
    extents = table.padded_global_shape()[table.array[rows]]
    start, end = table.start[rows], table.start[rows] + table.shape[rows]
    # gcd(0, n) is n, so what does not count becomes 0.
    step = np.gcd(np.where(start < extents, start, 0), np.where(end < extents, end, 0))
    begins = np.searchsorted(table.array[rows], arrays)
    steps = np.gcd.reduceat(step, begins, axis=0)
    return {
        number: steps[i, : len(table.arrays[number].global_shape)].tolist()
        for i, number in enumerate(arrays.tolist())
    }


def _split_kind(
    table: ChunkTable, rows: Ints, most: int, widths: Ints, grids: Mapping[int, Sequence[int]]
) -> _Cut:
    """Split rows of one array and shape, each of more than `most` bytes."""
    array, shape = int(table.array[rows[0]]), table.shape[rows[0]].tolist()
    most = max(most // int(widths[array]), 1)  # elements, more than a row of the last dim
    # Find the outermost dim with single indices that fit, and split it. The dims before it are split into
    # single indices.
    inner = [math.prod(shape[d + 1 :]) for d in range(len(shape))]
    dim = next(d for d, numel in enumerate(inner) if numel <= most)
    grid = grids[array]
    step = _step(shape[dim], most // inner[dim], grid[dim] if dim < len(grid) else 0)
    is_box = (table.flat_start[rows] == 0) & (table.flat_stop[rows] == math.prod(shape))
    boxes = _split_boxes(table, rows[is_box], shape, dim, step)
    flat = _split_ranges(table, rows[~is_box], step * inner[dim])
    return _joined([boxes, flat])


def _split_boxes(table: ChunkTable, rows: Ints, shape: Sequence[int], dim: int, step: int) -> _Cut:
    """Split whole boxes of one shape at multiples of step in one dim, and at each index of outer dims."""
    at = [range(n) for n in shape[:dim]] + [range(0, shape[dim], step)]
    index = np.stack(np.meshgrid(*at, indexing="ij"), axis=-1).reshape(-1, dim + 1).astype(np.int64)
    # One row for each new chunk of a box: `begin` is its start relative to the box.
    begin = np.zeros((len(index), len(shape)), np.int64)
    begin[:, : dim + 1] = index
    extents = np.tile(np.array(shape, np.int64), (len(index), 1))
    extents[:, :dim] = 1
    extents[:, dim] = np.minimum(step, shape[dim] - index[:, dim])
    strides = np.array([math.prod(shape[d + 1 :]) for d in range(len(shape))], np.int64)
    numel = extents.prod(axis=1)
    return _Cut(
        of=np.repeat(rows, len(index)),
        start=(table.start[rows][:, None, :] + begin[None]).reshape(-1, len(shape)),
        shape=np.tile(extents, (len(rows), 1)),
        low=np.zeros(len(rows) * len(index), np.int64),
        high=np.tile(numel, len(rows)),
        first=np.tile((begin * strides).sum(axis=1), len(rows)),
    )


def _split_ranges(table: ChunkTable, rows: Ints, numel: int) -> _Cut:
    """Split flat ranges at multiples of numel elements of their boxes."""
    low, high = table.flat_start[rows], table.flat_stop[rows]
    # Cuts are at multiples within the box, not within the range: ranges of one box are then cut at the same
    # elements on every rank.
    counts = -(-high // numel) - low // numel
    of = np.repeat(np.arange(len(rows)), counts)
    edge = joined_ranges(low // numel, counts) * numel
    begin, end = np.maximum(edge, low[of]), np.minimum(edge + numel, high[of])
    return _Cut(rows[of], table.start[rows[of]], table.shape[rows[of]], begin, end, begin - low[of])


def _step(extent: int, want: int, grid: int) -> int:
    """Return the extent of the new chunks, at most `want`, such that ends on a grid stay on one.

    A grid whose step has no divisor near `want` is given up.
    """
    if grid == 0:  # equal extents, as far as possible
        return -(-extent // -(-extent // want))
    if grid <= want:
        return want // grid * grid
    step = next(n for n in range(want, 0, -1) if grid % n == 0)
    return step if 4 * step >= want else want
