"""Random configs of small Hugging Face models of every family that has a map."""

from __future__ import annotations

import random
from typing import Any

from tests.support import huggingface_encoders as encoders
from tests.support import huggingface_recurrent as mamba
from tests.support.huggingface_experts import WITHOUT_LATENT, deepseek_expert_fields, latent_fields
from tests.support.huggingface_recurrent import delta_net_fields

FAMILIES = (
    *encoders.FAMILIES,
    *mamba.FAMILIES,
    "deepseek_v3",
    "gemma",
    "gemma2",
    "gemma3_text",
    "gpt2",
    "gpt_oss",
    "llama",
    "mistral",
    "mixtral",
    "phi3",
    "qwen2",
    "qwen2_moe",
    "qwen3",
    "qwen3_moe",
    "qwen3_next",
)
"""Their model types."""

IN_MEGATRON = tuple(family for family in FAMILIES if family not in ("bert", "t5", *mamba.FAMILIES))
"""Those with a map to Megatron-Core, but for Mamba's: test_map_families has its names. T5 has one if it is
not tied, as mT5 is not."""


def random_fields(model_type: str, seed: int) -> dict[str, Any]:
    """Return entries of a random config: odd sizes, all ratios of heads, biases, ties, mixed layers."""
    if model_type in encoders.FAMILIES:
        return encoders.random_fields(model_type, seed)
    if model_type in mamba.FAMILIES:
        return mamba.random_fields(model_type, seed)
    draw = random.Random(f"{model_type} {seed}")
    if model_type == "gpt2":
        heads = draw.choice([1, 2, 3])
        return {
            "vocab_size": draw.choice([31, 37, 53]),
            "n_positions": draw.choice([16, 21]),
            "n_embd": heads * draw.choice([4, 6]),
            "n_head": heads,
            "n_layer": draw.randint(1, 3),
            "n_inner": draw.choice([None, 10]),
            "tie_word_embeddings": draw.random() < 0.7,
        }
    groups = draw.choice([1, 2, 3])
    heads = groups * draw.choice([1, 2, 3])
    head_dim = draw.choice([4, 6])
    fields: dict[str, Any] = {
        "vocab_size": draw.choice([31, 37, 53]),
        "hidden_size": heads * head_dim,
        "num_hidden_layers": draw.randint(1, 3),
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "head_dim": head_dim,
        "intermediate_size": draw.choice([10, 14, 18]),
        "max_position_embeddings": 32,
        "tie_word_embeddings": draw.random() < 0.5,
    }
    if model_type == "deepseek_v3":
        fields = latent_fields(draw, {key: v for key, v in fields.items() if key not in WITHOUT_LATENT})
        return fields | deepseek_expert_fields(draw, seed)
    if model_type == "phi3":
        fields["pad_token_id"] = None  # that of Phi-3 is not in these vocabularies
    if model_type not in ("mistral", "mixtral", "phi3", "qwen2", "qwen2_moe"):
        fields["attention_bias"] = draw.random() < 0.5
        fields["head_dim"] = draw.choice([4, 6, 8])
    if model_type == "llama":
        fields["mlp_bias"] = draw.random() < 0.5
    if model_type in ("mixtral", "gpt_oss", "qwen3_moe", "qwen2_moe", "qwen3_next"):
        fields |= _experts(draw)
    if model_type in ("qwen3_moe", "qwen2_moe", "qwen3_next"):
        fields |= _sparse_layers(draw)
    if model_type == "qwen3_next":
        fields |= {"shared_expert_intermediate_size": 22}
        fields |= delta_net_fields(draw, seed, fields["num_hidden_layers"])
    if model_type == "qwen2_moe":
        fields |= {"shared_expert_intermediate_size": 22, "qkv_bias": draw.random() < 0.5}
    return fields


def _experts(draw: random.Random) -> dict[str, Any]:
    experts = draw.choice([2, 3, 5])
    return {"num_experts": experts, "num_experts_per_tok": draw.randint(1, experts)}


def _sparse_layers(draw: random.Random) -> dict[str, Any]:
    sparsity = draw.choice([{}, {"decoder_sparse_step": 2}, {"mlp_only_layers": [0]}])
    return {"moe_intermediate_size": draw.choice([6, 8]), **sparsity}
