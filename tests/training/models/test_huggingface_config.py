"""What of a Hugging Face `config.json` is an error: it names the field. Nothing becomes another function."""

from __future__ import annotations

from typing import Any

import pytest

from megackpt.errors import DeclarationError
from models import LinearScaling, RotaryConfig, SlidingWindow, YarnScaling
from models.huggingface import gpt_config

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 11,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "torch_dtype": "bfloat16",
    "rope_scaling": None,
    "eos_token_id": [1, 2],
}
GEMMA3 = {**LLAMA, "model_type": "gemma3_text", "num_key_value_heads": 2, "head_dim": 4}
GPT2 = {"model_type": "gpt2", "n_embd": 16, "n_head": 4, "n_layer": 2, "n_positions": 8, "vocab_size": 11}
QWEN2 = {**LLAMA, "model_type": "qwen2", "num_key_value_heads": 2, "max_window_layers": 1}
PHI3 = {**LLAMA, "model_type": "phi3"}
YARN = {"rope_type": "yarn", "factor": 4.0}


@pytest.mark.parametrize(
    ("config", "changes", "message"),
    [
        (LLAMA, {"model_type": "opt"}, r"model_type 'opt' is not supported; deepseek_v3.*qwen3_moe.* are"),
        (LLAMA, {"model_type": None}, r"model_type None is not supported"),
        (LLAMA, {"model_type": ["llama"]}, r"model_type \['llama'\] is not supported"),
        (LLAMA, {"model_type": "gemma3", "text_config": {}}, r"'gemma3' is not supported.*its text_config"),
        (LLAMA, {"quantization_config": {"bits": 4}}, r"has a quantization_config.*codes.*in floating point"),
        (
            LLAMA,
            {"quantization_config": {"quant_method": "fp8"}},
            r"codes.*Dequantise it.*FineGrainedFP8Config",
        ),
        (LLAMA, {"new_kind": 1, "other": 0}, r"new_kind, other.*If they do not.*`ignored`"),
        (LLAMA, {"is_encoder_decoder": True}, r"is_encoder_decoder is True, which is not supported"),
        (LLAMA, {"hidden_act": "quick_gelu"}, r"hidden_act is 'quick_gelu', which is not supported; silu"),
        (LLAMA, {"hidden_size": "16"}, r"hidden_size is '16', which must be a positive integer"),
        (LLAMA, {"num_hidden_layers": True}, r"num_hidden_layers is True"),
        (LLAMA, {"vocab_size": 0}, r"vocab_size is 0"),
        (LLAMA, {"num_attention_heads": None}, r"num_attention_heads is missing and must be"),
        (LLAMA, {"attention_bias": "yes"}, r"attention_bias is 'yes', which must be true or false"),
        (LLAMA, {"rms_norm_eps": -1e-6}, r"rms_norm_eps is -1e-06, which must be a positive number"),
        (LLAMA, {"num_key_value_heads": 3}, r"num_query_groups 3 does not divide num_heads 4"),
        (LLAMA, {"sliding_window": 4}, r"not supported with model_type 'llama': sliding_window"),
        (LLAMA, {"partial_rotary_factor": 0.5}, r"partial_rotary_factor is 0\.5.*do not have"),
        (LLAMA, {"rope_scaling": {"rope_type": "longrope"}}, r"rope_scaling\.rope_type is 'longrope'"),
        (LLAMA, {"rope_scaling": {"type": "mrope"}}, r"rope_scaling\.type is 'mrope'.*llama3 and yarn are"),
        (LLAMA, {"rope_scaling": {"type": "linear"}}, r"rope_scaling\.factor is missing"),
        (LLAMA, {"rope_scaling": {**YARN, "new": 1}}, r"rope_scaling\.new"),
        (LLAMA, {"rope_parameters": {**YARN, "beta_fast": "x"}}, r"rope_parameters\.beta_fast is 'x'"),
        (LLAMA, {"rope_parameters": {"full_attention": YARN}}, r"rope_parameters\.full_attention"),
        (LLAMA, {"rope_parameters": "default"}, r"rope_parameters is 'default', which must be a mapping"),
        (GEMMA3, {"use_bidirectional_attention": True}, r"use_bidirectional_attention is True"),
        (GEMMA3, {"attn_logit_softcapping": 50.0}, r"attn_logit_softcapping is 50\.0"),
        (GEMMA3, {"layer_types": ["full_attention"]}, r"layer_types.*one type for each of 2 layers"),
        (GEMMA3, {"layer_types": ["full_attention", "chunked_attention"]}, r"layer_types.*not supported"),
        (GEMMA3, {"sliding_window": None}, r"sliding_window is missing.*as layers have a window"),
        (GEMMA3, {"rope_parameters": {"rope_type": "linear"}}, r"rope_parameters\.rope_type"),
        (
            QWEN2,
            {"layer_types": ["sliding_attention"] * 2},
            r"use_sliding_window is False, which must be true",
        ),
        (PHI3, {"rope_scaling": {"type": "yarn", "factor": 4.0}}, r"rope_scaling is .*rope_type default, is"),
        (PHI3, {"rope_parameters": {"type": "longrope"}}, r"rope_parameters\.type is 'longrope'"),
        (GPT2, {"scale_attn_by_inverse_layer_idx": True}, r"scale_attn_by_inverse_layer_idx is True"),
        (GPT2, {"add_cross_attention": True}, r"add_cross_attention is True"),
    ],
)
def test_what_would_be_another_function_is_an_error(
    config: dict[str, Any], changes: dict[str, Any], message: str
) -> None:
    gpt_config(config)
    with pytest.raises(DeclarationError, match=message):
        gpt_config({**config, **changes})


