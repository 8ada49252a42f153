"""Proof that every element of every global array is saved exactly once.

Owns the check over main replicas. Equal boxes on a grid, the common case, are proved by comparing sorted
rows; what is irregular is cut along all edges that occur, and the resulting cells are counted.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from megackpt.errors import CoverageError, truncated_list
from megackpt.geometry import Ints, rectangles_of
from megackpt.metadata import ChunkTable, DeclaredChunks


@dataclass(frozen=True, slots=True)
class Fault:
    """A region of an array that is not covered exactly once.

    Attributes:
        key: the array.
        region: as text, `[0:4, 2:6]`.
        ranks: who covers it; empty where nobody does.
    """

    key: str
    region: str
    ranks: tuple[int, ...]

    def __str__(self) -> str:
        if not self.ranks:
            return f"{self.key!r}: elements {self.region} are saved by no rank"
        who = ", ".join(map(str, self.ranks))
        return f"{self.key!r}: elements {self.region} are saved by more than one main replica (ranks {who})"


def check_coverage(declared: DeclaredChunks) -> None:
    """Prove that main replicas cover every element of every array exactly once.

    Raises:
        CoverageError: all faults, sorted by key: the region and the ranks that cover it.
    """
    mains = declared.take(declared.main & (declared.table.flat_stop > declared.table.flat_start))
    faults: list[Fault] = []
    suspects = _suspects(mains.table)
    for array in suspects.tolist():
        faults += _faults_of(mains, array)
    if faults:
        shapes = {a.key: a.global_shape for a in declared.table.arrays}
        lines = [f"{f} (global shape {shapes[f.key]})" for f in faults]
        raise CoverageError(
            f"The ranks' declarations do not cover every element exactly once:\n{truncated_list(lines)}\n"
            f"Check global_offset and replica_id in the sharded_state_dict() of these keys: exactly one "
            f"rank's chunk "
            f"of each element must have replica_id 0 (or all zeros).",
            key=faults[0].key,
            rank=min(faults[0].ranks, default=None),
        )


def _suspects(table: ChunkTable) -> Ints:
    """Return the arrays not proved by the cheap test: equal boxes at distinct places of one grid."""
    arrays = len(table.arrays)
    numel = np.array([a.numel for a in table.arrays], np.int64)
    if not len(table):
        return np.flatnonzero(numel > 0)
    order = np.lexsort((table.flat_start, *table.start.T[::-1], table.array))
    array, start, shape = table.array[order], table.start[order], table.shape[order]
    flat_start, flat_stop = table.flat_start[order], table.flat_stop[order]
    first = np.flatnonzero(np.diff(array, prepend=-1))
    box_of_array = np.zeros((arrays, table.dims), np.int64)
    box_of_array[array[first]] = shape[first]
    box = box_of_array[array]
    same_box = (shape == box).all(axis=1) & (start % np.maximum(box, 1) == 0).all(axis=1)
    # Sorted by place: rows of one box must not begin before the row before them has ended. Then no element is
    # covered twice, and as many covered elements as there are mean that none is missing.
    same_place = np.zeros(len(array), np.bool_)
    same_place[1:] = (np.diff(array) == 0) & (np.diff(start, axis=0) == 0).all(axis=1)
    previous_stop = np.concatenate(([0], flat_stop[:-1]))
    overlaps = same_place & (flat_start < previous_stop)
    bad = np.bincount(array, ~same_box | overlaps, minlength=arrays) > 0
    covered = np.bincount(array, (flat_stop - flat_start).astype(np.float64), minlength=arrays).astype(
        np.int64
    )
    return np.flatnonzero(bad | (covered != numel))


def _faults_of(mains: DeclaredChunks, array: int) -> list[Fault]:
    """Examine one array in full: cut it along every edge that occurs and count who covers each cell."""
    spec = mains.table.arrays[array]
    if not spec.numel:
        return []
    rows = np.flatnonzero(mains.table.array == array)
    table = mains.table.take(rows)
    cut = rectangles_of(table.shape, table.flat_start, table.flat_stop)
    start = cut.start + table.start[cut.row]
    stop = start + cut.shape
    whole = mains.table.padded_global_shape()[array]
    edges = [np.unique(np.concatenate(([0, whole[d]], start[:, d], stop[:, d]))) for d in range(table.dims)]
    low = [np.searchsorted(edges[d], start[:, d]) for d in range(table.dims)]
    high = [np.searchsorted(edges[d], stop[:, d]) for d in range(table.dims)]
    count = np.zeros([len(e) - 1 for e in edges], np.int32)
    for i in range(len(start)):
        count[tuple(slice(a[i], b[i]) for a, b in zip(low, high, strict=True))] += 1
    ranks = mains.rank[rows][cut.row]
    faults = []
    for region in _regions(count):
        low_edge = [edges[d][s.start] for d, s in enumerate(region)]
        high_edge = [edges[d][s.stop] for d, s in enumerate(region)]
        inside = np.all((start < high_edge) & (stop > low_edge), axis=1)
        holders = tuple(sorted(set(ranks[inside].tolist())))
        dims = len(spec.global_shape)
        text = ", ".join(f"{a}:{b}" for a, b in zip(low_edge[:dims], high_edge[:dims], strict=True))
        faults.append(Fault(spec.key, f"[{text}]", holders))
    return faults


def _regions(count: np.ndarray[tuple[int, ...], np.dtype[np.int32]]) -> list[tuple[slice, ...]]:
    """Group the cells whose count is not 1 into boxes of equal count, greedily, in row-major order."""
    left = count != 1
    regions = []
    while left.any():
        corner = np.unravel_index(int(left.argmax()), left.shape)
        region = [slice(int(c), int(c) + 1) for c in corner]
        for dim in reversed(range(count.ndim)):
            while region[dim].stop < count.shape[dim]:
                grown = [*region]
                grown[dim] = slice(region[dim].stop, region[dim].stop + 1)
                slab = tuple(grown)
                if not (left[slab].all() and (count[slab] == count[corner]).all()):
                    break
                region[dim] = slice(region[dim].start, region[dim].stop + 1)
        left[tuple(region)] = False
        regions.append(tuple(region))
    return regions
