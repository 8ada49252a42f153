"""The mixtures of experts of Hugging Face models, read from `config.json`.

transformers adds a load-balancing loss if `output_router_logits` is set, over all layers at once; ours are of
each layer. So `router_aux_loss_coef` is not taken over: choose the losses of a training run yourself, with
`dataclasses.replace(moe.routing, balance_loss=...)`.

Source: transformers 4.57 and 5.23, `modeling_*.py` of the families.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from megackpt.training.parallel import RoutingOptions, SwiGLU
from models.block_config import MoEConfig
from models.huggingface.fields import ConfigFields


def mixtral_experts(fields: ConfigFields) -> MoEConfig:
    """Return the experts of Mixtral.

    Raises:
        DeclarationError: a field that is missing, out of range, or has a value that is not supported.
    """
    _require_silu(fields)
    fields.require("router_jitter_noise", None, 0)
    return MoEConfig(
        num_experts=fields.integer(_name_of_count(fields)),
        ffn_hidden_size=fields.integer("intermediate_size"),
        routing=_routing(fields, normalise=True),
        bias=False,
    )


def qwen_experts(fields: ConfigFields, *, shared: bool) -> MoEConfig | None:
    """Return the experts of Qwen2-MoE, whose layers also have shared ones with a gate, or of Qwen3-MoE.

    None if all layers are dense.

    Raises:
        DeclarationError: a field that is missing, out of range, or has a value that is not supported.
    """
    layers, count = _layers_with_experts(fields), _name_of_count(fields)
    if not any(layers) or fields.value(count) == 0:
        fields.skip(("num_experts_per_tok", "norm_topk_prob"))
        fields.skip(("moe_intermediate_size", "shared_expert_intermediate_size"))
        return None
    _require_silu(fields)
    return MoEConfig(
        num_experts=fields.integer(count),
        ffn_hidden_size=fields.integer("moe_intermediate_size"),
        routing=_routing(fields, normalise=fields.flag("norm_topk_prob")),
        shared_ffn_hidden_size=fields.integer("shared_expert_intermediate_size") if shared else 0,
        shared_gate=shared,
        layer_freq=1 if all(layers) else tuple(map(int, layers)),
        bias=False,
    )


def gpt_oss_experts(fields: ConfigFields) -> MoEConfig:
    """Return the experts of GPT-OSS, which have biases and an activation of their own.

    Raises:
        DeclarationError: a field that is missing, out of range, or has a value that is not supported.
    """
    fields.skip(("experts_per_token",))  # an older name of num_experts_per_tok, which is not looked at
    return MoEConfig(
        num_experts=fields.integer(_name_of_count(fields)),
        ffn_hidden_size=fields.integer("intermediate_size"),
        routing=_routing(fields, normalise=True),
        activation=SwiGLU(
            alpha=fields.number("swiglu_alpha"), limit=fields.number("swiglu_limit"), up_offset=1.0
        ),
        bias=True,
        router_bias=True,
    )


def deepseek_experts(fields: ConfigFields) -> MoEConfig | None:
    """Return the experts of DeepSeek-V3, which the first layers do not have; None if none has.

    The bias of the choice is kept as it is: give `routing` a `bias_rate` to train it.

    Raises:
        DeclarationError: a field that is missing, out of range, or has a value that is not supported.
    """
    # The original config.json of DeepSeek says what transformers takes for granted.
    fields.require("scoring_func", None, "sigmoid")
    fields.require("topk_method", None, "noaux_tc")
    fields.require("moe_layer_freq", None, 1)
    fields.skip(("ep_size", "aux_loss_alpha", "seq_aux", "num_local_experts"))
    count = fields.integer("num_hidden_layers")
    dense = min(fields.integer("first_k_dense_replace", at_least=0), count)
    sizes = {name: fields.integer(name) for name in ("n_routed_experts", "moe_intermediate_size")}
    routing = deepseek_routing(fields)
    shared_size = fields.integer("n_shared_experts") * sizes["moe_intermediate_size"]
    if dense == count:
        return None
    _require_silu(fields)
    return MoEConfig(
        num_experts=sizes["n_routed_experts"],
        ffn_hidden_size=sizes["moe_intermediate_size"],
        routing=routing,
        shared_ffn_hidden_size=shared_size,
        layer_freq=(0,) * dense + (1,) * (count - dense),
        bias=False,
    )


def deepseek_routing(fields: ConfigFields) -> RoutingOptions:
    """Return the routing to experts in groups, with a bias of the choice that stays as it is.

    Raises:
        DeclarationError: a field that is missing or out of range.
    """
    return RoutingOptions(
        top_k=fields.integer("num_experts_per_tok"),
        score_function="sigmoid",
        normalise=fields.flag("norm_topk_prob"),
        scaling_factor=fields.number("routed_scaling_factor"),
        num_groups=fields.integer("n_group"),
        group_top_k=fields.integer("topk_group"),
        group_score_count=2,
        bias_rate=0.0,
    )


def _layers_with_experts(fields: ConfigFields) -> list[bool]:
    step, dense = fields.integer("decoder_sparse_step"), _dense_layers(fields)
    return [
        layer not in dense and (layer + 1) % step == 0 for layer in range(fields.integer("num_hidden_layers"))
    ]


def _dense_layers(fields: ConfigFields) -> Collection[Any]:
    dense = fields.value("mlp_only_layers") or ()
    if not isinstance(dense, list | tuple) or any(type(layer) is not int for layer in dense):
        raise fields.error("mlp_only_layers", "must be a list of layers")
    return dense


def _routing(fields: ConfigFields, *, normalise: bool) -> RoutingOptions:
    top_k, num_experts = fields.integer("num_experts_per_tok"), fields.integer(_name_of_count(fields))
    if top_k > num_experts:
        raise fields.error("num_experts_per_tok", f"must be at most the number of experts, {num_experts}")
    if top_k == 1 and normalise:
        # Its weight would always be 1, so that the router would get no gradient: see RoutingOptions.
        raise fields.error("num_experts_per_tok", "must be at least 2, as their weights are normalised")
    return RoutingOptions(top_k=top_k, normalise=normalise)


def _name_of_count(fields: ConfigFields) -> str:
    """Return the name under which the file has the number of experts: `num_local_experts` is the newer one.

    Raises:
        DeclarationError: it has both names, with two values.
    """
    older, newer = (fields.config.get(name) for name in ("num_experts", "num_local_experts"))
    fields.skip(("num_experts", "num_local_experts"))
    if newer is None:
        return "num_experts"
    if older not in (None, newer):
        raise fields.error("num_experts", f"must be equal to num_local_experts, {newer!r}")
    return "num_local_experts"


def _require_silu(fields: ConfigFields) -> None:
    if fields.activation("hidden_act") != "silu":
        raise fields.error("hidden_act", "is not supported for experts; silu is")
