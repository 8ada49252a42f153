"""ParallelLayout and its groups without torch.distributed, and their errors."""

from __future__ import annotations

import pytest
import torch

from megackpt.errors import DeclarationError, MismatchError
from megackpt.parallel import (
    Coordinates,
    ExpertCoordinates,
    ParallelGroups,
    ParallelLayout,
    copy_to,
    reduce_from,
)


def test_rank_order_is_megatron_core_s() -> None:
    layout = ParallelLayout(tp=2, pp=2, dp=2)
    assert layout.ranks_of("tp", 6) == (6, 7)
    assert layout.ranks_of("dp", 6) == (4, 6)
    assert layout.ranks_of("pp", 6) == (2, 6)


def test_a_size_below_one_is_rejected() -> None:
    with pytest.raises(DeclarationError, match=r"pp=0.*at least 1"):
        ParallelLayout(pp=0)


def test_etp_is_tp_where_it_is_not_given() -> None:
    assert ParallelLayout(tp=4).etp == 4
    assert ParallelLayout(tp=4, etp=2).etp == 2


def test_experts_that_do_not_fit_the_ranks_of_a_stage_are_rejected() -> None:
    with pytest.raises(DeclarationError, match=r"etp=2 x ep=4 = 8 does not divide.*= 12 ranks.*divides 12"):
        ParallelLayout(tp=2, cp=2, dp=3, ep=4)


def test_chunks_of_a_single_stage_are_rejected() -> None:
    with pytest.raises(DeclarationError, match=r"vpp=2.*pp is 1.*vpp=1"):
        ParallelLayout(vpp=2)


def test_experts_may_cut_across_tp() -> None:
    layout = ParallelLayout(tp=2, cp=2, dp=2, pp=2, ep=4, etp=1)
    assert layout.edp == 2
    assert layout.ranks_of("ep", 13) == (12, 13, 14, 15)
    assert layout.ranks_of("edp", 13) == (9, 13)
    assert layout.ranks_of("dp_cp", 13) == (9, 11, 13, 15)
    assert layout.expert_coordinates(13) == ExpertCoordinates(ep=1, edp=1, pp=1)


def test_infer_names_the_numbers_that_do_not_divide() -> None:
    with pytest.raises(DeclarationError, match=r"6 ranks.*tp=2 x pp=2 = 4.*multiple of 4"):
        ParallelLayout.infer(6, tp=2, pp=2)


def test_a_rank_outside_the_layout_is_rejected() -> None:
    with pytest.raises(DeclarationError, match=r"rank 4 does not exist.*ranks 0 to 3") as caught:
        ParallelLayout(tp=4).coordinates(4)
    assert caught.value.rank == 4


def test_coordinates_outside_the_layout_are_rejected() -> None:
    with pytest.raises(DeclarationError, match=r"tp must be in \[0, 2\)"):
        ParallelLayout(tp=2).rank_at(Coordinates(tp=2))


def test_a_world_of_one_needs_no_torch_distributed() -> None:
    groups = ParallelGroups.create(ParallelLayout())
    assert [axis.group for axis in (groups.tp, groups.pp, groups.dp, groups.embedding)] == [None] * 4
    x = torch.ones(2)
    assert copy_to(x, groups.tp) is x
    assert reduce_from(x, groups.tp) is x


def test_create_names_the_number_of_missing_ranks() -> None:
    with pytest.raises(MismatchError, match=r"needs 2 ranks but 1 run.*init_process_group.*infer\(1, tp=2"):
        ParallelGroups.create(ParallelLayout(tp=2))


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


def test_offline_groups_cannot_communicate() -> None:
    groups = ParallelGroups.offline(ParallelLayout(tp=2), 1)
    with pytest.raises(DeclarationError, match=r"ranks \(0, 1\).*offline.*ParallelGroups\.create") as caught:
        reduce_from(torch.ones(2), groups.tp)
    assert caught.value.rank == 1
