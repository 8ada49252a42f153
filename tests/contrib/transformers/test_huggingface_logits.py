"""Our models, and layers of experts, compute what transformers does from its `config.json` and weights.

Tolerance, `RELATIVE`: both compute in float32, in another order. Errors of rounding are about 2^-24 = 6e-8 of
a value for each of some ten operations in a row; 1e-5 of the largest logit leaves room for 3 to 4 layers of
them. A wrong norm, position, window or cap is off by parts of a hundred. A recurrence
carries errors from token to token: 1e-4 there.

Of a layer of experts, outputs and gradients are compared: a gradient has at most tokens * hidden = 21 * 72 =
1512 rounded terms, which is sqrt(1512) * 2^-24 = 2e-6 of the largest element.
"""

from __future__ import annotations

import importlib
import json
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megackpt.testing.ranks import RankPool
from megackpt.training.parallel import ParallelGroups, ParallelLayout
from models.blocks import MoE
from models.huggingface import gpt_config
from models.stage import Stage
from tests.support.effort import sampled
from tests.support.gpt import assert_all_close, gradient_boxes, join
from tests.support.huggingface_configs import WITH_EXPERTS
from tests.support.huggingface_models import (
    FAMILIES,
    SEEDS,
    assert_close,
    experts_in_our_names,
    fill,
    logits,
    random_config,
    randomise,
    reference,
    relative_error_of,
)

pytest.importorskip("transformers", reason="the extra huggingface is not installed")


@pytest.mark.parametrize("seed", range(SEEDS))
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_transformers(family: str, seed: int) -> None:
    config, arrays, expected = reference(family, seed)
    weights = {key: array.numpy() for key, array in arrays.items()}
    assert_close(logits(config, weights, ParallelLayout()), expected, relative_error_of(config))


def compare_ranks(
    rank_pool: RankPool, family: str, layout: ParallelLayout, sequence_parallel: bool = False
) -> None:
    """Compare the logits of every rank of the last stage, of its part of the batch."""
    config, arrays, expected = reference(family, 0)
    weights = {key: array.numpy() for key, array in arrays.items()}
    compared = set()
    results = rank_pool.run(logits, layout.world_size, config, weights, layout, sequence_parallel)
    for rank, actual in enumerate(results):
        if actual is not None:
            dp = layout.coordinates(rank).dp
            assert_close(actual, expected.chunk(layout.dp)[dp], relative_error_of(config))
            compared.add(dp)
    assert compared == set(range(layout.dp))


@sampled(6)
@pytest.mark.parametrize(
    ("layout", "sequence_parallel"),
    [(ParallelLayout(tp=2, pp=2), True), (ParallelLayout(tp=2, cp=2), False)],
    ids=["tp2-pp2-sequence", "tp2-cp2"],
)
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_of_several_ranks_are_those_of_transformers(
    rank_pool: RankPool, family: str, layout: ParallelLayout, sequence_parallel: bool
) -> None:
    compare_ranks(rank_pool, family, layout, sequence_parallel)


LAYOUTS = {
    "ep2": ParallelLayout(dp=2, ep=2),
    "etp2": ParallelLayout(dp=2, etp=2),
    "tp2-ep2-etp1": ParallelLayout(tp=2, ep=2, etp=1),
    "pp2-ep2": ParallelLayout(pp=2, dp=2, ep=2),
}


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("family", WITH_EXPERTS)
def test_logits_are_those_of_transformers_with_experts_on_other_ranks(
    rank_pool: RankPool, family: str, name: str
) -> None:
    compare_ranks(rank_pool, family, LAYOUTS[name])


ONE = ParallelGroups.create(ParallelLayout())
OF_A_LAYER = 5e-6


LAYERS = {
    "mixtral": "MixtralSparseMoeBlock",
    "qwen2_moe": "Qwen2MoeSparseMoeBlock",
    "qwen3_moe": "Qwen3MoeSparseMoeBlock",
    "gpt_oss": "GptOssMLP",
    "qwen3_next": "Qwen3NextSparseMoeBlock",
    "deepseek_v3": "DeepseekV3MoE",
}


def their_layer(config: Any) -> Any:
    name = config.model_type
    modeling = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
    return getattr(modeling, LAYERS[name])(config)


def our_layer(config: Any) -> MoE:
    fields = json.loads(config.to_json_string())
    if config.model_type == "deepseek_v3":
        fields["first_k_dense_replace"] = 0  # all layers may be dense
    return MoE(Stage(config=gpt_config(fields), groups=ONE))


def _step(layer: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the output and the gradient of the input; those of the parameters are in the layer."""
    x = x.contiguous().requires_grad_()
    out = layer(x)
    out = out[0] if isinstance(out, tuple) else out
    out.square().mean().backward()
    assert x.grad is not None
    return out.detach(), x.grad


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("family", WITH_EXPERTS)
def test_outputs_and_gradients_are_those_of_transformers(family: str, seed: int) -> None:
    config = random_config(family, seed)
    theirs, ours = their_layer(config), our_layer(config)
    randomise(theirs, seed)
    declared = ours.sharded_state_dict()
    arrays = experts_in_our_names(theirs.state_dict(), config)
    assert fill(declared, arrays) == arrays.keys()
    x = torch.randn(7, 3, config.hidden_size, generator=torch.Generator().manual_seed(seed))
    out, grad = _step(ours, x.clone())
    expected, expected_grad = _step(theirs, x.transpose(0, 1))
    results = {"output": out, "input": grad}
    known = {"output": expected.transpose(0, 1), "input": expected_grad.transpose(0, 1)}
    assert_all_close(results, known, relative=OF_A_LAYER)
    grads = {name: param.grad for name, param in theirs.named_parameters() if param.grad is not None}
    assert_all_close(
        join(gradient_boxes(ours, declared, ONE)), experts_in_our_names(grads, config), relative=OF_A_LAYER
    )
