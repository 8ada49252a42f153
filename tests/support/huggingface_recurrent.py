"""Small models of transformers with recurrences: random configs, and our arrays of their weights."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from tests.support.optimizers import Arrays

FAMILIES = ("mamba2", "nemotron_h")
HYBRIDS = ("ME*-M", "M*E-", "EM-*", "ME", "M*M-")
"""Layers of Nemotron-H, one for each seed: mixers M, experts E, attention *, MLPs -."""


def random_fields(family: str, seed: int) -> dict[str, Any]:
    """Return fields of a small config; 4 divides heads, MLPs and experts, and 2 all of it twice."""
    draw = random.Random(f"{family} {seed}")
    heads, head_dim = draw.choice([4, 8]), draw.choice([3, 6])
    fields: dict[str, Any] = {
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


def random_config(family: str, seed: int) -> Any:
    """Return a transformers config."""
    from transformers import AutoConfig

    config = AutoConfig.for_model(family, **random_fields(family, seed))
    config._experts_implementation = config._attn_implementation = "eager"
    return config


def arrays_in_our_names(state: Any, config: Any) -> Arrays:
    """Return the weights of a state dict as our arrays; those of equal layers are stacked."""
    arrays: Arrays = {}
    if config.model_type == "mamba2":
        kinds = ["linear_attention"] * config.num_hidden_layers
        sizes = (config.num_heads * config.head_dim, config.n_groups * config.state_size, config.num_heads)
    else:
        kinds = config.layers_block_type
        inner = config.mamba_num_heads * config.mamba_head_dim
        sizes = (inner, config.n_groups * config.ssm_state_size, config.mamba_num_heads)
    for name, value in state.items():
        words = name.split(".")
        if "layers" not in words:
            arrays[_OUTER[words[-2]]] = value
            continue
        number = int(words[words.index("layers") + 1])
        for key, part in _in_layer(words[words.index("layers") + 2 :], value.detach(), kinds[number], sizes):
            arrays[f"decoder.layers.{number}.{key}"] = part
    if config.tie_word_embeddings:
        del arrays["output_layer.weight"]
    return arrays if len(set(kinds)) > 1 else _stacked(arrays, len(kinds))


_OUTER = {
    "embeddings": "embedding.word_embeddings.weight",
    "norm_f": "decoder.final_layernorm.weight",
    "lm_head": "output_layer.weight",
}
_NORMS = {
    "linear_attention": "norm",
    "full_attention": "input_layernorm",
    "mlp": "pre_mlp_layernorm",
    "moe": "pre_mlp_layernorm",
}
_NAMES = {
    "mixer.o_proj": "self_attention.linear_proj",
    "mixer.up_proj": "mlp.linear_fc1",
    "mixer.down_proj": "mlp.linear_fc2",
    "mixer.gate": "mlp.router",
    "mixer.gate.e_score_correction_bias": "mlp.router.expert_bias",
    "mixer.experts.up_proj": "mlp.experts.linear_fc1.weight",
    "mixer.experts.down_proj": "mlp.experts.linear_fc2.weight",
    "mixer.shared_experts.up_proj": "mlp.shared_experts.linear_fc1",
    "mixer.shared_experts.down_proj": "mlp.shared_experts.linear_fc2",
}


def _in_layer(
    words: list[str], value: Tensor, kind: str, sizes: tuple[int, int, int]
) -> list[tuple[str, Tensor]]:
    """Return our names inside of a layer, and the parts, of the array with the words of a name."""
    name, last = ".".join(words), words[-1]
    inner, state, steps = sizes
    if words[0] == "norm":
        return [(f"{_NORMS[kind]}.weight", value)]
    if words[1] == "in_proj":
        parts = value.split([inner, inner, state, state, steps])
        return [
            (f"{name}.{part}", rows) for part, rows in zip(("z", "x", "B", "C", "dt"), parts, strict=True)
        ]
    if words[1] == "conv1d":
        parts = value.split([inner, state, state])
        return [(f"{name}.{part}", rows) for part, rows in zip("xBC", parts, strict=True)]
    if words[1] in ("q_proj", "k_proj", "v_proj"):
        return [(f"self_attention.linear_qkv.{last}.{words[1][0]}", value)]
    if name in _NAMES:
        return [(_NAMES[name], value)]
    block = ".".join(words[:-1])
    return [(f"{_NAMES.get(block, block)}.{last}" if block != "mixer" else name, value)]


def _stacked(arrays: Arrays, count: int) -> Arrays:
    layers = {key.partition("layers.0.")[2] for key in arrays if "layers.0." in key}
    outer = {key: value for key, value in arrays.items() if ".layers." not in key}
    stacked = {
        f"decoder.layers.{name}": torch.stack([arrays[f"decoder.layers.{n}.{name}"] for n in range(count)])
        for name in layers
    }
    return outer | stacked


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
