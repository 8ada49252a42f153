"""Declarations of optimizer state, from the declarations of the parameters.

The keys are `optimizer.state.<state>.<model key>`. Everything is local: what a rank declares follows from the
model's declarations and from the range of each parameter that the rank owns.

Source: Megatron-Core `dist_checkpointing.optimizer`, for the functions that share its names.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from megackpt.entities import (
    ReplicaId,
    ShardedLayout,
    ShardedStateDict,
    ShardedTensor,
    ShardedTensorFactory,
)
from megackpt.entities.tree import iter_leaves
from megackpt.errors import DeclarationError, truncated_list

ParamEntity: TypeAlias = ShardedTensor | ShardedLayout | ShardedTensorFactory
"""What the sharded state dict of a model may contain for a parameter."""


def get_optim_param_to_id_map(optim_params_iter: Iterable[Tensor]) -> dict[int, int]:
    """Return `id(parameter) -> position` for the parameters of an optimizer, in order. Local, pure."""
    ids: dict[int, int] = {}
    for position, param in enumerate(optim_params_iter):
        ids.setdefault(id(param), position)
    return ids


def get_param_id_to_sharded_param_map(
    model_sharded_state_dict: ShardedStateDict, optim_params_iter: Iterable[Tensor]
) -> dict[int, ParamEntity]:
    """Return `position in the optimizer -> entity of the model`, for parameters that have one. Local, pure.

    An entity belongs to a parameter if its data *is* the parameter. A parameter without an entity is left
    out; if no parameter has one, a warning is issued.

    Raises:
        DeclarationError: an entity wraps a detached copy of a parameter, not the parameter itself.
    """
    params = list(optim_params_iter)
    positions = get_optim_param_to_id_map(params)
    entities: dict[int, ParamEntity] = {}
    for entity in _param_entities(model_sharded_state_dict):
        position = positions.get(id(entity.data))
        if position is not None:
            entities.setdefault(position, entity)
    missing = [p for position, p in enumerate(params) if position not in entities]
    _check_not_detached(model_sharded_state_dict, missing)
    if params and not entities:
        warnings.warn(_UNKNOWN_PARAMS.format(len(params)), stacklevel=2)
    return entities


_UNKNOWN_PARAMS = (
    "None of the optimizer's {} parameters is in the sharded state dict of the model. Pass the one of the "
    "model that this optimizer trains, with entities that wrap the parameters themselves (those of "
    "state_dict(keep_vars=True))."
)


def find_param_entities(
    model_sharded_state_dict: ShardedStateDict, params: Sequence[Tensor]
) -> list[ParamEntity]:
    """Return the model's entity of each parameter, in order. Local, pure.

    Raises:
        DeclarationError: a parameter has no entity, or an entity wraps a detached copy of it.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the error below says more
        entities = get_param_id_to_sharded_param_map(model_sharded_state_dict, params)
    missing = [i for i in range(len(params)) if i not in entities]
    if missing:
        lines = [f"parameter {i} of shape {tuple(params[i].shape)}" for i in missing]
        raise DeclarationError(
            f"{len(missing)} of the optimizer's {len(params)} parameters are in no entity of the model's "
            f"sharded state dict:\n{truncated_list(lines)}\nPass model.sharded_state_dict() "
            f"of the model that this optimizer trains; every trained parameter must be declared there, and "
            f"be the entity's data."
        )
    return [entities[i] for i in range(len(params))]


def make_sharded_optimizer_tensor(model_param: ParamEntity, optim_param: Tensor, prefix: str) -> ParamEntity:
    """Declare a whole optimizer state, of the parameter's local shape, under `prefix.<model key>`. Local.

    Raises:
        DeclarationError: optim_param has another shape than the parameter.
    """
    return model_param.retarget(key=f"{prefix}.{model_param.key}", data=optim_param)


