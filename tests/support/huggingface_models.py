"""Small models of Hugging Face families: random configs and weights, and our arrays of them."""

from __future__ import annotations

import functools
import json
import os
import random
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megackpt import DeclarationError
from megackpt.parallel import (
    ModelChunks,
    ParallelGroups,
    ParallelLayout,
    context_share,
    gather_context,
    gather_from,
)
from models import GPTConfig, build_gpt
from models.huggingface import gpt_config
from tests.support import huggingface_experts as experts
from tests.support.huggingface_recurrent import mixer_in_our_names
from tests.support.optimizers import Arrays

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # before it is imported; it prints notes

RELATIVE = 1e-5
SCAN_RELATIVE = 1e-4
"""Of models with a recurrence, whose errors of rounding go on from token to token."""
SEQUENCE = 24  # longer than the windows and the original lengths that are drawn
Fields = dict[str, Any]


def layout_of(config: GPTConfig) -> ParallelLayout:
    """Return a layout of 4 ranks with as many kinds of cuts as a config allows."""
    if config.moe is not None:
        layouts = [ParallelLayout(tp=2, pp=2, ep=2, etp=1), ParallelLayout(pp=2, cp=2, ep=2)]
        if config.delta_net is not None:  # with an odd number of heads
            layouts.append(ParallelLayout(pp=2, dp=2, etp=1))
    else:
        layouts = [ParallelLayout(tp=2, pp=2)]
    for layout in layouts:
        try:
            config.check_layout(layout)
        except DeclarationError:
            continue
        return layout
    return ParallelLayout(pp=2, cp=2)


def random_config(family: str, seed: int) -> Any:
    """Return a transformers config of odd sizes; that of seed 0 can be cut into 2 for tp and for pp."""
    from transformers import AutoConfig

    if family in experts.FAMILIES:
        return experts.random_config(family, seed)
    draw = random.Random(f"{family} {seed}")
    common = _common_fields(draw, seed)
    if family == "gpt2":
        common = {name: common[name] for name in ("vocab_size", "tie_word_embeddings")}
    config = AutoConfig.for_model(family, **{**common, **_FAMILIES[family](draw, seed)})
    config._attn_implementation = "eager"
    return config


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


_FAMILIES: Mapping[str, Callable[[random.Random, int], Fields]] = {
    "gemma2": _gemma2,
    "gemma3_text": _gemma3,
    "gpt2": _gpt2,
    "llama": _llama,
    "mistral": _mistral,
    "phi3": _phi3,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
}
FAMILIES = (*_FAMILIES, *experts.FAMILIES)
SEEDS = 6  # configs of each family


def random_model(config: Any, seed: int) -> nn.Module:
    """Return a model with random weights, biases and norms, in evaluation mode."""
    from transformers import AutoModelForCausalLM

    model: nn.Module = AutoModelForCausalLM.from_config(config).eval()
    if config.model_type in experts.FAMILIES:
        experts.randomise(model, seed)
        return model
    return randomised(model, seed)


