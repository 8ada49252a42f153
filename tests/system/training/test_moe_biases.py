"""Trained biases of routers and experts, and a clamped activation: loss and gradients of one rank.

Everything has values that a mistake would show: biases are not 0, so that one that each rank of etp adds
counts twice, and a part of what the activation gets is clamped.

Tolerance: that of test_moe_gpt.
"""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch

from megackpt.parallel import (
    ModelChunks,
    ParallelGroups,
    ParallelLayout,
    RoutingOptions,
    SwiGLU,
    all_reduce,
    forward_backward,
    share_losses,
    stable_seed,
)
from megackpt.testing.ranks import RankPool
from models import MoEConfig
from tests.support.gpt import (
    CONFIG,
    Box,
    Case,
    assert_all_close,
    build,
    gradient_boxes,
    join,
    micro_batches,
    tensors_of,
)

RELATIVE = 1e-5
BIASED = replace(
    CONFIG,
    linear_bias=False,  # that of dense layers
    moe=MoEConfig(
        num_experts=8,
        ffn_hidden_size=16,
        routing=RoutingOptions(top_k=3),
        activation=SwiGLU(alpha=1.702, limit=0.3, up_offset=1.0),
        bias=True,
        router_bias=True,
    ),
)
CASES = {
    "ep2": Case(ParallelLayout(dp=2, ep=2)),
    "etp2": Case(ParallelLayout(dp=2, etp=2)),
    "tp2-ep2-etp1": Case(ParallelLayout(tp=2, ep=2, etp=1), True),
    "pp2-tp2-dp2-ep2-etp2": Case(ParallelLayout(tp=2, pp=2, dp=2, ep=2, etp=2)),
}


def _set_biases(model: ModelChunks) -> None:
    """Set every bias to random values of its key, the same at all layouts."""
    with torch.no_grad():
        for tensor in tensors_of(model.sharded_state_dict()):
            if ".bias" in tensor.key and tensor.data is not None:
                generator = torch.Generator().manual_seed(stable_seed(5, tensor.key))
                whole = 0.3 * torch.randn(tensor.global_shape, generator=generator)
                tensor.data.copy_(whole[tensor.global_slice()].view_as(tensor.data))


def _train(case: Case) -> tuple[list[float], list[Box]]:
    groups = ParallelGroups.create(case.layout)
    model = build(case, BIASED, groups, seed=11)
    _set_biases(model)
    batches = micro_batches(groups)
    losses = share_losses(forward_backward(model, batches, groups), len(batches), groups)
    losses = all_reduce(losses, groups.cp) / groups.cp.size
    return losses.tolist(), gradient_boxes(model, model.sharded_state_dict(), groups)


@functools.cache
def _reference() -> tuple[list[float], list[Box]]:
    return _train(Case(ParallelLayout()))


@pytest.mark.parametrize("name", CASES)
def test_loss_and_gradients_with_biases_are_those_of_one_rank(rank_pool: RankPool, name: str) -> None:
    layout = CASES[name].layout
    losses, boxes = _reference()
    results = rank_pool.run(_train, layout.world_size, CASES[name])
    for rank, (losses_of_rank, _) in enumerate(results):
        dp = layout.coordinates(rank).dp
        assert losses_of_rank == pytest.approx(losses[dp :: layout.dp], rel=RELATIVE)
    expected = join(boxes)
    biases = [key for key in expected if ".bias" in key]
    assert sorted(key.removeprefix("decoder.layers.mlp.") for key in biases) == [
        "experts.linear_fc1.bias.gate",
        "experts.linear_fc1.bias.up",
        "experts.linear_fc2.bias",
        "router.bias",
    ]
    assert all(expected[key].any() for key in biases)
    rows = CONFIG.vocab_size  # of the vocabulary, without padding
    grads = join(box for _, part in results for box in part)
    trimmed = {key: grad[:rows] if "embedding" in key else grad for key, grad in grads.items()}
    assert_all_close(trimmed, expected, relative=RELATIVE)
