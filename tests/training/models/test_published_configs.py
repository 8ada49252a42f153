"""`config.json` files as published with well-known models, in every spelling of transformers.

Versions 4 and 5 describe the same model, also with defaults left out. And rotary frequencies, which small
models would not tell apart, are those of transformers to the last bit.
"""

from __future__ import annotations

import json
import random
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import pytest
import torch

from models import GPTConfig, LinearScaling, Llama3Scaling, RotaryConfig, SlidingWindow, YarnScaling
from models.blocks.rotary import rotary_frequencies, rotary_magnitude
from models.huggingface import gpt_config
from tests.support.huggingface_models import FAMILIES, SEEDS, random_config

GPT2: dict[str, Any] = {
    "activation_function": "gelu_new", "architectures": ["GPT2LMHeadModel"], "attn_pdrop": 0.1,
    "bos_token_id": 50256, "embd_pdrop": 0.1, "eos_token_id": 50256, "initializer_range": 0.02,
    "layer_norm_epsilon": 1e-05, "model_type": "gpt2", "n_ctx": 1024, "n_embd": 768, "n_head": 12,
    "n_layer": 12, "n_positions": 1024, "resid_pdrop": 0.1, "summary_activation": None,
    "summary_first_dropout": 0.1, "summary_proj_to_labels": True, "summary_type": "cls_index",
    "summary_use_proj": True,
    "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}}, "vocab_size": 50257,
}  # fmt: skip
LLAMA_3_1_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
    "bos_token_id": 128000, "eos_token_id": 128001, "hidden_act": "silu", "hidden_size": 4096,
    "initializer_range": 0.02, "intermediate_size": 14336, "max_position_embeddings": 131072,
    "mlp_bias": False, "model_type": "llama", "num_attention_heads": 32, "num_hidden_layers": 32,
    "num_key_value_heads": 8, "pretraining_tp": 1, "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192, "rope_type": "llama3",
    },
    "rope_theta": 500000.0, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    "transformers_version": "4.43.0.dev0", "use_cache": True, "vocab_size": 128256,
}  # fmt: skip
MISTRAL_7B: dict[str, Any] = {
    "architectures": ["MistralForCausalLM"], "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu",
    "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 14336,
    "max_position_embeddings": 32768, "model_type": "mistral", "num_attention_heads": 32,
    "num_hidden_layers": 32, "num_key_value_heads": 8, "rms_norm_eps": 1e-05, "rope_theta": 10000.0,
    "sliding_window": 4096, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    "transformers_version": "4.34.0.dev0", "use_cache": True, "vocab_size": 32000,
}  # fmt: skip
QWEN2_5_05B: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 151643,
    "eos_token_id": 151643, "hidden_act": "silu", "hidden_size": 896, "initializer_range": 0.02,
    "intermediate_size": 4864, "max_position_embeddings": 32768, "max_window_layers": 24,
    "model_type": "qwen2", "num_attention_heads": 14, "num_hidden_layers": 24, "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06, "rope_theta": 1000000.0, "sliding_window": 32768, "tie_word_embeddings": True,
    "torch_dtype": "bfloat16", "transformers_version": "4.40.1", "use_cache": True, "use_mrope": False,
    "use_sliding_window": False, "vocab_size": 151936,
}  # fmt: skip
GEMMA_3_4B_TEXT: dict[str, Any] = {
    "hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text", "num_hidden_layers": 34,
    "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024,
}  # fmt: skip
GPT_OSS_20B: dict[str, Any] = {
    "architectures": ["GptOssForCausalLM"], "attention_bias": True, "attention_dropout": 0.0,
    "eos_token_id": 200002, "experts_per_token": 4, "head_dim": 64, "hidden_act": "silu",
    "hidden_size": 2880, "initial_context_length": 4096, "initializer_range": 0.02,
    "intermediate_size": 2880, "layer_types": ["sliding_attention", "full_attention"] * 12,
    "max_position_embeddings": 131072, "model_type": "gpt_oss", "num_attention_heads": 64,
    "num_experts_per_tok": 4, "num_hidden_layers": 24, "num_key_value_heads": 8, "num_local_experts": 32,
    "output_router_logits": False, "pad_token_id": 199999, "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 4096,
        "rope_type": "yarn", "truncate": False,
    },
    "rope_theta": 150000, "router_aux_loss_coef": 0.9, "sliding_window": 128, "swiglu_limit": 7.0,
    "tie_word_embeddings": False, "transformers_version": "4.55.0.dev0", "use_cache": True,
    "vocab_size": 201088,
}  # fmt: skip


def test_gpt2_ties_its_embeddings_and_has_four_times_the_hidden_size() -> None:
    config = gpt_config(GPT2)
    assert (config.tied_embeddings, config.ffn_size, config.head_dim) == (True, 3072, 64)


def test_llama_3_1_scales_its_frequencies() -> None:
    config = gpt_config(LLAMA_3_1_8B)
    scaling = Llama3Scaling(
        factor=8.0, low_frequency_factor=1.0, high_frequency_factor=4.0, original_length=8192
    )
    assert config.positions == RotaryConfig(base=500000.0, scaling=scaling)
    assert (config.query_groups, config.ffn_size, config.seq_length) == (8, 14336, 131072)


def test_mistral_has_a_window_in_all_layers() -> None:
    assert gpt_config(MISTRAL_7B).attention.window == SlidingWindow(size=4096)


def test_qwen_2_5_has_biases_of_queries_keys_and_values_only_and_no_window() -> None:
    config = gpt_config(QWEN2_5_05B)
    assert (config.attention.qkv_bias, config.attention.output_bias, config.linear_bias) == (
        True,
        None,
        False,
    )
    assert config.attention.window is None
    assert config.tied_embeddings


def test_gemma_3_has_five_layers_with_a_window_before_one_without() -> None:
    config = gpt_config(GEMMA_3_4B_TEXT)
    window = config.attention.window
    assert window is not None
    assert window.layers is not None
    assert [layer for layer, has_window in enumerate(window.layers) if not has_window] == [5, 11, 17, 23, 29]
    assert (window.size, window.rotary) == (1024, RotaryConfig(base=10000.0))
    assert config.positions == RotaryConfig(base=1e6, scaling=LinearScaling(factor=8.0))
    assert (config.num_heads, config.query_groups, config.head_dim, config.vocab_size) == (8, 4, 256, 262208)
    assert config.embedding_scale == 2560**0.5


def test_gpt_oss_has_sinks_experts_and_yarn() -> None:
    config = gpt_config(GPT_OSS_20B)
    yarn = YarnScaling(factor=32.0, original_length=4096, whole_dims=False)
    assert config.positions == RotaryConfig(base=150000.0, scaling=yarn)
    assert config.attention.sinks
    assert config.attention.window == SlidingWindow(size=128, layers=(True, False) * 12)
    assert config.moe is not None
    assert (config.moe.num_experts, config.moe.routing.top_k) == (32, 4)


NEEDS_TRANSFORMERS = pytest.mark.skipif(
    find_spec("transformers") is None, reason="the extra huggingface is not installed"
)


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


@NEEDS_TRANSFORMERS
@pytest.mark.parametrize("seed", range(SEEDS))
@pytest.mark.parametrize("family", FAMILIES)
def test_both_spellings_describe_the_same_model(family: str, seed: int) -> None:
    newer = _written(random_config(family, seed))
    older = _as_version_4(json.loads(json.dumps(newer)))
    assert older.keys() != newer.keys() or family == "gpt2"
    assert gpt_config(older) == gpt_config(newer)


@NEEDS_TRANSFORMERS
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


@NEEDS_TRANSFORMERS
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
