"""Latent attention of Hugging Face models, read from `config.json`.

Source: transformers 5.23, `DeepseekV3Config` and `DeepseekV3Attention`.
"""

from __future__ import annotations

import math
from dataclasses import replace

from megackpt.training.parallel import LatentSizes
from models.block_config import AttentionConfig, RotaryConfig
from models.huggingface_fields import ConfigFields


def latent_attention(fields: ConfigFields) -> AttentionConfig:
    """Return the attention of DeepSeek-V3.

    Raises:
        DeclarationError: a field that is missing, out of range, or has a value that is not supported.
    """
    heads = fields.integer("num_attention_heads")
    fields.require("num_key_value_heads", None, heads)
    fields.skip(("head_dim", "qk_head_dim"))  # sums of others
    bias = fields.flag("attention_bias")
    latent = LatentSizes(
        kv_lora_rank=fields.integer("kv_lora_rank"),
        q_lora_rank=fields.integer("q_lora_rank") if fields.has("q_lora_rank") else None,
        qk_head_dim=fields.integer("qk_nope_head_dim"),
        qk_pos_emb_head_dim=fields.integer("qk_rope_head_dim"),
        v_head_dim=fields.integer("v_head_dim"),
    )
    scale = latent.head_dim**-0.5 * _scale_of_scores(fields)
    return AttentionConfig(latent=latent, qkv_bias=bias, output_bias=bias, scale=scale)


def interleaved(rotary: RotaryConfig, fields: ConfigFields) -> RotaryConfig:
    """Return rotary positions with the pairs that `rope_interleave` says."""
    return replace(rotary, interleaved=fields.flag("rope_interleave"))


def _scale_of_scores(fields: ConfigFields) -> float:
    """Return the factor on scores that goes with scaled rotary positions, by `mscale_all_dim`."""
    parameters = fields.mapping("rope_scaling") or fields.mapping("rope_parameters")
    growth, factor = parameters.get("mscale_all_dim"), parameters.get("factor")
    if not growth or not factor or factor <= 1:
        return 1.0
    scale: float = (0.1 * growth * math.log(factor) + 1.0) ** 2
    return scale
