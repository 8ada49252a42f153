"""Reading checkpoints of Megatron-Core's GPT into ours: its arrays, as boxes of our parameters.

    megackpt.load(megatron_state(model, megackpt.load_sharded_metadata(path)), path)

Where each of ours is in its arrays is a map: see `megackpt.maps.megatron`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from megackpt.entities import ShardedLayout, ShardedStateDict, ShardedTensor
from megackpt.errors import MapError
from megackpt.maps import MappedArray, bound_to, megatron_map
from megackpt.maps.requests import mapped_tensors
from megackpt.training.parallel import ModelChunks
from models.block_config import RotaryConfig
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
        MapError: the checkpoint has no array for a parameter, or Megatron-Core has no such model.
    """
    boxes: ShardedStateDict = {}
    for chunk in model if isinstance(model, ModelChunks) else [model]:
        assert isinstance(chunk, GPT)
        _check_rotary(chunk.config)
        tensors = list(_tensors(chunk.sharded_state_dict()))
        arrays = _arrays(tensors, chunk.config)
        made = megatron_map(arrays, _sizes(chunk.config), keys, prefix=prefix)
        bound = bound_to(made, {tensor.key for tensor in tensors})
        for tensor in tensors:
            for part in mapped_tensors(tensor, tensor.key, bound):
                if part.added:
                    raise MapError(
                        f"{tensor.key!r} is stored zero-centred by Megatron-Core: no box of it is the "
                        f"parameter. Load with a map: megackpt.load(state, path, maps=checkpoint_map(...)).",
                        key=tensor.key,
                    )
                boxes[f"{tensor.key}.{len(boxes)}"] = part.theirs
    return boxes


def _check_rotary(config: GPTConfig) -> None:
    positions = config.positions
    is_interleaved = isinstance(positions, RotaryConfig) and positions.interleaved
    if config.attention.latent is not None and not is_interleaved:
        raise MapError(
            "Megatron-Core's latent attention rotates pairs of neighbouring rows, and this model does not. "
            "Give it positions=RotaryConfig(interleaved=True).",
            key="positions",
        )


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
