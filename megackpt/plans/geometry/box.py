"""One box of a global array, and the byte ranges that it has in the array's row-major order.

`flat` has the same arithmetic for many boxes at once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

from megackpt.errors import GeometryError


@dataclass(frozen=True, slots=True)
class Box:
    """A rectangular region of an array; empty if any extent is 0.

    Attributes:
        start: first element along each dim; one int per dim, in elements.
        shape: extent along each dim; one int per dim, in elements, each >= 0.
    """

    start: tuple[int, ...]
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.start) != len(self.shape):
            raise GeometryError(
                f"Box start {self.start} has {len(self.start)} dims but shape {self.shape} has "
                f"{len(self.shape)}. Give one start per dim."
            )
        if any(x < 0 for x in (*self.start, *self.shape)):
            raise GeometryError(
                f"Box start {self.start} or shape {self.shape} is negative. Give starts and extents >= 0."
            )

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def stop(self) -> tuple[int, ...]:
        """One past the last element along each dim."""
        return tuple(a + n for a, n in zip(self.start, self.shape, strict=True))

    def slices(self) -> tuple[slice, ...]:
        """Return the index that selects this box from its array.

        >>> Box((0, 4), (2, 3)).slices()
        (slice(0, 2, None), slice(4, 7, None))
        """
        return tuple(slice(a, b) for a, b in zip(self.start, self.stop, strict=True))

    def __str__(self) -> str:
        return "[" + ", ".join(f"{a}:{b}" for a, b in zip(self.start, self.stop, strict=True)) + "]"


@dataclass(frozen=True, slots=True, kw_only=True)
class BoxRanges:
    """The byte ranges of a box in its array: of equal length, in row-major order.

    The bytes of the box are these ranges one after the other. Dims that follow each other without a gap are
    merged, so the ranges are as long as they can be.

    Attributes:
        nbytes: length of each range.
        first: first byte of the first range in the array.
        extents: number of ranges along each dim that is left, each above 1; empty for a single range.
        strides: distance in bytes between neighbouring ranges along each of these dims.
    """

    nbytes: int
    first: int
    extents: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def count(self) -> int:
        """Number of ranges."""
        return math.prod(self.extents)

    def begin_of(self, index: int) -> int:
        """Return the first byte of one range in the array.

        >>> ranges = box_ranges((0, 2), (3, 2), (3, 8), itemsize=4)
        >>> [ranges.begin_of(index) for index in range(ranges.count)], ranges.nbytes
        ([8, 40, 72], 8)
        """
        begin = self.first
        for extent, stride in zip(reversed(self.extents), reversed(self.strides), strict=True):
            index, at = divmod(index, extent)
            begin += at * stride
        return begin


def box_ranges(
    start: Sequence[int], shape: Sequence[int], global_shape: Sequence[int], *, itemsize: int
) -> BoxRanges:
    """Return the byte ranges of a box, which is given in elements and has no extent of 0.

    >>> box_ranges((1, 0, 0), (2, 4, 8), (3, 4, 8), itemsize=2)
    BoxRanges(nbytes=128, first=64, extents=(), strides=())
    >>> box_ranges((0, 0, 6), (3, 4, 2), (3, 4, 8), itemsize=2)
    BoxRanges(nbytes=4, first=12, extents=(12,), strides=(16,))
    """
    step = nbytes = itemsize
    first = 0
    extents: list[int] = []  # innermost first
    strides: list[int] = []
    for at, extent, whole in zip(reversed(start), reversed(shape), reversed(global_shape), strict=True):
        first += at * step
        if extent == 1:
            pass
        elif not extents and step == nbytes:  # this dim continues the range
            nbytes *= extent
        elif extents and step == extents[-1] * strides[-1]:  # its ranges continue those of the inner dim
            extents[-1] *= extent
        else:
            extents.append(extent)
            strides.append(step)
        step *= whole
    return BoxRanges(nbytes=nbytes, first=first, extents=tuple(extents[::-1]), strides=tuple(strides[::-1]))


# Arrays cut over a mesh of ranks, one mesh dim after the other, as torch's DTensor cuts them.
#
# Cuts need not be even, and may be strided. So along one dim a rank has a list of ranges, and of the array a
# list of boxes.

Range = tuple[int, int]
"""`(start, stop)`, in elements of the global dim."""


@dataclass(frozen=True, slots=True)
class MeshCut:
    """How one mesh dim cuts an array.

    Attributes:
        dim: the dim of the array that is cut.
        split_factor: the number of equal ranges into which the dim is cut first; every rank then takes its
            share of each. 1 is the plain cut. With others, a mesh dim on the left can cut what one on the
            right has cut before.
    """

    dim: int
    split_factor: int = 1


@dataclass(frozen=True, slots=True)
class MeshBox:
    """One box of an array that a rank has.

    Attributes:
        box: the box in the global array.
        local_start: its first element in the rank's own tensor.
    """

    box: Box
    local_start: tuple[int, ...]


def mesh_boxes(
    global_shape: Sequence[int],
    mesh_shape: Sequence[int],
    coordinate: Sequence[int],
    cuts: Sequence[MeshCut | None],
    *,
    order: Sequence[int] | None = None,
) -> list[MeshBox]:
    """Return the boxes of an array that the rank at a coordinate of a mesh has, in the order of its tensor.

    A rank that has nothing gets one box without elements.

    Args:
        global_shape: shape of the array.
        mesh_shape: number of ranks along each mesh dim.
        coordinate: position of the rank in the mesh.
        cuts: how each mesh dim cuts the array; None if it replicates.
        order: the order in which mesh dims cut; None for from left to right.

    >>> shard = MeshCut(0)
    >>> [b.box for b in mesh_boxes((5, 2), (2,), (1,), [shard])]
    [Box(start=(3, 0), shape=(2, 2))]
    >>> [str(b.box) for b in mesh_boxes((8,), (2,), (1,), [MeshCut(0, split_factor=2)])]
    ['[2:4]', '[6:8]']

    Raises:
        GeometryError: mesh, coordinate and cuts differ in length or do not fit each other or the array.

    Source: the semantics of torch.chunk, and of torch.distributed.tensor's Shard and _StridedShard.
    """
    _check(global_shape, mesh_shape, coordinate, cuts)
    ranges_of_dim: list[list[Range]] = [[(0, extent)] for extent in global_shape]
    for mesh_dim in range(len(cuts)) if order is None else order:
        cut = cuts[mesh_dim]
        if cut is not None:
            ranges, parts = ranges_of_dim[cut.dim], mesh_shape[mesh_dim]
            ranges_of_dim[cut.dim] = _share(ranges, cut.split_factor, parts=parts, index=coordinate[mesh_dim])
    if not all(ranges_of_dim):
        start = tuple(r[0][0] if r else extent for r, extent in zip(ranges_of_dim, global_shape, strict=True))
        shape = tuple(sum(b - a for a, b in ranges) for ranges in ranges_of_dim)
        return [MeshBox(Box(start, shape), (0,) * len(start))]
    placed = [list(zip(ranges, _local_starts(ranges), strict=True)) for ranges in ranges_of_dim]
    return [
        MeshBox(
            Box(tuple(a for (a, _), _ in row), tuple(b - a for (a, b), _ in row)), tuple(n for _, n in row)
        )
        for row in product(*placed)
    ]


def _share(ranges: list[Range], split_factor: int, *, parts: int, index: int) -> list[Range]:
    """Return one rank's share of ranges: share `index` of each of `split_factor` equal stretches."""
    length = sum(b - a for a, b in ranges)
    taken: list[Range] = []
    for first in range(split_factor):
        start, stop = _chunk(length, parts=split_factor, index=first)
        low, high = _chunk(stop - start, parts=parts, index=index)
        taken += _cut_out(ranges, start + low, start + high)
    return _joined(taken)


