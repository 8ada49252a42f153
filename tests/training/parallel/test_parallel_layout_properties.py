"""Laws of the arithmetic between ranks, coordinates and axes, in both coordinate systems."""

from __future__ import annotations

from hypothesis import given
from hypothesis.strategies import DrawFn, composite, integers, sampled_from

from megackpt.parallel import Coordinates, ExpertCoordinates, ParallelGroups, ParallelLayout
from megackpt.parallel.layout import EXPERT_RANK_ORDER, RANK_ORDER, AxisName

AXES: tuple[AxisName, ...] = (*RANK_ORDER, "etp", "ep", "edp", "dp_cp")
sizes = integers(1, 4)
axes = sampled_from(AXES)


@composite
def layouts(draw: DrawFn) -> ParallelLayout:
    """Any layout: experts may be spread over the ranks of a stage in any way that divides them."""
    tp, cp, dp, pp = (draw(sizes) for _ in range(4))
    stage = tp * cp * dp
    etp = draw(sampled_from([n for n in range(1, stage + 1) if stage % n == 0]))
    ep = draw(sampled_from([n for n in range(1, stage // etp + 1) if stage // etp % n == 0]))
    return ParallelLayout(tp=tp, cp=cp, dp=dp, pp=pp, ep=ep, etp=etp, vpp=draw(sizes) if pp > 1 else 1)


@given(layout=layouts())
def test_ranks_and_coordinates_are_inverse(layout: ParallelLayout) -> None:
    ranks = range(layout.world_size)
    for coordinates in (layout.coordinates, layout.expert_coordinates):
        everywhere = [coordinates(rank) for rank in ranks]
        assert [layout.rank_at(where) for where in everywhere] == list(ranks)
        assert len(set(everywhere)) == layout.world_size


@given(layout=layouts())
def test_the_first_axis_is_the_fastest_and_pp_the_slowest(layout: ParallelLayout) -> None:
    dense = [
        Coordinates(tp=t, cp=c, dp=d, pp=p)
        for p in range(layout.pp)
        for d in range(layout.dp)
        for c in range(layout.cp)
        for t in range(layout.tp)
    ]
    experts = [
        ExpertCoordinates(etp=t, ep=e, edp=d, pp=p)
        for p in range(layout.pp)
        for d in range(layout.edp)
        for e in range(layout.ep)
        for t in range(layout.etp)
    ]
    assert [layout.coordinates(rank) for rank in range(layout.world_size)] == dense
    assert [layout.expert_coordinates(rank) for rank in range(layout.world_size)] == experts


@given(layout=layouts())
def test_both_systems_have_the_same_stages(layout: ParallelLayout) -> None:
    for rank in range(layout.world_size):
        assert layout.coordinates(rank).pp == layout.expert_coordinates(rank).pp


@given(layout=layouts(), axis=axes)
def test_the_ranks_of_an_axis_partition_the_world(layout: ParallelLayout, axis: AxisName) -> None:
    partition = layout.all_ranks_of(axis)
    assert sorted(rank for ranks in partition for rank in ranks) == list(range(layout.world_size))
    assert {len(ranks) for ranks in partition} == {layout.size(axis)}


@given(layout=layouts(), axis=axes)
def test_ranks_of_an_axis_differ_along_it_only(layout: ParallelLayout, axis: AxisName) -> None:
    system = RANK_ORDER if axis in (*RANK_ORDER, "dp_cp") else EXPERT_RANK_ORDER
    along = {"dp", "cp"} if axis == "dp_cp" else {axis}
    for rank in range(layout.world_size):
        members = layout.ranks_of(axis, rank)
        of_rank = layout.coordinates if system is RANK_ORDER else layout.expert_coordinates
        coordinates = [of_rank(r) for r in members]
        assert rank in members
        assert list(members) == sorted(set(members))
        assert len(members) == layout.size(axis)
        for other in set(system) - along:
            assert len({getattr(where, other) for where in coordinates}) == 1


@given(layout=layouts())
def test_offline_groups_are_those_of_the_layout(layout: ParallelLayout) -> None:
    for rank in range(layout.world_size):
        groups = ParallelGroups.offline(layout, rank)
        for axis in AXES:
            if axis != "dp_cp":
                system = layout.coordinates(rank) if axis in RANK_ORDER else layout.expert_coordinates(rank)
                assert getattr(groups, axis).rank == getattr(system, axis)
            assert getattr(groups, axis).ranks == layout.ranks_of(axis, rank)


@given(layout=layouts())
def test_infer_finds_the_data_parallel_size(layout: ParallelLayout) -> None:
    inferred = ParallelLayout.infer(
        layout.world_size,
        tp=layout.tp,
        pp=layout.pp,
        cp=layout.cp,
        ep=layout.ep,
        etp=layout.etp,
        vpp=layout.vpp,
    )
    assert inferred == layout
