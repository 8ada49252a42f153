"""A layer of experts of each Hugging Face family: outputs and gradients of transformers' own layer.

Tolerance: both have the same products in float32 and another order of sums. Those of a gradient have at most
tokens * hidden = 21 * 72 = 1512 rounded terms, which is sqrt(1512) * 2^-24 = 2e-6 of the largest element.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megackpt.parallel import ParallelGroups, ParallelLayout
from models.blocks import MoE
from models.huggingface import gpt_config
from models.stage import Stage
from tests.support.gpt import assert_all_close, gradient_boxes, join
from tests.support.huggingface_experts import FAMILIES, experts_in_our_names, fill, random_config, randomise

pytest.importorskip("transformers")

ONE = ParallelGroups.create(ParallelLayout())
RELATIVE = 5e-6


def _theirs(config: Any) -> nn.Module:
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssMLP
    from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock
    from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeSparseMoeBlock
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock
    from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextSparseMoeBlock

    return {
        "mixtral": MixtralSparseMoeBlock,
        "qwen2_moe": Qwen2MoeSparseMoeBlock,
        "qwen3_moe": Qwen3MoeSparseMoeBlock,
        "gpt_oss": GptOssMLP,
        "qwen3_next": Qwen3NextSparseMoeBlock,
        "deepseek_v3": DeepseekV3MoE,
    }[config.model_type](config)


def _ours(config: Any) -> MoE:
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
@pytest.mark.parametrize("family", FAMILIES)
def test_outputs_and_gradients_are_those_of_transformers(family: str, seed: int) -> None:
    config = random_config(family, seed)
    theirs, ours = _theirs(config), _ours(config)
    randomise(theirs, seed)
    declared = ours.sharded_state_dict()
    arrays = experts_in_our_names(theirs.state_dict(), "", "")
    assert fill(declared, arrays) == arrays.keys()
    x = torch.randn(7, 3, config.hidden_size, generator=torch.Generator().manual_seed(seed))
    out, grad = _step(ours, x.clone())
    expected, expected_grad = _step(theirs, x.transpose(0, 1))
    results = {"output": out, "input": grad}
    known = {"output": expected.transpose(0, 1), "input": expected_grad.transpose(0, 1)}
    assert_all_close(results, known, relative=RELATIVE)
    grads = {name: param.grad for name, param in theirs.named_parameters() if param.grad is not None}
    assert_all_close(
        join(gradient_boxes(ours, declared, ONE)),
        experts_in_our_names(grads, "", ""),
        relative=RELATIVE,
    )
