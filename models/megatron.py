"""Reading checkpoints of Megatron-Core's GPT into ours: where each tensor is in its arrays.

Megatron-Core has the same tensors under its own keys, and joins some that we store one by one: queries, keys
and values by query group, gate and up one after the other. So a load asks for boxes of its arrays:

    megackpt.load(megatron_state(model, megackpt.load_sharded_metadata(path)), path)

Source: Megatron-Core `GPTModel.sharded_state_dict`, with the keys that its local and its Transformer Engine
layers share (`gpt_layer_specs`, `transformer.moe.experts`, `transformer.mlp`), 0.16.1 and 0.19.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import replace

from megackpt.errors import DeclarationError
from megackpt.mapping import ShardedLayout, ShardedStateDict, ShardedTensor
from megackpt.parallel import ModelChunks
from models.config import GPTConfig
from models.gpt import GPT

_LAYER = re.compile(r"decoder\.layers\.(?:(?P<index>\d+)\.)?(?P<name>.+)")
_COMPONENT = re.compile(r"(?P<fused>.+\.(?:weight|bias))\.(?P<component>q|k|v|gate|up)")


def megatron_state(model: GPT | ModelChunks, keys: Collection[str], *, prefix: str = "") -> ShardedStateDict:
    """Declare this rank's parameters as boxes of the arrays of a Megatron-Core checkpoint. Local.

    Args:
        model: the model; a load fills its parameters in place.
        keys: of the checkpoint, as `load_sharded_metadata` returns them. They tell whether its layers are
            stacked along an axis or have keys of their own.
        prefix: of the checkpoint's keys.

    Returns:
        The boxes, by our keys and a number.

    Raises:
        DeclarationError: the checkpoint has no array for a parameter.
    """
    boxes: ShardedStateDict = {}
    for chunk in model if isinstance(model, ModelChunks) else [model]:
        assert isinstance(chunk, GPT)
        for tensor in _tensors(chunk.sharded_state_dict()):
            for number, box in enumerate(_boxes(_renamed(tensor, keys, prefix), tensor.key, chunk.config)):
                boxes[f"{tensor.key}.{_layer(tensor)}.{number}"] = box
    return boxes


def _tensors(state: ShardedStateDict) -> list[ShardedTensor]:
    tensors: list[ShardedTensor] = []
    for entity in state.values():
        if isinstance(entity, ShardedLayout):
            tensors += entity.tensors()
        elif isinstance(entity, ShardedTensor):
            tensors.append(entity)
    return tensors


def _layer(tensor: ShardedTensor) -> int | None:
    """Return the global layer that a tensor is in, None outside of the layers."""
    match = _LAYER.fullmatch(tensor.key)
    if match is None:
        return None
    return tensor.global_offset[0] if match["index"] is None else int(match["index"])


def _renamed(tensor: ShardedTensor, keys: Collection[str], prefix: str) -> ShardedTensor:
    """Return a tensor under Megatron-Core's key, with or without a layer axis as the checkpoint has it."""
    component = _COMPONENT.fullmatch(tensor.key)
    fused = tensor.key if component is None else component["fused"]
    match = _LAYER.fullmatch(fused)
    names, stacked = [fused], list[str]()
    if match is not None:
        below = _megatron_names(match["name"])
        stacked = [] if match["index"] is not None else [f"decoder.layers.{name}" for name in below]
        names = stacked + [f"decoder.layers.{_layer(tensor)}.{name}" for name in below]
    key = next((prefix + name for name in names if prefix + name in keys), None)
    if key is None:
        raise DeclarationError(
            f"{tensor.key!r}: the checkpoint has no array "
            f"{' or '.join(repr(prefix + name) for name in names)}, which are Megatron-Core's names for it. "
            f"Give a model with the same parts (experts, ties, biases), or the prefix of its keys.",
            key=tensor.key,
        )
    is_stacked = key in [prefix + name for name in stacked]
    own = tensor if is_stacked or match is None or match["index"] is not None else _without_layer_axis(tensor)
    return replace(own, key=key, axis_fragmentations=None)


def _megatron_names(name: str) -> list[str]:
    """Return the names that Megatron-Core has for a parameter below a layer.

    A norm is stored with the projection that follows it. Before experts Transformer Engine's layers have
    none; the local ones use that name all the same.
    """
    if name.startswith("input_layernorm."):
        return [name.replace("input_layernorm.", "self_attention.linear_qkv.layer_norm_"), name]
    if name.startswith("pre_mlp_layernorm."):
        return [name.replace("pre_mlp_layernorm.", "mlp.linear_fc1.layer_norm_"), name]
    return [name.replace("mlp.experts.", "mlp.experts.experts.")]


def _without_layer_axis(tensor: ShardedTensor) -> ShardedTensor:
    return replace(
        tensor,
        global_shape=tensor.global_shape[1:],
        global_offset=tensor.global_offset[1:],
        prepend_axis_num=tensor.prepend_axis_num - 1,
        axis_fragmentations=None,
    )


def _boxes(tensor: ShardedTensor, our_key: str, config: GPTConfig) -> list[ShardedTensor]:
    """Return the boxes that a tensor of ours is in Megatron-Core's array, whose key it has already."""
    match = _COMPONENT.fullmatch(our_key)
    if match is None:
        return [tensor]
    axis = len(tensor.global_shape) - (2 if match["fused"].endswith("weight") else 1)
    rows, start = tensor.global_shape[axis], tensor.global_offset[axis]
    count = tensor.local_shape[axis - tensor.prepend_axis_num]
    if match["component"] in ("gate", "up"):
        first = rows if match["component"] == "up" else 0
        return [_box(tensor, axis, 0, count, to=first + start, extent=2 * rows)]
    # The rows of each query group follow each other: its queries, its key, its value.
    heads, head_dim = config.num_heads // config.query_groups, config.head_dim
    size = {"q": heads * head_dim, "k": head_dim, "v": head_dim}[match["component"]]
    before = {"q": 0, "k": heads * head_dim, "v": (heads + 1) * head_dim}[match["component"]]
    whole = (heads + 2) * head_dim
    boxes = []
    row = start
    while row < start + count:
        group, inside = divmod(row, size)
        length = min(size - inside, start + count - row)
        to = group * whole + before + inside
        extent = config.query_groups * whole
        boxes.append(_box(tensor, axis, row - start, length, to=to, extent=extent))
        row += length
    return boxes


def _box(tensor: ShardedTensor, axis: int, start: int, length: int, *, to: int, extent: int) -> ShardedTensor:
    """Return rows of a tensor as a box at row `to` of an array with `extent` rows."""
    dim = axis - tensor.prepend_axis_num
    assert tensor.data is not None
    data = tensor.data.narrow(dim, start, length)
    return replace(
        tensor,
        data=data,
        local_shape=tuple(data.shape),
        global_shape=(*tensor.global_shape[:axis], extent, *tensor.global_shape[axis + 1 :]),
        global_offset=(*tensor.global_offset[:axis], to, *tensor.global_offset[axis + 1 :]),
    )
