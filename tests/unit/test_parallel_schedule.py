"""Pipeline plans by example, and their errors."""

from __future__ import annotations

import pytest

from megackpt.errors import DeclarationError
from megackpt.parallel import (
    Backward,
    Forward,
    MicroBatch,
    ParallelGroups,
    ParallelLayout,
    Transfer,
    forward_backward,
    plan_1f1b,
)


def test_one_stage_is_plain_gradient_accumulation() -> None:
    assert plan_1f1b(1, 0, 3) == (Forward(0), Backward(0), Forward(1), Backward(1), Forward(2), Backward(2))


def test_neighbours_that_both_send_post_send_and_receive_together() -> None:
    # First of two stages: activation 1 goes out while the gradient of 0 comes in.
    assert Transfer(peer="next", send=1, receive=0) in plan_1f1b(2, 0, 3)
    assert Transfer(peer="previous", send=0, receive=1) in plan_1f1b(2, 1, 3)


def test_a_plan_for_a_stage_that_does_not_exist_is_rejected() -> None:
    with pytest.raises(DeclarationError, match=r"stage 2 of 2.*stage of 0\.\.1"):
        plan_1f1b(2, 2, 1)


def test_no_micro_batch_is_rejected() -> None:
    batches: list[MicroBatch] = []
    with pytest.raises(DeclarationError, match=r"no micro-batch.*at least one"):
        forward_backward(lambda x, y: x, batches, ParallelGroups.create(ParallelLayout()))  # type: ignore[arg-type]
