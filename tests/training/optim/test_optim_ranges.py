"""The buffer layout against the law it lives by: every element of every parameter has one owner."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megackpt.errors import GeometryError
from megackpt.optim.ranges import BufferLayout, FlatRange, plan_buffer

layouts = st.builds(
    plan_buffer,
    st.lists(st.integers(0, 300), max_size=12),
    dp=st.integers(1, 9),
    bucket_size=st.integers(1, 500),
    alignment=st.sampled_from([1, 2, 7, 64]),
)


@given(layouts)
def test_owned_ranges_tile_every_parameter_exactly_once(layout: BufferLayout) -> None:
    owned = [layout.owned_ranges(rank) for rank in range(layout.dp)]
    for index, param in enumerate(layout.params):
        elements = [e for ranges in owned for e in range(ranges[index].start, ranges[index].stop)]
        assert elements == list(range(param.numel))


@given(layouts)
def test_an_owned_range_lies_in_the_owned_slices_of_the_buffer(layout: BufferLayout) -> None:
    for rank in range(layout.dp):
        elements = {e for s in layout.owned_slices(rank) for e in range(s.start, s.stop)}
        for param, owned in zip(layout.params, layout.owned_ranges(rank), strict=True):
            assert {param.start + e for e in range(owned.start, owned.stop)} <= elements


@given(layouts)
def test_owned_slices_are_equal_and_tile_every_bucket(layout: BufferLayout) -> None:
    for index, bucket in enumerate(layout.buckets):
        slices = [layout.owned_slices(rank)[index] for rank in range(layout.dp)]
        assert len({s.numel for s in slices}) == 1
        assert [e for s in slices for e in range(s.start, s.stop)] == list(range(bucket.start, bucket.stop))


@given(
    numels=st.lists(st.integers(0, 300), max_size=12),
    dp=st.integers(1, 9),
    bucket_size=st.integers(1, 500),
    alignment=st.sampled_from([1, 2, 7, 64]),
)
def test_parameters_are_apart_aligned_and_whole_in_one_bucket(
    numels: list[int], dp: int, bucket_size: int, alignment: int
) -> None:
    layout = plan_buffer(numels, dp=dp, bucket_size=bucket_size, alignment=alignment)
    assert [p.numel for p in layout.params] == numels
    assert all(p.start % alignment == 0 for p in layout.params)
    placed = [p for p in reversed(layout.params) if p.numel]
    assert all(a.stop <= b.start for a, b in itertools.pairwise(placed))
    for param in placed:
        home = [b for b in layout.buckets if b.start <= param.start and param.stop <= b.stop]
        assert len(home) == 1
        others = [p for p in placed if home[0].start <= p.start < home[0].stop]
        used = max(p.stop for p in others) - home[0].start
        assert used <= bucket_size or len(others) == 1


def test_parameters_are_packed_in_reverse_order_of_registration() -> None:
    layout = plan_buffer([10, 20, 30], dp=1, bucket_size=50, alignment=1)
    assert layout.params == (FlatRange(50, 60), FlatRange(30, 50), FlatRange(0, 30))
    assert layout.buckets == (FlatRange(0, 50), FlatRange(50, 60))


def test_sizes_that_cannot_be_packed_raise_an_error() -> None:
    with pytest.raises(GeometryError, match=r"sizes \[-1\] for dp=2.*Give sizes >= 0"):
        plan_buffer([-1], dp=2, bucket_size=10)
    with pytest.raises(GeometryError, match=r"dp=0.*others >= 1"):
        plan_buffer([1], dp=0, bucket_size=10)
