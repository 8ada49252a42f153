"""Proof that every element of every global array, and every object, is saved (or requested) exactly once.

The chunks of main replicas become rectangles, and `geometry.tiling` proves that they tile the arrays. Ranks
may cut an array in any way: fragments need not be equal, as long as their union is the array and none
overlap.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

import numpy as np

from megackpt.errors import CoverageError, rank_list, truncated_list
from megackpt.geometry import Ints, rectangles_of
from megackpt.geometry.tiling import Mask, Rectangles, Regions, uncovered_regions
from megackpt.metadata import OBJECT, ArraySpec, ChunkTable, DeclaredChunks, MergedDeclarations

Doing: TypeAlias = Literal["saved", "requested"]

SHOWN = 10
"""How many faults of one kind the error describes. The others are only counted."""


@dataclass(frozen=True, slots=True)
class Fault:
    """A region of an array that is not covered exactly once.

    Attributes:
        spec: the array.
        start: first element.
        stop: one past the last.
        count: how many main replicas cover each element; -1 where this differs within the region.
        savers: ranks whose main replicas overlap the region.
        copies: ranks whose other replicas overlap it.
        declarers: ranks that declare any chunk of the array.
        doing: what the ranks' declarations are for.
    """

    spec: ArraySpec
    start: tuple[int, ...]
    stop: tuple[int, ...]
    count: int
    savers: tuple[int, ...]
    copies: tuple[int, ...]
    declarers: tuple[int, ...]
    doing: Doing = "saved"

    def __str__(self) -> str:
        is_object = self.spec.dtype == OBJECT and self.count >= 0
        what = _object_fault(self) if is_object else _element_fault(self)
        if self.count != 0:
            return what
        if self.copies:
            return f"{what}; ranks {rank_list(self.copies)} declare replicas, none of which is the main one"
        if self.declarers:
            return f"{what}; ranks {rank_list(self.declarers)} declare other chunks"
        return what


def _object_fault(fault: Fault) -> str:
    """Describe an object by its `ShardedObject.unique_key`, which users know better than an offset."""
    offset, shape = (".".join(map(str, numbers)) for numbers in (fault.start, fault.spec.global_shape))
    name = f"object {f'{fault.spec.key}/shard_{offset}_{shape}'!r}"
    if fault.count == 0:
        return f"{name} is {fault.doing} by no rank"
    return f"{name} is {fault.doing} by more than one main replica ({_savers_text(fault)})"


def _element_fault(fault: Fault) -> str:
    region = ", ".join(f"{a}:{b}" for a, b in zip(fault.start, fault.stop, strict=True))
    shape = f"(global shape {fault.spec.global_shape})"
    if fault.count == 0:
        return f"{fault.spec.key!r}: elements [{region}] are {fault.doing} by no rank {shape}"
    if fault.count < 0:
        return (
            f"{fault.spec.key!r}: many elements within [{region}] are {fault.doing} by no rank or by more "
            f"than one main replica {shape}"
        )
    return (
        f"{fault.spec.key!r}: elements [{region}] are {fault.doing} by more than one main replica "
        f"({_savers_text(fault)}) {shape}"
    )


def _savers_text(fault: Fault) -> str:
    return f"ranks {rank_list(fault.savers)}" if len(fault.savers) > 1 else f"all of rank {fault.savers[0]}"


def coverage_faults(table: ChunkTable, keys: Collection[str]) -> list[Fault]:
    """Return every region of the arrays of these keys that the chunks of a table do not cover exactly once.

    Faults are in the order of arrays and regions; they name no ranks. Other arrays may lack all of their
    chunks.
    """
    faults = []
    chunks = _rectangles(table, table.flat_stop > table.flat_start)
    for regions in uncovered_regions(chunks, table.padded_global_shape()):
        spec = table.arrays[regions.array]
        if spec.key not in keys:
            continue
        dims = len(spec.global_shape)
        boxes = zip(
            regions.start[:, :dims].tolist(),
            regions.stop[:, :dims].tolist(),
            regions.count.tolist(),
            strict=True,
        )
        faults += [Fault(spec, tuple(a), tuple(b), count, (), (), ()) for a, b, count in boxes]
    return faults


def check_coverage(declared: DeclaredChunks, *, doing: Doing = "saved") -> None:
    """Prove that main replicas cover every element of every array exactly once.

    Args:
        declared: what all ranks declare.
        doing: what they declare it for; a word of the error.

    Raises:
        CoverageError: lists the first faults of each kind, sorted by key and region, and how many there are.
            Each fault names the region, the ranks that save it, and the ranks that declare other replicas.
    """
    table = declared.table
    is_counted = declared.main & (table.flat_stop > table.flat_start)
    regions = uncovered_regions(_rectangles(table, is_counted), table.padded_global_shape())
    if regions:
        raise _coverage_error(declared, regions, doing)


def check_merged_coverage(merged: MergedDeclarations, *, doing: Doing = "saved") -> None:
    """Prove the same of merged declarations, in which ranks with equal replicas are one owner group.

    Raises:
        CoverageError: as `check_coverage`; it names every rank.
    """
    try:
        check_coverage(merged.declared, doing=doing)
    except CoverageError:
        check_coverage(merged.expanded(), doing=doing)  # raises the same error, and names every rank
        raise


def _rectangles(table: ChunkTable, is_counted: Mask) -> Rectangles:
    """Return the counted chunks as rectangles; flat ranges that fill a box become that box.

    A sharded optimizer declares such ranges. Cut one by one, each would be up to 2 n - 1 rectangles.
    """
    numel = table.shape.prod(axis=1)
    is_flat = table.flat_stop - table.flat_start < numel
    whole, flat = np.flatnonzero(is_counted & ~is_flat), np.flatnonzero(is_counted & is_flat)
    # After this, the flat ranges of one box are neighbours, in the order of their elements.
    flat = flat[np.lexsort((table.flat_start[flat], table.start_keys()[flat]))]
    filled, loose = _filled_boxes(table.take(flat), numel[flat])
    boxes, loose = np.concatenate((whole, flat[filled])), flat[loose]
    # Only ranges that do not fill a box have to be cut.
    cut = rectangles_of(table.shape[loose], table.flat_start[loose], table.flat_stop[loose])
    cut_row = loose[cut.row]
    cut_start = table.start[cut_row] + cut.start
    return Rectangles(
        np.concatenate((table.array[boxes], table.array[cut_row])),
        np.concatenate((table.start[boxes], cut_start)),
        np.concatenate((table.start[boxes] + table.shape[boxes], cut_start + cut.shape)),
    )


def _filled_boxes(table: ChunkTable, numel: Ints) -> tuple[Ints, Ints]:
    """Find the boxes that flat ranges, sorted by box and start, fill exactly once.

    Returns one row for each such box, and the rows of all other boxes.
    """
    if not len(table):
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    # The rows of one box are a stretch that begins where the array or the start changes.
    begins = np.ones(len(table), np.bool_)
    begins[1:] = np.diff(table.array) != 0
    begins[1:] |= (table.start[1:] != table.start[:-1]).any(axis=1)
    first = np.flatnonzero(begins)
    last = np.append(first[1:], len(table)) - 1
    # A box is filled if its first range begins at 0, each one begins where the one before ends (boxes of
    # equal start but other shape break the chain), and the last one ends with the box.
    follows = np.ones(len(table), np.bool_)
    follows[1:] = (table.flat_start[1:] == table.flat_stop[:-1]) & (table.shape[1:] == table.shape[:-1]).all(
        axis=1
    )
    follows[first] = table.flat_start[first] == 0
    follows[last] &= table.flat_stop[last] == numel[last]
    is_filled = np.logical_and.reduceat(follows, first)
    return first[is_filled], np.flatnonzero(np.repeat(~is_filled, np.diff(np.append(first, len(table)))))


def _coverage_error(declared: DeclaredChunks, regions: Sequence[Regions], doing: Doing) -> CoverageError:
    """Describe the faults, kind by kind: elements, then objects; saved by no rank, then by several."""
    is_object = np.array([spec.dtype == OBJECT for spec in declared.table.arrays])
    faults_of_kinds: list[list[Fault]] = []
    sections: list[str] = []
    for of_objects in (False, True):
        of_kind = [r for r in regions if is_object[r.array] == of_objects]
        for title, several in (("by no rank", False), ("more than once", True)):
            faults, total = _first_faults(declared, of_kind, several=several, one_by_one=of_objects)
            if total:
                faults_of_kinds.append(faults)
                lines = [str(replace(fault, doing=doing)) for fault in faults]
                sections.append(f"{doing.capitalize()} {title}:\n{truncated_list(lines, total=total)}")
    first = min((faults[0] for faults in faults_of_kinds), key=lambda f: (f.spec.key, f.start))
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
        # A count of -1, where it was not examined, is listed with the elements that nobody saves.
        rows = np.flatnonzero((of_array.count > 1) == several)
        extents = of_array.stop[rows] - of_array.start[rows]
        total += int(extents.prod(axis=1).sum()) if one_by_one else len(rows)
        for row in rows[: SHOWN - len(faults)].tolist():
            start, stop = of_array.start[row], of_array.stop[row]
            count = int(of_array.count[row])
            singly = one_by_one and count >= 0
            boxes = _elements(start, stop, SHOWN - len(faults)) if singly else [(start, stop)]
            faults += [_fault(declared, of_array.array, low, high, count) for low, high in boxes]
    return faults, total


def _elements(start: Ints, stop: Ints, limit: int) -> list[tuple[Ints, Ints]]:
    """Return the first elements of a box, each as a box of its own, in row-major order."""
    shape = (stop - start).tolist()
    count = min(limit, int(np.prod(shape)))
    elements = start + np.column_stack(np.unravel_index(np.arange(count), shape))
    return [(element, element + 1) for element in elements]


def _fault(declared: DeclaredChunks, array: int, start: Ints, stop: Ints, count: int) -> Fault:
    spec = declared.table.arrays[array]
    of_array = declared.take(np.flatnonzero(declared.table.array == array))
    overlaps = _overlaps(of_array.table, start, stop)
    # Rows are padded to the widest array; the fault shows only the dims of its own array.
    dims = len(spec.global_shape)
    return Fault(
        spec,
        tuple(start[:dims].tolist()),
        tuple(stop[:dims].tolist()),
        count,
        savers=_distinct(of_array.rank[overlaps & of_array.main]),
        copies=_distinct(of_array.rank[overlaps & ~of_array.main]),
        declarers=_distinct(of_array.rank),
    )


def _overlaps(table: ChunkTable, start: Ints, stop: Ints) -> Mask:
    """Return which chunks have elements in a box, `[n]`."""
    cut = rectangles_of(table.shape, table.flat_start, table.flat_stop)
    low = table.start[cut.row] + cut.start
    # Half-open boxes overlap if along every dim each of them begins before the other ends.
    inside = ((low < stop) & (low + cut.shape > start)).all(axis=1)
    overlaps = np.zeros(len(table), np.bool_)
    overlaps[cut.row[inside]] = True
    return overlaps


def _distinct(ranks: Ints) -> tuple[int, ...]:
    return tuple(np.unique(ranks).tolist())
