"""States of several ranks become whole ones, in whatever order their ranges come."""

from __future__ import annotations

import pytest
import torch

from megackpt.errors import DeclarationError
from megackpt.optim.gather import StateRange, gather_states, join_states
from megackpt.optim.ranges import FlatRange
from megackpt.parallel import Axis

OWN = [StateRange(0, "exp_avg", FlatRange(0, 3), torch.arange(3.0))]


def test_a_rank_that_shares_with_no_other_keeps_its_own_ranges() -> None:
    assert gather_states(OWN, Axis.of([5], 5)) == OWN


def test_groups_that_cannot_communicate_are_an_error() -> None:
    with pytest.raises(DeclarationError, match="needs groups that communicate"):
        gather_states(OWN, Axis.of([4, 5], 5))


def test_ranges_of_all_ranks_are_joined_by_parameter_and_state() -> None:
    ranges = [
        StateRange(1, "exp_avg", FlatRange(2, 5), torch.tensor([2.0, 3.0, 4.0])),
        StateRange(0, "step", FlatRange(0, 1), torch.tensor([7])),
        StateRange(1, "exp_avg", FlatRange(0, 2), torch.tensor([0.0, 1.0])),
    ]
    whole = join_states(ranges, [1, 5])
    assert {named: state.tolist() for named, state in whole.items()} == {
        (1, "exp_avg"): [0, 1, 2, 3, 4],
        (0, "step"): [7],
    }
    assert whole[0, "step"].dtype == torch.int64
