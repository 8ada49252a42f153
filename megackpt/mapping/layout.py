"""Declarative layouts: one local tensor that is stored as boxes of several global arrays.

A fused gate/up or QKV weight holds, on every rank, a piece of each of its parts one after the other. Stored
under one key the pieces of the ranks would interleave, and another tensor-parallel size would read them in
the wrong order. Here each part is its own global array. A layout is only slicing, so what it stores are
views: loading fills the local tensor in place, and a flat optimizer shard of the fused parameter is cut by
the same rule.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from megackpt.errors import DeclarationError
from megackpt.geometry import Box, rectangles_of, row_major_strides
from megackpt.mapping.base import RankOffset, ReplicaId, ShardedBase
from megackpt.mapping.sharded_tensor import ShardedTensor, place_on_grid


@dataclass(frozen=True, slots=True)
class Part:
    """One named part of a local tensor and its place in its own global array.

    Attributes:
        name: stored under `key.name`.
        box: region of the local tensor, in the local tensor's own dims.
        global_shape: shape of the part's global array, prepended axes included.
        global_offset: first element of the region in it, prepended axes included.
        axis_fragmentations: equal fragments per global axis.
    """

    name: str
    box: Box
    global_shape: tuple[int, ...]
    global_offset: tuple[int, ...]
    axis_fragmentations: tuple[int, ...]


@dataclass(eq=False)
class ShardedLayout(ShardedBase):
    """A local tensor made of named parts, each sharded on its own.

    Attributes:
        key: prefix of the parts' keys.
        data: the local tensor; with `flattened_range` a 1-D slice of its flattening; None without data.
        local_shape: shape of the local tensor.
        parts: where each region goes; together they cover the local tensor.
        replica_id: as in ShardedTensor, for all parts.
        prepend_axis_num: leading global axes that the local tensor lacks.
        flattened_range: which slice of the row-major flattening data holds.

    >>> w = torch.arange(8.0).reshape(4, 2)  # this rank's half of gate (2 rows) and up (2 rows)
    >>> for t in ShardedLayout.split("fc1", w, 0, {"gate": 2, "up": 2}, (0, 1, 2)).tensors():
    ...     print(t.key, t.global_shape, t.global_offset, t.data.tolist())
    fc1.gate (4, 2) (2, 0) [[0.0, 1.0], [2.0, 3.0]]
    fc1.up (4, 2) (2, 0) [[4.0, 5.0], [6.0, 7.0]]
    """

    key: str
    data: torch.Tensor | None
    local_shape: tuple[int, ...]
    parts: tuple[Part, ...]
    replica_id: ReplicaId = 0
    prepend_axis_num: int = 0
    flattened_range: slice | None = None
    dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        if self.data is None:
            return
        self.dtype = self.data.dtype
        flat = self.flattened_range
        expected = self.local_shape if flat is None else (flat.stop - flat.start,)
        if tuple(self.data.shape) != expected:
            raise DeclarationError(
                f"{self.key!r}: data has shape {tuple(self.data.shape)} but local_shape {self.local_shape} "
                f"with flattened_range {flat} means {expected}.",
                key=self.key,
            )

    @classmethod
    def split(
        cls,
        key: str,
        data: torch.Tensor,
        axis: int,
        sizes: Mapping[str, int],
        *rank_offsets: RankOffset,
        replica_id: ReplicaId = 0,
        prepend_axis_num: int = 0,
    ) -> ShardedLayout:
        """Split a dim of data into named parts, in order; every part is sharded by the same rank_offsets.

        axis counts data's own dims; sizes are local extents along it, in elements; rank_offsets are
        `(axis, index, fragments)` with axes counted in the global array (prepended axes included), as in
        `ShardedTensor.from_rank_offsets`. Local.

        Raises:
            DeclarationError: the sizes do not add up to the extent of the dim, or a rank offset is invalid.
        """
        shape = tuple(data.shape)
        if (
            not 0 <= axis < len(shape)
            or sum(sizes.values()) != shape[axis]
            or min(sizes.values(), default=-1) < 0
        ):
            raise DeclarationError(
                f"{key!r}: parts {dict(sizes)} do not add up to dim {axis} of the local shape {shape}. Give "
                f"the local size of every part, in order.",
                key=key,
            )
        index, fragments = place_on_grid(key, prepend_axis_num + len(shape), rank_offsets)
        parts = []
        position = 0
        for name, size in sizes.items():
            start = tuple(position if d == axis else 0 for d in range(len(shape)))
            extent = tuple(size if d == axis else n for d, n in enumerate(shape))
            block = (1,) * prepend_axis_num + extent
            parts.append(
                Part(
                    name,
                    Box(start, extent),
                    tuple(n * f for n, f in zip(block, fragments, strict=True)),
                    tuple(n * i for n, i in zip(block, index, strict=True)),
                    fragments,
                )
            )
            position += size
        return cls(key, data, shape, tuple(parts), replica_id, prepend_axis_num)

    def tensors(self) -> list[ShardedTensor]:
        """Return the parts as ShardedTensors whose data are views into this data.

        A whole local tensor gives one per part; a flat shard gives those regions of each part that it holds.
        """
        if self.flattened_range is None:
            return [self._whole(part) for part in self.parts]
        return [t for part in self.parts for t in self._flat(part, self.flattened_range)]

    def without_data(self) -> ShardedLayout:
        """Return the same declaration with `data=None`."""
        return replace(self, data=None)

    def retarget(
        self,
        *,
        key: str,
        data: torch.Tensor,
        replica_id: ReplicaId | None = None,
        flattened_range: slice | None = None,
    ) -> ShardedLayout:
        """Lay another tensor out in the same way; see `ShardedBase.retarget`."""
        replica = self.replica_id if replica_id is None else replica_id
        return replace(self, key=key, data=data, replica_id=replica, flattened_range=flattened_range)

    def _whole(self, part: Part) -> ShardedTensor:
        data = None if self.data is None else self.data.detach()[part.box.slices()]
        return self._tensor(part, data, part.box.shape, part.global_offset, part.axis_fragmentations, None)

    def _flat(self, part: Part, held: slice) -> list[ShardedTensor]:
        span = _contiguous_span(part.box, self.local_shape)
        if span is None:
            return self._flat_rectangles(part, held)
        start, stop = max(span[0], held.start), min(span[1], held.stop)
        if start >= stop:
            return []
        data = None if self.data is None else self.data.detach()[start - held.start : stop - held.start]
        flat = slice(start - span[0], stop - span[0])
        return [self._tensor(part, data, part.box.shape, part.global_offset, part.axis_fragmentations, flat)]

    def _flat_rectangles(self, part: Part, held: slice) -> list[ShardedTensor]:
        """The part's rows are not contiguous in the flat shard: store the rectangles it has of them."""
        ends = [np.array([e], np.int64) for e in (held.start, held.stop)]
        strides = row_major_strides(self.local_shape)
        found = []
        cut = rectangles_of(np.array([self.local_shape], np.int64), *ends)
        for start, shape in zip(cut.start.tolist(), cut.shape.tolist(), strict=True):
            common = Box(tuple(start), tuple(shape)).intersect(part.box)
            if common is None:
                continue
            first = sum(a * s for a, s in zip(common.start, strides, strict=True)) - held.start
            data = None
            if self.data is not None:
                flat = self.data.detach()
                data = flat.as_strided(common.shape, strides, flat.storage_offset() + first)
            inside = [a - b for a, b in zip(common.start, part.box.start, strict=True)]
            prepended = self.prepend_axis_num
            offset = (
                *part.global_offset[:prepended],
                *(g + i for g, i in zip(part.global_offset[prepended:], inside, strict=True)),
            )
            found.append(self._tensor(part, data, common.shape, offset, None, None))
        return found

    def _tensor(
        self,
        part: Part,
        data: torch.Tensor | None,
        local_shape: tuple[int, ...],
        global_offset: tuple[int, ...],
        fragments: tuple[int, ...] | None,
        flattened_range: slice | None,
    ) -> ShardedTensor:
        if self.dtype is None:
            raise DeclarationError(f"{self.key!r}: a layout needs data or a dtype.", key=self.key)
        return ShardedTensor(
            key=f"{self.key}.{part.name}",
            data=data,
            dtype=self.dtype,
            local_shape=local_shape,
            global_shape=part.global_shape,
            global_offset=global_offset,
            axis_fragmentations=fragments,
            replica_id=self.replica_id,
            prepend_axis_num=self.prepend_axis_num,
            flattened_range=flattened_range,
        )


def _contiguous_span(box: Box, shape: Sequence[int]) -> tuple[int, int] | None:
    """Flat range of a box that is contiguous in the row-major `shape`, or None where it is not."""
    split = [d for d, n in enumerate(shape) if box.shape[d] != n]
    if split and any(n != 1 for n in box.shape[: split[-1]]):
        return None
    start = sum(a * s for a, s in zip(box.start, row_major_strides(shape), strict=True))
    return start, start + math.prod(box.shape)
