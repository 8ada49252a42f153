"""A view of a checkpoint whose arrays have more dims than in the files, in the same row-major order.

A map between families may split a dim of another family's array: of a fused `[experts, hidden, 2 x ffn]` the
last one into `[ffn, 2]`, for instance. No byte moves, so a chunk keeps its bytes and its position in them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace

import numpy as np

from megackpt.engine.checkpoint.other_table import ChunksOfOtherTable
from megackpt.errors import MismatchError
from megackpt.formats.contents import Chunks, Contents
from megackpt.plans.metadata import ChunkTable

Shape = tuple[int, ...]


def with_views(contents: Contents, views: Mapping[str, Shape], *, where: str) -> Contents:
    """Return contents whose arrays have the shapes of views; arrays without a view are left out.

    `chunks` of the result raises a MismatchError for a chunk that is cut inside a group that a view splits
    off.

    Args:
        contents: an opened checkpoint.
        views: by the keys of stored arrays, their own shape, or one with dims of it split.
        where: the checkpoint, for errors.
    """
    arrays = {key: replace(contents.arrays[key], global_shape=shape) for key, shape in views.items()}
    if all(spec == contents.arrays[key] for key, spec in arrays.items()):
        return replace(contents, arrays=arrays)

    def chunks(keys: Iterable[str]) -> Chunks:
        stored = contents.chunks(keys)
        return ChunksOfOtherTable(stored, viewed_table(stored.table, views, where=where))

    # The format finds overlapping chunks by boxes of the stored shapes, and boxes of the request have those
    # of the views.
    return replace(contents, arrays=arrays, chunks=chunks, chunks_overlapping=None)


def viewed_table(table: ChunkTable, views: Mapping[str, Shape], *, where: str) -> ChunkTable:
    """Return the same chunks as boxes of arrays with the shapes of views. Pure.

    Raises:
        MismatchError: a chunk is cut inside a group that a view splits off, so it is no box of the view.
    """
    arrays = tuple(
        replace(spec, global_shape=views.get(spec.key, spec.global_shape)) for spec in table.arrays
    )
    dims = max([len(spec.global_shape) for spec in arrays], default=1) or 1
    start = np.zeros((len(table), dims), np.int64)
    shape = np.ones((len(table), dims), np.int64)
    for number, (stored, viewed) in enumerate(zip(table.arrays, arrays, strict=True)):
        rows = np.flatnonzero(table.array == number)
        # Along the dims of the stored array: `column` is the first dim of the view that this dim becomes.
        column = 0
        for dim, extents in enumerate(split_dims(stored.global_shape, viewed.global_shape)):
            # A box stays a box if its cuts along this dim are at multiples of the inner extents, which it
            # then has completely.
            inner = math.prod(extents[1:])
            if (table.start[rows, dim] % inner).any() or (table.shape[rows, dim] % inner).any():
                raise MismatchError(
                    f"{where}: {stored.key!r} {stored.global_shape} is stored in chunks that are cut inside "
                    f"of groups of {inner} along dim {dim}, which the map takes apart. Convert the "
                    f"checkpoint to one with whole arrays first (megackpt convert).",
                    key=stored.key,
                    path=where,
                )
            start[rows, column] = table.start[rows, dim] // inner
            shape[rows, column] = table.shape[rows, dim] // inner
            shape[rows, column + 1 : column + len(extents)] = extents[1:]
            column += len(extents)
    # Flat ranges stay: they number the elements of a box in row-major order, which a view does not change.
    return replace(table, arrays=arrays, start=start, shape=shape)


def split_dims(stored: Shape, viewed: Shape) -> list[Shape]:
    """Return for each dim of a stored array the extents that a view splits it into, outermost first.

    >>> split_dims((8, 4, 6), (8, 4, 3, 2))
    [(8,), (4,), (3, 2)]
    """
    parts, position = [], 0
    for extent in stored:
        stop = position + 1
        while math.prod(viewed[position:stop]) < extent:
            stop += 1
        parts.append(viewed[position:stop])
        position = stop
    assert position == len(viewed), f"{viewed} is no split of {stored}"
    return parts
