"""Latent attention and cross attention of `megackpt.parallel`, without models: what they compute and declare.

At several layouts they are tested with the models that are made of them (DeepSeek-V3, T5).
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megackpt import DeclarationError
from megackpt.parallel import (
    CrossAttention,
    LatentAttention,
    LatentSizes,
    ParallelGroups,
    ParallelLayout,
    join_heads,
    split_heads,
)

HIDDEN, HEADS, TOKENS, BATCH = 12, 3, 7, 2
SIZES = LatentSizes(
    kv_lora_rank=5, q_lora_rank=6, qk_head_dim=4, qk_pos_emb_head_dim=2, v_head_dim=3, norm_eps=1e-5
)
RELATIVE = 1e-5  # float32: two products with sums of at most 18 terms, and a softmax


def groups() -> ParallelGroups:
    return ParallelGroups.create(ParallelLayout())


def randomise(module: nn.Module) -> None:
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(generator=generator)


def hidden(tokens: int, seed: int) -> Tensor:
    return torch.randn(tokens, BATCH, HIDDEN, generator=torch.Generator().manual_seed(seed))


def assert_close(actual: Tensor, expected: Tensor) -> None:
    assert actual.shape == expected.shape
    assert (actual - expected).abs().max() <= RELATIVE * expected.abs().max()


def test_cross_attention_is_that_of_torch() -> None:
    layer = CrossAttention(HIDDEN, HEADS, HIDDEN // HEADS, groups(), bias=True, output_bias=True)
    randomise(layer)
    theirs = nn.MultiheadAttention(HIDDEN, HEADS)
    keys, values = layer.linear_kv.split(layer.linear_kv.weight.T)
    key_bias, value_bias = layer.linear_kv.split(layer.linear_kv.bias)
    with torch.no_grad():
        theirs.in_proj_weight.copy_(torch.cat([layer.linear_q.weight, keys.T, values.T]))
        theirs.in_proj_bias.copy_(torch.cat([layer.linear_q.bias, key_bias, value_bias]))
    theirs.out_proj.load_state_dict(layer.linear_proj.state_dict())
    x, memory = hidden(TOKENS, 1), hidden(TOKENS + 2, 2)
    bias = torch.randn(BATCH, HEADS, TOKENS, TOKENS + 2, generator=torch.Generator().manual_seed(3))
    expected, _ = theirs(x, memory, memory, attn_mask=bias.flatten(0, 1), need_weights=False)
    assert_close(layer(x, memory, bias), expected)


class Turned(LatentAttention):
    """Positions that are seen in the result: each part is multiplied by its position."""

    def with_positions(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        numbers = torch.arange(q.shape[2], dtype=q.dtype)[:, None]
        return q * numbers, k * numbers


@pytest.mark.parametrize("q_rank", [6, None])
def test_latent_attention_is_that_of_its_definition(q_rank: int | None) -> None:
    sizes = LatentSizes(
        kv_lora_rank=5, q_lora_rank=q_rank, qk_head_dim=4, qk_pos_emb_head_dim=2, v_head_dim=3
    )
    layer: Any = Turned(HIDDEN, HEADS, sizes, groups(), scale=0.3)
    randomise(layer)
    x = hidden(TOKENS, 1)
    if q_rank is None:
        queries = x @ layer.linear_q_proj.weight.T
    else:
        queries = layer.q_layernorm(x @ layer.linear_q_down_proj.weight.T) @ layer.linear_q_up_proj.weight.T
    features, rotary = (x @ layer.linear_kv_down_proj.weight.T).split([5, 2], dim=-1)
    kv = split_heads(layer.kv_layernorm(features) @ layer.linear_kv_up_proj.weight.T, 7)
    numbers = torch.arange(TOKENS, dtype=x.dtype)[:, None]
    q = split_heads(queries, 6)
    q = torch.cat([q[..., :4], q[..., 4:] * numbers], dim=-1)
    k_rotary = (split_heads(rotary, 2) * numbers).expand(-1, HEADS, -1, -1)
    k = torch.cat([kv[..., :4], k_rotary], dim=-1)
    scores = (q @ k.transpose(-1, -2) * 0.3).masked_fill(~torch.ones(TOKENS, TOKENS).tril().bool(), -1e9)
    expected = F.linear(join_heads(scores.softmax(dim=-1) @ kv[..., 4:]), layer.linear_proj.weight)
    assert_close(layer(x), expected)


def test_what_latent_attention_declares_has_the_names_of_megatron_core() -> None:
    layer = LatentAttention(HIDDEN, HEADS, SIZES, groups(), bias=True)
    assert layer.scale == SIZES.head_dim**-0.5
    assert {key: tuple(entity.global_shape) for key, entity in layer.sharded_state_dict().items()} == {
        "linear_q_down_proj.weight": (6, HIDDEN),
        "linear_q_down_proj.bias": (6,),
        "q_layernorm.weight": (6,),
        "linear_q_up_proj.weight": (18, 6),
        "linear_kv_down_proj.weight": (7, HIDDEN),
        "linear_kv_down_proj.bias": (7,),
        "kv_layernorm.weight": (5,),
        "linear_kv_up_proj.weight": (21, 5),
        "linear_proj.weight": (HIDDEN, 9),
    }


@pytest.mark.parametrize("name", ["kv_lora_rank", "q_lora_rank", "v_head_dim"])
def test_a_size_below_1_is_an_error(name: str) -> None:
    sizes: dict[str, Any] = {"kv_lora_rank": 1, "q_lora_rank": 1, "qk_head_dim": 1, "v_head_dim": 1}
    with pytest.raises(DeclarationError, match=rf"LatentSizes\.{name} is 0. It must be at least 1"):
        LatentSizes(**{**sizes, "qk_pos_emb_head_dim": 1, name: 0})