def randomised(model: nn.Module, seed: int) -> nn.Module:
    """Return a model whose weights, biases and norms are made random."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, param in model.named_parameters():
            noise = torch.randn(param.shape, generator=generator)
            # Matrices keep the size of what they multiply; norms are 1 (0 if zero-centred) and some.
            param.copy_(param + 0.4 * noise if param.ndim == 1 else noise / param.shape[-1] ** 0.5)
            assert param.abs().max() > 0, name
    return model


def arrays_in_our_names(model: nn.Module) -> Arrays:
    """Return the weights of a transformers model as our arrays; equal layers are stacked."""
    arrays: Arrays = {}
    for name, value in model.state_dict().items():
        arrays.update(renamed(name, value, model.config))
    if model.config.model_type in experts.FAMILIES:
        arrays = {key: value for key, value in arrays.items() if ".mlp." not in key}
        for layer in range(model.config.num_hidden_layers):
            theirs, ours = f"model.layers.{layer}.mlp.", f"decoder.layers.{layer}.mlp."
            arrays.update(experts.experts_in_our_names(model.state_dict(), theirs, ours))
    if model.config.tie_word_embeddings:
        del arrays["output_layer.weight"]
    return _stacked(arrays, model.config.num_hidden_layers)


def _stacked(arrays: Arrays, count: int) -> Arrays:
    """Return arrays of layers under keys without their numbers, if all layers have the same ones."""
    stacked: Arrays = {}
    layers: dict[str, list[Tensor]] = {}
    for key, value in sorted(arrays.items(), key=_layer_number):
        name, changes = re.subn(r"layers\.\d+\.", "layers.", key)
        if changes:
            layers.setdefault(name, []).append(value)
        else:
            stacked[key] = value
    if any(len(values) < count for values in layers.values()):
        return arrays
    return stacked | {name: torch.stack(values) for name, values in layers.items()}


def _layer_number(item: tuple[str, Tensor]) -> int:
    number = re.search(r"layers\.(\d+)\.", item[0])
    return -1 if number is None else int(number[1])


_NAMES = {
    "model.embed_tokens.": "embedding.word_embeddings.",
    "model.norm.": "decoder.final_layernorm.",
    "lm_head.": "output_layer.",
    "model.layers.": "decoder.layers.",
    "self_attn.o_proj.": "self_attention.linear_proj.",
    "self_attn.q_norm.": "self_attention.q_layernorm.",
    "self_attn.k_norm.": "self_attention.k_layernorm.",
    "self_attn.q_a_proj.": "self_attention.linear_q_down_proj.",
    "self_attn.q_a_layernorm.": "self_attention.q_layernorm.",
    "self_attn.q_b_proj.": "self_attention.linear_q_up_proj.",
    "self_attn.kv_a_proj_with_mqa.": "self_attention.linear_kv_down_proj.",
    "self_attn.kv_a_layernorm.": "self_attention.kv_layernorm.",
    "self_attn.kv_b_proj.": "self_attention.linear_kv_up_proj.",
    "self_attn.sinks": "self_attention.softmax_offset",
    "pre_feedforward_layernorm.": "pre_mlp_layernorm.",
    "post_feedforward_layernorm.": "post_mlp_layernorm.",
    "mlp.down_proj.": "mlp.linear_fc2.",
    "transformer.wte.": "embedding.word_embeddings.",
    "transformer.wpe.": "embedding.position_embeddings.",
    "transformer.ln_f.": "decoder.final_layernorm.",
    "transformer.h.": "decoder.layers.",
    "ln_1.": "input_layernorm.",
    "ln_2.": "pre_mlp_layernorm.",
    "attn.c_proj.": "self_attention.linear_proj.",
    "mlp.c_fc.": "mlp.linear_fc1.",
    "mlp.c_proj.": "mlp.linear_fc2.",
}
_PARTS = {
    **{f"self_attn.{part}_proj.": ("self_attention.linear_qkv.", part) for part in "qkv"},
    "self_attn.qkv_proj.": ("self_attention.linear_qkv.", "q k v"),
    "attn.c_attn.": ("self_attention.linear_qkv.", "q k v"),
    "mlp.gate_proj.": ("mlp.linear_fc1.", "gate"),
    "mlp.up_proj.": ("mlp.linear_fc1.", "up"),
    "mlp.gate_up_proj.": ("mlp.linear_fc1.", "gate up"),
}


def renamed(name: str, value: Tensor, config: Any) -> list[tuple[str, Tensor]]:
    """Return our names of the parts of a tensor, and the parts."""
    if ".c_" in name and value.ndim == 2:
        value = value.t()  # GPT-2 has its matrices transposed
    has_norms_after_blocks = config.model_type.startswith("gemma")
    after = "post_self_attn_layernorm." if has_norms_after_blocks else "pre_mlp_layernorm."
    ours = name
    for theirs, own in {**_NAMES, "post_attention_layernorm.": after}.items():
        ours = ours.replace(theirs, own)
    if config.model_type == "qwen3_next" and (mixers := mixer_in_our_names(ours, value, config)):
        return mixers
    if config.model_type == "deepseek_v3":
        ours = ours.replace("self_attn.q_proj.", "self_attention.linear_q_proj.")
    for theirs, (own, parts) in _PARTS.items():
        if theirs in ours:
            names = parts.split()
            return [
                (f"{ours.replace(theirs, own)}.{part}", rows)
                for part, rows in zip(names, _split(value, names, config), strict=True)
            ]
    return [(ours, value)]


def _split(value: Tensor, names: list[str], config: Any) -> tuple[Tensor, ...]:
    """Return the rows of fused projections."""
    if names != ["q", "k", "v"] or config.model_type == "gpt2":
        return value.chunk(len(names))
    queries = len(value) * config.num_attention_heads
    queries //= config.num_attention_heads + 2 * config.num_key_value_heads
    keys = (len(value) - queries) // 2
    return value.split([queries, keys, keys])


def token_ids(vocab_size: int) -> Tensor:
    """Return token ids `[b, s]`."""
    return torch.randint(0, vocab_size, (2, SEQUENCE), generator=torch.Generator().manual_seed(5))


@functools.cache
def reference(family: str, seed: int) -> tuple[GPTConfig, Arrays, Tensor]:
    """Return our config, the weights as our arrays, and the logits `[b, s, vocab]` of transformers."""
    config = random_config(family, seed)
    model = random_model(config, seed)
    ours = gpt_config(json.loads(config.to_json_string()))
    if ours.seq_length < SEQUENCE:  # drawn with a scaling for longer sequences
        ours = replace(ours, seq_length=SEQUENCE)
    ours = replace(ours, make_vocab_divisible=1)
    with torch.no_grad():
        return ours, arrays_in_our_names(model), model(token_ids(ours.vocab_size), use_cache=False).logits


def relative_error_of(config: GPTConfig) -> float:
    """Return the largest error of results of a model, relative to the largest of them."""
    return RELATIVE if config.delta_net is None else SCAN_RELATIVE


def stays_in_float32(key: str) -> bool:
    """Whether an array of ours or theirs is float32 in a model in bfloat16."""
    return key.endswith((".expert_bias", ".e_score_correction_bias", ".A_log", ".dt_bias"))


def assert_close(actual: Any, expected: Tensor, relative: float = RELATIVE) -> None:
    """Compare logits, numpy's with torch's, relative to the largest one."""
    assert actual.shape == tuple(expected.shape)  # a difference of unequal shapes would be broadcast
    error = (torch.from_numpy(actual) - expected).abs().max() / expected.abs().max()
    assert error <= relative, f"off by {error:.1e} of the largest logit"


def logits(config: GPTConfig, weights: Any, layout: ParallelLayout, sequence_parallel: bool = False) -> Any:
    """Return the logits `[b, s, vocab]` of our model, of ranks of the last stage; of others None.

    Each rank of dp has its part of the batch. Arrays come and go as numpy's, which need no shared memory.
    """
    groups = ParallelGroups.create(layout)
    model = build_gpt(config, groups, sequence_parallel=sequence_parallel)
    keys = experts.fill(
        model.sharded_state_dict(), {key: torch.from_numpy(array) for key, array in weights.items()}
    )
    assert layout.pp > 1 or keys == weights.keys()
    return logits_of(model, config, groups)


def logits_of(model: ModelChunks, config: GPTConfig, groups: ParallelGroups) -> Any:
    """Return the logits of `logits` of a model with weights."""
    (chunk,) = model
    batch = token_ids(config.vocab_size).chunk(groups.dp.size)[groups.dp.rank]
    inputs = own = context_share(batch, groups.cp, dim=1)
    pp = groups.pp
    with torch.no_grad():
        if pp.rank > 0:
            inputs = chunk.activation_buffer(own)
            dist.recv(inputs, pp.ranks[pp.rank - 1])
        out = chunk(inputs)
        if pp.rank < pp.size - 1:
            dist.send(out.contiguous(), pp.ranks[pp.rank + 1])
            return None
        whole = gather_context(gather_from(out, groups.tp), groups.cp, dim=0)
    return whole.transpose(0, 1)[..., : config.vocab_size].numpy()
