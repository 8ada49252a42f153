"""Random configs of small Hugging Face models of every family that has a map.

Sizes are odd, with all ratios of heads, biases, ties and mixed layers. What has recurrences or experts can be
cut into 2 where its seed is 0, 100, 200, ...
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

Fields = dict[str, Any]
SEQUENCE = 24  # longer than the windows and the original lengths that are drawn


def published(*sizes: int, **others: Any) -> Fields:
    """Return a config: vocabulary, hidden state, layers, query heads, key heads, inside of the MLP."""
    names = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    return dict(zip((*names, "intermediate_size"), sizes, strict=True)) | others


ENCODERS = ("bert", "mt5", "t5")
RECURRENT = ("mamba2", "nemotron_h")
HYBRIDS = ("ME*-M", "M*E-", "EM-*", "ME", "M*M-")
"""Layers of Nemotron-H, one for each seed: mixers M, experts E, attention *, MLPs -."""


def _encoder(family: str, seed: int) -> Fields:
    """Return fields of a small config: tied or not, plain and gated MLPs; 2 divides heads and MLPs."""
    draw = random.Random(f"{family} {seed}")
    heads = draw.choice([2, 4])
    if family == "bert":
        return {
            "vocab_size": draw.choice([31, 37]),
            "hidden_size": heads * draw.choice([3, 5]),
            "num_attention_heads": heads,
            "intermediate_size": draw.choice([10, 22]),
            "num_hidden_layers": draw.choice([4, 5]),
            "max_position_embeddings": draw.choice([24, 29]),
            "type_vocab_size": draw.choice([2, 3]),
            "layer_norm_eps": draw.choice([1e-12, 1e-3]),
            "hidden_act": draw.choice(["gelu", "relu", "gelu_new"]),
        }
    return {
        "vocab_size": draw.choice([31, 37]),
        "d_model": draw.choice([12, 18]),
        "d_kv": draw.choice([3, 4, 5]),
        "d_ff": draw.choice([10, 22]),
        "num_layers": draw.choice([2, 3]),
        "num_decoder_layers": draw.choice([2, 4]),
        "num_heads": heads,
        "relative_attention_num_buckets": draw.choice([8, 14, 32]),
        "relative_attention_max_distance": draw.choice([18, 40]),
        "layer_norm_epsilon": draw.choice([1e-6, 1e-3]),
        "feed_forward_proj": ["relu", "gated-gelu", "gelu", "gated-silu"][seed % 4],
        "tie_word_embeddings": family == "t5" and seed % 2 == 0,
    }


def untie(model: Any, fields: Mapping[str, Any]) -> None:
    """Give a model of transformers with these fields an output layer of its own, if they say so.

    transformers 5 ties that of T5 and mT5, and says so in their configs, until a folder has both.
    """
    if model.config.model_type in ("mt5", "t5") and not fields["tie_word_embeddings"]:
        model.lm_head.weight = nn.Parameter(torch.randn_like(model.shared.weight))


def _recurrent(family: str, seed: int) -> Fields:
    """Return fields of a small config; 4 divides heads, MLPs and experts, and 2 all of it twice."""
    draw = random.Random(f"{family} {seed}")
    heads, head_dim = draw.choice([4, 8]), draw.choice([3, 6])
    fields: Fields = {
        "vocab_size": draw.choice([31, 37, 53]),
        "n_groups": (2, 1, 4, 1, 2)[seed % 5],
        "conv_kernel": draw.choice([2, 3, 4]),
        "chunk_size": draw.choice([4, 7, 32]),
        "use_bias": draw.random() < 0.5,
        "use_conv_bias": draw.random() < 0.7,
        "layer_norm_epsilon": draw.choice([1e-6, 1e-5]),
        "pad_token_id": None,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    if family == "mamba2":
        return fields | {
            "hidden_size": heads * head_dim // 2,
            "num_hidden_layers": 2 if seed % 2 else 4,
            "num_heads": heads,
            "head_dim": head_dim,
            "state_size": draw.choice([3, 5]),
            "tie_word_embeddings": draw.random() < 0.5,
            "time_step_limit": draw.choice([[0.0, float("inf")], [0.2, 0.9]]),
        }
    return fields | {
        "hidden_size": draw.choice([10, 14]),
        "hybrid_override_pattern": HYBRIDS[seed % len(HYBRIDS)],
        "mamba_num_heads": heads,
        "mamba_head_dim": head_dim,
        "ssm_state_size": draw.choice([3, 5]),
        "num_attention_heads": 4,
        "num_key_value_heads": draw.choice([1, 2, 4]),
        "head_dim": draw.choice([3, 6]),
        "intermediate_size": draw.choice([8, 12]),
        "mlp_bias": draw.random() < 0.5,
        "max_position_embeddings": 64,
        "time_step_min": draw.choice([0.001, 0.3]),
        "n_routed_experts": 4,
        "n_group": draw.choice([1, 2]),
        "num_experts_per_tok": 2,
        "moe_intermediate_size": draw.choice([4, 8]),
        "moe_shared_expert_intermediate_size": draw.choice([4, 12]),
        "norm_topk_prob": draw.random() < 0.5,
        "routed_scaling_factor": draw.choice([1.0, 2.5]),
    }


def _delta_net(draw: random.Random, seed: int, layers: int) -> Fields:
    """Return fields of gated delta nets and gated attention."""
    key_heads = draw.choice([1, 2, 3]) if seed % 100 else 2
    shared = draw.choice([1, 2, 3]) if seed % 100 else 2 * draw.choice([1, 2])
    kinds = [draw.choice(["linear_attention", "full_attention"]) for _ in range(layers)]
    return {
        "layer_types": kinds if seed % 3 else None,
        "full_attention_interval": 2,
        "linear_num_key_heads": key_heads,
        "linear_num_value_heads": key_heads * shared,
        "linear_key_head_dim": draw.choice([7, 8, 12]),  # shorter keys of length near 0 enlarge errors
        "linear_value_head_dim": draw.choice([3, 5, 6]),
        "linear_conv_kernel_dim": draw.choice([2, 4]),
        "head_dim": 8,
        "attention_bias": draw.random() < 0.5,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 100.0,
            "partial_rotary_factor": draw.choice([0.25, 0.5, 1.0]),
        },
    }


def _with_experts(family: str, seed: int) -> Fields:
    """Return fields; 2 divides heads and experts of seeds 0, 100, 200, ..."""
    draw = random.Random(f"{family} {seed}")
    is_odd = seed % 100 != 0
    groups = draw.choice([1, 2, 3]) if is_odd else 2
    head_dim = draw.choice([4, 6, 8])
    heads = groups * draw.choice([1, 2, 3])
    experts = draw.choice([3, 5, 7, 8]) if is_odd else 4
    fields: Fields = {
        "vocab_size": draw.choice([31, 37, 53]),
        "hidden_size": heads * head_dim,
        "num_hidden_layers": 3 if is_odd else 2,
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "head_dim": head_dim,
        "intermediate_size": draw.choice([10, 14, 18]),
        "max_position_embeddings": 32,
        "num_experts": experts,
        "num_experts_per_tok": draw.randint(2, experts),
        "tie_word_embeddings": draw.random() < 0.5,
        "rms_norm_eps": draw.choice([1e-6, 1e-5]),
    }
    if family == "deepseek_v3":
        fields = _latent(draw, {k: v for k, v in fields.items() if k not in _WITHOUT_LATENT})
        fields |= {"num_hidden_layers": 3, **_deepseek_experts(draw, seed)}
    else:
        fields |= _EXPERTS[family](draw, seed)
    return fields


def _mixtral(draw: random.Random, seed: int) -> Fields:
    return {"sliding_window": draw.choice([None, 3])}


def _qwen(draw: random.Random, seed: int) -> Fields:
    # In the first config all layers have experts, so that their arrays are stacked.
    sparsity = draw.choice([{}, {"decoder_sparse_step": 2}, {"mlp_only_layers": [1]}]) if seed else {}
    return {"moe_intermediate_size": draw.choice([6, 10]), "norm_topk_prob": draw.random() < 0.5} | sparsity


def _qwen2(draw: random.Random, seed: int) -> Fields:
    return _qwen(draw, seed) | {
        "shared_expert_intermediate_size": draw.choice([6, 14]),
        "qkv_bias": draw.random() < 0.5,
        "use_sliding_window": draw.random() < 0.5,
        "sliding_window": 5,
        "max_window_layers": draw.choice([1, 28]),
    }


def _qwen3(draw: random.Random, seed: int) -> Fields:
    window = {"use_sliding_window": draw.random() < 0.5, "sliding_window": 5}
    return _qwen(draw, seed) | window | {"attention_bias": draw.random() < 0.5}


def _qwen3_next(draw: random.Random, seed: int) -> Fields:
    shared = {"shared_expert_intermediate_size": draw.choice([6, 14])}
    return _qwen(draw, seed) | shared | _delta_net(draw, seed, layers=3 if seed % 100 else 2)


def _gpt_oss(draw: random.Random, seed: int) -> Fields:
    return {
        "swiglu_limit": draw.choice([0.5, 1.5]),  # some values are clamped
        "swiglu_alpha": draw.choice([1.702, 0.9]),
        "sliding_window": draw.choice([3, 128]),
        "attention_bias": draw.random() < 0.5,
    }


_WITHOUT_LATENT = ("head_dim", "num_key_value_heads", "num_experts", "num_experts_per_tok")


def _latent(draw: random.Random, fields: Fields) -> Fields:
    """Return fields of a model with latent attention; 2 divides its heads."""
    scaling = {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 16,
        "beta_fast": 4.0,
        "mscale": draw.choice([0.7, 1.0]),
        "mscale_all_dim": draw.choice([0.9, 1.0]),
    }
    heads = draw.choice([2, 4])
    return {
        **fields,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "hidden_size": draw.choice([18, 22]),
        "q_lora_rank": draw.choice([None, 6, 10]),
        "kv_lora_rank": draw.choice([5, 8]),
        "qk_nope_head_dim": draw.choice([3, 6]),
        "qk_rope_head_dim": draw.choice([4, 6]),
        "v_head_dim": draw.choice([4, 5, 8]),
        "rope_interleave": draw.random() < 0.7,
        "attention_bias": draw.random() < 0.5,
        "rope_parameters": {"rope_theta": 100.0, **draw.choice([scaling, {"rope_type": "default"}])},
    }


def _deepseek_experts(draw: random.Random, seed: int) -> Fields:
    """Return fields of experts in groups, after some dense layers; 2 divides the experts."""
    groups, members = draw.choice([2, 4]), draw.choice([2, 3])
    return {
        "n_routed_experts": groups * members,
        "n_group": groups,
        "topk_group": draw.randint(1, groups),
        "num_experts_per_tok": 2,
        "n_shared_experts": draw.choice([1, 2]),
        "moe_intermediate_size": draw.choice([6, 10]),
        "first_k_dense_replace": draw.choice([0, 1, 3]) if seed else 1,
        "norm_topk_prob": draw.random() < 0.5,
        "routed_scaling_factor": draw.choice([1.0, 2.5]),
        "num_nextn_predict_layers": 0,
    }


_EXPERTS = {
    "mixtral": _mixtral,
    "qwen2_moe": _qwen2,
    "qwen3_moe": _qwen3,
    "qwen3_next": _qwen3_next,
    "gpt_oss": _gpt_oss,
}


def _common_fields(draw: random.Random, seed: int) -> Fields:
    groups = 2 if seed == 0 else draw.choice([1, 2, 3])
    heads = groups * draw.choice([1, 2, 3])
    head_dim = draw.choice([4, 6, 8])
    return {
        "vocab_size": draw.choice([31, 37, 53]),
        "hidden_size": heads * head_dim,
        "intermediate_size": draw.choice([10, 14, 22]),
        "num_hidden_layers": 4 if seed == 0 else draw.choice([2, 3]),
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "max_position_embeddings": 64,
        "tie_word_embeddings": draw.random() < 0.5,
        "rms_norm_eps": draw.choice([1e-6, 1e-3]),
        "pad_token_id": None,
    }


def _rope(draw: random.Random, seed: int) -> Fields:
    """Return parameters of rotary positions; each kind is drawn by one of five seeds."""
    base = draw.choice([100.0, 10000.0])
    kinds: list[Fields] = [
        {
            "rope_type": "llama3",
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 16,
        },
        {"rope_type": "default"},
        {"rope_type": "linear", "factor": draw.choice([2.0, 3.5])},
        {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 16,
            "beta_fast": 4.0,
            "truncate": draw.random() < 0.5,
        },
        {"rope_type": "dynamic", "factor": 3.0},
        {
            "rope_type": "yarn",
            "factor": 2.0,
            "original_max_position_embeddings": 32,
            "mscale": 0.7,
            "mscale_all_dim": 0.9,
        },
    ]
    return {"rope_theta": base, **kinds[seed % len(kinds)]}


def _llama(draw: random.Random, seed: int) -> Fields:
    rope = _rope(draw, seed)
    shorter = {"max_position_embeddings": SEQUENCE // 2} if rope["rope_type"] == "dynamic" else {}
    biases = {name: draw.random() < 0.5 for name in ("attention_bias", "mlp_bias")}
    head_dim = {"head_dim": draw.choice([4, 10])} if seed % 2 else {}
    return {"rope_parameters": rope, **biases, **shorter, **head_dim}


def _mistral(draw: random.Random, seed: int) -> Fields:
    return {"sliding_window": None if seed == 1 else draw.choice([1, 3, 7]), "head_dim": draw.choice([4, 6])}


def _phi3(draw: random.Random, seed: int) -> Fields:
    rope = {"rope_theta": 500.0, "partial_rotary_factor": draw.choice([0.5, 0.75]), "rope_type": "default"}
    window = {"sliding_window": draw.choice([None, 5])}
    heads = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": draw.choice([2, 4])}
    return {"rope_parameters": rope, **window, **heads}


def _qwen2(draw: random.Random, seed: int) -> Fields:
    windowed = seed % 2 == 0
    window = {"use_sliding_window": windowed, "sliding_window": 5, "max_window_layers": draw.choice([0, 1])}
    return {"rope_parameters": _rope(draw, 2 * seed + 1), **window}


def _qwen3(draw: random.Random, seed: int) -> Fields:
    return {**_qwen2(draw, seed), "head_dim": draw.choice([4, 8, 14]), "attention_bias": draw.random() < 0.5}


def _gemma2(draw: random.Random, seed: int) -> Fields:
    return {
        "head_dim": draw.choice([4, 8]),
        "query_pre_attn_scalar": draw.choice([2, 5, 16]),
        "sliding_window": draw.choice([2, 5]),
        "attn_logit_softcapping": None if seed == 1 else draw.choice([0.5, 2.0]),
        "final_logit_softcapping": None if seed == 2 else draw.choice([1.0, 5.0]),
        "attention_bias": draw.random() < 0.5,
        "layer_types": None if seed else ["full_attention", "sliding_attention"] * 2,
    }


def _gemma3(draw: random.Random, seed: int) -> Fields:
    layers = 4 if seed == 0 else 3
    rope = {
        "full_attention": {"rope_theta": 1000.0, "rope_type": "linear", "factor": 8.0},
        "sliding_attention": {"rope_theta": 10.0, "rope_type": "default"},
    }
    return {
        **_gemma2(draw, seed),
        "attn_logit_softcapping": None,
        # Larger scores, which nothing caps here, would multiply errors of rounding.
        "query_pre_attn_scalar": draw.choice([20, 50]),
        "num_hidden_layers": layers,
        "layer_types": [draw.choice(["full_attention", "sliding_attention"]) for _ in range(layers)],
        "rope_parameters": None if seed == 1 else rope,
    }


def _gpt2(draw: random.Random, seed: int) -> Fields:
    heads = 2 if seed == 0 else draw.choice([1, 3, 4])
    return {
        "n_positions": 32,
        "n_embd": heads * draw.choice([4, 5, 7]),
        "n_layer": 4 if seed == 0 else draw.choice([2, 3]),
        "n_head": heads,
        "n_inner": None if seed == 1 else draw.choice([10, 22]),
        "activation_function": draw.choice(["gelu_new", "gelu", "relu"]) if seed else "gelu_new",
        "layer_norm_epsilon": draw.choice([1e-5, 1e-2]),
        "scale_attn_weights": seed != 2,
    }


_DENSE: Mapping[str, Callable[[random.Random, int], Fields]] = {
    "gemma": lambda draw, seed: {"head_dim": draw.choice([4, 6, 8])},
    "gemma2": _gemma2,
    "gemma3_text": _gemma3,
    "gpt2": _gpt2,
    "llama": _llama,
    "mistral": _mistral,
    "phi3": _phi3,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
}

DENSE, WITH_EXPERTS = tuple(_DENSE), (*_EXPERTS, "deepseek_v3")
FAMILIES = (*ENCODERS, *RECURRENT, *DENSE, *WITH_EXPERTS)
"""Their model types."""

IN_MEGATRON = tuple(family for family in FAMILIES if family not in ("bert", "t5", *RECURRENT))
"""Those with a map to Megatron-Core, but for Mamba's: test_map_families has its names. T5 has one if it is
not tied, as mT5 is not."""


def random_fields(model_type: str, seed: int) -> Fields:
    """Return entries of a random config."""
    for families, make in ((ENCODERS, _encoder), (RECURRENT, _recurrent), (WITH_EXPERTS, _with_experts)):
        if model_type in families:
            return make(model_type, seed)
    draw = random.Random(f"{model_type} {seed}")
    common = _common_fields(draw, seed)
    if model_type == "gpt2":
        common = {name: common[name] for name in ("vocab_size", "tie_word_embeddings")}
    return {**common, **_DENSE[model_type](draw, seed)}
