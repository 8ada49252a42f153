"""Proof that every element of every global array, and every object, is saved (or requested) exactly once.

The chunks of main replicas become rectangles, and `geometry.tiling` proves that they tile the arrays. Ranks
may cut an array in any way: fragments need not be equal, as long as their union is the array and none
overlap. `coverage_error` describes what the proof finds.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

import numpy as np

from megackpt.errors import CoverageError
from megackpt.plans.geometry import Ints, rectangles_of
from megackpt.plans.geometry.tiling import Mask, Rectangles, uncovered_regions
from megackpt.plans.metadata import ChunkTable, DeclaredChunks, MergedDeclarations

if TYPE_CHECKING:
    from megackpt.plans.validation.coverage_error import Doing, Fault


def coverage_faults(table: ChunkTable, keys: Collection[str]) -> list[Fault]:
    """Return every region of the arrays of these keys that the chunks of a table do not cover exactly once.

    Faults are in the order of arrays and regions; they name no ranks. Other arrays may lack all of their
    chunks.
    """
    chunks = _rectangles(table, table.flat_stop > table.flat_start)
    regions = uncovered_regions(chunks, table.padded_global_shape())
    regions = [of_array for of_array in regions if table.arrays[of_array.array].key in keys]
    if not regions:
        return []
    from megackpt.plans.validation.coverage_error import faults_of

    return faults_of(table, regions)


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
        from megackpt.plans.validation.coverage_error import coverage_error

        raise coverage_error(declared, regions, doing)


def check_merged_coverage(merged: MergedDeclarations, *, doing: Doing = "saved") -> None:
    """Prove the same of merged declarations, where ranks with equal replicas are one owner group.

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
