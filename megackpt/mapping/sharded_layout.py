"""ShardedLayout: one local tensor that is stored as boxes of several global arrays.

Owns the placement of a layout's parts and their ShardedTensors; what the parts are is for `layout` to say.
What is stored are views: loading fills the local tensor in place, and a flat optimizer shard of the tensor
is cut by the same rule.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from megackpt.geometry import View
from megackpt.mapping.base import RankOffset, ReplicaId, ShardedBase
from megackpt.mapping.checks import (
    as_extents,
    check_data,
    check_flattened_range,
    check_key,
    check_replica_id,
    declaration_error,
)
from megackpt.mapping.layout import Layout
from megackpt.mapping.sharded_tensor import ShardedTensor, declare_chunk, grid_position
from megackpt.mapping.views import ViewChunk, chunks_of_view, whole_view


@dataclass(frozen=True, slots=True)
class LayoutComponent:
    """One named part of a local tensor and its place in its own global array.

    Attributes:
        name: stored under `key.name`, or under the key itself if empty.
        view: the part's elements of the local tensor, through the axes that it is stored with.
        global_shape: shape of the part's global array, prepended axes included.
        global_offset: first element of the part in it, prepended axes included.
        axis_fragmentations: equal fragments per global axis.
        replica_id: added to that of the layout, element by element: other than 0 where ranks hold copies of
            this part, though each has the rest of its tensor for itself.
    """

    name: str
    view: View
    global_shape: tuple[int, ...]
    global_offset: tuple[int, ...]
    axis_fragmentations: tuple[int, ...]
    replica_id: ReplicaId = 0


@dataclass(frozen=True, slots=True)
class ComponentPlacement:
    """Where a part of a layout lies, if not where the layout's other parts do.

    Attributes:
        rank_offsets: `(axis, index, fragments)` of this part; those of the layout do not count for it.
        replica_id: added to that of the layout, element by element.
    """

    rank_offsets: tuple[RankOffset, ...] = ()
    replica_id: ReplicaId = 0


@dataclass(eq=False)
class ShardedLayout(ShardedBase):
    """A local tensor made of named parts, each sharded on its own.

    Attributes:
        key: prefix of the parts' keys.
        data: the local tensor; with `flattened_range` a 1-D slice of its flattening; None without data.
        local_shape: shape of the local tensor.
        parts: where each region goes; together they cover the local tensor.
        replica_id: as in ShardedTensor, for all parts; a part may add to it.
        prepend_axis_num: leading global axes that the local tensor lacks.
        flattened_range: which slice of the row-major flattening data holds.
        dtype: that of data.
        allow_shape_mismatch: as in ShardedTensor, for all parts.

    Raises:
        DeclarationError: the fields contradict each other.

    >>> w = torch.arange(8.0).reshape(4, 2)  # this rank's half of gate (2 rows) and up (2 rows)
    >>> for t in ShardedLayout.split("fc1", w, 0, {"gate": 2, "up": 2}, (0, 1, 2)).tensors():
    ...     print(t.key, t.global_shape, t.global_offset, t.data.tolist())
    fc1.gate (4, 2) (2, 0) [[0.0, 1.0], [2.0, 3.0]]
    fc1.up (4, 2) (2, 0) [[4.0, 5.0], [6.0, 7.0]]
    """

    key: str
    data: torch.Tensor | None
    local_shape: tuple[int, ...]
    components: tuple[LayoutComponent, ...]
    replica_id: ReplicaId = 0
    prepend_axis_num: int = 0
    flattened_range: slice | None = None
    dtype: torch.dtype | None = None
    allow_shape_mismatch: bool = False

    def __post_init__(self) -> None:
        check_key(self.key, "ShardedLayout")
        check_replica_id(self.key, self.replica_id)
        self.local_shape = as_extents(self.key, "local_shape", self.local_shape)
        if sum(part.view.numel for part in self.components) != math.prod(self.local_shape):
            raise declaration_error(
                self.key,
                f"the parts {[part.name for part in self.components]} do not cover local_shape "
                f"{self.local_shape}. Build them with a Layout.",
            )
        for part in self.components:
            self._replica_of(part)
        if self.flattened_range is not None:
            check_flattened_range(self.key, self.flattened_range, self.local_shape)
        if self.data is not None:
            self.dtype = getattr(self.data, "dtype", self.dtype)
            assert self.dtype is not None
            check_data(self.key, self.data, self.dtype, self.local_shape, self.flattened_range)

    @classmethod
    def of(
        cls,
        key: str,
        data: torch.Tensor,
        layout: Layout,
        *rank_offsets: RankOffset,
        replica_id: ReplicaId = 0,
        prepend_axis_num: int = 0,
        allow_shape_mismatch: bool = False,
        placements: Mapping[str, ComponentPlacement] | None = None,
    ) -> ShardedLayout:
        """Place every part of a layout by the same rank_offsets, except those that placements names.

        rank_offsets are `(axis, index, fragments)`; axes are those of the stored arrays (prepended ones, then
        the layout's), as in `ShardedTensor.from_rank_offsets`. Local.

        >>> w1 = torch.zeros(8, 2 * 6)  # two of four experts, [hidden, 2 * (gate 3 + up 3)]
        >>> experts = Layout.of(w1.shape).stack(1, 2).transpose((0, 2, 1)).split(1, {"gate": 3, "up": 3})
        >>> for t in ShardedLayout.of("fc1", w1, experts, (0, 1, 2)).tensors():
        ...     print(t.key, t.global_shape, t.global_offset)
        fc1.gate (4, 3, 8) (2, 0, 0)
        fc1.up (4, 3, 8) (2, 0, 0)

        Four ranks, two key heads: ranks 0 and 1 hold the first one, rank 1 as a replica.

        >>> heads = Layout.of((12, 4)).split(0, {"q": 8, "k": 4})  # on rank 1 of 4
        >>> k = PartPlacement(((0, 0, 2),), replica_id=1)
        >>> qk = ShardedLayout.of("qk", torch.zeros(12, 4), heads, (0, 1, 4), placements={"k": k})
        >>> [(t.key, t.global_shape, t.global_offset, t.replica_id) for t in qk.tensors()]
        [('qk.q', (32, 4), (8, 0), 0), ('qk.k', (8, 4), (0, 0), 1)]

        Raises:
            DeclarationError: an invalid rank offset, data is not what the layout is for, or placements names
                no part.
        """
        own = {} if placements is None else placements
        if unknown := sorted(own.keys() - layout.views.keys()):
            raise declaration_error(
                key, f"placements names {unknown}, but the parts are {sorted(layout.views)}. Name a part."
            )
        usual = ComponentPlacement(rank_offsets)
        components = tuple(
            _place(key, name, view, own.get(name, usual), prepend_axis_num)
            for name, view in layout.views.items()
        )
        return cls(
            key,
            data,
            layout.local_shape,
            components,
            replica_id,
            prepend_axis_num,
            allow_shape_mismatch=allow_shape_mismatch,
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
        allow_shape_mismatch: bool = False,
        placements: Mapping[str, ComponentPlacement] | None = None,
    ) -> ShardedLayout:
        """Split a dim of data into named parts, in order; every part is sharded by the same rank_offsets.

        axis counts data's own dims; sizes are local extents along it, in elements; rank_offsets are
        `(axis, index, fragments)` with axes counted in the global array (prepended axes included), as in
        `ShardedTensor.from_rank_offsets`. Parts that placements names are placed by theirs. Local.

        Raises:
            DeclarationError: the sizes do not add up to the extent of the dim, or a rank offset is invalid.
        """
        return cls.of(
            key,
            data,
            Layout.of(data.shape, key=key).split(axis, sizes),
            *rank_offsets,
            replica_id=replica_id,
            prepend_axis_num=prepend_axis_num,
            allow_shape_mismatch=allow_shape_mismatch,
            placements=placements,
        )

    @classmethod
    def interleave(
        cls,
        key: str,
        data: torch.Tensor,
        axis: int,
        sizes: Mapping[str, int],
        *rank_offsets: RankOffset,
        replica_id: ReplicaId = 0,
        prepend_axis_num: int = 0,
        allow_shape_mismatch: bool = False,
    ) -> ShardedLayout:
        """Split a dim of data that repeats a pattern of named parts, as a grouped-query QKV weight does.

        Stored arrays have the repetitions as an axis of their own in the place of `axis`, followed by the
        extent within the part; rank_offsets count both. In row-major order that is the part with the two
        merged, as a converter may read it. Local.

        >>> qkv = torch.zeros(2 * (3 + 1 + 1) * 4, 16)  # 2 of 8 groups: 3 query heads, key, value of dim 4
        >>> sizes = {"q": 12, "k": 4, "v": 4}
        >>> layout = ShardedLayout.interleave("qkv", qkv, 0, sizes, (0, 1, 4))
        >>> [(t.key, t.global_shape) for t in layout.tensors()]
        [('qkv.q', (8, 12, 16)), ('qkv.k', (8, 4, 16)), ('qkv.v', (8, 4, 16))]

        Raises:
            DeclarationError: the pattern does not repeat along the dim, or a rank offset is invalid.

        Source: Megatron-Core `SelfAttention.linear_qkv`, whose weight is `[ng * (np / ng + 2) * hn, h]`.
        """
        return cls.of(
            key,
            data,
            Layout.of(data.shape, key=key).interleave(axis, sizes),
            *rank_offsets,
            replica_id=replica_id,
            prepend_axis_num=prepend_axis_num,
            allow_shape_mismatch=allow_shape_mismatch,
        )

    @classmethod
    def stack(
        cls,
        key: str,
        data: torch.Tensor,
        axis: int,
        count: int,
        *rank_offsets: RankOffset,
        replica_id: ReplicaId = 0,
        prepend_axis_num: int = 0,
        allow_shape_mismatch: bool = False,
    ) -> ShardedLayout:
        """Store `count` slabs that lie side by side along a dim of data stacked along a new axis.

        The new axis is the first after the prepended ones. So weights of grouped experts, `[h, e * ffn]`,
        are stored as `[e, h, ffn]`, which a rank with other experts reads a part of. Local.

        Raises:
            DeclarationError: the dim is not a multiple of count, or a rank offset is invalid.
        """
        return cls.of(
            key,
            data,
            Layout.of(data.shape, key=key).stack(axis, count),
            *rank_offsets,
            replica_id=replica_id,
            prepend_axis_num=prepend_axis_num,
            allow_shape_mismatch=allow_shape_mismatch,
        )

    @classmethod
    def transpose(
        cls,
        key: str,
        data: torch.Tensor,
        order: Sequence[int],
        *rank_offsets: RankOffset,
        replica_id: ReplicaId = 0,
        prepend_axis_num: int = 0,
        allow_shape_mismatch: bool = False,
    ) -> ShardedLayout:
        """Store data with its dims in another order: stored axis i is dim `order[i]`. Local.

        Raises:
            DeclarationError: order does not name every dim once, or a rank offset is invalid.
        """
        return cls.of(
            key,
            data,
            Layout.of(data.shape, key=key).transpose(order),
            *rank_offsets,
            replica_id=replica_id,
            prepend_axis_num=prepend_axis_num,
            allow_shape_mismatch=allow_shape_mismatch,
        )

    def tensors(self) -> list[ShardedTensor]:
        """Return the parts as ShardedTensors whose data are views into this data.

        A whole local tensor gives one per part; a flat shard gives those regions of each part that it holds.

        Raises:
            DeclarationError: there is neither data nor a dtype.
        """
        if self.flattened_range is None:
            return [replace(self._block(p), data=whole_view(p.view, self.data)) for p in self.components]
        return [
            declare_chunk(self._block(part), piece)
            for part in self.components
            for piece in self._pieces(part.view, self.flattened_range)
        ]

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

    def _pieces(self, view: View, held: slice) -> list[ViewChunk]:
        if view.numel:
            return chunks_of_view(view, self.data, held)
        # A part without elements lies in no flat range, yet its key has to be in the checkpoint.
        data = None if self.data is None else self.data.detach()[:0].reshape(view.shape)
        return [ViewChunk((0,) * len(view.axes), view.shape, None, data)]

    def _block(self, part: LayoutComponent) -> ShardedTensor:
        """Declare the whole local block of a part, without data."""
        if self.dtype is None:
            raise declaration_error(self.key, "a layout needs data or a dtype.")
        return ShardedTensor(
            key=f"{self.key}.{part.name}" if part.name else self.key,
            data=None,
            dtype=self.dtype,
            local_shape=part.view.shape,
            global_shape=part.global_shape,
            global_offset=part.global_offset,
            axis_fragmentations=part.axis_fragmentations,
            replica_id=self._replica_of(part),
            prepend_axis_num=self.prepend_axis_num,
            allow_shape_mismatch=self.allow_shape_mismatch,
        )

    def _replica_of(self, part: LayoutComponent) -> ReplicaId:
        """Return the replica id of a part: that of the layout and its own, added."""
        whole, own = self.replica_id, part.replica_id
        if own == 0:
            return whole
        if isinstance(whole, int) and isinstance(own, int):
            return whole + own
        if isinstance(whole, tuple) and isinstance(own, tuple) and len(whole) == len(own):
            return tuple(a + b for a, b in zip(whole, own, strict=True))
        raise declaration_error(
            self.key,
            f"replica_id {own} of the part {part.name!r} cannot be added to {whole}, that of the layout. "
            f"Give two numbers, or two tuples of the same length.",
        )


def _place(key: str, name: str, view: View, placement: ComponentPlacement, prepended: int) -> LayoutComponent:
    check_replica_id(key, placement.replica_id)
    block = (1,) * prepended + view.shape
    index, fragments = grid_position(key, len(block), placement.rank_offsets)
    return LayoutComponent(
        name,
        view,
        tuple(n * f for n, f in zip(block, fragments, strict=True)),
        tuple(n * i for n, i in zip(block, index, strict=True)),
        fragments,
        placement.replica_id,
    )
