"""Reductions that start in the backward pass do not lose gradients that come later."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

from megackpt.errors import OptimizerError
from megackpt.optim import DistributedOptimizer
from megackpt.parallel import ParallelGroups, ParallelLayout

ALONE = ParallelGroups.offline(ParallelLayout(), 0)


def build(micro_batches: int) -> tuple[nn.Module, DistributedOptimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    optimizer = DistributedOptimizer(
        model.parameters(),
        lambda g: torch.optim.SGD(g, lr=1.0),
        ALONE,
        bucket_size=10,
        overlap_grad_reduce=True,
        overlap_param_gather=[model],
    )
    optimizer.micro_batches = micro_batches
    return model, optimizer


def backward(model: nn.Module) -> None:
    model(torch.ones(2, 3)).sum().backward()


def test_a_copy_of_a_model_does_not_wait_for_the_optimizer_of_the_model() -> None:
    model, optimizer = build(micro_batches=1)
    optimizer._gathers._waiting = lambda: None  # type: ignore[union-attr]  # cannot be copied or pickled
    for twin in (pickle.loads(pickle.dumps(model)), copy.deepcopy(model)):
        assert torch.equal(twin(torch.ones(3)), model(torch.ones(3)))


def test_a_gradient_after_the_reduction_of_its_bucket_is_rejected() -> None:
    model, _ = build(micro_batches=1)
    backward(model)
    with pytest.raises(OptimizerError, match=r"shape \(3,\) got a gradient after .*optimizer.micro_batches"):
        backward(model)


def test_gradients_are_not_set_to_zero_while_they_are_reduced() -> None:
    model, optimizer = build(micro_batches=1)
    backward(model)
    with pytest.raises(OptimizerError, match=r"zero_grad\(\) was called while .*optimizer.step\(\) before"):
        optimizer.zero_grad()
    before = [p.detach().clone() for p in model.parameters()]
    optimizer.skip_step()
    optimizer.step()
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))


def test_a_step_after_fewer_backward_passes_reduces_what_is_there() -> None:
    model, optimizer = build(micro_batches=3)
    twin, plain = build(micro_batches=1)
    for m, o in ((model, optimizer), (twin, plain)):
        backward(m)
        o.step()
        o.zero_grad()
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), twin.parameters(), strict=True))
