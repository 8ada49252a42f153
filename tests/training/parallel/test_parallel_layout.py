"""Layouts of ranks, by example and by laws."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis.strategies import DrawFn, composite, integers, sampled_from

from megackpt import DeclarationError, MismatchError
from megackpt.parallel import (
    Coordinates,
    ExpertCoordinates,
    ParallelGroups,
    ParallelLayout,
    copy_to,
    reduce_from,
)
from megackpt.parallel.layout import EXPERT_RANK_ORDER, RANK_ORDER, AxisName
from tests.support.effort import few


def test_rank_order_is_megatron_core_s() -> None:
    layout = ParallelLayout(tp=2, pp=2, dp=2)
    assert layout.ranks_of("tp", 6) == (6, 7)
    assert layout.ranks_of("dp", 6) == (4, 6)
    assert layout.ranks_of("pp", 6) == (2, 6)


TP2, TP4 = ParallelLayout(tp=2), ParallelLayout(tp=4)
OFFLINE = ParallelGroups.offline(TP2, 1)


@pytest.mark.parametrize(
    ("make", "error", "rank", "message"),
    [
        (lambda: ParallelLayout(pp=0), DeclarationError, None, r"pp=0.*at least 1"),
        (
            lambda: ParallelLayout(tp=2, cp=2, dp=3, ep=4), DeclarationError, None,
            r"etp=2 x ep=4 = 8 does not divide.*= 12 ranks.*divides 12",
        ),
        (lambda: ParallelLayout(vpp=2), DeclarationError, None, r"vpp=2.*pp is 1.*vpp=1"),
        (
            lambda: ParallelLayout.infer(6, tp=2, pp=2), DeclarationError, None,
            r"6 ranks.*tp=2 x pp=2 = 4.*multiple of 4",
        ),
        (lambda: TP4.coordinates(4), DeclarationError, 4, r"rank 4 does not exist.*ranks 0 to 3"),
        (lambda: TP2.rank_at(Coordinates(tp=2)), DeclarationError, None, r"tp must be in \[0, 2\)"),
        (
            lambda: ParallelGroups.create(TP2), MismatchError, None,
            r"needs 2 ranks but 1 run.*init_process_group.*infer\(1, tp=2",
        ),
        (
            lambda: reduce_from(torch.ones(2), OFFLINE.tp), DeclarationError, 1,
            r"ranks \(0, 1\).*offline.*ParallelGroups\.create",
        ),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_an_error(
    make: Callable[[], object], error: type[DeclarationError | MismatchError], rank: int | None, message: str
) -> None:
    with pytest.raises(error, match=message) as caught:
        make()
    assert rank is None or caught.value.rank == rank


def test_etp_is_tp_where_it_is_not_given() -> None:
    assert ParallelLayout(tp=4).etp == 4
    assert ParallelLayout(tp=4, etp=2).etp == 2


def test_experts_may_cut_across_tp() -> None:
    layout = ParallelLayout(tp=2, cp=2, dp=2, pp=2, ep=4, etp=1)
    assert layout.edp == 2
    assert layout.ranks_of("ep", 13) == (12, 13, 14, 15)
    assert layout.ranks_of("edp", 13) == (9, 13)
    assert layout.ranks_of("dp_cp", 13) == (9, 11, 13, 15)
    assert layout.expert_coordinates(13) == ExpertCoordinates(ep=1, edp=1, pp=1)


def test_a_world_of_one_needs_no_torch_distributed() -> None:
    groups = ParallelGroups.create(ParallelLayout())
    assert [axis.group for axis in (groups.tp, groups.pp, groups.dp, groups.embedding)] == [None] * 4
    x = torch.ones(2)
    assert copy_to(x, groups.tp) is x
    assert reduce_from(x, groups.tp) is x


def test_offline_groups_know_every_axis_of_every_rank() -> None:
    layout = ParallelLayout(tp=2, pp=3, dp=2)
    groups = ParallelGroups.offline(layout, 5)
    assert (groups.tp.rank, groups.dp.rank, groups.pp.rank) == (1, 0, 1)
    assert groups.pp.ranks == (1, 5, 9)
    assert groups.embedding.ranks == (5,)
    assert ParallelGroups.offline(layout, 9).embedding.ranks == (1, 9)


def test_experts_have_groups_of_their_own() -> None:
    groups = ParallelGroups.offline(ParallelLayout(tp=2, dp=4, ep=2, etp=1), 3).experts
    assert (groups.tp.ranks, groups.dp.ranks, groups.cp.ranks) == ((3,), (1, 3, 5, 7), (3,))
    assert groups.dp_cp == groups.dp == groups.edp
    assert groups.for_experts


AXES: tuple[AxisName, ...] = (*RANK_ORDER, "etp", "ep", "edp", "dp_cp")
LAWS = settings(max_examples=few(40, of=100), deadline=None)  # a busy machine is no error
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


@LAWS
@given(layout=layouts())
def test_ranks_and_coordinates_are_inverse(layout: ParallelLayout) -> None:
    ranks = range(layout.world_size)
    for coordinates in (layout.coordinates, layout.expert_coordinates):
        everywhere = [coordinates(rank) for rank in ranks]
        assert [layout.rank_at(where) for where in everywhere] == list(ranks)
        assert len(set(everywhere)) == layout.world_size


@LAWS
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


@LAWS
@given(layout=layouts(), axis=axes)
def test_the_ranks_of_an_axis_partition_the_world(layout: ParallelLayout, axis: AxisName) -> None:
    partition = layout.all_ranks_of(axis)
    assert sorted(rank for ranks in partition for rank in ranks) == list(range(layout.world_size))
    assert {len(ranks) for ranks in partition} == {layout.size(axis)}


@LAWS
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


@LAWS
@given(layout=layouts())
def test_offline_groups_are_those_of_the_layout(layout: ParallelLayout) -> None:
    for rank in range(layout.world_size):
        groups = ParallelGroups.offline(layout, rank)
        for axis in AXES:
            if axis != "dp_cp":
                system = layout.coordinates(rank) if axis in RANK_ORDER else layout.expert_coordinates(rank)
                assert getattr(groups, axis).rank == getattr(system, axis)
            assert getattr(groups, axis).ranks == layout.ranks_of(axis, rank)


@LAWS
@given(layout=layouts())
def test_infer_finds_the_data_parallel_size(layout: ParallelLayout) -> None:
    sizes = {axis: getattr(layout, axis) for axis in ("tp", "pp", "cp", "ep", "etp", "vpp")}
    assert ParallelLayout.infer(layout.world_size, **sizes) == layout


def test_coordinates_that_are_not_given_are_those_of_the_first_rank() -> None:
    layout = ParallelLayout(tp=2, cp=2, pp=2, dp=2, ep=2)
    assert layout.coordinates(0) == Coordinates()
    assert layout.expert_coordinates(0) == ExpertCoordinates()
