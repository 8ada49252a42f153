"""Reading checkpoints of Megatron-Core's GPT into ours: its arrays, as boxes of our parameters.

    megackpt.load(megatron_state(model, megackpt.load_sharded_metadata(path)), path)

Where each of ours is in its arrays is a map: see `megackpt.maps.megatron`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from megackpt.mapping import ShardedLayout, ShardedStateDict, ShardedTensor
from megackpt.maps import MappedArray, bound_to, megatron_map
from megackpt.maps.requests import mapped_tensors
from megackpt.parallel import ModelChunks
from models.config import GPTConfig
from models.gpt import GPT

_STACKED = "decoder.layers."


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
        MapError: the checkpoint has no array for a parameter.
    """
    boxes: ShardedStateDict = {}
    for chunk in model if isinstance(model, ModelChunks) else [model]:
        assert isinstance(chunk, GPT)
        tensors = list(_tensors(chunk.sharded_state_dict()))
        arrays = _arrays(tensors, chunk.config)
        made = megatron_map(arrays, _sizes(chunk.config), keys, prefix=prefix)
        bound = bound_to(made, {tensor.key for tensor in tensors})
        for tensor in tensors:
            for part in mapped_tensors(tensor, tensor.key, bound):
                boxes[f"{tensor.key}.{len(boxes)}"] = part.theirs
    return boxes


def _tensors(state: ShardedStateDict) -> Iterable[ShardedTensor]:
    for entity in state.values():
        if isinstance(entity, ShardedLayout):
            yield from entity.tensors()
        elif isinstance(entity, ShardedTensor):
            yield entity


def _arrays(tensors: Iterable[ShardedTensor], config: GPTConfig) -> dict[str, MappedArray]:
    """Return the arrays that tensors are chunks of, with keys for each layer and without padding."""
    arrays = {}
    for tensor in tensors:
        key, shape = tensor.key, tensor.global_shape
        if tensor.allow_shape_mismatch:
            rows = (config.vocab_size, *shape[1:])
            arrays[key] = MappedArray(rows, rows, is_padded=True)
        elif key.startswith(_STACKED) and not key[len(_STACKED)].isdigit():
            name = key.removeprefix(_STACKED)
            arrays |= {f"{_STACKED}{n}.{name}": MappedArray(shape[1:], shape[1:]) for n in range(shape[0])}
        else:
            arrays[key] = MappedArray(shape, shape)
    return arrays


def _sizes(config: GPTConfig) -> dict[str, int]:
    return {"heads": config.num_heads, "groups": config.query_groups, "d": config.head_dim}
