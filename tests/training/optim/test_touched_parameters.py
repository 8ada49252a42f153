"""A parameter is updated if any of the ranks that share its gradient has one. Without processes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from megackpt.optim import grad_sync
from megackpt.optim.grad_sync import touched_on_any_rank
from megackpt.parallel import Axis, ParallelGroups, ParallelLayout


@pytest.mark.parametrize(
    ("own", "of_the_other", "expected"),
    [
        ((True, False, False), (False, True, False), (True, True, False)),
        ((False, False, True), (False, False, False), (False, False, True)),
        ((True, True, True), (False, False, False), (True, True, True)),
    ],
)
def test_what_another_rank_touched_is_updated_here_too(
    own: tuple[bool, ...],
    of_the_other: tuple[bool, ...],
    expected: tuple[bool, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def summed(flags: Tensor, axis: Axis) -> Tensor:
        assert axis.size == 2
        return flags + torch.tensor(of_the_other, dtype=flags.dtype)

    monkeypatch.setattr(grad_sync, "all_reduce", summed)
    groups = ParallelGroups.offline(ParallelLayout(dp=2), 0)
    params = [Parameter(torch.zeros(2)) for _ in own]
    assert touched_on_any_rank(params, own, groups) == expected
