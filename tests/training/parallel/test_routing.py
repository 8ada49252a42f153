"""Routing against a plain reference: a loop over tokens in Python floats, with every option.

Tolerance: float32 scores against float64 ones; 2^-24 = 6e-8 relative in each of a few operations.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from megackpt.errors import DeclarationError
from megackpt.parallel import RoutingOptions
from megackpt.parallel.routing import choose_experts, scores_of

TOKENS, EXPERTS = 64, 12
RELATIVE = 1e-5

OPTIONS = {
    "softmax": RoutingOptions(top_k=3),
    "softmax-plain": RoutingOptions(top_k=3, normalise=False),
    "sigmoid": RoutingOptions(top_k=3, score_function="sigmoid", scaling_factor=2.5),
    "sigmoid-plain": RoutingOptions(top_k=1, score_function="sigmoid", normalise=False),
    "groups": RoutingOptions(top_k=4, score_function="sigmoid", num_groups=4, group_top_k=2),
    "one-group": RoutingOptions(top_k=3, num_groups=4, group_top_k=1),
    "more-groups-than-choices": RoutingOptions(top_k=2, num_groups=6, group_top_k=4),
}


def _logits() -> Tensor:
    return torch.randn(TOKENS, EXPERTS, generator=torch.Generator().manual_seed(5)) * 2


def _bias() -> Tensor:
    return torch.randn(EXPERTS, generator=torch.Generator().manual_seed(6)) * 0.3


def _reference(logits: list[float], bias: list[float], options: RoutingOptions) -> dict[int, float]:
    """Return the weight of each chosen expert of one token."""
    if options.score_function == "sigmoid":
        scores = [1 / (1 + math.exp(-x)) for x in logits]
    else:
        total = sum(math.exp(x) for x in logits)
        scores = [math.exp(x) / total for x in logits]
    biased = [s + b for s, b in zip(scores, bias, strict=True)]
    size = EXPERTS // options.num_groups
    groups = [range(i, i + size) for i in range(0, EXPERTS, size)]
    counted = max(1, options.top_k // options.group_top_k)
    groups.sort(key=lambda group: -sum(sorted((biased[e] for e in group), reverse=True)[:counted]))
    allowed = [e for group in groups[: options.group_top_k] for e in group]
    if options.num_groups == 1:
        allowed = list(range(EXPERTS))
    chosen = sorted(allowed, key=lambda e: -biased[e])[: options.top_k]
    total = sum(scores[e] for e in chosen) if options.normalise else 1
    return {e: scores[e] / total * options.scaling_factor for e in chosen}


@pytest.mark.parametrize("biased", [False, True], ids=["no bias", "bias"])
@pytest.mark.parametrize("name", OPTIONS)
def test_experts_and_weights_are_those_of_a_loop_over_tokens(name: str, biased: bool) -> None:
    options, logits = OPTIONS[name], _logits()
    bias = _bias() if biased else None
    experts, weights = choose_experts(scores_of(logits, options), bias, options)
    assert weights.dtype == torch.float32
    for token in range(TOKENS):
        expected = _reference(
            logits[token].tolist(), [0.0] * EXPERTS if bias is None else bias.tolist(), options
        )
        actual = dict(zip(experts[token].tolist(), weights[token].tolist(), strict=True))
        assert actual == pytest.approx(expected, rel=RELATIVE)


def test_scores_of_nought_have_finite_weights() -> None:
    options = RoutingOptions(score_function="sigmoid")
    scores = scores_of(torch.full((1, 4), -1000.0), options)
    assert torch.equal(choose_experts(scores, None, options).weights, torch.zeros(1, 2))


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"top_k": 0}, r"top_k is 0. It must be at least 1"),
        ({"top_k": 1}, r"top_k is 1 with normalise=True.*Set normalise=False"),
        ({"num_groups": 2, "group_top_k": 3}, r"group_top_k 3 is larger than num_groups 2"),
        ({"z_loss": -1.0}, r"z_loss is -1.0. It must be at least 0"),
        ({"bias_rate": -1.0}, r"bias_rate is -1.0"),
        ({"score_function": "tanh"}, r"score_function is 'tanh'. It must be 'softmax' or 'sigmoid'"),
        ({"balance_over": "batch"}, r"balance_over is 'batch'. It must be 'sequence' or 'micro_batch'"),
    ],
)
def test_options_that_cannot_be_are_rejected(arguments: dict[str, object], text: str) -> None:
    with pytest.raises(DeclarationError, match=text):
        RoutingOptions(**arguments)


def test_faults_name_what_does_not_fit_the_number_of_experts() -> None:
    assert RoutingOptions(top_k=4, num_groups=3, group_top_k=1).faults(9) == [
        "top_k 4 is larger than the 3 experts that a token can choose from"
    ]
    assert RoutingOptions(num_groups=3, group_top_k=3).faults(8) == [
        "num_experts 8 is not a multiple of num_groups 3"
    ]
    assert RoutingOptions(top_k=8).faults(8) == []
