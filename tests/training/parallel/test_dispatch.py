"""What is sent to experts and what comes back, on one rank, against loops over tokens."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis.strategies import booleans, floats, integers, sampled_from
from torch import Tensor

from megackpt.errors import DeclarationError
from megackpt.parallel import Capacity, ParallelGroups, ParallelLayout, Routing, TokenDispatcher
from megackpt.parallel.dispatch import plan_rows

ONE = ParallelGroups.create(ParallelLayout())
EXPERTS, TOP_K, HIDDEN = 6, 2, 5


def _routing(tokens: int, seed: int) -> Routing:
    generator = torch.Generator().manual_seed(seed)
    scores = torch.rand(tokens, EXPERTS, generator=generator)
    scores[:, :2] += 0.4  # an uneven load
    weights, experts = scores.topk(TOP_K)
    return Routing(experts, weights)


def _kept(routing: Routing, capacity: Capacity | None) -> dict[int, list[int]]:
    """Return the choices that each expert takes, in the order of tokens; a loop over the experts."""
    experts, weights = (part.detach().flatten().tolist() for part in routing)
    kept = {}
    for expert in range(EXPERTS):
        own = [i for i, e in enumerate(experts) if e == expert]
        if capacity is not None:
            limit = math.ceil(len(experts) / EXPERTS * capacity.factor)
            if capacity.drop == "weight":
                own.sort(key=lambda i: -weights[i])
            own = sorted(own[:limit])
        kept[expert] = own
    return kept


@given(
    tokens=integers(0, 12),
    seed=integers(0, 99),
    factor=floats(0.1, 2.0),
    drop=sampled_from(["weight", "position"]),
    pad=booleans(),
)
def test_rows_are_sorted_by_expert_and_within_the_capacity(
    tokens: int, seed: int, factor: float, drop: str, pad: bool
) -> None:
    routing = _routing(tokens, seed)
    capacity = Capacity(factor=factor, drop=drop, pad=pad)
    plan = plan_rows(routing, EXPERTS, capacity)
    limit = capacity.limit(tokens * TOP_K, EXPERTS)
    rows = [part.tolist() for part in plan.choices.split(plan.counts.tolist())]
    expected = _kept(routing, capacity)
    assert [[i for i in part if i >= 0] for part in rows] == list(expected.values())
    if pad:
        assert plan.counts.tolist() == [limit] * EXPERTS
    else:
        assert plan.counts.tolist() == [len(own) for own in expected.values()]


@given(tokens=integers(0, 12), seed=integers(0, 99))
def test_without_a_capacity_every_choice_is_sent(tokens: int, seed: int) -> None:
    routing = _routing(tokens, seed)
    plan = plan_rows(routing, EXPERTS, None)
    assert sorted(plan.choices.tolist()) == list(range(tokens * TOP_K))
    rows = [part.tolist() for part in plan.choices.split(plan.counts.tolist())]
    assert rows == list(_kept(routing, None).values())


def _experts(rows: Tensor, counts: list[int]) -> Tensor:
    """Expert e multiplies by e + 1."""
    factors = torch.arange(1.0, EXPERTS + 1).repeat_interleave(torch.tensor(counts))
    return rows * factors.unsqueeze(1)


@pytest.mark.parametrize(
    "capacity",
    [None, Capacity(factor=0.6), Capacity(factor=0.6, drop="position"), Capacity(factor=0.6, pad=True)],
    ids=["dropless", "weight", "position", "padded"],
)
def test_outputs_and_gradients_are_those_of_a_loop_over_tokens(capacity: Capacity | None) -> None:
    routing = _routing(9, seed=3)
    tokens = torch.randn(9, HIDDEN, generator=torch.Generator().manual_seed(1)).requires_grad_()
    weights = routing.weights.requires_grad_()
    dispatcher = TokenDispatcher(EXPERTS, ONE, capacity=capacity)
    rows, dispatch = dispatcher.dispatch(tokens, routing)
    out = dispatcher.combine(_experts(rows, list(dispatch.counts)), dispatch)
    out.square().sum().backward()

    x, w = tokens.detach().clone().requires_grad_(), weights.detach().clone().requires_grad_()
    kept = {choice for own in _kept(routing, capacity).values() for choice in own}
    expected = torch.zeros_like(x)
    for token in range(9):
        for k in range(TOP_K):
            if token * TOP_K + k in kept:
                part = x[token] * (int(routing.experts[token, k]) + 1) * w[token, k]
                expected = expected.index_add(0, torch.tensor([token]), part.unsqueeze(0))
    expected.square().sum().backward()
    torch.testing.assert_close(out, expected)  # sums of two products
    torch.testing.assert_close(tokens.grad, x.grad)
    torch.testing.assert_close(weights.grad, w.grad)
    if capacity is not None:
        assert len(kept) < 9 * TOP_K


def test_a_token_that_all_experts_drop_gets_zeros() -> None:
    routing = Routing(torch.zeros(4, 1, dtype=torch.int64), torch.tensor([[0.1], [0.4], [0.3], [0.2]]))
    dispatcher = TokenDispatcher(2, ONE, capacity=Capacity(factor=1.0))
    rows, dispatch = dispatcher.dispatch(torch.ones(4, 3), routing)
    assert dispatch.counts == [2, 0]
    assert dispatcher.combine(rows, dispatch).sum(1).tolist() == pytest.approx([0, 1.2, 0.9, 0])


def test_outputs_have_the_dtype_of_the_tokens() -> None:
    dispatcher = TokenDispatcher(EXPERTS, ONE)
    rows, dispatch = dispatcher.dispatch(torch.ones(9, HIDDEN, dtype=torch.bfloat16), _routing(9, seed=3))
    assert dispatcher.combine(rows, dispatch).dtype == rows.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"factor": 0.0}, r"factor is 0.0. It must be larger than 0"),
        ({"factor": math.nan}, r"factor is nan"),
        ({"factor": 1.0, "drop": "random"}, r"drop is 'random'. It must be 'weight' or 'position'"),
    ],
)
def test_a_capacity_that_cannot_be_is_rejected(arguments: dict[str, object], text: str) -> None:
    with pytest.raises(DeclarationError, match=text):
        Capacity(**arguments)
