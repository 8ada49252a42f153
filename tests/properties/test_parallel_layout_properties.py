"""Laws of the arithmetic between ranks, coordinates and axes."""

from __future__ import annotations

from hypothesis import given
from hypothesis.strategies import integers, sampled_from

from megackpt.parallel import Coordinates, ParallelLayout
from megackpt.parallel.layout import RANK_ORDER, AxisName

sizes = integers(1, 5)
axes = sampled_from(RANK_ORDER)


@given(tp=sizes, pp=sizes, dp=sizes)
def test_ranks_and_coordinates_are_inverse(tp: int, pp: int, dp: int) -> None:
    layout = ParallelLayout(tp=tp, pp=pp, dp=dp)
    everywhere = [layout.coordinates(rank) for rank in range(layout.world_size)]
    assert [layout.rank_at(where) for where in everywhere] == list(range(tp * pp * dp))
    assert len(set(everywhere)) == layout.world_size


@given(tp=sizes, pp=sizes, dp=sizes)
def test_tp_is_the_fastest_axis_and_pp_the_slowest(tp: int, pp: int, dp: int) -> None:
    layout = ParallelLayout(tp=tp, pp=pp, dp=dp)
    walk = [Coordinates(tp=t, dp=d, pp=p) for p in range(pp) for d in range(dp) for t in range(tp)]
    assert [layout.coordinates(rank) for rank in range(layout.world_size)] == walk


@given(tp=sizes, pp=sizes, dp=sizes, axis=axes)
def test_the_ranks_of_an_axis_partition_the_world(tp: int, pp: int, dp: int, axis: AxisName) -> None:
    layout = ParallelLayout(tp=tp, pp=pp, dp=dp)
    partition = layout.all_ranks_of(axis)
    assert sorted(rank for ranks in partition for rank in ranks) == list(range(layout.world_size))
    assert {len(ranks) for ranks in partition} == {layout.size(axis)}


@given(tp=sizes, pp=sizes, dp=sizes, axis=axes)
def test_ranks_of_an_axis_differ_along_it_only(tp: int, pp: int, dp: int, axis: AxisName) -> None:
    layout = ParallelLayout(tp=tp, pp=pp, dp=dp)
    for rank in range(layout.world_size):
        mine = [layout.coordinates(r) for r in layout.ranks_of(axis, rank)]
        assert [getattr(where, axis) for where in mine] == list(range(layout.size(axis)))
        for other in set(RANK_ORDER) - {axis}:
            assert len({getattr(where, other) for where in mine}) == 1
        assert rank in layout.ranks_of(axis, rank)


@given(tp=sizes, pp=sizes, dp=sizes)
def test_infer_finds_the_data_parallel_size(tp: int, pp: int, dp: int) -> None:
    assert ParallelLayout.infer(tp * pp * dp, tp=tp, pp=pp) == ParallelLayout(tp=tp, pp=pp, dp=dp)
