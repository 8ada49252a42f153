"""Strided views of a row-major array: some of its elements, with axes of their own.

One view describes elements of a whole local tensor and of any flat shard of it. It is made by splitting,
permuting and narrowing axes, never by merging them. So its strides stay nested, and the elements of a view
that lie in a flat range of the array are few boxes of the view.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from megackpt.errors import GeometryError
from megackpt.plans.geometry.box import Box
from megackpt.plans.geometry.flat import rectangles_of, row_major_strides


class Axis(NamedTuple):
    """One axis of a view: every `step`-th index of a dim of the array, `extent` times."""

    dim: int
    step: int
    extent: int


@dataclass(frozen=True, slots=True)
class View:
    """Elements of a row-major array, with axes of their own.

    Attributes:
        base: shape of the array.
        start: index in the array of the view's first element.
        axes: the view's axes, in its own order.

    >>> rows = View.of((6, 4)).unflatten(0, (3, 2)).transpose((1, 0, 2)).narrow(0, 1, 1)
    >>> rows.shape, rows.first, rows.strides  # the odd rows
    ((1, 3, 4), 4, (4, 8, 1))
    """

    base: tuple[int, ...]
    start: tuple[int, ...]
    axes: tuple[Axis, ...]

    @classmethod
    def of(cls, shape: Sequence[int]) -> View:
        """Return the view of a whole array, its dims as axes."""
        return cls(tuple(shape), (0,) * len(shape), tuple(Axis(d, 1, n) for d, n in enumerate(shape)))

    @property
    def shape(self) -> tuple[int, ...]:
        """Extent of each axis."""
        return tuple(axis.extent for axis in self.axes)

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def strides(self) -> tuple[int, ...]:
        """Distance in the flattened array between neighbours along each axis."""
        base = row_major_strides(self.base)
        return tuple(base[axis.dim] * axis.step for axis in self.axes)

    @property
    def first(self) -> int:
        """Position in the flattened array of the first element."""
        return sum(a * s for a, s in zip(self.start, row_major_strides(self.base), strict=True))

    @property
    def uniform_stride(self) -> int | None:
        """Distance between neighbours in the view's row-major order, or None if it is not always the same."""
        wide = [(n, s) for n, s in zip(self.shape, self.strides, strict=True) if n != 1]
        if not wide:
            return 1
        innermost = wide[-1][1]
        dense = row_major_strides([n for n, _ in wide])
        return innermost if [s for _, s in wide] == [innermost * s for s in dense] else None

    def unflatten(self, axis: int, sizes: Sequence[int]) -> View:
        """Split an axis into several, row-major; one size may be -1, for what is left.

        Raises:
            GeometryError: the view has no such axis, or the sizes do not multiply to its extent.
        """
        dim, step, extent = self._axis(axis)
        known = math.prod(n for n in sizes if n != -1)
        if list(sizes).count(-1) == 1 and known > 0:
            sizes = [extent // known if n == -1 else n for n in sizes]
        if not sizes or min(sizes) < 0 or math.prod(sizes) != extent:
            raise GeometryError(
                f"Axis {axis} of extent {extent} does not split into {tuple(sizes)}. Give sizes that "
                f"multiply to the extent; at most one may be -1."
            )
        digits = [Axis(dim, step * s, n) for n, s in zip(sizes, row_major_strides(sizes), strict=True)]
        return replace(self, axes=(*self.axes[:axis], *digits, *self.axes[axis + 1 :]))

    def transpose(self, order: Sequence[int]) -> View:
        """Put the axes in another order: axis i of the result is axis `order[i]` of this.

        Raises:
            GeometryError: order does not name each axis once.
        """
        if sorted(order) != list(range(len(self.axes))):
            raise GeometryError(
                f"{tuple(order)} does not name each of the {len(self.axes)} axes once. Give a permutation of "
                f"their numbers."
            )
        return replace(self, axes=tuple(self.axes[a] for a in order))

    def narrow(self, axis: int, start: int, length: int) -> View:
        """Keep `[start, start + length)` of an axis.

        Raises:
            GeometryError: the view has no such axis, or the range lies outside of it.
        """
        dim, step, extent = self._axis(axis)
        if not 0 <= start <= start + length <= extent:
            raise GeometryError(
                f"[{start}:{start + length}) lies outside of axis {axis} of extent {extent}. Give a range "
                f"inside of it."
            )
        begin = tuple(a + start * step * (d == dim) for d, a in enumerate(self.start))
        axes = (*self.axes[:axis], Axis(dim, step, length), *self.axes[axis + 1 :])
        return View(self.base, begin, axes)

    def boxes_in(self, start: int, stop: int) -> list[Box]:
        """Return the elements that lie in `[start, stop)` of the flattened array, as boxes of the view.

        At most `2 n - 1` for n axes.

        >>> View.of((3, 2)).transpose((1, 0)).boxes_in(1, 6)
        [Box(start=(1, 0), shape=(1, 1)), Box(start=(0, 1), shape=(2, 2))]
        """
        strides = self.strides
        # With axes sorted by descending stride, positions ascend in lexicographic order.
        order = sorted(range(len(self.axes)), key=lambda a: -strides[a])
        low, high = self._before(start, order), self._before(stop, order)
        if low >= high:
            return []
        if not order:
            return [Box((), ())]
        cut = rectangles_of(
            np.array([[self.axes[a].extent for a in order]], np.int64), np.array([low]), np.array([high])
        )
        back = np.argsort(order)
        return [
            Box(tuple(a), tuple(n))
            for a, n in zip(cut.start[:, back].tolist(), cut.shape[:, back].tolist(), strict=True)
        ]

    def flat_range_in(self, start: int, stop: int) -> tuple[int, int]:
        """Return the elements that lie in `[start, stop)` of the flattened array as a range of the view's.

        Only where `uniform_stride` is not None: there the view's order is that of the array.
        """
        order = range(len(self.axes))
        low = self._before(start, order)
        return low, max(low, self._before(stop, order))

    def position_of(self, index: Sequence[int]) -> int:
        """Return the position in the flattened array of one element of the view."""
        return self.first + sum(i * s for i, s in zip(index, self.strides, strict=True))

    def _axis(self, axis: int) -> Axis:
        if not 0 <= axis < len(self.axes):
            raise GeometryError(
                f"There is no axis {axis} among the {len(self.axes)} of shape {self.shape}. Axes count from "
                f"0."
            )
        return self.axes[axis]

    def _before(self, position: int, order: Sequence[int]) -> int:
        """Count the elements before a position of the flattened array; order is of descending stride."""
        left = position - self.first
        count, inner = 0, self.numel
        if left <= 0 or not inner:
            return 0
        for axis in order:
            extent, stride = self.axes[axis].extent, self.strides[axis]
            inner //= extent
            if extent == 1:
                continue  # its stride may be anything
            whole = min(left // stride, extent)
            count += whole * inner
            if whole == extent:
                return count
            left -= whole * stride
        return count + (left > 0)
