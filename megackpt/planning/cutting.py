"""Long chunks cut into shorter ones, each of which is one range of the long one's bytes.

Pure. Where the chunks of an array form a grid, the shorter ones do, too.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from megackpt.geometry import Ints
from megackpt.metadata import OBJECT, ChunkTable, itemsizes
from megackpt.metadata.chunk_table import Rows

_Part = tuple[list[int], list[int], int, int, int]  # start, shape, flat range, first element in the chunk


def cut_into_rows(table: ChunkTable, *, most: int, only: Rows | None = None) -> tuple[ChunkTable, Ints, Ints]:
    """Cut chunks of more than `most` bytes along their outermost dims; objects stay whole.

    Where only, a mask `[n]`, is given, other rows stay whole, too. Returns the new chunks, not sorted; the
    row each comes from, `[n]`; where it begins in the bytes of that, `[n]`. A whole box is cut into boxes,
    and a flat range of one into flat ranges of the same box.
    """
    is_object = np.array([a.dtype == OBJECT for a in table.arrays], np.bool_)
    long = table.nbytes > most
    if only is not None:
        long &= only.astype(np.bool_)
    long &= ~is_object[table.array] if len(table) else long
    if not long.any():
        return table, np.arange(len(table)), np.zeros(len(table), np.int64)
    widths = itemsizes(table.arrays)
    grids = {int(array): _grid_steps(table, int(array)) for array in np.unique(table.array[long])}
    of, parts, width_of = [], [], []
    for row in np.flatnonzero(long).tolist():
        array = int(table.array[row])
        item = int(widths[array])
        of_row = list(_parts_of(table, row, max(most // item, 1), grids[array]))
        parts += of_row
        of += [row] * len(of_row)
        width_of += [item] * len(of_row)
    start, shape, low, high, first = (np.array(column, np.int64) for column in zip(*parts, strict=True))
    width = np.array(width_of, np.int64)
    rows = np.concatenate([np.flatnonzero(~long), np.array(of, np.int64)])
    kept = int((~long).sum())
    cut = table.take(rows)
    columns = {
        "start": start,
        "shape": shape,
        "flat_start": low,
        "flat_stop": high,
        "nbytes": (high - low) * width,
    }
    longer: dict[str, Any] = {n: np.concatenate([getattr(cut, n)[:kept], c]) for n, c in columns.items()}
    cut = replace(cut, **longer)
    return cut, rows, np.concatenate([np.zeros(kept, np.int64), first * width])


def _grid_steps(table: ChunkTable, array: int) -> list[int]:
    """Return the coarsest steps along each dim that meet all ends of an array's chunks; 0: there are none."""
    rows = table.array == array
    extents = np.array(table.arrays[array].global_shape, np.int64)
    dims = len(extents)
    ends = np.concatenate([table.start[rows], table.start[rows] + table.shape[rows]])[:, :dims]
    return [int(np.gcd.reduce(ends[(ends[:, d] < extents[d]), d], initial=0)) for d in range(dims)]


def _parts_of(table: ChunkTable, row: int, most: int, grid: list[int]) -> Iterator[_Part]:
    """Yield parts of at most `most` elements, which are more than one element's row of the last dim."""
    start, shape = table.start[row].tolist(), table.shape[row].tolist()
    low, high = int(table.flat_start[row]), int(table.flat_stop[row])
    inner = [math.prod(shape[d + 1 :]) for d in range(len(shape))]
    dim = next(d for d, numel in enumerate(inner) if numel <= most)
    step = _step(shape[dim], most // inner[dim], grid[dim] if dim < len(grid) else 0)
    numel = step * inner[dim]
    if (low, high) != (0, math.prod(shape)):
        for first in range(low // numel * numel, high, numel):
            first_kept, end = max(first, low), min(first + numel, high)
            yield start, shape, first_kept, end, first_kept - low
        return
    for index in np.ndindex(*shape[:dim]):
        outer = sum(i * n for i, n in zip(index, inner, strict=False))
        for at in range(0, shape[dim], step):
            extent = min(step, shape[dim] - at)
            begin = [*(a + i for a, i in zip(start, index, strict=False)), start[dim] + at, *start[dim + 1 :]]
            part = [*([1] * dim), extent, *shape[dim + 1 :]]
            yield begin, part, 0, extent * inner[dim], outer + at * inner[dim]


def _step(extent: int, want: int, grid: int) -> int:
    """Return the extent of parts, at most `want`: such that all ends stay multiples of one number, if any do.

    A grid whose step has no fitting divisor is given up.
    """
    if grid == 0:
        return -(-extent // -(-extent // want))
    if grid <= want:
        return want // grid * grid
    step = next(n for n in range(want, 0, -1) if grid % n == 0)
    return step if 4 * step >= want else want
