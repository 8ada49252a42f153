"""Small models with experts of Hugging Face families: random configs and weights, and our arrays of them."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from megackpt.mapping import ShardedStateDict
from tests.support.huggingface_recurrent import delta_net_fields
from tests.support.optimizers import Arrays, tensors_of

FAMILIES = ("mixtral", "qwen2_moe", "qwen3_moe", "qwen3_next", "gpt_oss", "deepseek_v3")


def random_config(family: str, seed: int) -> Any:
    """Return a transformers config of odd sizes; 2 divides heads and experts of seeds 0, 100, 200, ..."""
    from transformers import AutoConfig

    draw = random.Random(f"{family} {seed}")
    is_odd = seed % 100 != 0
    groups = draw.choice([1, 2, 3]) if is_odd else 2
    head_dim = draw.choice([4, 6, 8])
    heads = groups * draw.choice([1, 2, 3])
    experts = draw.choice([3, 5, 7, 8]) if is_odd else 4
    fields: dict[str, Any] = {
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
        fields = latent_fields(draw, {k: v for k, v in fields.items() if k not in WITHOUT_LATENT})
        fields |= {"num_hidden_layers": 3, **deepseek_expert_fields(draw, seed)}
    else:
        fields |= _FIELDS[family](draw, seed)
    config = AutoConfig.for_model(family, **fields)
    config._experts_implementation = config._attn_implementation = "eager"
    return config


def _mixtral(draw: random.Random, seed: int) -> dict[str, Any]:
    return {"sliding_window": draw.choice([None, 3])}


def _qwen(draw: random.Random, seed: int) -> dict[str, Any]:
    # In the first config all layers have experts, so that their arrays are stacked.
    sparsity = draw.choice([{}, {"decoder_sparse_step": 2}, {"mlp_only_layers": [1]}]) if seed else {}
    return {
        "moe_intermediate_size": draw.choice([6, 10]),
        "norm_topk_prob": draw.random() < 0.5,
    } | sparsity


def _qwen2(draw: random.Random, seed: int) -> dict[str, Any]:
    return _qwen(draw, seed) | {
        "shared_expert_intermediate_size": draw.choice([6, 14]),
        "qkv_bias": draw.random() < 0.5,
        "use_sliding_window": draw.random() < 0.5,
        "sliding_window": 5,
        "max_window_layers": draw.choice([1, 28]),
    }


def _qwen3(draw: random.Random, seed: int) -> dict[str, Any]:
    window = {"use_sliding_window": draw.random() < 0.5, "sliding_window": 5}
    return _qwen(draw, seed) | window | {"attention_bias": draw.random() < 0.5}


def _qwen3_next(draw: random.Random, seed: int) -> dict[str, Any]:
    shared = {"shared_expert_intermediate_size": draw.choice([6, 14])}
    return _qwen(draw, seed) | shared | delta_net_fields(draw, seed, layers=3 if seed % 100 else 2)


def _gpt_oss(draw: random.Random, seed: int) -> dict[str, Any]:
    return {
        "swiglu_limit": draw.choice([0.5, 1.5]),  # some values are clamped
        "swiglu_alpha": draw.choice([1.702, 0.9]),
        "sliding_window": draw.choice([3, 128]),
        "attention_bias": draw.random() < 0.5,
    }


WITHOUT_LATENT = ("head_dim", "num_key_value_heads", "num_experts", "num_experts_per_tok")


def latent_fields(draw: random.Random, fields: dict[str, Any]) -> dict[str, Any]:
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


def deepseek_expert_fields(draw: random.Random, seed: int) -> dict[str, Any]:
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


_FIELDS = {
    "mixtral": _mixtral,
    "qwen2_moe": _qwen2,
    "qwen3_moe": _qwen3,
    "qwen3_next": _qwen3_next,
    "gpt_oss": _gpt_oss,
}


def randomise(module: nn.Module, seed: int) -> None:
    """Set all parameters, norms and biases too, to random values that differ from their initial ones.

    Matrices keep the size of what goes through them; scores of routers are far from each other, so that
    rounding changes no choice.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, param in module.named_parameters():
            noise = torch.randn(param.shape, generator=generator)
            if "norm" in name:
                param.add_(0.3 * noise)  # to 1, or 0 if it is zero-centred
            elif param.ndim == 1 or name.endswith("_bias"):
                param.copy_(0.5 * noise)
            else:
                param.copy_(noise * param.shape[-1] ** -0.5)
        for name, buffer in module.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(0.3 * torch.randn(buffer.shape, generator=generator))


def experts_in_our_names(state: Mapping[str, Tensor], prefix: str, ours: str) -> Arrays:
    """Return a layer's experts below `prefix` of a transformers state dict, as our arrays below `ours`."""
    own = {name.removeprefix(prefix): t.detach() for name, t in state.items() if name.startswith(prefix)}
    arrays: Arrays = {}
    renamed = {
        "gate.weight": "router.weight",
        "gate.e_score_correction_bias": "router.expert_bias",
        "router.weight": "router.weight",
        "router.bias": "router.bias",
        "experts.down_proj": "experts.linear_fc2.weight",
        "experts.down_proj_bias": "experts.linear_fc2.bias",
        "shared_expert.gate_proj.weight": "shared_experts.linear_fc1.weight.gate",
        "shared_expert.up_proj.weight": "shared_experts.linear_fc1.weight.up",
        "shared_expert.down_proj.weight": "shared_experts.linear_fc2.weight",
        "shared_experts.gate_proj.weight": "shared_experts.linear_fc1.weight.gate",
        "shared_experts.up_proj.weight": "shared_experts.linear_fc1.weight.up",
        "shared_experts.down_proj.weight": "shared_experts.linear_fc2.weight",
        "shared_expert_gate.weight": "shared_experts.gate_weight",
        "gate_proj.weight": "linear_fc1.weight.gate",  # of a dense layer
        "up_proj.weight": "linear_fc1.weight.up",
        "down_proj.weight": "linear_fc2.weight",
    }
    is_gpt_oss = "experts.gate_up_proj_bias" in own
    for name, value in own.items():
        # GPT-OSS has its experts' matrices transposed, and rows of gate and up by turns.
        value = value.transpose(1, 2) if is_gpt_oss and value.ndim == 3 else value
        if name.startswith("experts.gate_up_proj"):
            kind = "bias" if name.endswith("_bias") else "weight"
            gate, up = (value[:, ::2], value[:, 1::2]) if is_gpt_oss else value.chunk(2, dim=1)
            arrays[f"{ours}experts.linear_fc1.{kind}.gate"] = gate
            arrays[f"{ours}experts.linear_fc1.{kind}.up"] = up
        else:
            arrays[ours + renamed[name]] = value
    return arrays


def fill(declared: ShardedStateDict | Iterable[ShardedStateDict], arrays: Arrays) -> set[str]:
    """Fill the parameters of one rank with its boxes of the arrays; return the keys of those it has.

    Rows of a padded vocabulary stay as they are.
    """
    keys = set()
    for tensor in tensors_of(declared):
        array, box = arrays[tensor.key], tensor.global_slice()
        assert tensor.data is not None
        if tensor.allow_shape_mismatch:
            start, stop, _ = box[0].indices(len(array))
            tensor.data.detach()[: stop - start] = array[start:stop]
        else:
            assert tuple(array.shape) == tensor.global_shape, tensor.key
            tensor.data.detach().copy_(array[box].view(tensor.data.shape))
        keys.add(tensor.key)
    return keys
