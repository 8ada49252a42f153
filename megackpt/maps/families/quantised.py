"""Quantised folders: they hold codes and scales instead of weights.

A map cannot move these, so a load raises an error that says how to dequantise.

Source: transformers 5.23, `utils.quantization_config` and `quantizers`. Without
`save_original_format=False`, its `save_pretrained` quantises again what `from_pretrained` has dequantised.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

from megackpt.errors import MapError

_QUANTISED_KEYS = re.compile(r".*(_blocks|_scales|\.weight_scale(_inv)?|\.qweight|\.weight_packed|\.absmax)")
"""Keys of a quantised folder: MXFP4, FP8, GPTQ and AWQ, compressed tensors, bitsandbytes."""

_DEQUANTISING_CONFIGS = {
    "compressed-tensors": "CompressedTensorsConfig",
    "fp8": "FineGrainedFP8Config",
    "mxfp4": "Mxfp4Config",
}
"""Classes of transformers that dequantise weights when they are loaded, by `quant_method`."""


def check_not_quantised(config: Mapping[str, Any], keys: Collection[str]) -> None:
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


def how_to_dequantise(config: Mapping[str, Any]) -> str:
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


def _method_of(config: Mapping[str, Any]) -> str:
    """Return the `quant_method` of a config; "" if it has none."""
    quantisation = config.get("quantization_config")
    method = quantisation.get("quant_method") if isinstance(quantisation, Mapping) else None
    return method if isinstance(method, str) else ""
