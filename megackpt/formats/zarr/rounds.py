"""Finds which files each row writes to, and the round that writes each row.

Pure: a function of the whole plan and its grids. Two ranks that write parts of one file do so one after the
other: their rows are in different rounds, and all ranks synchronise between two rounds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from megackpt.plans.geometry import Ints, joined_ranges, rectangles_of
from megackpt.plans.metadata import OBJECT, ArraySpec, ChunkTable, itemsizes
from megackpt.plans.planning import SavePlan

# The chunk grid of each array.
#
# Pure: a function of the whole plan, so every rank computes the same. Each chunk of a grid is a file, and two
# ranks cannot write parts of one file at the same time. So a grid follows the cuts between ranks if these are
# regular. If not, its chunks are chosen so that few ranks share one (see `plan_rounds`).


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
    if math.prod(grid_extents(spec.global_shape, exact.chunk)) <= most:
        # Every cut is on a line of this grid, so no two ranks share a file.
        steps = exact
    else:
        # Ranks share files. Few ranks share a file that is no larger than what a rank has.
        least = int((rows.flat_stop - rows.flat_start).min()) * width
        target = min(target, max(least, nbytes // (rules.files_per_row * len(rows)), 1))
        fits = math.prod(grid_extents(spec.global_shape, boxes.chunk)) <= most
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


@dataclass(frozen=True, slots=True, eq=False)
class TouchedFiles:
    """Pairs of a row and a file that it writes a part of, each pair once, sorted by row, then file.

    Attributes:
        row: row of the plan, `[m]`.
        file: number of the file, `[m]`: row-major position in the grid, counted from its array's first file.
        first_file: number of the first file of each array, and one past the last, `[arrays + 1]`.
    """

    row: Ints
    file: Ints
    first_file: Ints

    def files_of(self, row: int) -> Ints:
        """Return the numbers of the files that a row writes parts of."""
        low, high = np.searchsorted(self.row, [row, row + 1])
        return self.file[low:high]


@dataclass(frozen=True, slots=True, eq=False)
class Rounds:
    """The order of writing.

    Attributes:
        count: number of rounds; at least 1.
        round: the round of each row of the plan, `[n]`.
        first_round: the first round of each file that is written in several rounds, by its number. Not all
            of these are shared: a rank's own rows are in different rounds if one of them shares another file.
    """

    count: int
    round: Ints
    first_round: dict[int, int]


def grid_extents(shape: tuple[int, ...], chunk: tuple[int, ...]) -> tuple[int, ...]:
    """Return the number of chunks along each dim."""
    return tuple(-(-n // c) for n, c in zip(shape, chunk, strict=True))


def find_touched_files(table: ChunkTable, grids: Sequence[Grid | None]) -> TouchedFiles:
    """Return which files each row writes to. Rows of objects have no grid and are left out."""
    chunk = np.ones((len(table.arrays), table.dims), np.int64)
    extents = np.zeros((len(table.arrays), table.dims), np.int64)
    for i, (spec, grid) in enumerate(zip(table.arrays, grids, strict=True)):
        if grid is not None:
            dims = len(spec.global_shape)
            chunk[i, :dims] = grid.chunk
            # One cell along padding dims. Arrays without a grid keep 0 cells, so they number no files.
            extents[i] = 1
            extents[i, :dims] = grid_extents(spec.global_shape, grid.chunk)
    first_file = np.concatenate([[0], np.cumsum(extents.prod(axis=1))]).astype(np.int64)
    rows = np.flatnonzero(np.array([g is not None for g in grids], np.bool_)[table.array])
    cut = rectangles_of(table.shape[rows], table.flat_start[rows], table.flat_stop[rows])
    # The range of cells of each rectangle, along each dim.
    row = rows[cut.row]
    array = table.array[row]
    start = cut.start + table.start[row]
    low = start // chunk[array]
    high = -(-(start + cut.shape) // chunk[array])
    which, linear = _cells(low, high, extents[array])
    # Several rectangles of a row may be in one file, which counts once.
    pairs = np.unique(np.stack([row[which], first_file[array[which]] + linear], axis=1), axis=0)
    return TouchedFiles(pairs[:, 0], pairs[:, 1], first_file)


def _cells(low: Ints, high: Ints, extents: Ints) -> tuple[Ints, Ints]:
    """Return the cells of ranges `[low, high)`, `[m, dims]`: of each, the range and row-major position."""
    counts = high - low
    total = counts.prod(axis=1)
    which = np.repeat(np.arange(len(low)), total)
    rest = joined_ranges(0, total)  # row-major position within the range; divided by counts, dim by dim
    linear = np.zeros(len(which), np.int64)
    stride = np.ones(len(low), np.int64)
    for d in range(low.shape[1] - 1, -1, -1):
        linear += (low[which, d] + rest % counts[which, d]) * stride[which]
        rest //= counts[which, d]
        stride = stride * extents[:, d]
    return which, linear


def plan_rounds(plan: SavePlan, touches: TouchedFiles) -> Rounds:
    """Return rounds such that no two ranks write parts of the same file in one round.

    Each row, in order, is put into the first round in which no other rank writes its files. The shards of one
    array follow each other in its files, so there are as many rounds as ranks in the file that most share.
    """
    writer = plan.writer[touches.row] if len(touches.row) else touches.row
    shared = _shared_files(touches.file, writer)
    rounds = np.zeros(len(plan.table), np.int64)
    taken: dict[int, dict[int, int]] = {}  # file -> round -> the one rank that writes it then
    # Pairs are sorted by row: each group has the shared files of one row.
    pairs = np.flatnonzero(np.isin(touches.file, shared))
    groups = np.split(pairs, np.flatnonzero(np.diff(touches.row[pairs])) + 1) if pairs.size else ()
    for group in groups:
        row, rank = int(touches.row[group[0]]), int(writer[group[0]])
        uses = [taken.setdefault(file, {}) for file in touches.file[group].tolist()]
        # A rank may write a file in the same round twice; another rank may not.
        number = 0
        while any(use.get(number, rank) != rank for use in uses):
            number += 1
        rounds[row] = number
        for use in uses:
            use[number] = rank
    return Rounds(int(rounds.max(initial=0)) + 1, rounds, _first_rounds(touches, rounds))


def _first_rounds(touches: TouchedFiles, rounds: Ints) -> dict[int, int]:
    """Return the first round of each file that is written in several rounds."""
    files, number = np.unique(touches.file, return_inverse=True)
    round_of_pair = rounds[touches.row]
    # The least and the greatest round of each file, over its pairs. They differ if it has several rounds.
    first = np.full(len(files), np.iinfo(np.int64).max)
    last = np.zeros(len(files), np.int64)
    np.minimum.at(first, number, round_of_pair)
    np.maximum.at(last, number, round_of_pair)
    several = first < last
    return dict(zip(files[several].tolist(), first[several].tolist(), strict=True))


def _shared_files(file: Ints, writer: Ints) -> Ints:
    """Return the files that more than one rank writes parts of."""
    pairs = np.unique(np.stack([file, writer], axis=1), axis=0)
    files, counts = np.unique(pairs[:, 0], return_counts=True)
    return files[counts > 1]
