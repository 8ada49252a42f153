"""Views of a local tensor, or of the flat shard of one, that share its memory.

Owns the step from the integers of `geometry.View` to torch. Loading fills what is returned here, and with it
the tensor of the user.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from megackpt.geometry import View


class ViewChunk(NamedTuple):
    """A part of a view that a flat shard holds.

    Attributes:
        start: first element of the piece's block in the view, one int per axis.
        shape: extents of that block.
        flattened_range: which slice of the flattened block the shard holds; None for all of it.
        data: that many elements of the shard, 1-D with a flattened_range; None without data.
    """

    start: tuple[int, ...]
    shape: tuple[int, ...]
    flattened_range: slice | None
    data: torch.Tensor | None


def whole_view(view: View, data: torch.Tensor | None) -> torch.Tensor | None:
    """Return the elements of a view of a whole local tensor `view.base`, of any strides."""
    if data is None:
        return None
    data = data.detach()
    strides = tuple(data.stride(axis.dim) * axis.step for axis in view.axes)
    first = sum(i * s for i, s in zip(view.start, data.stride(), strict=True))
    return _strided(data, view.shape, strides, first)


def chunks_of_view(view: View, data: torch.Tensor | None, held: slice) -> list[ViewChunk]:
    """Return the parts of a view that lie in the slice `held` of the flattened `view.base`.

    data is that slice, 1-D. A view whose elements are evenly spaced gives one flat range of its block at
    most, any other up to `2 n - 1` rectangles.
    """
    if view.uniform_stride is not None:
        start, stop = view.flat_range_in(held.start, held.stop)
        return [_flat_range(view, data, held, start, stop)] if start < stop else []
    found = []
    for box in view.boxes_in(held.start, held.stop):
        first = view.position_of(box.start) - held.start
        found.append(ViewChunk(box.start, box.shape, None, _of_flat(data, box.shape, view.strides, first)))
    return found


def _flat_range(view: View, data: torch.Tensor | None, held: slice, start: int, stop: int) -> ViewChunk:
    step = view.uniform_stride or 1
    elements = _of_flat(data, (stop - start,), (step,), view.first + start * step - held.start)
    return ViewChunk((0,) * len(view.axes), view.shape, slice(start, stop), elements)


def _of_flat(
    data: torch.Tensor | None, shape: tuple[int, ...], strides: tuple[int, ...], first: int
) -> torch.Tensor | None:
    """View elements of a 1-D tensor that may itself be strided."""
    if data is None:
        return None
    (step,) = data.stride()
    return _strided(data.detach(), shape, tuple(s * step for s in strides), first * step)


def _strided(
    data: torch.Tensor, shape: tuple[int, ...], strides: tuple[int, ...], first: int
) -> torch.Tensor:
    return data.as_strided(shape, strides, data.storage_offset() + first)
