"""`config.json` files as published with well-known models, in the spelling of their time."""

from __future__ import annotations

from typing import Any

from models import LinearScaling, Llama3Scaling, RotaryConfig, SlidingWindow, YarnScaling
from models.huggingface import gpt_config

GPT2: dict[str, Any] = {
    "activation_function": "gelu_new",
    "architectures": ["GPT2LMHeadModel"],
    "attn_pdrop": 0.1,
    "bos_token_id": 50256,
    "embd_pdrop": 0.1,
    "eos_token_id": 50256,
    "initializer_range": 0.02,
    "layer_norm_epsilon": 1e-05,
    "model_type": "gpt2",
    "n_ctx": 1024,
    "n_embd": 768,
    "n_head": 12,
    "n_layer": 12,
    "n_positions": 1024,
    "resid_pdrop": 0.1,
    "summary_activation": None,
    "summary_first_dropout": 0.1,
    "summary_proj_to_labels": True,
    "summary_type": "cls_index",
    "summary_use_proj": True,
    "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}},
    "vocab_size": 50257,
}
LLAMA_3_1_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 128000,
    "eos_token_id": 128001,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 14336,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.43.0.dev0",
    "use_cache": True,
    "vocab_size": 128256,
}
MISTRAL_7B: dict[str, Any] = {
    "architectures": ["MistralForCausalLM"],
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "model_type": "mistral",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_theta": 10000.0,
    "sliding_window": 4096,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.34.0.dev0",
    "use_cache": True,
    "vocab_size": 32000,
}
QWEN2_5_05B: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"],
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151643,
    "hidden_act": "silu",
    "hidden_size": 896,
    "initializer_range": 0.02,
    "intermediate_size": 4864,
    "max_position_embeddings": 32768,
    "max_window_layers": 24,
    "model_type": "qwen2",
    "num_attention_heads": 14,
    "num_hidden_layers": 24,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 32768,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.40.1",
    "use_cache": True,
    "use_mrope": False,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
GEMMA_3_4B_TEXT: dict[str, Any] = {
    "hidden_size": 2560,
    "intermediate_size": 10240,
    "model_type": "gemma3_text",
    "num_hidden_layers": 34,
    "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
    "sliding_window": 1024,
}
GPT_OSS_20B: dict[str, Any] = {
    "architectures": ["GptOssForCausalLM"],
    "attention_bias": True,
    "attention_dropout": 0.0,
    "eos_token_id": 200002,
    "experts_per_token": 4,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2880,
    "initial_context_length": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 2880,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
    "max_position_embeddings": 131072,
    "model_type": "gpt_oss",
    "num_attention_heads": 64,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 24,
    "num_key_value_heads": 8,
    "num_local_experts": 32,
    "output_router_logits": False,
    "pad_token_id": 199999,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "rope_type": "yarn",
        "truncate": False,
    },
    "rope_theta": 150000,
    "router_aux_loss_coef": 0.9,
    "sliding_window": 128,
    "swiglu_limit": 7.0,
    "tie_word_embeddings": False,
    "transformers_version": "4.55.0.dev0",
    "use_cache": True,
    "vocab_size": 201088,
}


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
