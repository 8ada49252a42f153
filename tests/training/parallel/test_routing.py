"""The router and the dispatch of tokens on one rank, against loops over tokens in Python floats.

Tolerance: float32 scores against float64 ones; 2^-24 = 6e-8 relative in each of a few operations.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis.strategies import booleans, floats, integers, sampled_from
from torch import Tensor, nn

from megackpt import DeclarationError
from megackpt.training.parallel import (
    Capacity,
    GatedExperts,
    MixtureOfExperts,
    ParallelGroups,
    ParallelLayout,
    Router,
    RoutingOptions,
    update_expert_bias,
)
from megackpt.training.parallel.attributes import is_marked
from megackpt.training.parallel.moe import TokenDispatcher, plan_rows
from megackpt.training.parallel.router import mean_auxiliary_losses, set_auxiliary_loss_scale
from megackpt.training.parallel.routing import Routing, choose_experts, scores_of

HIDDEN, EXPERTS, SEQUENCES, LENGTH = 6, 5, 3, 7
GROUPS = ParallelGroups.create(ParallelLayout())
BALANCED = RoutingOptions(top_k=2, score_function="sigmoid", balance_loss=0.1)


def _router(options: RoutingOptions) -> Router:
    torch.manual_seed(3)
    router = Router(HIDDEN, EXPERTS, GROUPS, options)
    nn.init.normal_(router.weight)
    return router


def _tokens() -> tuple[Tensor, Tensor]:
    """Return tokens `[LENGTH * SEQUENCES, HIDDEN]`, as a flattened `[s, b, hidden]`, and their sequences."""
    tokens = torch.randn(LENGTH * SEQUENCES, HIDDEN, generator=torch.Generator().manual_seed(4))
    return tokens, torch.arange(LENGTH * SEQUENCES) % SEQUENCES


def _balance_reference(scores: Tensor, options: RoutingOptions) -> Tensor:
    """Equations 17 to 20 of DeepSeek-V3 for the tokens of one sequence."""
    count, experts = scores.shape
    best = scores.topk(options.top_k).indices
    loss = torch.zeros(())
    for i in range(experts):
        f = experts / (options.top_k * count) * (best == i).sum()
        p = (scores[:, i] / scores.sum(1)).mean()
        loss = loss + f * p
    return options.balance_loss * loss


@pytest.mark.parametrize("score_function", ["softmax", "sigmoid"])
@pytest.mark.parametrize("over", ["sequence", "micro_batch"])
def test_balance_loss_and_its_gradient_are_those_of_the_equations(score_function: str, over: str) -> None:
    options = replace(BALANCED, score_function=score_function, balance_over=over)
    router = _router(options)
    tokens, sequences = _tokens()
    router(tokens, sequences, SEQUENCES).weights.sum().mul(0).backward()

    weight = router.weight.detach().clone().requires_grad_()
    logits = tokens @ weight.T
    scores = logits.sigmoid() if score_function == "sigmoid" else logits.softmax(-1)
    parts = [scores] if over == "micro_batch" else [scores[sequences == i] for i in range(SEQUENCES)]
    expected = torch.stack([_balance_reference(part, options) for part in parts]).mean()
    expected.backward()
    # fp32 sums of about 20 terms in another order.
    torch.testing.assert_close(router.weight.grad, weight.grad, rtol=1e-5, atol=1e-7)
    assert mean_auxiliary_losses(router, GROUPS)[0].tolist() == pytest.approx([expected.item(), 0], rel=1e-5)


def test_z_loss_is_the_mean_square_of_the_log_partition_function() -> None:
    router = _router(RoutingOptions(z_loss=0.01))
    tokens, _ = _tokens()
    set_auxiliary_loss_scale(nn.Sequential(router), 0.5)
    router(tokens).weights.sum().mul(0).backward()
    weight = router.weight.detach().clone().requires_grad_()
    expected = (tokens @ weight.T).exp().sum(-1).log().square().mean() * 0.01
    (expected * 0.5).backward()
    torch.testing.assert_close(router.weight.grad, weight.grad, rtol=1e-5, atol=1e-7)
    assert mean_auxiliary_losses(router, GROUPS)[0].tolist() == pytest.approx([0, expected.item()], rel=1e-5)


def test_an_even_load_has_the_smallest_balance_loss() -> None:
    router = Router(EXPERTS, EXPERTS, GROUPS, RoutingOptions(top_k=1, normalise=False, balance_loss=1.0))
    with torch.no_grad():
        router.weight.copy_(torch.eye(EXPERTS) * 50)
    router(torch.eye(EXPERTS))  # each token to an expert of its own
    assert mean_auxiliary_losses(router, GROUPS)[0, 0].item() == pytest.approx(1.0)
    router(torch.eye(EXPERTS)[:1].expand(EXPERTS, -1))  # all tokens to one expert
    assert mean_auxiliary_losses(router, GROUPS)[0, 0].item() == pytest.approx(EXPERTS)


def test_losses_are_means_over_micro_batches_and_start_again_when_read() -> None:
    router = _router(BALANCED)
    tokens, sequences = _tokens()
    router(tokens, sequences, SEQUENCES)
    first = mean_auxiliary_losses(router, GROUPS)
    for _ in range(2):
        router(tokens, sequences, SEQUENCES)
    torch.testing.assert_close(mean_auxiliary_losses([router], GROUPS), first)
    assert torch.equal(mean_auxiliary_losses(router, GROUPS), torch.zeros(1, 2))


def test_evaluation_counts_nothing_and_adds_no_loss() -> None:
    router = _router(replace(BALANCED, bias_rate=0.1))
    tokens, _ = _tokens()
    with torch.no_grad():
        router(tokens)
    router.eval()
    router(tokens)
    assert router.chosen is None
    assert router.losses is None


def test_bias_moves_by_the_sign_of_the_missing_load() -> None:
    router = _router(RoutingOptions(top_k=2, bias_rate=0.25))
    router.chosen = torch.tensor([10, 0, 4, 6, 0])  # 4 on average
    update_expert_bias(router, GROUPS)
    assert router.expert_bias is not None
    assert router.expert_bias.tolist() == [-0.25, 0.25, 0, -0.25, 0.25]
    assert router.chosen is None
    update_expert_bias(router, GROUPS)  # without a token since
    assert router.expert_bias.tolist() == [-0.25, 0.25, 0, -0.25, 0.25]


def test_updates_even_out_the_load() -> None:
    router = _router(RoutingOptions(top_k=1, score_function="sigmoid", normalise=False, bias_rate=0.02))
    tokens = torch.randn(500, HIDDEN, generator=torch.Generator().manual_seed(4)) + 0.5
    loads = []
    for _ in range(60):
        router(tokens)
        assert router.chosen is not None
        loads.append(router.chosen.max().item())
        update_expert_bias(router, GROUPS)
    assert loads[0] > 200
    assert loads[-1] < 130  # 100 is even; the bias goes on moving by its rate


def test_bias_changes_the_choice_and_not_the_weights() -> None:
    router = _router(RoutingOptions(top_k=2, score_function="sigmoid", normalise=False, bias_rate=0.1))
    assert router.expert_bias is not None
    router.expert_bias[3] = 100.0
    tokens, _ = _tokens()
    experts, weights = router(tokens)
    assert (experts == 3).any(dim=1).all()
    scores = (tokens @ router.weight.T).sigmoid()
    torch.testing.assert_close(weights, scores.gather(1, experts))


@pytest.mark.parametrize("cast", ["half", "bfloat16", "double", "to"])
def test_bias_keeps_its_float32_values_whatever_the_model_is_cast_to(cast: str) -> None:
    model = nn.Sequential(_router(RoutingOptions(bias_rate=1e-3)))
    router = model[0]
    assert isinstance(router, Router)
    assert router.expert_bias is not None
    router.expert_bias += 1.0009765
    before = router.expert_bias.clone()
    model.to(torch.bfloat16) if cast == "to" else getattr(model, cast)()
    assert router.weight.dtype != torch.float32
    assert router.expert_bias.dtype == torch.float32
    assert torch.equal(router.expert_bias, before)
    assert "expert_bias" in router.state_dict()
    weights = router(torch.ones(2, HIDDEN, dtype=router.weight.dtype)).weights
    assert weights.dtype == torch.float32


def test_bias_follows_the_model_to_a_device() -> None:
    router = Router(HIDDEN, EXPERTS, GROUPS, RoutingOptions(bias_rate=1e-3), device="meta")
    router.to_empty(device="cpu").bfloat16()
    assert router.expert_bias is not None
    assert (router.expert_bias.device.type, router.expert_bias.dtype) == ("cpu", torch.float32)


def test_state_of_a_router_is_its_weight_and_bias() -> None:
    router = _router(replace(BALANCED, bias_rate=0.0))
    tokens, sequences = _tokens()
    router(tokens, sequences, SEQUENCES)
    update_expert_bias(router, GROUPS)
    assert not router.expert_bias.any()
    assert list(router.sharded_state_dict()) == ["weight", "expert_bias"]
    assert list(_router(BALANCED).sharded_state_dict()) == ["weight"]
    assert is_marked(router.weight, "sequence_parallel")


TOKENS, ROUTED = 64, 12
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
    return torch.randn(TOKENS, ROUTED, generator=torch.Generator().manual_seed(5)) * 2


def _bias() -> Tensor:
    return torch.randn(ROUTED, generator=torch.Generator().manual_seed(6)) * 0.3


def _reference(logits: list[float], bias: list[float], options: RoutingOptions) -> dict[int, float]:
    """Return the weight of each chosen expert of one token."""
    if options.score_function == "sigmoid":
        scores = [1 / (1 + math.exp(-x)) for x in logits]
    else:
        total = sum(math.exp(x) for x in logits)
        scores = [math.exp(x) / total for x in logits]
    biased = [s + b for s, b in zip(scores, bias, strict=True)]
    size = ROUTED // options.num_groups
    groups = [range(i, i + size) for i in range(0, ROUTED, size)]
    counted = max(1, options.top_k // options.group_top_k)
    groups.sort(key=lambda group: -sum(sorted((biased[e] for e in group), reverse=True)[:counted]))
    allowed = [e for group in groups[: options.group_top_k] for e in group]
    if options.num_groups == 1:
        allowed = list(range(ROUTED))
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
            logits[token].tolist(), [0.0] * ROUTED if bias is None else bias.tolist(), options
        )
        actual = dict(zip(experts[token].tolist(), weights[token].tolist(), strict=True))
        assert actual == pytest.approx(expected, rel=RELATIVE)


def test_scores_of_nought_have_finite_weights() -> None:
    options = RoutingOptions(score_function="sigmoid")
    scores = scores_of(torch.full((1, 4), -1000.0), options)
    assert torch.equal(choose_experts(scores, None, options).weights, torch.zeros(1, 2))


@pytest.mark.parametrize(
    ("kind", "arguments", "text"),
    [
        (RoutingOptions, {"top_k": 0}, r"top_k is 0. It must be at least 1"),
        (RoutingOptions, {"top_k": 1}, r"top_k is 1 with normalise=True.*Set normalise=False"),
        (RoutingOptions, {"num_groups": 2, "group_top_k": 3}, r"group_top_k 3 is larger than num_groups 2"),
        (RoutingOptions, {"z_loss": -1.0}, r"z_loss is -1.0. It must be at least 0"),
        (RoutingOptions, {"bias_rate": -1.0}, r"bias_rate is -1.0"),
        (
            RoutingOptions,
            {"score_function": "tanh"},
            r"score_function is 'tanh'. It must be 'softmax' or 'sigmoid'",
        ),
        (
            RoutingOptions,
            {"balance_over": "batch"},
            r"balance_over is 'batch'. It must be 'sequence' or 'micro_batch'",
        ),
        (Capacity, {"factor": 0.0}, r"factor is 0.0. It must be larger than 0"),
        (Capacity, {"factor": math.nan}, r"factor is nan"),
        (
            Capacity,
            {"factor": 1.0, "drop": "random"},
            r"drop is 'random'. It must be 'weight' or 'position'",
        ),
    ],
)
def test_options_that_cannot_be_are_rejected(kind: type, arguments: dict[str, object], text: str) -> None:
    with pytest.raises(DeclarationError, match=text):
        kind(**arguments)


def test_faults_name_what_does_not_fit_the_number_of_experts() -> None:
    assert RoutingOptions(top_k=4, num_groups=3, group_top_k=1).faults(9) == [
        "top_k 4 is larger than the 3 experts that a token can choose from"
    ]
    assert RoutingOptions(num_groups=3, group_top_k=3).faults(8) == [
        "num_experts 8 is not a multiple of num_groups 3"
    ]
    assert RoutingOptions(top_k=8).faults(8) == []
    with pytest.raises(DeclarationError, match=r"router of 5 experts.*num_experts 5 is not a multiple of"):
        Router(HIDDEN, EXPERTS, GROUPS, RoutingOptions(num_groups=2))


DISPATCHED, TOP_K, DISPATCHED_HIDDEN = 6, 2, 5


def _routing(tokens: int, seed: int) -> Routing:
    generator = torch.Generator().manual_seed(seed)
    scores = torch.rand(tokens, DISPATCHED, generator=generator)
    scores[:, :2] += 0.4  # an uneven load
    weights, experts = scores.topk(TOP_K)
    return Routing(experts, weights)


def _kept(routing: Routing, capacity: Capacity | None) -> dict[int, list[int]]:
    """Return the choices that each expert takes, in the order of tokens; a loop over the experts."""
    experts, weights = (part.detach().flatten().tolist() for part in routing)
    kept = {}
    for expert in range(DISPATCHED):
        own = [i for i, e in enumerate(experts) if e == expert]
        if capacity is not None:
            limit = math.ceil(len(experts) / DISPATCHED * capacity.factor)
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
    plan = plan_rows(routing, DISPATCHED, capacity)
    limit = capacity.limit(tokens * TOP_K, DISPATCHED)
    rows = [part.tolist() for part in plan.choices.split(plan.counts.tolist())]
    expected = _kept(routing, capacity)
    assert [[i for i in part if i >= 0] for part in rows] == list(expected.values())
    if pad:
        assert plan.counts.tolist() == [limit] * DISPATCHED
    else:
        assert plan.counts.tolist() == [len(own) for own in expected.values()]


@given(tokens=integers(0, 12), seed=integers(0, 99))
def test_without_a_capacity_every_choice_is_sent(tokens: int, seed: int) -> None:
    routing = _routing(tokens, seed)
    plan = plan_rows(routing, DISPATCHED, None)
    assert sorted(plan.choices.tolist()) == list(range(tokens * TOP_K))
    rows = [part.tolist() for part in plan.choices.split(plan.counts.tolist())]
    assert rows == list(_kept(routing, None).values())


def _experts(rows: Tensor, counts: list[int]) -> Tensor:
    """Expert e multiplies by e + 1."""
    factors = torch.arange(1.0, DISPATCHED + 1).repeat_interleave(torch.tensor(counts))
    return rows * factors.unsqueeze(1)


@pytest.mark.parametrize(
    "capacity",
    [None, Capacity(factor=0.6), Capacity(factor=0.6, drop="position"), Capacity(factor=0.6, pad=True)],
    ids=["dropless", "weight", "position", "padded"],
)
def test_outputs_and_gradients_are_those_of_a_loop_over_tokens(capacity: Capacity | None) -> None:
    routing = _routing(9, seed=3)
    tokens = torch.randn(9, DISPATCHED_HIDDEN, generator=torch.Generator().manual_seed(1)).requires_grad_()
    weights = routing.weights.requires_grad_()
    dispatcher = TokenDispatcher(DISPATCHED, GROUPS, capacity=capacity)
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
    dispatcher = TokenDispatcher(2, GROUPS, capacity=Capacity(factor=1.0))
    rows, dispatch = dispatcher.dispatch(torch.ones(4, 3), routing)
    assert dispatch.counts == [2, 0]
    assert dispatcher.combine(rows, dispatch).sum(1).tolist() == pytest.approx([0, 1.2, 0.9, 0])


def test_outputs_have_the_dtype_of_the_tokens() -> None:
    dispatcher = TokenDispatcher(DISPATCHED, GROUPS)
    rows, dispatch = dispatcher.dispatch(
        torch.ones(9, DISPATCHED_HIDDEN, dtype=torch.bfloat16), _routing(9, seed=3)
    )
    assert dispatcher.combine(rows, dispatch).dtype == rows.dtype == torch.bfloat16


LENGTH, BATCH, TP = 6, 4, 4


class RouterCalled(Exception):
    """Carries what the router has got."""


def sequences_on(rank: int, *, sequence_parallel: bool) -> list[tuple[int, int]]:
    """Return, on a rank of tp, the sequence that each token is of and the one that the router gets."""
    groups = ParallelGroups.offline(ParallelLayout(tp=TP), rank)
    router = Router(HIDDEN, 4, groups, RoutingOptions(top_k=2))
    layer = MixtureOfExperts(
        router, GatedExperts(4, HIDDEN, 8, groups), groups, sequence_parallel=sequence_parallel
    )

    def report(_: nn.Module, arguments: tuple[Tensor, Tensor, int]) -> None:
        tokens, sequences, count = arguments
        assert count == BATCH
        raise RouterCalled(list(zip(tokens[:, 0].int().tolist(), sequences.tolist(), strict=True)))

    router.register_forward_pre_hook(report)
    # The value of a token is the number of its sequence.
    x = torch.arange(BATCH).view(1, BATCH, 1).expand(LENGTH, BATCH, HIDDEN).float()
    with pytest.raises(RouterCalled) as raised:
        layer(x)
    pairs: list[tuple[int, int]] = raised.value.args[0]
    return pairs


@pytest.mark.parametrize("rank", range(TP))
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_the_router_gets_the_sequence_of_every_token(rank: int, sequence_parallel: bool) -> None:
    pairs = sequences_on(rank, sequence_parallel=sequence_parallel)
    assert len(pairs) == LENGTH * BATCH // (1 if sequence_parallel else TP)
    assert all(own == received for own, received in pairs)