def _chunk(length: int, *, parts: int, index: int) -> Range:
    """Return one range of a length as torch.chunk cuts it: equally long, the last ones shorter or empty."""
    size = -(-length // parts)
    return min(length, index * size), min(length, (index + 1) * size)


def _cut_out(ranges: list[Range], start: int, stop: int) -> list[Range]:
    """Return the elements at positions `[start, stop)` of ranges that are laid one after the other."""
    cut = []
    position = 0
    for a, b in ranges:
        low, high = max(a, a + start - position), min(b, a + stop - position)
        if low < high:
            cut.append((low, high))
        position += b - a
    return cut


def _joined(ranges: list[Range]) -> list[Range]:
    joined: list[Range] = []
    for a, b in ranges:
        if joined and joined[-1][1] == a:
            joined[-1] = (joined[-1][0], b)
        else:
            joined.append((a, b))
    return joined


def _local_starts(ranges: list[Range]) -> list[int]:
    starts = [0]
    for a, b in ranges[:-1]:
        starts.append(starts[-1] + b - a)
    return starts


def _check(
    global_shape: Sequence[int],
    mesh_shape: Sequence[int],
    coordinate: Sequence[int],
    cuts: Sequence[MeshCut | None],
) -> None:
    fits = len(mesh_shape) == len(coordinate) == len(cuts)
    fits = fits and all(0 <= i < n for i, n in zip(coordinate, mesh_shape, strict=True))
    if not fits or any(c and not (0 <= c.dim < len(global_shape) and c.split_factor > 0) for c in cuts):
        raise GeometryError(
            f"Cuts {list(cuts)} at {tuple(coordinate)} of a mesh {tuple(mesh_shape)} do not fit an array of "
            f"shape {tuple(global_shape)}. Give one cut and one coordinate per mesh dim, of dims that exist."
        )
