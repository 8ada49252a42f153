"""Optimizer state that is gathered on one rank is the same arrays, which the others no longer declare."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch.nn import Parameter

from megackpt.mapping import ShardedStateDict, ShardedTensor
from megackpt.optim import DistributedOptimizer, distributed
from megackpt.optim.gather import StateRange
from megackpt.parallel import Axis, ParallelGroups, ParallelLayout
from tests.support.optimizers import gather, tensors_of

RANKS = 2


def declared(rank: int, *, gathered: bool) -> ShardedStateDict:
    """Return what a rank of dp declares of an optimizer with two parameters."""
    groups = ParallelGroups.offline(ParallelLayout(dp=RANKS), rank)
    params = [Parameter(torch.arange(21.0).view(3, 7)), Parameter(torch.arange(5.0))]
    optimizer = DistributedOptimizer(params, torch.optim.AdamW, groups)
    model = {
        name: ShardedTensor.from_rank_offsets(name, param, replica_id=(0, 0, rank))
        for name, param in zip("ab", params, strict=True)
    }
    return optimizer.sharded_state_dict(model, gathered=gathered)


def test_the_first_rank_declares_whole_states_and_the_others_none(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[StateRange] = []

    def gather_states(own: Sequence[StateRange], axis: Axis) -> list[StateRange]:
        assert axis.size == RANKS
        if axis.is_first:
            return [*own, *sent]
        sent.extend(own)
        return []

    monkeypatch.setattr(distributed, "gather_states", gather_states)
    other = declared(1, gathered=True)
    first = declared(0, gathered=True)
    cut = gather([declared(rank, gathered=False) for rank in range(RANKS)])
    whole = gather([first, other])
    assert {key: tensor.tolist() for key, tensor in whole.items()} == {
        key: tensor.tolist() for key, tensor in cut.items()
    }
    assert [t for t in tensors_of(other) if t.local_shape] == []
    assert all(t.flattened_range is None and t.local_shape == t.global_shape for t in tensors_of(first))
