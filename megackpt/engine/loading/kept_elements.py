"""Elements that stay as they are in a load: rows of tokens that a checkpoint does not have yet.

The stored array may have padding in their place, which is read like the rest. So their values are copied
before the load reads, and put back when it has read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TypeAlias

import numpy as np
import torch

from megackpt.engine.loading.prepared_load import KeptElements
from megackpt.engine.loading.shared_targets import SharedTargets
from megackpt.entities import ShardedTensor
from megackpt.plans.geometry import rectangles_of

Shape: TypeAlias = tuple[int, ...]


def kept_elements(
    targets: SharedTargets, grown: Mapping[str, Shape], shrunk: Mapping[str, Shape]
) -> list[KeptElements]:
    """Copy the elements of targets that are outside of what is loaded. Local.

    Args:
        targets: the memory that is read into, and that of the request.
        grown: of arrays that keep elements, the shape of the elements that are loaded, by key.
        shrunk: of arrays with fewer elements than are stored, the shape of what is no padding. Padding
            becomes 0, as the stored array may have values in its place.
    """
    kept = []
    for tensor, own in zip(targets.tensors, targets.targets, strict=True):
        shape = grown.get(tensor.key, shrunk.get(tensor.key))
        if shape is None or tensor.data is None:
            continue
        # Targets that share memory are read into memory that has no values yet.
        pairs = zip(
            _outside(tensor, tensor.data.detach(), shape), _outside(tensor, own.detach(), shape), strict=True
        )
        kept += [
            KeptElements(target, values.clone() if tensor.key in grown else torch.zeros_like(values))
            for target, values in pairs
        ]
    return kept


def count_outside(tensor: ShardedTensor, shape: Shape) -> int:
    """Return how many elements of a tensor with data are outside of `[0, shape)` of its array. Pure."""
    assert tensor.data is not None
    return sum(view.numel() for view in _outside(tensor, tensor.data.detach(), shape))


def _outside(tensor: ShardedTensor, data: torch.Tensor, shape: Shape) -> Iterator[torch.Tensor]:
    """Yield views of data, which is the tensor's or has its shape: the elements outside of `[0, shape)`."""
    for start, box in _boxes(tensor, data):
        # Along each axis, what lies beyond; and of the next axes only what lies within the ones before.
        for axis, (first, limit) in enumerate(zip(start, shape, strict=True)):
            within = min(max(limit - first, 0), box.shape[axis])
            if within < box.shape[axis]:
                yield box.narrow(axis, within, box.shape[axis] - within)
            box = box.narrow(axis, 0, within)


def _boxes(tensor: ShardedTensor, data: torch.Tensor) -> Iterator[tuple[list[int], torch.Tensor]]:
    """Yield the boxes of the global array that a tensor has: the first element, and a view of data."""
    flat = tensor.flattened_range
    if flat is None:
        yield list(tensor.global_offset), data[(None,) * tensor.prepend_axis_num]
        return
    cut = rectangles_of(
        np.array([tensor.box_shape], np.int64),
        np.array([flat.start], np.int64),
        np.array([flat.stop], np.int64),
    )
    position = 0
    for start, extents in zip(cut.start.tolist(), cut.shape.tolist(), strict=True):
        count = int(np.prod(extents))
        # A range of a flat tensor may have any stride, so it is taken apart, not viewed.
        view = data[position : position + count].unflatten(0, extents)
        yield [o + s for o, s in zip(tensor.global_offset, start, strict=True)], view
        position += count
