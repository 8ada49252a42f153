"""States of several ranks become whole ones, in whatever order their ranges come."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

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


class Messages:
    """Stands in for torch.distributed where ranks run one after the other, the first one last."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.rank = 0
        self._objects: dict[int, Any] = {}
        self._tensors: dict[int, list[Tensor]] = {}
        for function in (self.gather_object, self.send, self.recv):
            monkeypatch.setattr(dist, function.__name__, function)

    def gather_object(self, sent: Any, received: list[Any] | None, *, dst: int, group: Any) -> None:
        """Keep what other ranks send; give all of it to the first rank."""
        assert dst == RANKS[0]
        self._objects[self.rank] = sent
        if received is not None:
            received[:] = [self._objects[rank] for rank in RANKS]

    def send(self, tensor: Tensor, dst: int, *, group: Any) -> None:
        """Keep a message to the first rank."""
        assert dst == RANKS[0]
        assert tensor.is_contiguous()
        self._tensors.setdefault(self.rank, []).append(tensor)

    def recv(self, out: Tensor, source: int, *, group: Any) -> None:
        """Take the next message of a rank."""
        sent = self._tensors[source].pop(0)
        assert (sent.shape, sent.dtype) == (out.shape, out.dtype)
        out.copy_(sent)


RANKS = [3, 5, 8]


def test_the_first_rank_gets_the_ranges_of_all_and_the_others_none(monkeypatch: pytest.MonkeyPatch) -> None:
    messages = Messages(monkeypatch)
    own = {
        3: [StateRange(0, "exp_avg", FlatRange(0, 2), torch.tensor([1.0, 2.0]))],
        5: [
            StateRange(0, "exp_avg", FlatRange(2, 3), torch.tensor([3.0])),
            StateRange(1, "step", FlatRange(0, 2), torch.arange(4)[::2]),
        ],
        8: [],
    }
    group: Any = "a group"
    gathered = {}
    for rank in reversed(RANKS):
        messages.rank = rank
        gathered[rank] = gather_states(own[rank], Axis.of(RANKS, rank, group))
    assert gathered[5] == gathered[8] == []
    assert [(r.position, r.state, r.flat_range, r.data.tolist()) for r in gathered[3]] == [
        (0, "exp_avg", FlatRange(0, 2), [1, 2]),
        (0, "exp_avg", FlatRange(2, 3), [3]),
        (1, "step", FlatRange(0, 2), [0, 2]),
    ]


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
