"""Entities as DCP knows chunks: rectangles of the global array, each with a view of its elements.

DCP knows neither flat shards nor prepended axes, so they are cut into such rectangles here.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from megackpt.entities import ShardedTensor
from megackpt.plans.geometry import Box, rectangles_of


@dataclass(frozen=True, slots=True, eq=False)
class Rectangle:
    """A part of what an entity holds.

    Attributes:
        box: where it lies in the global array.
        data: its elements, a view of the entity's, of the box's shape; None without data.
    """

    box: Box
    data: torch.Tensor | None


def rectangles(tensor: ShardedTensor) -> list[Rectangle]:
    """Return the rectangles of an entity; a block without elements is one, an empty flat range none."""
    data = None if tensor.data is None else tensor.data.detach()
    flat = tensor.flattened_range
    if flat is None or not tensor.box_shape:
        whole = None if data is None else data[(None,) * tensor.prepend_axis_num]
        return [Rectangle(Box(tensor.global_offset, tensor.box_shape), whole)]
    cut = rectangles_of(np.array([tensor.box_shape]), np.array([flat.start]), np.array([flat.stop]))
    rectangles = []
    position = 0
    for start, extents in zip(cut.start.tolist(), cut.shape.tolist(), strict=True):
        offset = tuple(a + b for a, b in zip(tensor.global_offset, start, strict=True))
        box = Box(offset, tuple(extents))
        present = None if data is None else data[position : position + box.numel].view(box.shape)
        rectangles.append(Rectangle(box, present))
        position += box.numel
    return rectangles
