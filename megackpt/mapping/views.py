"""Views of a local tensor, or of a flat shard of one, that share its memory.

They are the torch side of `geometry.View`. A load fills the views, and by that the tensor of the user.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from megackpt.geometry import View


class ViewChunk(NamedTuple):
    """A chunk of a view that a flat shard has: a box of the view, or a flat range of a box.

    Attributes:
        start: first element of the box in the view, one int per axis.
        shape: extents of the box.
        flattened_range: which slice of the flattened box the shard has; None for all of it.
        data: the elements, as a view of the shard, 1-D with a flattened_range; None without data.
    """

    start: tuple[int, ...]
    shape: tuple[int, ...]
    flattened_range: slice | None
    data: torch.Tensor | None


def whole_view(view: View, data: torch.Tensor | None) -> torch.Tensor | None:
    """Return the elements of a view of a whole local tensor, which has shape `view.base` and any strides."""
    if data is None:
        return None
    data = data.detach()
    strides = tuple(data.stride(axis.dim) * axis.step for axis in view.axes)
    first = sum(i * s for i, s in zip(view.start, data.stride(), strict=True))
    return _strided(data, view.shape, strides, first)


def chunks_of_view(view: View, data: torch.Tensor | None, shard: slice) -> list[ViewChunk]:
    """Return the chunks of a view that lie in one slice of the flattened `view.base`.

    A view whose elements are evenly spaced gives at most one flat range, any other view up to `2 n - 1`
    boxes.

    Args:
        view: elements of a local tensor.
        data: the flat shard of the local tensor, 1-D; None without data.
        shard: which slice of the flattened local tensor the shard is.
    """
    if view.uniform_stride is not None:
        start, stop = view.flat_range_in(shard.start, shard.stop)
        return [_flat_range(view, data, shard, start, stop)] if start < stop else []
    chunks = []
    for box in view.boxes_in(shard.start, shard.stop):
        first = view.position_of(box.start) - shard.start
        chunks.append(ViewChunk(box.start, box.shape, None, _of_flat(data, box.shape, view.strides, first)))
    return chunks


def _flat_range(view: View, data: torch.Tensor | None, shard: slice, start: int, stop: int) -> ViewChunk:
    step = view.uniform_stride or 1
    elements = _of_flat(data, (stop - start,), (step,), view.first + start * step - shard.start)
    return ViewChunk((0,) * len(view.axes), view.shape, slice(start, stop), elements)


def _of_flat(
    data: torch.Tensor | None, shape: tuple[int, ...], strides: tuple[int, ...], first: int
) -> torch.Tensor | None:
    """Return a view of elements of a 1-D tensor, which may itself be strided."""
    if data is None:
        return None
    (step,) = data.stride()
    return _strided(data.detach(), shape, tuple(s * step for s in strides), first * step)


def _strided(
    data: torch.Tensor, shape: tuple[int, ...], strides: tuple[int, ...], first: int
) -> torch.Tensor:
    return data.as_strided(shape, strides, data.storage_offset() + first)
