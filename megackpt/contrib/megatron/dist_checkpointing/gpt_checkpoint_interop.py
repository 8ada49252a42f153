"""Load a checkpoint of a GPT model into a hybrid model: its request is given the keys of the GPT model.

A layer of a GPT holds attention and an MLP. A hybrid model has a layer for each, named by a pattern such as
`M*-M*-`: `*` attention, `-` or `E` an MLP, `M` a Mamba layer, which no GPT has. The GPT stores all its layers
in one array along a first axis, under keys without a number.

Source: Megatron-Core 0.19, `dist_checkpointing.gpt_checkpoint_interop`, for the names and what they do.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from megackpt.contrib.megatron.dist_checkpointing.dict_utils import dict_list_map_inplace
from megackpt.entities import (
    LocalNonpersistentObject,
    ShardedBase,
    ShardedObject,
    ShardedStateDict,
    ShardedTensor,
    ShardedTensorFactory,
)
from megackpt.errors import DeclarationError

_LAYER = re.compile(r"decoder\.layers\.(\d+)\.")
_NORMS = ("decoder.final_norm.", "decoder.final_layernorm.")  # in a hybrid model, in a GPT
_NOT_STORED = "output_layer._extra_state"
_MTP, _STAGE = "/", "|"  # what separates the layers that predict more tokens, and pipeline stages


@dataclass(frozen=True)
class GPTCompatLayerMaps:
    """Which layer of a GPT stands for which layer of a hybrid model.

    Attributes:
        attention_to_gpt: GPT layer of each attention layer, by its number in the hybrid model.
        mlp_to_gpt: the same for MLP layers.
        fresh_init: layers that no GPT has; they keep the values they have.
        num_gpt_layers: layers of the GPT.
    """

    attention_to_gpt: Mapping[int, int]
    mlp_to_gpt: Mapping[int, int]
    fresh_init: frozenset[int]
    num_gpt_layers: int

    def gpt_layer(self, number: int, key: str) -> int | None:
        """Return the GPT's layer for a layer of the hybrid model; None for one that no GPT has.

        Raises:
            DeclarationError: the pattern has no such layer.
        """
        if number in self.fresh_init:
            return None
        layer = self.attention_to_gpt.get(number, self.mlp_to_gpt.get(number))
        if layer is None:
            raise DeclarationError(
                f"{key!r} is of layer {number}, which the hybrid pattern does not have. Give the pattern "
                f"that the model was built with.",
                key=key,
            )
        return layer


def gpt_compatible_layer_maps(hybrid_layer_pattern: str) -> GPTCompatLayerMaps:
    """Return which layers of a GPT stand for those of a hybrid pattern. Pure.

    Raises:
        DeclarationError: no GPT has such layers; it is a ValueError, as in Megatron-Core.
    """
    layers, _, predicting = hybrid_layer_pattern.partition(_MTP)
    layers = layers.replace(_STAGE, "")
    attention, mlps = _numbers(layers, "*"), _numbers(layers, "-E")
    fault = (
        "it has layers that predict several tokens, which a GPT checkpoint has no weights for"
        if predicting
        else _fault_of(layers)
    )
    if fault:
        raise DeclarationError(f"Pattern {hybrid_layer_pattern!r} fits no GPT checkpoint: {fault}.")
    return GPTCompatLayerMaps(
        attention_to_gpt={number: index for index, number in enumerate(attention)},
        mlp_to_gpt={number: index for index, number in enumerate(mlps)},
        fresh_init=frozenset(_numbers(layers, "M")),
        num_gpt_layers=len(attention),
    )


def _fault_of(layers: str) -> str:
    """Return why no GPT has layers of these symbols; "" if one can have them."""
    others = sorted(set(layers) - set("*-EM"))
    if others:
        return f"layers {others} hold other weights than a GPT's; only *, -, E and M can be taken"
    if "-" in layers and "E" in layers:
        return "it has both dense MLPs (-) and experts (E), and all layers of a GPT have one kind"
    attention, mlps = len(_numbers(layers, "*")), len(_numbers(layers, "-E"))
    return f"it has {attention} attention and {mlps} MLP layers" if not attention or attention != mlps else ""


def _numbers(layers: str, symbols: str) -> list[int]:
    """Return the numbers of the layers that have one of the symbols."""
    return [number for number, symbol in enumerate(layers) if symbol in symbols]


def retarget_sharded_state_dict_to_gpt_checkpoint(
    sharded_state_dict: ShardedStateDict, layer_maps: GPTCompatLayerMaps
) -> None:
    """Give the entities of a hybrid model or its optimizer the keys of a GPT checkpoint, in place. Local.

    Entities of layers that no GPT has become `LocalNonpersistentObject`s of the data that they have.

    Raises:
        DeclarationError: an entity is of a layer that the maps do not have.
    """
    dict_list_map_inplace(lambda leaf: _retargeted(leaf, layer_maps), sharded_state_dict)


def retarget_fsdp_state_dict_to_gpt_checkpoint(
    state_dict: Mapping[Any, Any],
    layer_maps: GPTCompatLayerMaps,
    checkpoint_keys: Iterable[str] | None = None,
    checkpoint_prefix: str = "",
) -> dict[Any, Any]:
    """Return a state dict of plain names (`fsdp_dtensor`) with the names of a GPT checkpoint. Local.

    With checkpoint_keys, paths of the checkpoint joined with dots, wrapper prefixes (`module.`) become those
    of the checkpoint, and leaves that it does not have are left out. checkpoint_prefix is the path of the
    given state dict there.

    Raises:
        DeclarationError: a name is of a layer that the maps do not have.
    """
    stored = None if checkpoint_keys is None else frozenset(checkpoint_keys)

    def renamed(value: Any, path: str) -> Any:
        if isinstance(value, (list, tuple)):
            return type(value)(renamed(inner, f"{path}.{index}") for index, inner in enumerate(value))
        if not isinstance(value, Mapping):
            return value
        result = {}
        for key, inner in value.items():
            name = _name_in_gpt(key, layer_maps, stored) if isinstance(key, str) else key
            if name is None:
                continue
            child_path = f"{path}.{name}" if path else str(name)
            if stored is None or isinstance(inner, (Mapping, list, tuple)) or child_path in stored:
                result[name] = renamed(inner, child_path)
        return result

    whole: dict[Any, Any] = renamed(state_dict, checkpoint_prefix)
    return whole


def _retargeted(leaf: Any, maps: GPTCompatLayerMaps) -> Any:
    if not isinstance(leaf, ShardedBase):
        return leaf
    match = _LAYER.search(leaf.key)
    layer = maps.gpt_layer(int(match[1]), leaf.key) if match else None
    if leaf.key.endswith(_NOT_STORED) or (match and layer is None):
        return LocalNonpersistentObject(leaf.data)
    if layer is None:
        leaf.key = leaf.key.replace(*_NORMS, 1)
        return leaf
    leaf.key = _LAYER.sub("decoder.layers.", leaf.key, count=1)
    return _as_layer(leaf, layer, maps.num_gpt_layers)


def _as_layer(entity: ShardedBase, layer: int, layers: int) -> ShardedBase:
    """Put an axis of layers before the axes of an entity, in place: it is one of them."""
    if isinstance(entity, ShardedTensorFactory):
        build = entity.build_fn

        def build_layer(*args: Any) -> Any:
            built = build(*args)
            dict_list_map_inplace(lambda part: _as_layer(part, layer, layers), built)
            return built

        entity.build_fn = build_layer
    elif isinstance(entity, ShardedTensor):
        entity.global_shape = (layers, *entity.global_shape)
        entity.global_offset = (layer, *entity.global_offset)
        if entity.axis_fragmentations is not None:
            entity.axis_fragmentations = (layers, *entity.axis_fragmentations)
        entity.prepend_axis_num += 1
    elif isinstance(entity, ShardedObject):
        is_single = tuple(entity.global_shape) == (1,)  # the axis stands for no axis at all
        entity.global_shape = (layers, *(() if is_single else entity.global_shape))
        entity.global_offset = (layer, *(() if is_single else entity.global_offset))
    return entity


def _name_in_gpt(name: str, maps: GPTCompatLayerMaps, stored: frozenset[str] | None) -> str | None:
    """Return a name as a GPT checkpoint has it; None for what it does not have."""
    layer_match = _LAYER.search(name)
    layer = maps.gpt_layer(int(layer_match[1]), name) if layer_match else None
    if name.endswith(_NOT_STORED) or (layer_match and layer is None):
        return None
    if layer is None:
        name = name.replace(*_NORMS, 1)
    else:
        name = _LAYER.sub(f"decoder.layers.{layer}.", name, count=1)
    bare = re.escape(re.sub(r"^(module\.)+", "", name))
    wrapped = re.compile(rf"(?<!\w)((?:module\.)*{bare})(?=\.|$)")
    spellings = {match[1] for key in stored or () if (match := wrapped.search(key))}
    return spellings.pop() if len(spellings) == 1 else name
