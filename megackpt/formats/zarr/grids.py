"""The chunk grid of each array.

Pure: a function of the whole plan, so every rank computes the same. Each chunk of a grid is a file, and two
ranks cannot write parts of one file at the same time. So a grid follows the cuts between ranks if these are
regular. If not, its chunks are chosen so that few ranks share one (see `rounds`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from megackpt.plans.geometry import Ints, rectangles_of
from megackpt.plans.metadata import OBJECT, ArraySpec, ChunkTable, itemsizes


@dataclass(frozen=True, slots=True, kw_only=True)
class GridRules:
    """Target sizes of grids.

    Attributes:
        file_bytes: about the largest size of a file.
        inner_bytes: about the largest size of a chunk inside a file.
        files_per_row: largest number of files for each row of the plan.
    """

    file_bytes: int = 16 * 1024 * 1024
    inner_bytes: int = 1024 * 1024
    files_per_row: int = 4


@dataclass(frozen=True, slots=True)
class Grid:
    """The chunk grid of an array; extents are 1 where the array has none.

    Attributes:
        chunk: extents of a file, one for each dim.
        inner: extents of the chunks in it, which divide those of chunk.
    """

    chunk: tuple[int, ...]
    inner: tuple[int, ...]


def choose_grids(table: ChunkTable, rules: GridRules) -> list[Grid | None]:
    """Return the grid of each array of a plan; None for arrays of objects.

    The table has the rows of all ranks.
    """
    first = np.searchsorted(table.array, np.arange(len(table.arrays) + 1))  # rows are sorted by array
    widths = itemsizes(table.arrays).tolist()
    return [
        None
        if spec.dtype == OBJECT
        else _grid_of(spec, table.take(np.arange(first[i], first[i + 1])), widths[i], rules)
        for i, spec in enumerate(table.arrays)
    ]


def _grid_of(spec: ArraySpec, rows: ChunkTable, width: int, rules: GridRules) -> Grid:
    dims = len(spec.global_shape)
    cuts = _cuts_of(rows, spec.global_shape)
    # Two candidates: a grid on the ends of boxes, and a finer one on those of flat ranges as well.
    boxes = _common_steps(cuts.boxes, spec.global_shape)
    exact = _common_steps(cuts.rectangles, spec.global_shape)
    nbytes = spec.numel * width
    most = max(rules.files_per_row * len(rows), -(-nbytes // rules.file_bytes))
    target = rules.file_bytes
    if _count(exact.chunk, spec.global_shape) <= most:
        # Every cut is on a line of this grid, so no two ranks share a file.
        steps = exact
    else:
        # Ranks share files. Few ranks share a file that is no larger than what a rank has.
        least = int((rows.flat_stop - rows.flat_start).min()) * width
        target = min(target, max(least, nbytes // (rules.files_per_row * len(rows)), 1))
        fits = _count(boxes.chunk, spec.global_shape) <= most
        whole = tuple(max(n, 1) for n in spec.global_shape)
        steps = boxes if fits else _Steps(whole, (False,) * dims)
    chunk = _shrunk(steps, max(target // width, 1))
    return _cut_inside(_Steps(chunk, steps.aligned), max(rules.inner_bytes // width, 1))


@dataclass(frozen=True, slots=True)
class _Steps:
    """Chunk extents, and whether there are cuts along a dim, which have to be multiples of its extent."""

    chunk: tuple[int, ...]
    aligned: tuple[bool, ...]


@dataclass(frozen=True, slots=True, eq=False)
class _Cuts:
    """Where the boxes of rows, and their rectangles, begin and end along each dim, `[k, dims]`."""

    boxes: Ints
    rectangles: Ints


def _cuts_of(rows: ChunkTable, shape: tuple[int, ...]) -> _Cuts:
    dims = len(shape)
    cut = rectangles_of(rows.shape, rows.flat_start, rows.flat_stop)
    start = cut.start + rows.start[cut.row]
    return _Cuts(
        np.concatenate([rows.start, rows.start + rows.shape])[:, :dims],
        np.concatenate([start, start + cut.shape])[:, :dims],
    )


def _common_steps(ends: Ints, shape: tuple[int, ...]) -> _Steps:
    """Return the coarsest grid that has all cuts on its lines."""
    chunk, aligned = [], []
    for d, extent in enumerate(shape):
        inside = ends[(ends[:, d] > 0) & (ends[:, d] < extent), d]
        step = int(np.gcd.reduce(inside)) if inside.size else 0
        chunk.append(step or max(extent, 1))
        aligned.append(step > 0)
    return _Steps(tuple(chunk), tuple(aligned))


def _count(chunk: tuple[int, ...], shape: tuple[int, ...]) -> int:
    return math.prod(-(-n // c) for n, c in zip(shape, chunk, strict=True))


def _shrunk(steps: _Steps, target: int) -> tuple[int, ...]:
    """Divide chunks of more than `target` elements, outermost dims first: inner ones stay contiguous."""
    chunk = list(steps.chunk)
    for d, extent in enumerate(chunk):
        rest = math.prod(chunk) // extent
        if rest * extent <= target:
            break
        want = max(target // rest, 1)
        # Along a dim without cuts, any equal extents will do. With cuts, the extent has to be a divisor.
        chunk[d] = _near_divisor(extent, want) if steps.aligned[d] else -(-extent // -(-extent // want))
    return tuple(chunk)


def _cut_inside(steps: _Steps, target: int) -> Grid:
    """Divide files into chunks of about `target` elements; files may grow a little to be multiples."""
    chunk, inner = list(steps.chunk), list(steps.chunk)
    for d, extent in enumerate(chunk):
        rest = math.prod(inner) // extent
        if rest * extent <= target:
            break
        want = max(target // rest, 1)
        inner[d] = _near_divisor(extent, want) if steps.aligned[d] else want
        chunk[d] = -(-extent // inner[d]) * inner[d]
    return Grid(tuple(chunk), tuple(inner))


def _near_divisor(number: int, want: int) -> int:
    """Return the divisor of number that is nearest to want, by ratio."""
    # Of two factors of a number, one is no larger than its root.
    low: npt.NDArray[np.int64] = np.arange(1, math.isqrt(number) + 1)
    low = low[number % low == 0]
    divisors = np.concatenate([low, number // low])
    return int(divisors[np.argmin(np.maximum(divisors / want, want / divisors))])
