"""A mixture of experts at every layout computes the outputs, losses and gradients of the one-rank layer.

Tolerance: everything is fp32 and only the order of sums differs. An element of a gradient is a sum of at most
4 micro-batches * 16 tokens * 12 features = 768 rounded terms; random rounding errors add up to about
sqrt(768) * 2^-24 = 2e-6 of the largest element, and a few such sums follow each other. A wrong or missing
reduction is off by a factor of two.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn

from megackpt.testing.ranks import RankPool
from megackpt.training.parallel import (
    Capacity,
    ColumnParallelLinear,
    ExpertStack,
    GatedExperts,
    MixtureOfExperts,
    ParallelGroups,
    ParallelLayout,
    Router,
    RoutingOptions,
    RowParallelLinear,
    update_expert_bias,
)
from megackpt.training.parallel.collectives import collect_sequence
from megackpt.training.parallel.moe import TokenDispatcher
from megackpt.training.parallel.router import mean_auxiliary_losses, set_auxiliary_loss_scale
from megackpt.training.parallel.routing import Routing
from tests.support.effort import sampled
from tests.support.gpt import Box, assert_all_close, assert_close, gradient_boxes, join
from tests.support.optimizers import random_of_key, scatter, tensors_of

HIDDEN, FFN, EXPERTS = 12, 8, 8
SEQUENCE, BATCH, MICRO_BATCHES = 8, 2, 4
RELATIVE = 1e-5

DEEPSEEK = RoutingOptions(
    top_k=3,
    score_function="sigmoid",
    scaling_factor=1.5,
    num_groups=4,
    group_top_k=2,
    balance_loss=0.5,
    z_loss=0.05,
    bias_rate=0.01,
)
SWITCH = RoutingOptions(
    top_k=2, normalise=False, balance_loss=0.5, balance_over="micro_batch", bias_rate=0.01
)
OPTIONS = {"deepseek": DEEPSEEK, "switch": SWITCH}


class Mlp(nn.Module):
    """A column layer and a row layer: an expert of its own, or a shared one."""

    def __init__(self, groups: ParallelGroups, sequence_parallel: bool = False) -> None:
        super().__init__()
        self.up = ColumnParallelLinear(HIDDEN, FFN, groups, sequence_parallel=sequence_parallel)
        self.down = RowParallelLinear(FFN, HIDDEN, groups, sequence_parallel=sequence_parallel)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(torch.tanh(self.up(x)))
        return out


class Case(NamedTuple):
    """What a job runs."""

    experts: str = "stacked"  # whether they are stacked, or modules of their own
    options: str = "deepseek"  # name of the routing options
    sequence_parallel: bool = False  # whether the input is cut along the sequence
    skewed: bool = False  # whether two experts get two of each token's choices
    capacity: Capacity | None = None  # limit on the tokens of an expert


class Result(NamedTuple):
    """What one rank has after its micro-batches."""

    outputs: list[tuple[int, int, Tensor]]  # micro-batch, cp rank, [s/cp, b, hidden]
    input_grads: list[tuple[int, int, Tensor]]
    grads: list[Box]
    losses: list[float]
    bias: Tensor


def _layer(groups: ParallelGroups, case: Case) -> MixtureOfExperts:
    experts: GatedExperts | ExpertStack = (
        GatedExperts(EXPERTS, HIDDEN, FFN, groups, bias=True)
        if case.experts == "stacked"
        else ExpertStack(lambda index: Mlp(groups.experts), EXPERTS, groups)
    )
    layer = MixtureOfExperts(
        Router(HIDDEN, EXPERTS, groups, OPTIONS[case.options]),
        experts,
        groups,
        capacity=case.capacity,
        shared_experts=Mlp(groups, case.sequence_parallel),
        sequence_parallel=case.sequence_parallel,
    )
    declared = layer.sharded_state_dict()
    arrays = {t.key: random_of_key(*t.global_shape, key=t.key) * 0.3 for t in tensors_of(declared)}
    arrays["router.expert_bias"] *= 0.1  # the tokens decide, and those of each rank choose other experts
    arrays["router.expert_bias"][2:4] += 100.0 * case.skewed  # both are in one group
    scatter(declared, arrays)
    return layer


def _train(layout: ParallelLayout, case: Case) -> Result:
    groups = ParallelGroups.create(layout)
    layer = _layer(groups, case)
    own_batches = range(MICRO_BATCHES)[groups.dp.rank :: groups.dp.size]
    set_auxiliary_loss_scale(layer, 1 / len(own_batches))
    outputs, input_grads = [], []
    for k in own_batches:
        x, target = (
            random_of_key(SEQUENCE, BATCH, HIDDEN, key=f"{what} {k}").chunk(groups.cp.size)[groups.cp.rank]
            for what in ("input", "target")
        )
        if case.sequence_parallel:
            x = x.chunk(groups.tp.size)[groups.tp.rank]
        x = x.clone().requires_grad_()
        out = layer(x)
        if case.sequence_parallel:
            out = collect_sequence(out, groups.tp)
        loss = (out * target).sum(-1).mean()
        (loss / len(own_batches)).backward()
        outputs.append((k, groups.cp.rank, out.detach()))
        assert x.grad is not None
        grad = collect_sequence(x.grad, groups.tp) if case.sequence_parallel else x.grad
        input_grads.append((k, groups.cp.rank, grad / groups.dp_cp.size))
    boxes = gradient_boxes(layer, layer.sharded_state_dict(), groups)
    losses = mean_auxiliary_losses(layer, groups)[0].tolist()
    update_expert_bias(layer, groups)
    return Result(outputs, input_grads, boxes, losses, layer.router.expert_bias)


def _join_tokens(parts: list[tuple[int, int, Tensor]], cp: int) -> Tensor:
    """Put `[micro-batches, s, b, hidden]` together; ranks of tp have to have the same."""
    whole = torch.full((MICRO_BATCHES, cp, SEQUENCE // cp, BATCH, HIDDEN), float("nan"))
    for k, part, data in parts:
        if not whole[k, part].isnan().any():
            assert torch.equal(whole[k, part], data)
        whole[k, part] = data
    return whole.flatten(1, 2)


@functools.cache
def _reference(case: Case) -> Result:
    return _train(ParallelLayout(), case)


LAYOUTS = {
    "tp2": ParallelLayout(tp=2),
    "tp8": ParallelLayout(tp=8),
    "dp8-ep8": ParallelLayout(dp=4, cp=2, ep=8),
    "tp4-ep8-etp1": ParallelLayout(tp=4, cp=2, ep=8, etp=1),
    "tp2-dp2-ep1-etp1": ParallelLayout(tp=2, dp=2, etp=1),
    "dp4-ep4": ParallelLayout(dp=4, ep=4),
    "tp1-dp4-ep2-etp2": ParallelLayout(dp=4, ep=2, etp=2),
    "tp2-dp4-ep2-etp4": ParallelLayout(tp=2, dp=4, ep=2, etp=4),
    "tp2-cp2-dp2-ep2": ParallelLayout(tp=2, cp=2, dp=2, ep=2),
    "cp4-ep2": ParallelLayout(cp=4, ep=2),
}


CASES = {
    "stacked": Case(),
    "stacked-sequence": Case(sequence_parallel=True),
    "modules-switch": Case(options="switch", experts="modules"),
    "stacked-skewed": Case(skewed=True),
    "modules-skewed-sequence": Case(skewed=True, experts="modules", sequence_parallel=True),
}


@sampled(6)
@pytest.mark.parametrize("kind", CASES)
@pytest.mark.parametrize("name", LAYOUTS)
def test_outputs_losses_and_gradients_are_those_of_one_rank(
    rank_pool: RankPool, name: str, kind: str
) -> None:
    case, layout = CASES[kind], LAYOUTS[name]
    if case.sequence_parallel and layout.tp == 1:
        case = case._replace(sequence_parallel=False)
    results = rank_pool.run(_train, layout.world_size, layout, case)
    expected = _reference(case._replace(sequence_parallel=False))
    for part in ("outputs", "input_grads"):
        actual = _join_tokens([p for r in results for p in getattr(r, part)], layout.cp)
        assert_close(actual, _join_tokens(getattr(expected, part), 1), part, relative=RELATIVE)
    grads = join(box for result in results for box in result.grads)
    assert_all_close(grads, join(expected.grads), relative=RELATIVE)
    for result in results:
        assert result.losses == pytest.approx(expected.losses, rel=RELATIVE)
        assert torch.equal(result.bias, expected.bias)


@pytest.mark.parametrize(
    "capacity",
    [Capacity(factor=0.7), Capacity(factor=0.7, drop="position"), Capacity(factor=0.7, pad=True)],
    ids=str,
)
@pytest.mark.parametrize("name", ["dp4-ep4", "tp1-dp4-ep2-etp2"])
def test_dropped_tokens_are_those_of_one_rank_that_has_the_same_tokens(
    rank_pool: RankPool, name: str, capacity: Capacity
) -> None:
    case, layout = Case(capacity=capacity), LAYOUTS[name]  # tp and cp are 1: a rank has whole sequences
    results = rank_pool.run(_train, layout.world_size, layout, case)
    expected = _reference(case)
    outputs = _join_tokens([p for r in results for p in r.outputs], 1)
    assert_close(outputs, _join_tokens(expected.outputs, 1), "outputs", relative=RELATIVE)
    dropless = _join_tokens(_reference(Case()).outputs, 1)
    assert (outputs - dropless).abs().max() > 0.01
    grads = join(box for result in results for box in result.grads)
    assert_all_close(grads, join(expected.grads), relative=RELATIVE)


def test_an_expert_without_tokens_has_a_gradient_of_zeros() -> None:
    grads = join(_reference(Case(skewed=True)).grads)["experts.linear_fc2.weight"]
    assert grads[2:4].abs().amax(dim=(1, 2)).min() > 0
    assert (grads.abs().amax(dim=(1, 2)) == 0).any()


def _dispatch_uneven() -> Tensor:
    """Send the rank's tokens, as many as its number, to expert 1 and back; return them."""
    groups = ParallelGroups.create(ParallelLayout(dp=4, ep=2, etp=2))
    dispatcher = TokenDispatcher(2, groups)
    tokens = torch.full((groups.rank, 3), float(groups.rank), requires_grad=True)
    weights = torch.full((groups.rank, 1), 0.5, requires_grad=True)
    routing = Routing(torch.ones(groups.rank, 1, dtype=torch.int64), weights)
    rows, dispatch = dispatcher.dispatch(tokens, routing)
    assert dispatch.counts == [6 * groups.ep.rank]  # all six tokens, on both ranks of etp
    out = dispatcher.combine(rows * 2.0, dispatch)
    out.sum().backward()
    assert tokens.grad is not None
    assert weights.grad is not None
    assert torch.equal(tokens.grad, torch.full_like(tokens, 2.0))  # two ranks of etp, each 2 * 0.5
    assert torch.equal(weights.grad, torch.full_like(weights, 3 * 4.0 * groups.rank))
    return out.detach()


def test_ranks_without_tokens_take_part(rank_pool: RankPool) -> None:
    for rank, out in enumerate(rank_pool.run(_dispatch_uneven, 4)):
        # Each of the two ranks of etp has doubled the token, and the weight is a half.
        assert torch.equal(out, torch.full((rank, 3), 2.0 * rank))
