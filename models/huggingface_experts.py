"""The mixture of experts of a Hugging Face model, read from its `config.json`.

Mixtral, Qwen2-MoE, Qwen3-MoE and GPT-OSS, as transformers 4 and 5 write them.

transformers adds a load-balancing loss if `output_router_logits` is set, over all layers at once; ours are of
each layer. So `router_aux_loss_coef` is not taken over: choose the losses of a training run yourself, with
`dataclasses.replace(moe.routing, balance_loss=...)`.

Source: transformers 4.57 and 5.23, `MixtralConfig`, `Qwen2MoeConfig`, `Qwen3MoeConfig`, `GptOssConfig` and
their models.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from megackpt.errors import DeclarationError
from megackpt.parallel import RoutingOptions, SwiGLU
from models.moe_config import MoEConfig

_NUMBER_OF_EXPERTS = ("num_local_experts", "num_experts")
# How other families, which have other routers, spell it.
_SIGNS_OF_EXPERTS = (*_NUMBER_OF_EXPERTS, "n_routed_experts", "moe_num_experts")


def experts_of(config: Mapping[str, Any]) -> MoEConfig | None:
    """Return the experts that a Hugging Face `config.json` describes; None if all layers are dense. Pure.

    Args:
        config: the parsed file.

    Raises:
        DeclarationError: a family whose experts are not supported, a field that is missing or no number in
            its range, or one that changes what the model computes in a way that is not supported. The message
            has its name.
    """
    family = config.get("model_type")
    read = _FAMILIES.get(family) if isinstance(family, str) else None
    if read is not None:
        return read(config)
    signs = [f"{name} {config[name]}" for name in _SIGNS_OF_EXPERTS if config.get(name)]
    if signs:
        raise DeclarationError(
            f"config.json: model_type {family!r} has experts ({', '.join(signs)}), which are not supported. "
            f"Families with experts that are: {', '.join(_FAMILIES)}."
        )
    return None


def _mixtral(config: Mapping[str, Any]) -> MoEConfig:
    _require(config, "hidden_act", "silu", default="silu")
    _require(config, "router_jitter_noise", 0, default=0)
    return MoEConfig(
        num_experts=_num_experts(config),
        ffn_hidden_size=_integer(config, "intermediate_size"),
        routing=_routing(config, normalise=True),
        bias=False,
    )


def _qwen(config: Mapping[str, Any]) -> MoEConfig | None:
    """Qwen2-MoE and Qwen3-MoE: the first has shared experts with a gate."""
    layers = _sparse_layers(config)
    if not any(layers) or _num_experts(config) == 0:
        return None
    _require(config, "hidden_act", "silu", default="silu")
    has_shared = config["model_type"] == "qwen2_moe"
    return MoEConfig(
        num_experts=_num_experts(config),
        ffn_hidden_size=_integer(config, "moe_intermediate_size"),
        routing=_routing(config, normalise=bool(config.get("norm_topk_prob", False))),
        shared_ffn_hidden_size=_integer(config, "shared_expert_intermediate_size") if has_shared else 0,
        shared_gate=has_shared,
        layer_freq=1 if all(layers) else tuple(map(int, layers)),
        bias=False,
    )


def _gpt_oss(config: Mapping[str, Any]) -> MoEConfig:
    # The activation does not depend on hidden_act. transformers 4 has its numbers in the model's code.
    return MoEConfig(
        num_experts=_num_experts(config),
        ffn_hidden_size=_integer(config, "intermediate_size"),
        routing=_routing(config, normalise=True),
        activation=SwiGLU(
            alpha=_number(config, "swiglu_alpha", 1.702),
            limit=_number(config, "swiglu_limit", 7.0),
            up_offset=1.0,
        ),
        bias=True,
        router_bias=True,
    )


_FAMILIES: Mapping[str, Callable[[Mapping[str, Any]], MoEConfig | None]] = {
    "mixtral": _mixtral,
    "qwen2_moe": _qwen,
    "qwen3_moe": _qwen,
    "gpt_oss": _gpt_oss,
}


def _sparse_layers(config: Mapping[str, Any]) -> list[bool]:
    """Return for each layer whether it has experts."""
    step = _integer(config, "decoder_sparse_step", default=1, at_least=1)
    dense = config.get("mlp_only_layers") or ()
    return [
        layer not in dense and (layer + 1) % step == 0
        for layer in range(_integer(config, "num_hidden_layers"))
    ]


def _routing(config: Mapping[str, Any], *, normalise: bool) -> RoutingOptions:
    top_k, num_experts = _integer(config, "num_experts_per_tok"), _num_experts(config)
    if top_k > num_experts:
        raise _unsupported(config, "num_experts_per_tok", f"at most the number of experts, {num_experts}")
    if top_k == 1 and normalise:
        # Its weight would always be 1, so that the router would get no gradient: see RoutingOptions.
        raise _unsupported(config, "num_experts_per_tok", "at least 2, as their weights are normalised")
    return RoutingOptions(top_k=top_k, normalise=normalise)


def _num_experts(config: Mapping[str, Any]) -> int:
    names = [name for name in _NUMBER_OF_EXPERTS if config.get(name) is not None]
    if len({config[name] for name in names}) > 1:
        spelled = " and ".join(f"{name} {config[name]}" for name in names)
        raise DeclarationError(f"config.json: {spelled} are two names of one number. Remove the wrong one.")
    return _integer(config, names[0] if names else _NUMBER_OF_EXPERTS[0], at_least=0)


def _integer(config: Mapping[str, Any], name: str, *, default: int | None = None, at_least: int = 1) -> int:
    value = config.get(name, default)
    if not isinstance(value, int) or isinstance(value, bool) or value < at_least:
        raise _unsupported(config, name, f"an integer of at least {at_least}")
    return value


def _number(config: Mapping[str, Any], name: str, default: float) -> float:
    value = config.get(name, default)
    if not isinstance(value, int | float) or isinstance(value, bool) or not value > 0:
        raise _unsupported(config, name, "a number larger than 0")
    return float(value)


def _require(config: Mapping[str, Any], name: str, value: object, *, default: object) -> None:
    if config.get(name, default) != value:
        raise _unsupported(config, name, repr(value))


def _unsupported(config: Mapping[str, Any], name: str, supported: str) -> DeclarationError:
    state = f"{name} is {config[name]!r}" if name in config else f"there is no {name}"
    return DeclarationError(
        f"config.json of model_type {config['model_type']!r}: {state}. Supported is {supported}. Correct the "
        f"file, or choose another model."
    )
