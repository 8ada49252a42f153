"""The router on one rank: its losses against equations written out, its bias, and what is kept of it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from megackpt.errors import DeclarationError
from megackpt.parallel import (
    ParallelGroups,
    ParallelLayout,
    Router,
    RoutingOptions,
    is_marked,
    mean_auxiliary_losses,
    set_auxiliary_loss_scale,
    update_expert_bias,
)

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
    assert list(router.sharded_state_dict()) == ["weight", "expert_bias"]
    assert list(_router(BALANCED).sharded_state_dict()) == ["weight"]
    assert is_marked(router.weight, "sequence_parallel")


def test_options_that_do_not_fit_the_experts_are_rejected() -> None:
    with pytest.raises(DeclarationError, match=r"router of 5 experts.*num_experts 5 is not a multiple of"):
        Router(HIDDEN, EXPERTS, GROUPS, RoutingOptions(num_groups=2))
