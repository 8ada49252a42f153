"""Reading checkpoints of Megatron-Core's GPT into ours: its arrays, as boxes of our parameters.

    megackpt.load(megatron_state(model, megackpt.load_sharded_metadata(path)), path)

Where each of ours is in its arrays is a map: see `megackpt.maps.megatron`. Each state of the optimizer is
where its parameter is, in an array of its own: `optimizer.state.exp_avg.<key of the parameter's array>`.

Source: Megatron-Core 0.16.1 `sharded_state_dict` of `DistributedOptimizer` (`fully_reshardable`),
`Float16OptimizerWithFloat16Params`, `FP32Optimizer` and `ChainedOptimizer`.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace

from megackpt.entities import ShardedLayout, ShardedStateDict, ShardedTensor
from megackpt.errors import MapError
from megackpt.maps import MappedArray, bound_to, megatron_map
from megackpt.maps.requests import mapped_tensors, zero_padding
from megackpt.training.parallel import ModelChunks
from models.block_config import RotaryConfig
from models.config import GPTConfig
from models.gpt import GPT

_STACKED = "decoder.layers."
_MASTER = "fp32_param"
_STATE = re.compile(r"(?:chained_\d+\.)?(optimizer\.state\..+)")  # of several optimizers, each has a prefix
_BUCKETS = "optimizer.distributed.dp_group_idx_"


def megatron_state(
    model: GPT | ModelChunks,
    keys: Collection[str],
    *,
    prefix: str = "",
    optimizer: ShardedStateDict | None = None,
) -> ShardedStateDict:
    """Declare this rank's parameters as boxes of the arrays of a Megatron-Core checkpoint. Local.

    Rows of padding of a vocabulary, which no box has, become 0.

    Args:
        model: the model; a load fills its parameters in place.
        keys: of the checkpoint, as `load_sharded_metadata` returns them. They tell whether its layers are
            stacked along an axis or have keys of their own.
        prefix: of the checkpoint's keys.
        optimizer: what the `sharded_state_dict` of an optimizer, or `optim_state_to_sharding_state`, has
            declared: a load fills its masters and moments in place, too. Numbers of steps are no arrays of
            Megatron-Core: call `resume_from_megatron` after the load.

    Returns:
        The boxes, by our keys and a number.

    Raises:
        MapError: the checkpoint has no array for a parameter, or Megatron-Core has no such model. Or it has
            no state of an optimizer, or one in a form that only the layout that wrote it can read.
    """
    tensors: list[ShardedTensor] = []
    for chunk in model if isinstance(model, ModelChunks) else [model]:
        assert isinstance(chunk, GPT)
        config = chunk.config  # the same of all chunks
        tensors += _tensors(chunk.sharded_state_dict())
    _check_rotary(config)
    made = megatron_map(_arrays(tensors, config), _sizes(config), keys, prefix=prefix)
    bound = bound_to(made, {tensor.key for tensor in tensors})
    wanted = [("", tensor.key, tensor) for tensor in tensors]
    stored: Mapping[str, str] = {}
    if optimizer is not None:
        stored = _stored_states(keys)
        wanted += _states(optimizer)
    boxes: ShardedStateDict = {}
    for state, key, tensor in wanted:
        if key in bound.left and bound.left[key].is_padded:
            zero_padding(tensor, rows=config.vocab_size)
        for part in mapped_tensors(tensor, key, bound):
            # The gradient, and so each moment, is the same for a norm that is stored zero-centred.
            if part.added and state in ("", _MASTER):
                raise MapError(
                    f"{tensor.key!r} is stored zero-centred by Megatron-Core: no box of it is the "
                    f"parameter. Load with a map: megackpt.load(state, path, maps=checkpoint_map(...)).",
                    key=tensor.key,
                )
            theirs = part.theirs
            if state:
                theirs = replace(theirs, key=_key_of_state(state, theirs.key, stored))
            boxes[f"{tensor.key}.{len(boxes)}"] = theirs
    return boxes


def _stored_states(keys: Collection[str]) -> dict[str, str]:
    """Return the key of each array of optimizer state, by the key without the prefix of one of several."""
    stored = {match[1]: key for key in keys if (match := _STATE.fullmatch(key)) is not None}
    if stored:
        return stored
    if any(_BUCKETS in key for key in keys):
        raise MapError(
            "The checkpoint has the buckets of Megatron-Core's distributed optimizer as they are in memory "
            "(dp_reshardable), which do not say where each parameter is. Load it once with Megatron-Core, at "
            "the tensor and pipeline sizes that saved it, and save it with "
            "--dist-ckpt-optim-fully-reshardable.",
            key=_BUCKETS,
        )
    raise MapError(
        "The checkpoint has no state of an optimizer (--no-save-optim). Leave optimizer= out, and begin with "
        "new moments.",
        key="optimizer.state",
    )


def _states(optimizer: ShardedStateDict) -> Iterator[tuple[str, str, ShardedTensor]]:
    """Yield name, key of the parameter and tensor of each elementwise state."""
    for states in optimizer["state"].values():
        for name, entity in states.items():
            if name == "step":
                continue
            for tensor in _tensors({name: entity}):
                yield name, tensor.key.removeprefix(f"optimizer.state.{name}."), tensor


def _key_of_state(state: str, parameter: str, stored: Mapping[str, str]) -> str:
    """Return the key of the array of a state; that of the first name if the checkpoint has none."""
    # The distributed optimizer calls its masters `param`, the others call them as we do.
    names = ("param", _MASTER) if state == _MASTER else (state,)
    keys = [f"optimizer.state.{name}.{parameter}" for name in names]
    return next((stored[key] for key in keys if key in stored), keys[0])


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
