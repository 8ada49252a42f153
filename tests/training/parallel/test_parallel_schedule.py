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
    plan_interleaved,
)


def test_one_stage_is_plain_gradient_accumulation() -> None:
    assert plan_1f1b(1, 0, 3) == (Forward(0), Backward(0), Forward(1), Backward(1), Forward(2), Backward(2))


def test_neighbours_that_both_send_post_send_and_receive_together() -> None:
    # First of two stages: activation 1 goes out while the gradient of 0 comes in.
    first = Transfer(send_activation=Forward(1), receive_gradient=Backward(0))
    second = Transfer(send_gradient=Backward(0), receive_activation=Forward(1))
    assert first in plan_1f1b(2, 0, 3)
    assert second in plan_1f1b(2, 1, 3)


def test_a_plan_for_a_stage_that_does_not_exist_is_rejected() -> None:
    with pytest.raises(DeclarationError, match=r"stage 2 of 2.*stage of 0\.\.1"):
        plan_1f1b(2, 2, 1)


def test_the_last_stage_of_an_interleaved_plan_sends_to_the_first() -> None:
    # Two stages, two chunks, two micro-batches: chunk 0 of the last stage feeds chunk 1 of the first one.
    first, last = (plan_interleaved(2, stage, 2, 2) for stage in range(2))
    assert first[:7] == (
        Forward(0, 0),
        Transfer(send_activation=Forward(0, 0)),
        Forward(1, 0),
        Transfer(send_activation=Forward(1, 0), receive_activation=Forward(0, 1)),
        Forward(0, 1),
        Transfer(send_activation=Forward(0, 1), receive_activation=Forward(1, 1)),
        Forward(1, 1),
    )
    assert last[1:4] == (
        Forward(0, 0),
        Transfer(send_activation=Forward(0, 0), receive_activation=Forward(1, 0)),
        Forward(1, 0),
    )


def test_a_plan_without_chunks_is_rejected() -> None:
    with pytest.raises(DeclarationError, match=r"0 model chunks.*at least one"):
        plan_interleaved(2, 0, 0, 2)


def test_no_micro_batch_is_rejected() -> None:
    batches: list[MicroBatch] = []
    with pytest.raises(DeclarationError, match=r"no micro-batch.*at least one"):
        forward_backward(lambda x, y: x, batches, ParallelGroups.create(ParallelLayout()))  # type: ignore[arg-type]