def make_flat_optimizer_tensor(
    model_param: ParamEntity, shard: Tensor, *, prefix: str, flattened_range: slice, replica: tuple[int, int]
) -> ParamEntity:
    """Declare a 1-D shard of an optimizer state: a range of the flattening of the local parameter. Local.

    Ranks with equal parameters have different ranges and no copies, so the last element of the replica id
    is 0; `replica` gives the first two.
    """
    return model_param.retarget(
        key=f"{prefix}.{model_param.key}",
        data=shard,
        replica_id=(*replica, 0),
        flattened_range=flattened_range,
    )


def make_sharded_scalar(
    model_param: ParamEntity, scalar: Tensor, *, prefix: str, replica: tuple[int, int, int]
) -> ShardedTensor:
    """Declare a number that belongs to a whole parameter, such as `step`, under `prefix.<model key>`. Local.

    The global array has the prepended axes of the parameter only, e.g. `[num_layers]`, so that every layer
    has its own number. All ranks with elements of the parameter have a copy; the one at the origin of the
    parameter is the main replica.

    Args:
        model_param: the parameter's entity.
        scalar: a 0-dim tensor.
        prefix: of the key.
        replica: the replica id of the parameter, as `(copy, tp, dp)`.
    """
    shape, offset, prepended, copy = _first_box(model_param)
    return ShardedTensor.from_rank_offsets(
        f"{prefix}.{model_param.key}",
        scalar,
        *((axis, offset[axis], shape[axis]) for axis in range(prepended)),
        # An offset inside of the parameter means another slice over tp, whose number is a copy.
        replica_id=(replica[0], replica[1] + sum(offset[prepended:]) + copy, replica[2]),
        prepend_axis_num=prepended,
    )


def make_own_array(
    model_param: ParamEntity, value: Tensor, *, prefix: str, cuts: Sequence[tuple[int, int]]
) -> ShardedTensor:
    """Declare state of this rank's slice of a parameter that has another shape. Local.

    The key is `prefix.<model key>`; the global array has the prepended axes of the parameter, then an axis
    for each cut, then those of value: `[num_layers, tp, *value.shape]`. So at other cuts its shape is
    another, and a load is an error. Ranks with an equal slice have copies.

    Args:
        model_param: the parameter's entity.
        value: of any shape, the same for each slice.
        prefix: of the key.
        cuts: this rank's position along each axis that cuts the parameter, and the size of that axis.
    """
    shape, offset, prepended, _ = _first_box(model_param)
    return ShardedTensor.from_rank_offsets(
        f"{prefix}.{model_param.key}",
        value,
        *((axis, offset[axis], shape[axis]) for axis in range(prepended)),
        *((prepended + number, position, size) for number, (position, size) in enumerate(cuts)),
        replica_id=replica_of(model_param),
        prepend_axis_num=prepended + len(cuts),
    )


