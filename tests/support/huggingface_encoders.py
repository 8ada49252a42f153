"""Random configs of small models with an encoder: T5, mT5 and BERT of transformers."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

FAMILIES = ("bert", "mt5", "t5")


def random_fields(family: str, seed: int) -> dict[str, Any]:
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
