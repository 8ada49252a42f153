"""Small Qwen3-Next models of transformers: random configs, and our arrays of their attention."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

from torch import Tensor


def delta_net_fields(draw: random.Random, seed: int, layers: int) -> dict[str, Any]:
    """Return fields of gated delta nets and gated attention.

    Of seeds 0, 100, ... 2 divides heads, and 4 those of values.
    """
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


def mixer_in_our_names(name: str, value: Tensor, config: Any) -> list[tuple[str, Tensor]]:
    """Return the parts of a tensor of `linear_attn` or `q_proj` with our names; none for other tensors."""
    layer, _, own = name.partition(".linear_attn.")
    if own:
        return [
            (f"{layer}.self_attention.{ours}", part) for ours, part in _delta_net_parts(own, value, config)
        ]
    if ".self_attn.q_proj." in name:
        layer, _, kind = name.partition(".self_attn.q_proj.")
        q, gate = value.unflatten(0, (-1, 2, config.head_dim)).unbind(1)
        ours = f"{layer}.self_attention.linear_qkv.{kind}"
        return [(f"{ours}.q", q.flatten(0, 1)), (f"{ours}.gate", gate.flatten(0, 1))]
    return []


def _delta_net_parts(name: str, value: Tensor, config: Any) -> Iterator[tuple[str, Tensor]]:
    groups, key = config.linear_num_key_heads, config.linear_key_head_dim
    heads = config.linear_num_value_heads // groups
    values = heads * config.linear_value_head_dim
    parts: dict[str, tuple[int, ...]] = {
        "in_proj_qkvz.weight": (key, key, values, values),
        "in_proj_ba.weight": (heads, heads),
    }
    if name in parts:
        names = ("query", "key", "value", "z") if len(parts[name]) == 4 else ("beta", "alpha")
        split = value.unflatten(0, (groups, -1)).split(parts[name], dim=1)
        for ours, part in zip(names, split, strict=True):
            yield f"in_proj.weight.{ours}", part.flatten(0, 1)
    elif name == "conv1d.weight":
        split = value.split((groups * key, groups * key, groups * values))
        for ours, part in zip(("query", "key", "value"), split, strict=True):
            yield f"conv1d.weight.{ours}", part
    else:
        yield name.replace("norm.", "out_norm."), value
