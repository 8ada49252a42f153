"""A `config.json` describes the same model as transformers 4 and 5 spell it, and with defaults left out.

And rotary frequencies, which small models would not tell apart, are those of transformers to the last bit.
"""

from __future__ import annotations

import json
import random
from dataclasses import replace
from typing import Any

import pytest
import torch

from models import GPTConfig, RotaryConfig
from models.blocks.rotary import rotary_frequencies, rotary_magnitude
from models.huggingface import gpt_config
from tests.support.huggingface_models import FAMILIES, SEEDS, random_config

pytest.importorskip("transformers", reason="the extra huggingface is not installed")


def _written(config: Any) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(config.to_json_string())
    return document


def _as_version_4(config: dict[str, Any]) -> dict[str, Any]:
    """Return what transformers 4 writes for a config that version 5 wrote."""
    config = {("torch_dtype" if name == "dtype" else name): value for name, value in config.items()}
    rope = config.pop("rope_parameters", None)
    if rope is None:
        return config
    if "full_attention" in rope:
        config["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
        rope = rope["full_attention"]
    config["rope_theta"] = rope.pop("rope_theta")
    if "partial_rotary_factor" in rope:
        config["partial_rotary_factor"] = rope.pop("partial_rotary_factor")
    config["rope_scaling"] = None if rope["rope_type"] == "default" else rope
    return config


@pytest.mark.parametrize("seed", range(SEEDS))
@pytest.mark.parametrize("family", FAMILIES)
def test_both_spellings_describe_the_same_model(family: str, seed: int) -> None:
    newer = _written(random_config(family, seed))
    older = _as_version_4(json.loads(json.dumps(newer)))
    assert older.keys() != newer.keys() or family == "gpt2"
    assert gpt_config(older) == gpt_config(newer)


@pytest.mark.parametrize("family", FAMILIES)
def test_fields_that_a_file_leaves_out_have_the_values_of_transformers(family: str) -> None:
    from transformers import AutoConfig

    written = _written(AutoConfig.for_model(family))
    assert _in_numbers(gpt_config({"model_type": family})) == _in_numbers(gpt_config(written))


def _in_numbers(config: GPTConfig) -> GPTConfig:
    """Return a config with sizes that follow from others as numbers."""
    attention = config.attention
    if attention.latent is None:
        attention = replace(attention, head_dim=config.head_dim)
    return replace(config, num_query_groups=config.query_groups, attention=attention)


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("kind", ["default", "linear", "dynamic", "llama3", "yarn"])
def test_rotary_frequencies_are_those_of_transformers(kind: str, seed: int) -> None:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    draw = random.Random(seed)
    heads, length = draw.choice([1, 2, 3]), draw.choice([4096, 8192])
    rope = {
        "rope_type": kind,
        "rope_theta": draw.choice([10000.0, 500000.0, 1e6]),
        **({} if kind == "default" else {"factor": draw.choice([1.0, 2.5, 8.0, 32.0])}),
        **_other_parameters(kind, draw),
    }
    config = LlamaConfig(
        hidden_size=heads * draw.choice([32, 80, 128]),
        num_attention_heads=heads,
        max_position_embeddings=length,
        rope_parameters=rope,
    )
    longest = draw.choice([length // 2, 3 * length])
    compute = ROPE_INIT_FUNCTIONS.get(kind, LlamaRotaryEmbedding.compute_default_rope_parameters)
    expected, magnitude = compute(config, seq_len=longest)
    positions = gpt_config(_written(config)).positions
    assert isinstance(positions, RotaryConfig)
    assert torch.equal(rotary_frequencies(positions, config.head_dim, longest), expected)
    assert rotary_magnitude(positions) == pytest.approx(magnitude, rel=1e-12)


def _other_parameters(kind: str, draw: random.Random) -> dict[str, Any]:
    original = {"original_max_position_embeddings": draw.choice([1024, 4096])}
    if kind == "llama3":
        return {"low_freq_factor": draw.choice([1.0, 2.0]), "high_freq_factor": 4.0, **original}
    if kind != "yarn":
        return {}
    magnitudes = [{}, {"attention_factor": 1.3}, {"mscale": 0.7, "mscale_all_dim": 1.0}, {"mscale": 0.7}]
    ramps = [{}, {"beta_fast": 16.0, "beta_slow": 2.0}, {"truncate": False}, {"beta_fast": 1.0}]
    return {**original, **draw.choice(magnitudes), **draw.choice(ramps)}