def cuts_of_entity(model_param: ParamEntity) -> list[tuple[int, int]] | None:
    """Return this rank's slice along each axis that cuts a parameter: its number, and how many there are.

    Local, pure. None if some slices are of other sizes, so that they have no numbers. Of a fused parameter
    those of the component with the most slices, as tp may cut queries into more of them than keys. The boxes
    of one component are one slice: groups of queries, keys and values that alternate are a box each.
    """
    cuts: list[tuple[int, int]] = []
    for boxes in _by_array(_boxes(model_param)):
        starts = [min(offsets) for offsets in zip(*(box.global_offset for box in boxes), strict=True)]
        ends = [max(ends) for ends in zip(*(_end_of(box) for box in boxes), strict=True)]
        sizes = [end - start for start, end in zip(starts, ends, strict=True)]
        axes = list(zip(boxes[0].global_shape, starts, sizes, strict=True))
        cut_axes = [axis for axis in axes[boxes[0].prepend_axis_num :] if axis[0] != axis[2]]
        if any(not local or extent % local or offset % local for extent, offset, local in cut_axes):
            return None
        if sum(math.prod(box.box_shape) for box in boxes) != math.prod(sizes):
            return None  # with a gap
        of_array = [(offset // local, extent // local) for extent, offset, local in cut_axes]
        if math.prod(size for _, size in of_array) > math.prod(size for _, size in cuts):
            cuts = of_array
    return cuts


def _by_array(boxes: Sequence[ShardedTensor]) -> Iterable[list[ShardedTensor]]:
    arrays: dict[str, list[ShardedTensor]] = {}
    for box in boxes:
        arrays.setdefault(box.key, []).append(box)
    return arrays.values()


def _end_of(box: ShardedTensor) -> tuple[int, ...]:
    return tuple(start + size for start, size in zip(box.global_offset, box.box_shape, strict=True))


def replica_of(model_param: ParamEntity) -> tuple[int, int, int]:
    """Return the replica id of a model's entity as `(pp, tp, dp)`; a single number is a dp one. Local, pure.

    Raises:
        DeclarationError: it is a tuple of another length.
    """
    replica: ReplicaId = model_param.replica_id
    if isinstance(replica, int):
        return (0, 0, replica)
    if len(replica) != 3:
        raise DeclarationError(
            f"{model_param.key!r}: replica_id {replica} does not have the three elements (pipeline copy, tp "
            f"rank if not sharded over tp, dp rank) from which those of the optimizer state are made. Give "
            f"all three.",
            key=model_param.key,
        )
    return (replica[0], replica[1], replica[2])


def _param_entities(sharded_state_dict: ShardedStateDict) -> list[ParamEntity]:
    kinds = (ShardedTensor, ShardedLayout, ShardedTensorFactory)
    return [leaf for _, leaf in iter_leaves(sharded_state_dict) if isinstance(leaf, kinds)]


def _check_not_detached(sharded_state_dict: ShardedStateDict, missing: Sequence[Tensor]) -> None:
    """Raise if an entity shares its memory, but not its identity, with one of the `missing` parameters."""
    memory = {(p.data_ptr(), tuple(p.shape)) for p in missing if p.numel()}
    if not memory:
        return
    detached = sorted(
        repr(entity.key)
        for entity in _param_entities(sharded_state_dict)
        if isinstance(entity.data, Tensor) and (entity.data.data_ptr(), tuple(entity.data.shape)) in memory
    )
    if detached:
        raise DeclarationError(
            f"The model's sharded state dict was built without keep_vars=True: the data of {len(detached)} "
            f"entities is a detached copy and not the parameter itself, so the optimizer cannot tell which "
            f"is which:\n{truncated_list(detached)}\nWrap the parameters themselves, "
            f"those of model.state_dict(keep_vars=True)."
        )


def _boxes(entity: ParamEntity) -> list[ShardedTensor]:
    """Return the boxes of global arrays that an entity's elements are."""
    if isinstance(entity, ShardedTensor):
        return [entity]
    if isinstance(entity, ShardedLayout):
        return entity.without_data().tensors()
    with torch.no_grad():  # a factory's function may copy its parameter
        return [box for part in _param_entities({"built": entity.build()}) for box in _boxes(part)]


def _first_box(entity: ParamEntity) -> tuple[tuple[int, ...], tuple[int, ...], int, int]:
    """Return the global shape and offset of the entity's first box, and the number of prepended axes.

    The last value is not 0 if that box is a copy although the entity as a whole is not.
    """
    if isinstance(entity, ShardedTensor):
        return entity.global_shape, entity.global_offset, entity.prepend_axis_num, 0
    if isinstance(entity, ShardedLayout):
        first = entity.components[0]
        copy = first.replica_id if isinstance(first.replica_id, int) else sum(first.replica_id)
        return first.global_shape, first.global_offset, entity.prepend_axis_num, copy
    if entity.of_states is not None:
        return _first_box(entity.of_states)
    with torch.no_grad():  # a factory's function may copy its parameter
        built = _param_entities({"built": entity.build()})
    if not built:
        raise DeclarationError(
            f"{entity.key!r}: the build_fn of this factory returned no ShardedTensor, so the position of "
            f"the parameter in the model is not known. Return at least one.",
            key=entity.key,
        )
    return _first_box(built[0])
