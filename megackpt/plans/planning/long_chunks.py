"""Long chunks split into shorter ones, each of them a contiguous range of the long one's bytes. Pure.

If the chunks of an array form a grid, the shorter ones do so as well.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

import numpy as np

from megackpt.plans.geometry import Ints, joined_ranges
from megackpt.plans.metadata import OBJECT, ChunkTable, itemsizes
from megackpt.plans.metadata.chunk_table import Rows


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
    is_object = np.array([a.dtype == OBJECT for a in table.arrays], np.bool_)
    long = table.nbytes > most
    if only is not None:
        long &= only.astype(np.bool_)
    long &= ~is_object[table.array] if len(table) else long
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
