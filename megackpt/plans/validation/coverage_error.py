"""The faults that the proof of coverage finds, and the error that describes them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

import numpy as np

from megackpt.errors import CoverageError, rank_list, truncated_list
from megackpt.plans.geometry import Ints, rectangles_of
from megackpt.plans.geometry.tiling import Mask, Regions
from megackpt.plans.metadata import OBJECT, ArraySpec, ChunkTable, DeclaredChunks

Doing: TypeAlias = Literal["saved", "requested"]

SHOWN = 10
_LINES = 16  # of all kinds of faults together
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
            return f"{what}; ranks {rank_list(self.copies)} declare replicas, but no rank has the main one"
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


def faults_of(table: ChunkTable, regions: Sequence[Regions]) -> list[Fault]:
    """Return the faults of all regions, in their order; they name no ranks."""
    faults = []
    for of_array in regions:
        spec = table.arrays[of_array.array]
        dims = len(spec.global_shape)
        boxes = zip(
            of_array.start[:, :dims].tolist(),
            of_array.stop[:, :dims].tolist(),
            of_array.count.tolist(),
            strict=True,
        )
        faults += [Fault(spec, tuple(a), tuple(b), count, (), (), ()) for a, b, count in boxes]
    return faults


def coverage_error(declared: DeclaredChunks, regions: Sequence[Regions], doing: Doing) -> CoverageError:
    """Describe the faults, kind by kind: elements, then objects; saved by no rank, then by several."""
    is_object = np.array([spec.dtype == OBJECT for spec in declared.table.arrays])
    kinds: list[tuple[str, list[Fault], int]] = []
    for of_objects in (False, True):
        of_kind = [r for r in regions if is_object[r.array] == of_objects]
        for title, several in (("by no rank", False), ("more than once", True)):
            faults, total = _first_faults(declared, of_kind, several=several, one_by_one=of_objects)
            kinds += [(title, faults, total)] if total else []
    sections: list[str] = []
    for title, faults, total in kinds:
        # The lines of all kinds together fit on a screen.
        lines = [str(replace(fault, doing=doing)) for fault in faults[: _LINES // len(kinds)]]
        sections.append(f"{doing.capitalize()} {title}:\n{truncated_list(lines, total=total)}")
    first = min((faults[0] for _, faults, _ in kinds), key=lambda f: (f.spec.key, f.start))
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
