"""Packs small tensors into further rows of the hidden states, for the next chunk of a pipeline.

Later stages receive no tokens, only one tensor of activations. A mask of padding, for instance, therefore
travels in further rows of that tensor.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

Shape = tuple[int, ...]


def row_count(shapes: Sequence[Shape | None], *, batch: int, hidden: int) -> int:
    """Return how many rows `[batch, hidden]` tensors of these shapes need; None for an absent one. Pure."""
    return -(-sum(_sizes(shapes)) // (batch * hidden))


def with_rows(hidden: Tensor, extras: Sequence[Tensor | None]) -> Tensor:
    """Return hidden states `[s, b, hidden]`, then rows with the elements of `extras` and zeros. Pure."""
    batch, width = hidden.shape[1:]
    rows = row_count([None if x is None else x.shape for x in extras], batch=batch, hidden=width)
    if rows == 0:
        return hidden
    elements = torch.cat([x.flatten() for x in extras if x is not None])
    filled = F.pad(elements, (0, rows * batch * width - len(elements)))
    return torch.cat([hidden, filled.view(rows, batch, width)])


def without_rows(inputs: Tensor, shapes: Sequence[Shape | None]) -> tuple[Tensor, list[Tensor | None]]:
    """Return the hidden states, and the extras of these shapes, that `with_rows` has joined. Pure."""
    batch, width = inputs.shape[1:]
    rows, sizes = row_count(shapes, batch=batch, hidden=width), _sizes(shapes)
    hidden, packed = inputs.tensor_split([len(inputs) - rows])
    parts = packed.flatten()[: sum(sizes)].split_with_sizes(sizes)
    return hidden, [
        None if shape is None else part.view(shape) for part, shape in zip(parts, shapes, strict=True)
    ]


def _sizes(shapes: Sequence[Shape | None]) -> list[int]:
    return [0 if shape is None else math.prod(shape) for shape in shapes]
