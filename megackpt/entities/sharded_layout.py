"""ShardedLayout: one local tensor that is stored as boxes of several global arrays.

A `Layout` tells the components of the tensor; here each one gets its position in a global array. The stored
tensors are views, so a load fills the local tensor in place, and flat optimizer shards are cut by the same
rule.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from megackpt.entities.base import (
    Expansion,
    RankOffset,
    ReplicaId,
    ShardedBase,
    as_extents,
    check_data,
    check_flattened_range,
    check_key,
    check_replica_id,
    check_tensor,
    declaration_error,
    grid_position,
)
from megackpt.entities.layout import Layout, ViewChunk, chunks_of_view, whole_view
from megackpt.entities.sharded_tensor import ShardedTensor, declare_chunk
from megackpt.plans.geometry import View


@dataclass(frozen=True, slots=True)
class LayoutComponent:
    """One named component of a local tensor and its position in a global array of its own.

    Attributes:
        name: the component is stored under `key.name`, or under the key itself if the name is empty.
        view: the component's elements of the local tensor, with the axes with which they are stored.
        global_shape: shape of the global array, with prepended axes.
        global_offset: first element of the component in it, with prepended axes.
        axis_fragmentations: number of equal fragments per global axis.
        replica_id: added to that of the layout, element by element. It is not 0 if ranks have replicas of
            this component and different shares of the others.
    """

    name: str
    view: View
    global_shape: tuple[int, ...]
    global_offset: tuple[int, ...]
    axis_fragmentations: tuple[int, ...]
    replica_id: ReplicaId = 0


@dataclass(frozen=True, slots=True)
class ComponentPlacement:
    """The position of a component that is sharded otherwise than the rest of its layout.

    Attributes:
        rank_offsets: `(axis, index, fragments)` of this component, instead of those of the layout.
        replica_id: added to that of the layout, element by element.
    """

    rank_offsets: tuple[RankOffset, ...] = ()
    replica_id: ReplicaId = 0


@dataclass(eq=False)
class ShardedLayout(ShardedBase):
    """A local tensor made of named components, each sharded on its own.

    Attributes:
        key: prefix of the keys of the components.
        data: the local tensor, or with `flattened_range` a 1-D slice of its flattening; None without data.
        local_shape: shape of the local tensor.
        components: the components with their positions; together they cover the local tensor.
        replica_id: as in ShardedTensor, for all components; a component may add to it.
        prepend_axis_num: number of leading global axes that the local tensor lacks.
        flattened_range: which slice of the row-major flattening data is.
        dtype: that of data.
        allow_shape_mismatch: as in ShardedTensor, for all components.

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
        if sum(c.view.numel for c in self.components) != math.prod(self.local_shape):
            raise declaration_error(
                self.key,
                f"the components {[c.name for c in self.components]} do not cover local_shape "
                f"{self.local_shape}. Build them with a Layout.",
            )
        for component in self.components:
            self._replica_of(component)
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
        """Shard every component of a layout by the same rank_offsets, except those in placements. Local.

        Args:
            key: prefix of the keys of the components.
            data: the local tensor, whose shape is that of the layout.
            layout: the components.
            rank_offsets: `(axis, index, fragments)`; axes are those of the stored arrays: prepended ones,
                then those of the layout.
            replica_id: 0 or all zeros for the main replica.
            prepend_axis_num: number of leading global axes that data lacks.
            allow_shape_mismatch: whether the global shapes may differ between checkpoint and request.
            placements: by name, the components that are sharded otherwise.

        >>> w1 = torch.zeros(8, 2 * 6)  # two of four experts, [hidden, 2 * (gate 3 + up 3)]
        >>> experts = Layout.of(w1.shape).stack(1, 2).transpose((0, 2, 1)).split(1, {"gate": 3, "up": 3})
        >>> for t in ShardedLayout.of("fc1", w1, experts, (0, 1, 2)).tensors():
        ...     print(t.key, t.global_shape, t.global_offset)
        fc1.gate (4, 3, 8) (2, 0, 0)
        fc1.up (4, 3, 8) (2, 0, 0)

        Four ranks, two key heads: ranks 0 and 1 have the first one, rank 1 as a replica.

        >>> heads = Layout.of((12, 4)).split(0, {"q": 8, "k": 4})  # on rank 1 of 4
        >>> k = ComponentPlacement(((0, 0, 2),), replica_id=1)
        >>> qk = ShardedLayout.of("qk", torch.zeros(12, 4), heads, (0, 1, 4), placements={"k": k})
        >>> [(t.key, t.global_shape, t.global_offset, t.replica_id) for t in qk.tensors()]
        [('qk.q', (32, 4), (8, 0), 0), ('qk.k', (8, 4), (0, 0), 1)]

        Raises:
            DeclarationError: a rank offset is not valid, data does not have the shape of the layout, or
                placements has a name of no component.
        """
        own = {} if placements is None else placements
        if unknown := sorted(own.keys() - layout.views.keys()):
            raise declaration_error(
                key,
                f"placements names {unknown}, but the components are {sorted(layout.views)}. Name one.",
            )
        default = ComponentPlacement(rank_offsets)
        components = tuple(
            _component(key, name, view, own.get(name, default), prepend_axis_num)
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
        """Split a dim of data into named components, in order. Local.

        axis is a dim of data, without prepended axes; sizes are the local extents of the components along it,
        in elements. The other arguments are those of `of`.

        Raises:
            DeclarationError: the sizes do not add up to the extent of the dim, or a rank offset is not valid.
        """
        return cls.of(
            key,
            data,
            _whole(key, data).split(axis, sizes),
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
        """Split a dim of data along which a pattern of components repeats, as in a grouped-query QKV weight.

        A stored array has two axes in place of `axis`: the repetitions, then the extent of the component;
        rank_offsets count both. A converter may read them as one axis, as the row-major order is the same.
        Local.

        >>> qkv = torch.zeros(2 * (3 + 1 + 1) * 4, 16)  # 2 of 8 groups: 3 query heads, key, value of dim 4
        >>> sizes = {"q": 12, "k": 4, "v": 4}
        >>> layout = ShardedLayout.interleave("qkv", qkv, 0, sizes, (0, 1, 4))
        >>> [(t.key, t.global_shape) for t in layout.tensors()]
        [('qkv.q', (8, 12, 16)), ('qkv.k', (8, 4, 16)), ('qkv.v', (8, 4, 16))]

        Raises:
            DeclarationError: the pattern does not repeat along the dim, or a rank offset is not valid.

        Source: Megatron-Core `SelfAttention.linear_qkv`, whose weight is `[ng * (np / ng + 2) * hn, h]`.
        """
        return cls.of(
            key,
            data,
            _whole(key, data).interleave(axis, sizes),
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
        """Cut a dim of data into `count` equal slabs, and store them stacked along a new axis. Local.

        The new axis is the first after the prepended ones. So weights of grouped experts, `[h, e * ffn]`, are
        stored as `[e, h, ffn]`, of which a load reads the experts of its rank.

        Raises:
            DeclarationError: the dim is not a multiple of count, or a rank offset is not valid.
        """
        return cls.of(
            key,
            data,
            _whole(key, data).stack(axis, count),
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
            DeclarationError: order does not name every dim once, or a rank offset is not valid.
        """
        return cls.of(
            key,
            data,
            _whole(key, data).transpose(order),
            *rank_offsets,
            replica_id=replica_id,
            prepend_axis_num=prepend_axis_num,
            allow_shape_mismatch=allow_shape_mismatch,
        )

    def tensors(self) -> list[ShardedTensor]:
        """Return the components as ShardedTensors whose data are views of this data.

        A whole local tensor gives one for each component, a flat shard one for each chunk that it has of a
        component.

        Raises:
            DeclarationError: data and dtype are both None.
        """
        if self.flattened_range is None:
            return [replace(self._box(c), data=whole_view(c.view, self.data)) for c in self.components]
        return [
            declare_chunk(self._box(component), chunk)
            for component in self.components
            for chunk in self._chunks(component.view, self.flattened_range)
        ]

    def expand(self, on_host: Callable[[torch.Tensor], torch.Tensor]) -> Expansion:
        """Return the components; they are views of the tensor, so a load that fills them fills it."""
        if self.data is None:
            raise declaration_error(self.key, "this layout has no data to save or fill.")
        layout = replace(self, data=on_host(self.data))
        return Expansion(parts=layout.tensors(), merge=lambda _: layout.data)

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
        """Declare another tensor of the same layout; see `ShardedBase.retarget`."""
        replica = self.replica_id if replica_id is None else replica_id
        return replace(self, key=key, data=data, replica_id=replica, flattened_range=flattened_range)

    def _chunks(self, view: View, shard: slice) -> list[ViewChunk]:
        if view.numel:
            return chunks_of_view(view, self.data, shard)
        # A component without elements is in no flat range, but its key has to be in the checkpoint.
        data = None if self.data is None else self.data.detach()[:0].reshape(view.shape)
        return [ViewChunk((0,) * len(view.axes), view.shape, None, data)]

    def _box(self, component: LayoutComponent) -> ShardedTensor:
        """Declare the whole local box of a component, without data."""
        if self.dtype is None:
            raise declaration_error(self.key, "a layout needs data or a dtype.")
        return ShardedTensor(
            key=f"{self.key}.{component.name}" if component.name else self.key,
            data=None,
            dtype=self.dtype,
            local_shape=component.view.shape,
            global_shape=component.global_shape,
            global_offset=component.global_offset,
            axis_fragmentations=component.axis_fragmentations,
            replica_id=self._replica_of(component),
            prepend_axis_num=self.prepend_axis_num,
            allow_shape_mismatch=self.allow_shape_mismatch,
        )

    def _replica_of(self, component: LayoutComponent) -> ReplicaId:
        """Return the replica id of a component: the sum of that of the layout and its own."""
        whole, own = self.replica_id, component.replica_id
        if own == 0:
            return whole
        if isinstance(whole, int) and isinstance(own, int):
            return whole + own
        if isinstance(whole, tuple) and isinstance(own, tuple) and len(whole) == len(own):
            return tuple(a + b for a, b in zip(whole, own, strict=True))
        raise declaration_error(
            self.key,
            f"replica_id {own} of the component {component.name!r} cannot be added to {whole}, that of the "
            f"layout. Give two numbers, or two tuples of the same length.",
        )


def _component(
    key: str, name: str, view: View, placement: ComponentPlacement, prepended: int
) -> LayoutComponent:
    check_replica_id(key, placement.replica_id)
    box = (1,) * prepended + view.shape
    return LayoutComponent(name, view, *grid_position(key, box, placement.rank_offsets), placement.replica_id)


def _whole(key: str, data: torch.Tensor) -> Layout:
    """Return the layout of data as a whole."""
    check_tensor(key, data, "ShardedLayout.split('w', tensor, 0, {'gate': 4, 'up': 4})")
    return Layout.of(data.shape, key=key)
