"""The slice of a bucket that a rank gets: summed in float32, then averaged. Without processes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megackpt.optim.collectives import start_reduction
from megackpt.parallel import Axis


class Done:
    """Work that is over."""

    def wait(self) -> None:
        """Return at once."""


def test_a_rank_gets_the_mean_of_its_slice_summed_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    # In bf16, 256 + 1 is 256: a sum that is rounded after each rank would be 256.
    buckets = [torch.tensor([r, 256 if r == 0 else 1], dtype=torch.bfloat16) for r in range(3)]
    buckets = [
        bucket.repeat_interleave(2)[:3] for bucket in buckets
    ]  # [r, r, 256 or 1], a slice for each rank

    def all_to_all(received: Tensor, sent: Tensor, *, group: Any, async_op: bool) -> Done:
        assert torch.equal(sent, buckets[2])
        received.copy_(torch.stack([bucket[2] for bucket in buckets]))
        return Done()

    group: Any = "a group"
    monkeypatch.setattr(dist, "all_to_all_single", all_to_all)
    bucket = buckets[2].clone()
    start_reduction(bucket, Axis.of([0, 1, 2], 2, group), divisor=2).finish()
    assert bucket[2].item() == 129


@pytest.mark.parametrize(("divisor", "expected"), [(1, [2.0, 6.0]), (4, [0.5, 1.5])])
def test_a_rank_alone_only_divides(divisor: int, expected: list[float]) -> None:
    bucket = torch.tensor([2.0, 6.0])
    start_reduction(bucket, Axis.of([0], 0), divisor=divisor).finish()
    assert bucket.tolist() == expected
