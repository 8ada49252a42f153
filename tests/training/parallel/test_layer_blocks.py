"""Layers of different kinds: which blocks each layer of a model has."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from megackpt import DeclarationError
from megackpt.parallel import ParallelGroups, ParallelLayout
from models import GPTConfig, MoEConfig, build_gpt, init_weights
from tests.support.optimizers import tensors_of

CONFIG = GPTConfig(
    vocab_size=32, hidden_size=16, num_layers=4, num_heads=4, seq_length=16, make_vocab_divisible=1
)
SPLIT = replace(CONFIG, layer_blocks=(("attention",), ("mlp",)) * 2)


def test_layers_of_one_block_compute_what_layers_of_two_do() -> None:
    whole, split = (
        build_gpt(config, ParallelGroups.create(ParallelLayout()))
        for config in (replace(CONFIG, num_layers=2), SPLIT)
    )
    init_weights(whole, 1)
    values = {}
    for key, value in whole.state_dict().items():
        for layer in range(2):
            # Layer n of the one is layers 2n and 2n + 1 of the other.
            of_attention = ".self_attention." in key or ".input_layernorm." in key
            number = 2 * layer + (not of_attention)
            if f"layers.{layer}." in key:
                key = key.replace(f"layers.{layer}.", f"layers.{number}.")
                break
        values[key] = value
    split.load_state_dict(values)
    tokens = torch.arange(12).view(2, 6)
    (whole_chunk,), (split_chunk,) = whole, split
    assert torch.equal(whole_chunk(tokens), split_chunk(tokens))


def test_layers_of_different_kinds_have_keys_of_their_own() -> None:
    groups = ParallelGroups.create(ParallelLayout())
    keys = {tensor.key for tensor in tensors_of(build_gpt(SPLIT, groups).sharded_state_dict())}
    assert {key for key in keys if ".layers.0." in key} == {
        "decoder.layers.0.input_layernorm.weight",
        *(f"decoder.layers.0.self_attention.linear_qkv.weight.{part}" for part in "qkv"),
        "decoder.layers.0.self_attention.linear_proj.weight",
    }
    assert "decoder.layers.3.mlp.linear_fc2.weight" in keys
    equal_layers = build_gpt(replace(CONFIG, layer_blocks=(("mlp",),) * 4), groups)
    assert "decoder.layers.mlp.linear_fc2.weight" in {
        t.key for t in tensors_of(equal_layers.sharded_state_dict())
    }


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer_blocks": (("mlp",),)}, "layer_blocks has 1 layers, but num_layers is 4"),
        ({"layer_blocks": ((),) * 4}, r"layer_blocks\[0\] is \(\)"),
        ({"layer_blocks": (("mlp",), ("mlp", "attention")) * 2}, r"layer_blocks\[1\].*in this order"),
        ({"layer_blocks": (("mlp", "moe"),) * 4}, "Give one of attention"),
        ({"layer_blocks": (("conv",),) * 4}, "one of mlp, moe"),
        ({"layer_blocks": (("moe",),) * 4}, "layers with experts, and moe is None"),
        (
            {"layer_blocks": (("mlp",),) * 4, "moe": MoEConfig(num_experts=2, ffn_hidden_size=8)},
            "has no layers with experts",
        ),
    ],
)
def test_blocks_that_a_layer_cannot_have_are_an_error(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(DeclarationError, match=message):
        replace(CONFIG, **changes)


def test_a_model_without_attention_may_have_any_number_of_heads() -> None:
    config = replace(CONFIG, num_heads=1, ffn_hidden_size=12, layer_blocks=(("mlp",),) * 4)
    config.check_layout(ParallelLayout(tp=2))
    with pytest.raises(DeclarationError, match="num_heads 1 is not a multiple of tp=2"):
        replace(config, layer_blocks=(("attention",),) * 4).check_layout(ParallelLayout(tp=2))
