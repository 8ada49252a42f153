"""Geometry against slow, obvious references."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megackpt.errors import GeometryError
from megackpt.geometry import Box, rectangles_of, row_major_strides, split_range, strides_of


@given(rows=st.integers(0, 64), parts=st.integers(1, 8))
def test_fragments_tile_the_dim_without_gap_or_overlap(rows: int, parts: int) -> None:
    shares = [split_range(rows, parts=parts, index=i) for i in range(parts)]
    assert [e for start, stop in shares for e in range(start, stop)] == list(range(rows))


def test_split_range_rejects_a_part_that_does_not_exist() -> None:
    with pytest.raises(GeometryError, match=r"part 4 of 10 elements in 4 parts.*0 <= index < parts"):
        split_range(10, parts=4, index=4)


@st.composite
def flat_ranges(draw: st.DrawFn) -> tuple[tuple[int, ...], int, int]:
    shape = tuple(draw(st.lists(st.integers(0, 5), min_size=1, max_size=4)))
    ends = sorted(draw(st.tuples(*[st.integers(0, math.prod(shape))] * 2)))
    return shape, ends[0], ends[1]


@settings(max_examples=500)
@given(ranges=st.lists(flat_ranges(), min_size=1, max_size=4))
def test_rectangles_of_a_flat_range_are_its_elements_in_order(
    ranges: list[tuple[tuple[int, ...], int, int]],
) -> None:
    dims = max(len(shape) for shape, _, _ in ranges)
    shapes = np.array([shape + (1,) * (dims - len(shape)) for shape, _, _ in ranges], np.int64)
    starts, stops = (np.array([r[i] for r in ranges], np.int64) for i in (1, 2))
    got = rectangles_of(shapes, starts, stops)
    for row, (shape, start, stop) in enumerate(ranges):
        elements = np.arange(math.prod(shape)).reshape(shapes[row])
        rows = np.flatnonzero(got.row == row)
        assert len(rows) <= 2 * dims - 1
        flat: list[int] = []
        for i in rows:
            index = tuple(slice(a, a + n) for a, n in zip(got.start[i], got.shape[i], strict=True))
            flat += elements[index].ravel().tolist()
        assert flat == list(range(start, stop))


@given(shape=st.lists(st.integers(0, 6), min_size=1, max_size=4))
def test_strides_are_those_of_numpy(shape: list[int]) -> None:
    reference = tuple(s // 8 for s in np.zeros([max(n, 1) for n in shape], np.int64).strides)
    assert row_major_strides([max(n, 1) for n in shape]) == reference
    assert tuple(strides_of(np.array([[max(n, 1) for n in shape]]))[0]) == reference


def test_box_names_what_is_wrong_with_it() -> None:
    with pytest.raises(GeometryError, match=r"has 1 dims but shape \(2, 3\) has 2"):
        Box((0,), (2, 3))
    with pytest.raises(GeometryError, match="negative"):
        Box((-1,), (2,))
