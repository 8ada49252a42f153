"""Proof that every element of every global array, and every object, is saved exactly once.

Owns what declarations mean for that, and the text of the error; the geometry is `tiling`'s, the wording for
objects `objects`'. Nothing else about how ranks cut an array has to agree: equal fragments, or the same ones
on every rank, are not needed where the union of what is written is the array itself.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from megackpt.errors import CoverageError, rank_list, truncated_list
from megackpt.geometry import Ints, rectangles_of
from megackpt.geometry.tiling import Mask, Rectangles, Regions, uncovered_regions
from megackpt.metadata import OBJECT, ArraySpec, ChunkTable, DeclaredChunks
from megackpt.validation.objects import object_fault

SHOWN = 10
"""Faults of one kind that the error describes; the others are counted."""


@dataclass(frozen=True, slots=True)
class Fault:
    """A region of an array that is not covered exactly once.

    Attributes:
        spec: the array.
        start: first element.
        stop: one past the last.
        count: how many main replicas cover each element; -1 for parts of the region some number other than 1.
        savers: whose main replicas meet the region.
        copies: who holds replicas that meet it, but are not main ones.
        declarers: who declares something of the array at all.
    """

    spec: ArraySpec
    start: tuple[int, ...]
    stop: tuple[int, ...]
    count: int
    savers: tuple[int, ...]
    copies: tuple[int, ...]
    declarers: tuple[int, ...]

    def __str__(self) -> str:
        if self.spec.dtype == OBJECT and self.count >= 0:
            what = object_fault(self.spec, self.start, self.count, self.savers)
        else:
            what = _element_fault(self)
        if self.count != 0:
            return what
        if self.copies:
            return f"{what}; ranks {rank_list(self.copies)} hold copies, none of which is the main one"
        return f"{what}; ranks {rank_list(self.declarers)} declare other parts" if self.declarers else what


def _element_fault(fault: Fault) -> str:
    region = ", ".join(f"{a}:{b}" for a, b in zip(fault.start, fault.stop, strict=True))
    shape = f"(global shape {fault.spec.global_shape})"
    if fault.count == 0:
        return f"{fault.spec.key!r}: elements [{region}] are saved by no rank {shape}"
    if fault.count < 0:
        return (
            f"{fault.spec.key!r}: many elements within [{region}] are saved by no rank or by more than one "
            f"main replica {shape}"
        )
    who = f"ranks {rank_list(fault.savers)}" if len(fault.savers) > 1 else f"all of rank {fault.savers[0]}"
    return f"{fault.spec.key!r}: elements [{region}] are saved by more than one main replica ({who}) {shape}"


def uncovered(table: ChunkTable, keys: Collection[str]) -> list[Fault]:
    """Return every region of the arrays of these keys that the chunks of a table do not cover exactly once.

    In the order of arrays and places; the ranks in a fault stand for nothing. An array that is not asked for
    may lack all of its chunks.
    """
    pieces = _pieces(table, table.flat_stop > table.flat_start)
    faults = []
    for regions in uncovered_regions(pieces, table.padded_global_shape()):
        spec = table.arrays[regions.array]
        if spec.key not in keys:
            continue
        dims = len(spec.global_shape)
        places = zip(
            regions.start[:, :dims].tolist(),
            regions.stop[:, :dims].tolist(),
            regions.count.tolist(),
            strict=True,
        )
        faults += [Fault(spec, tuple(a), tuple(b), count, (), (), ()) for a, b, count in places]
    return faults


def check_coverage(declared: DeclaredChunks) -> None:
    """Prove that main replicas cover every element of every array exactly once.

    Raises:
        CoverageError: the first faults of each kind, sorted by key and place, and how many there are: the
            region, the ranks that cover it, and who holds copies of what nobody saves.
    """
    table = declared.table
    is_counted = declared.main & (table.flat_stop > table.flat_start)
    regions = uncovered_regions(_pieces(table, is_counted), table.padded_global_shape())
    if regions:
        raise _coverage_error(declared, regions)


def _pieces(table: ChunkTable, is_counted: Mask) -> Rectangles:
    """Return the counted chunks as rectangles; flat ranges that together fill a box become that box.

    Such ranges are what a sharded optimizer declares. Cut one by one each would be up to 2 n - 1 rectangles.
    """
    numel = table.shape.prod(axis=1)
    is_flat = table.flat_stop - table.flat_start < numel
    whole, flat = np.flatnonzero(is_counted & ~is_flat), np.flatnonzero(is_counted & is_flat)
    flat = flat[np.lexsort((table.flat_start[flat], table.places()[flat]))]
    joined, loose = _joined_ranges(table.take(flat), numel[flat])
    boxes, loose = np.concatenate((whole, flat[joined])), flat[loose]
    cut = rectangles_of(table.shape[loose], table.flat_start[loose], table.flat_stop[loose])
    cut_row = loose[cut.row]
    cut_start = table.start[cut_row] + cut.start
    return Rectangles(
        np.concatenate((table.array[boxes], table.array[cut_row])),
        np.concatenate((table.start[boxes], cut_start)),
        np.concatenate((table.start[boxes] + table.shape[boxes], cut_start + cut.shape)),
    )


def _joined_ranges(table: ChunkTable, numel: Ints) -> tuple[Ints, Ints]:
    """Of flat ranges sorted by place: one row for each box they fill exactly once, and all other rows."""
    if not len(table):
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    begins = np.ones(len(table), np.bool_)
    begins[1:] = np.diff(table.array) != 0
    begins[1:] |= (table.start[1:] != table.start[:-1]).any(axis=1)
    first = np.flatnonzero(begins)
    follows = np.ones(len(table), np.bool_)
    follows[1:] = (table.flat_start[1:] == table.flat_stop[:-1]) & (table.shape[1:] == table.shape[:-1]).all(
        axis=1
    )
    follows[first] = table.flat_start[first] == 0
    last = np.append(first[1:], len(table)) - 1
    follows[last] &= table.flat_stop[last] == numel[last]
    fills = np.logical_and.reduceat(follows, first)
    return first[fills], np.flatnonzero(np.repeat(~fills, np.diff(np.append(first, len(table)))))


def _coverage_error(declared: DeclaredChunks, regions: Sequence[Regions]) -> CoverageError:
    """Describe the faults, kind by kind: elements, then objects; saved by no rank, then by several."""
    is_object = np.array([spec.dtype == OBJECT for spec in declared.table.arrays])
    found: list[list[Fault]] = []
    sections: list[str] = []
    for of_objects in (False, True):
        mine = [r for r in regions if is_object[r.array] == of_objects]
        for title, several in (("Saved by no rank", False), ("Saved more than once", True)):
            faults, total = _first_faults(declared, mine, several=several, one_by_one=of_objects)
            if total:
                found.append(faults)
                sections.append(f"{title}:\n{truncated_list([str(f) for f in faults], total=total)}")
    first = min((faults[0] for faults in found), key=lambda f: (f.spec.key, f.start))
    return CoverageError(
        "The ranks' declarations do not cover everything exactly once.\n" + "\n".join(sections) + "\n"
        "Check global_offset and replica_id in the sharded_state_dict() of these keys, and the spelling of "
        "keys that some ranks lack: exactly one rank's chunk of each element, and exactly one copy of each "
        "object, must have replica_id 0 (or all zeros).",
        key=first.spec.key,
        rank=min(first.savers, default=None),
    )


def _first_faults(
    declared: DeclaredChunks, regions: Sequence[Regions], *, several: bool, one_by_one: bool
) -> tuple[list[Fault], int]:
    """Return the first faults of a kind and how many there are of it; objects are counted one by one."""
    faults: list[Fault] = []
    total = 0
    for of_array in regions:
        rows = np.flatnonzero((of_array.count > 1) == several)
        extents = of_array.stop[rows] - of_array.start[rows]
        total += int(extents.prod(axis=1).sum()) if one_by_one else len(rows)
        for row in rows[: SHOWN - len(faults)].tolist():
            start, stop = of_array.start[row], of_array.stop[row]
            count = int(of_array.count[row])
            singly = one_by_one and count >= 0
            places = _elements(start, stop, SHOWN - len(faults)) if singly else [(start, stop)]
            faults += [_fault(declared, of_array.array, low, high, count) for low, high in places]
    return faults, total


def _elements(start: Ints, stop: Ints, limit: int) -> list[tuple[Ints, Ints]]:
    """The first boxes of one element each of a box, in row-major order."""
    shape = (stop - start).tolist()
    count = min(limit, int(np.prod(shape)))
    places = start + np.column_stack(np.unravel_index(np.arange(count), shape))
    return [(place, place + 1) for place in places]


def _fault(declared: DeclaredChunks, array: int, start: Ints, stop: Ints, count: int) -> Fault:
    spec = declared.table.arrays[array]
    rows = np.flatnonzero(declared.table.array == array)
    mine = declared.take(rows)
    meets = _meets(mine.table, start, stop)
    dims = len(spec.global_shape)
    return Fault(
        spec,
        tuple(start[:dims].tolist()),
        tuple(stop[:dims].tolist()),
        count,
        savers=_distinct(mine.rank[meets & mine.main]),
        copies=_distinct(mine.rank[meets & ~mine.main]),
        declarers=_distinct(mine.rank),
    )


def _meets(table: ChunkTable, start: Ints, stop: Ints) -> npt.NDArray[np.bool_]:
    """Which chunks have elements in a box."""
    cut = rectangles_of(table.shape, table.flat_start, table.flat_stop)
    low = table.start[cut.row] + cut.start
    inside = ((low < stop) & (low + cut.shape > start)).all(axis=1)
    meets = np.zeros(len(table), np.bool_)
    meets[cut.row[inside]] = True
    return meets


def _distinct(ranks: Ints) -> tuple[int, ...]:
    return tuple(np.unique(ranks).tolist())