def test_the_error_has_the_name_of_the_field_as_its_key() -> None:
    with pytest.raises(DeclarationError) as caught:
        gpt_config({**LLAMA, "rope_scaling": {"type": "linear", "factor": 0}})
    assert caught.value.key == "rope_scaling.factor"


def test_fields_that_the_caller_knows_are_ignored() -> None:
    assert gpt_config({**LLAMA, "new_kind": 1}, ignored=["new_kind"]) == gpt_config(LLAMA)


def test_empty_false_and_private_fields_change_nothing() -> None:
    empty = {"_name_or_path": "here", "pruned_heads": {}, "quantization_config": None, "use_mrope": False}
    assert gpt_config({**LLAMA, **empty}) == gpt_config(LLAMA)


def test_older_names_of_rotary_parameters_are_read() -> None:
    linear = {"rope_scaling": {"type": "linear", "factor": 2}, "rope_theta": 5000}
    expected = RotaryConfig(base=5000.0, scaling=LinearScaling(factor=2.0))
    assert gpt_config({**LLAMA, **linear}).positions == expected
    yarn = gpt_config({**LLAMA, "rope_scaling": {"type": "yarn", "factor": 4.0}}).positions
    assert yarn == RotaryConfig(scaling=YarnScaling(factor=4.0, original_length=64))


def test_older_files_of_gemma_3_are_read() -> None:
    old = {
        "sliding_window_pattern": 2,
        "sliding_window": 5,
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    }
    config = gpt_config({**GEMMA3, **old})
    local = RotaryConfig(base=1e4)
    assert config.attention.window == SlidingWindow(size=5, layers=(True, False), rotary=local)
    assert config.positions == RotaryConfig(base=1e6, scaling=LinearScaling(factor=8.0))


def test_windows_of_qwen_begin_after_max_window_layers_if_they_are_on() -> None:
    assert gpt_config({**QWEN2, "use_sliding_window": False}).attention.window is None
    windowed = gpt_config({**QWEN2, "use_sliding_window": True, "sliding_window": 3})
    assert windowed.attention.window == SlidingWindow(size=3, layers=(False, True))
