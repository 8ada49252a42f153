"""Reads the sizes of a model from the `config.json` of a folder, and rejects quantised ones.

A quantised folder holds codes and scales instead of weights. A map cannot move these, so a load raises an
error that says how to dequantise.

Source: transformers 5.23, `utils.quantization_config` and `quantizers`. Without
`save_original_format=False`, its `save_pretrained` quantises again what `from_pretrained` has dequantised.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any, TypeAlias

from megackpt.errors import MapError

Config: TypeAlias = Mapping[str, Any]
"""The parsed `config.json` of a Hugging Face folder."""

_LARGEST = 2**31 - 1
"""Largest extent of an axis."""

_MOST = 10_000
"""Most layers, experts or heads of a model."""


_QUANTISED_KEYS = re.compile(r".*(_blocks|_scales|\.weight_scale(_inv)?|\.qweight|\.weight_packed|\.absmax)")
"""Keys of a quantised folder: MXFP4, FP8, GPTQ and AWQ, compressed tensors, bitsandbytes."""

_DEQUANTISING_CONFIGS = {
    "compressed-tensors": "CompressedTensorsConfig",
    "fp8": "FineGrainedFP8Config",
    "mxfp4": "Mxfp4Config",
}
"""Classes of transformers that dequantise weights when they are loaded, by `quant_method`."""


def with_defaults(config: Config, keys: Collection[str], **defaults: object) -> Config:
    """Return a config with the defaults of its family for what it does not name.

    Args:
        config: the config.
        keys: of the folder; none for one to be written.
        **defaults: of the family, where they decide which arrays there are and of which shape.

    Raises:
        MapError: the weights are quantised.
    """
    check_not_quantised(config, keys)
    return {**defaults, **config}


def size_of(config: Config, *names: str) -> int:
    """Return the first of some sizes that a config has.

    Raises:
        MapError: it has none of them, or it is not a positive integer.
    """
    for name in names:
        value = config.get(name)
        if value is not None:
            if type(value) is not int or not 0 < value <= _LARGEST:
                raise MapError(
                    f"config.json: {name} is {value!r}. Give a positive integer of at most {_LARGEST}.",
                    key=name,
                )
            return value
    raise MapError(
        f"config.json has no {' or '.join(names)}, which the map needs. Give the config of the model.",
        key=names[0],
    )


def count_of(config: Config, *names: str) -> int:
    """Return the first of some numbers of layers, experts or heads that a config has.

    Raises:
        MapError: it has none of them, or it is not a positive integer, or more than any model has. A map has
            a pair for each, so that a wrong number would cost memory without end.
    """
    count = size_of(config, *names)
    if count > _MOST:
        raise MapError(
            f"config.json: {names[0]} is {count}, and at most {_MOST} are supported. Correct the config.",
            key=names[0],
        )
    return count


def decoder_sizes(config: Config) -> dict[str, int]:
    """Return the sizes that decoders have in common, by the names of axes in rules.

    `v` vocabulary, `h` hidden state, `i` inside of the MLP, `d` one head, `q` all query heads, `k` all key
    (or value) heads, `heads` queries, `groups` keys.
    """
    hidden, heads = size_of(config, "hidden_size"), count_of(config, "num_attention_heads")
    groups = heads if config.get("num_key_value_heads") is None else count_of(config, "num_key_value_heads")
    head_dim = _head_dim(config, hidden, heads)
    if heads % groups:
        raise MapError(
            f"config.json: num_key_value_heads {groups} does not divide num_attention_heads {heads}.",
            key="num_key_value_heads",
        )
    return {
        "v": size_of(config, "vocab_size"),
        "h": hidden,
        "i": size_of(config, "intermediate_size"),
        "d": head_dim,
        "q": heads * head_dim,
        "k": groups * head_dim,
        "heads": heads,
        "groups": groups,
    }


def _head_dim(config: Config, hidden: int, heads: int) -> int:
    if config.get("head_dim") is not None:
        return size_of(config, "head_dim")
    if hidden % heads:
        raise MapError(
            f"config.json: hidden_size {hidden} is not a multiple of num_attention_heads {heads}, and there "
            f"is no head_dim. Give head_dim.",
            key="head_dim",
        )
    return hidden // heads


def layers_with_experts(config: Config) -> list[int]:
    """Return the layers of a Qwen model that have experts instead of one MLP."""
    if 0 in (config.get("num_experts"), config.get("num_local_experts")):
        return []
    step = 1 if config.get("decoder_sparse_step") is None else size_of(config, "decoder_sparse_step")
    dense = config.get("mlp_only_layers") or []
    if not isinstance(dense, list):
        raise MapError(
            f"config.json: mlp_only_layers is {dense!r}. It must be a list of layers.", key="mlp_only_layers"
        )
    layers = range(count_of(config, "num_hidden_layers"))
    return [layer for layer in layers if layer not in dense and (layer + 1) % step == 0]


def check_not_quantised(config: Config, keys: Collection[str]) -> None:
    """Check that the weights of a folder are not quantised. Pure.

    Args:
        config: its parsed `config.json`. That of a folder to be written, without keys, must not say so.
        keys: of the folder.

    Raises:
        MapError: they are.
    """
    quantised = sorted(key for key in keys if _QUANTISED_KEYS.fullmatch(key))
    if quantised or (config.get("quantization_config") and not keys):
        where = f"{quantised[0]!r}" if quantised else "quantization_config of config.json"
        raise MapError(
            f"The weights are quantised ({_method_of(config) or 'unknown method'}; {where}). A map moves "
            f"elements and cannot compute weights of codes and scales. {how_to_dequantise(config)}",
            key=quantised[0] if quantised else "quantization_config",
        )


def how_to_dequantise(config: Config) -> str:
    """Return what to do with a quantised folder, by its `config.json`. Pure."""
    method = _method_of(config)
    if method == "bitsandbytes":
        load = "model = AutoModelForCausalLM.from_pretrained(folder).dequantize()"
    elif method in _DEQUANTISING_CONFIGS:
        load = (
            f"model = AutoModelForCausalLM.from_pretrained(folder, dtype='bfloat16', "
            f"quantization_config={_DEQUANTISING_CONFIGS[method]}(dequantize=True))"
        )
    else:
        return (
            "config.json names no method that transformers dequantises: give the folder in floating point "
            "that this one was made of."
        )
    return (
        f"Dequantise it with transformers 5: {load}; "
        f"model.save_pretrained(plain, save_original_format=False). Then give the folder `plain`."
    )


def _method_of(config: Config) -> str:
    """Return the `quant_method` of a config; "" if it has none."""
    quantisation = config.get("quantization_config")
    method = quantisation.get("quant_method") if isinstance(quantisation, Mapping) else None
    return method if isinstance(method, str) else ""
