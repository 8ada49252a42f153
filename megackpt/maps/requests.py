"""The request of a load in the names of another family.

Each tensor of ours becomes views of its memory, one for each pair that it overlaps: a load fills the views,
and by that the tensor.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from megackpt.entities import ShardedLayout, ShardedStateDict, ShardedTensor, ShardedTensorFactory
from megackpt.entities.recognition import is_torch_sharded
from megackpt.entities.tree import ABSENT, map_leaves
from megackpt.maps.regions import RegionMap, RegionPair
from megackpt.plans.geometry import Box, rectangles_of

# The part of a training state that another family's checkpoint can fill: weights, and their masters.

MASTER = "optimizer.state.fp32_param."
"""What the key of a float32 master weight begins with; the key of its parameter follows."""

EMBEDDING = "embedding.word_embeddings.weight"
"""The key of the embedding, to which an output layer may be tied."""

OPTIMIZER = "optimizer."
"""What the key of any optimizer state begins with."""


def parameter_key(key: str) -> str:
    """Return the key of the parameter that a key belongs to: that of a master weight, or the key itself.

    >>> parameter_key("optimizer.state.fp32_param.decoder.final_layernorm.weight")
    'decoder.final_layernorm.weight'
    """
    return key.removeprefix(MASTER)


def weights_of(sharded_state_dict: ShardedStateDict) -> ShardedStateDict:
    """Return the part of a state dict that a folder of weights can fill. Local.

    That are the parameters and buffers of the model in floating point, and the float32 master weights of its
    optimizer. Moments, numbers of steps, random states, positions in the data and everything that is no
    tensor are left out.

    Args:
        sharded_state_dict: as for `megackpt.load`. The keys of optimizer state begin with `optimizer.`.
    """
    kept = map_leaves(_kept, sharded_state_dict)
    return {} if kept is ABSENT else kept


def is_weight(key: str) -> bool:
    """Return whether a key is that of a parameter, buffer or master weight."""
    return key.startswith(MASTER) or not key.startswith(OPTIMIZER)


def _kept(path: str, leaf: Any) -> Any:
    if isinstance(leaf, (ShardedTensor, ShardedLayout, ShardedTensorFactory)):
        key, dtype = leaf.key, getattr(leaf, "dtype", None)
    elif isinstance(leaf, torch.Tensor) or is_torch_sharded(leaf):
        key, dtype = path, leaf.dtype
    else:
        return ABSENT
    is_float = dtype is None or dtype.is_floating_point
    return leaf if is_float and is_weight(key) else ABSENT


@dataclass(frozen=True, slots=True)
class MappedTensor:
    """Part of a tensor of ours, as a box of an array of another family.

    Attributes:
        theirs: the box; its data is a view of our memory.
        added: what to add to the loaded values to get ours.
    """

    theirs: ShardedTensor
    added: int


def mapped_tensors(tensor: ShardedTensor, key: str, made: RegionMap) -> Iterator[MappedTensor]:
    """Yield the boxes of the right family that hold the elements of a tensor. Local.

    Padding, and elements that no pair has, get no box.

    Args:
        tensor: a tensor with data.
        key: the left array that it is a chunk of: its key, or that of the parameter of an optimizer's state.
        made: the map.
    """
    for box, data in _boxes(tensor):
        for pair in made.pairs_within(key, box):
            yield MappedTensor(_declared(pair, box, data, tensor, made), pair.added)


@torch.no_grad()
def zero_padding(tensor: ShardedTensor, *, rows: int) -> None:
    """Set the elements of a tensor beyond the first rows of its global array to 0. Local.

    Args:
        tensor: a tensor with data.
        rows: how many rows along dim 0 are no padding.
    """
    for box, data in _boxes(tensor):
        data[max(0, rows - box.start[0]) :].zero_()


def _boxes(tensor: ShardedTensor) -> Iterator[tuple[Box, torch.Tensor]]:
    """Yield the boxes of the global array that a tensor has, with views of that shape."""
    assert tensor.data is not None
    shape, offset = tensor.box_shape, tensor.global_offset
    flat = tensor.flattened_range
    if flat is None:
        yield Box(offset, shape), tensor.data.view(tensor.data.shape)[(None,) * tensor.prepend_axis_num]
        return
    if not shape:
        yield Box((), ()), tensor.data.view(())
        return
    cut = rectangles_of(
        np.array([shape], np.int64), np.array([flat.start], np.int64), np.array([flat.stop], np.int64)
    )
    position = 0
    for start, extent in zip(cut.start.tolist(), cut.shape.tolist(), strict=True):
        count = math.prod(extent)
        box = Box(tuple(o + s for o, s in zip(offset, start, strict=True)), tuple(extent))
        yield box, tensor.data[position : position + count].view(extent)
        position += count


def _declared(
    pair: RegionPair, box: Box, data: torch.Tensor, tensor: ShardedTensor, made: RegionMap
) -> ShardedTensor:
    """Return a pair of a box as a box of the right array; data has the shape of the box."""
    own = pair.left.box
    view = data[tuple(slice(a - o, b - o) for a, b, o in zip(own.start, own.stop, box.start, strict=True))]
    view = in_order_of(view, pair.axes)
    return ShardedTensor(
        key=pair.right.key,
        data=view,
        dtype=tensor.dtype,
        local_shape=pair.right.box.shape,
        global_shape=made.right[pair.right.key].viewed,
        global_offset=pair.right.box.start,
        replica_id=tensor.replica_id,
        allow_shape_mismatch=made.right[pair.right.key].is_padded,
    )


def in_order_of(view: torch.Tensor, axes: Sequence[int]) -> torch.Tensor:
    """Return a view with dims in another order; -1 is a new dim, and dims not named have extent 1. Pure."""
    for dim in sorted(set(range(view.ndim)) - set(axes), reverse=True):
        view = view.select(dim, 0)
    kept = sorted(a for a in axes if a >= 0)
    view = view.permute([kept.index(a) for a in axes if a >= 0])
    for dim, axis in enumerate(axes):
        if axis < 0:
            view = view.unsqueeze(dim)
    return view
