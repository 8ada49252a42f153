"""Mamba-2, and hybrids of it with attention, MLPs and experts, read from a Hugging Face `config.json`.

Source: transformers 5.23, `Mamba2Config`, `NemotronHConfig` and their models; the older spellings of layers
are those of the `config.json` that NVIDIA publishes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from megackpt.training.parallel import MambaSizes
from models.block_config import AttentionConfig, MLPConfig, MoEConfig, NoPositions
from models.config import BlockKind, GPTConfig
from models.huggingface.experts import deepseek_routing
from models.huggingface.fields import ConfigFields

_KINDS: Mapping[str, BlockKind] = {
    "M": "mamba",
    "*": "attention",
    "-": "mlp",
    "E": "moe",
    "linear_attention": "mamba",
    "full_attention": "attention",
    "mamba": "mamba",
    "attention": "attention",
    "mlp": "mlp",
    "moe": "moe",
}
_SEQ_LENGTH = 4096  # of Mamba-2, whose config has no longest sequence


def mamba2(fields: ConfigFields) -> GPTConfig:
    """Return Mamba-2, all of whose layers are mixers.

    Raises:
        DeclarationError: a field that is missing, out of range, or has a value that is not supported.
    """
    fields.skip(_WITHOUT_EFFECT)
    fields.require("hidden_act", "silu")
    count = fields.integer("num_hidden_layers")
    sizes = _sizes(fields, ("num_heads", "head_dim", "state_size"), _limit(fields))
    if sizes.inner_size != fields.integer("hidden_size") * fields.integer("expand"):
        raise fields.error("expand", f"must make {sizes.inner_size} of hidden_size, the extent of all heads")
    return GPTConfig(
        vocab_size=fields.integer("vocab_size"),
        hidden_size=fields.integer("hidden_size"),
        num_layers=count,
        num_heads=1,
        seq_length=_SEQ_LENGTH,
        tied_embeddings=fields.flag("tie_word_embeddings"),
        norm_eps=sizes.norm_eps,
        positions=NoPositions(),
        layer_blocks=(("mamba",),) * count,
        mamba=sizes,
    )


def nemotron_h(fields: ConfigFields) -> GPTConfig:
    """Return Nemotron-H, each of whose layers is a Mamba-2 mixer, attention, an MLP or experts.

    Raises:
        DeclarationError: a field that is missing, out of range, or has a value that is not supported.
    """
    # transformers gives attention no biases, and takes the first of the limits from time_step_min.
    fields.skip({*_WITHOUT_EFFECT, *_OF_FURTHER_TOKENS, "attention_bias", "time_step_limit", "expand"})
    fields.require("mamba_hidden_act", "silu")
    fields.require("sliding_window", None)
    fields.require("tie_word_embeddings", None, False)  # transformers does not tie them
    fields.require("moe_latent_size", None)
    blocks = tuple((kind,) for kind in _layer_kinds(fields))
    kinds = {kind for (kind,) in blocks}
    moe = _experts(fields)
    limits = fields.number("time_step_min"), math.inf
    mamba = _sizes(fields, ("mamba_num_heads", "mamba_head_dim", "ssm_state_size"), limits)
    mlp_bias = fields.flag("mlp_bias")
    return GPTConfig(
        vocab_size=fields.integer("vocab_size"),
        hidden_size=fields.integer("hidden_size"),
        num_layers=len(blocks),
        num_heads=fields.integer("num_attention_heads"),
        num_query_groups=fields.integer("num_key_value_heads"),
        ffn_hidden_size=fields.integer("intermediate_size"),
        seq_length=fields.integer("max_position_embeddings"),
        tied_embeddings=False,
        norm_eps=mamba.norm_eps,
        positions=NoPositions(),
        attention=AttentionConfig(head_dim=fields.integer("head_dim")),
        mlp=MLPConfig(gated=False, activation=fields.activation("mlp_hidden_act"), bias=mlp_bias),
        moe=moe if "moe" in kinds else None,
        mamba=mamba if "mamba" in kinds else None,
        layer_blocks=blocks,
    )


_WITHOUT_EFFECT = (
    "mamba_ssm_cache_dtype",
    "num_logits_to_keep",
    "rescale_prenorm_residual",
    "residual_in_fp32",
    "time_step_floor",
    "time_step_max",
    "time_step_min",
    "time_step_rank",
    "use_mamba_kernels",
    "mamba_proj_bias",
    "moe_shared_expert_overlap",
    "hidden_dropout",
)
"""What decides about initial values, kernels and rounding only, or is not looked at."""

_OF_FURTHER_TOKENS = ("num_nextn_predict_layers", "mtp_layers_block_type", "mtp_hybrid_override_pattern")


def _layer_kinds(fields: ConfigFields) -> list[BlockKind]:
    """Return the kind of each layer; the file has a list of words, or a string of one letter for each."""
    fields.skip(("num_hidden_layers", *_NAMES_OF_LAYERS))  # their number is that of the list
    name = next((name for name in _NAMES_OF_LAYERS if fields.config.get(name)), _NAMES_OF_LAYERS[0])
    kinds = fields.value(name)
    if not isinstance(kinds, str | list | tuple) or not kinds or not {*kinds} <= _KINDS.keys():
        raise fields.error(name, f"must be a list of layers: {', '.join(_KINDS)} are supported")
    return [_KINDS[kind] for kind in kinds]


_NAMES_OF_LAYERS = ("layers_block_type", "layer_types", "hybrid_override_pattern")


def _sizes(
    fields: ConfigFields, names: tuple[str, str, str], time_step_limit: tuple[float, float]
) -> MambaSizes:
    """Return the sizes of the mixers; `names` are those of heads, head dim and state."""
    num_heads, head_dim, state_size = map(fields.integer, names)
    return MambaSizes(
        num_heads=num_heads,
        head_dim=head_dim,
        state_size=state_size,
        num_groups=fields.integer("n_groups"),
        kernel=fields.integer("conv_kernel"),
        chunk_size=fields.integer("chunk_size"),
        bias=fields.flag("use_bias"),
        conv_bias=fields.flag("use_conv_bias"),
        time_step_limit=time_step_limit,
        norm_eps=fields.number("layer_norm_epsilon"),
    )


def _experts(fields: ConfigFields) -> MoEConfig:
    fields.skip(("n_shared_experts",))  # the size that follows is that of all
    return MoEConfig(
        num_experts=fields.integer("n_routed_experts"),
        ffn_hidden_size=fields.integer("moe_intermediate_size"),
        routing=deepseek_routing(fields),
        shared_ffn_hidden_size=fields.integer("moe_shared_expert_intermediate_size"),
        gated=False,
        bias=False,
    )


def _limit(fields: ConfigFields) -> tuple[float, float]:
    """Return the limits of time steps; JSON has no infinity, so transformers 5 writes a mapping."""
    limits = fields.value("time_step_limit")
    if not isinstance(limits, list | tuple) or len(limits) != 2:
        raise fields.error("time_step_limit", "must have two numbers")
    least, most = (math.inf if limit == {"__float__": "Infinity"} else limit for limit in limits)
    if not all(isinstance(limit, int | float) for limit in (least, most)) or not 0 <= least < most:
        raise fields.error("time_step_limit", "must have two numbers, the smaller one first")
    return float(least), float(most)
