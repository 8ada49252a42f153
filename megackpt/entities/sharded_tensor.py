"""ShardedTensor: one rank's chunk of a global array; and leaves of torch that a state dict holds as they are.

`plans.validation` checks that the declarations of all ranks fit together.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from operator import attrgetter, is_
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch

from megackpt.entities.base import (
    RankOffset,
    ReplicaId,
    ShardedBase,
    as_extents,
    box_of,
    check_box,
    check_data,
    check_flattened_range,
    check_grid,
    check_key,
    check_replica_id,
    check_tensor,
    data_shape,
    declaration_error,
    grid_position,
)
from megackpt.ground.arguments import check_choice
from megackpt.plans.geometry import Ints, row_major_strides

if TYPE_CHECKING:
    from megackpt.entities.layout import ViewChunk


@dataclass(eq=False)
class ShardedTensor(ShardedBase):
    """A local tensor as a box of a global array, or as a flat range of such a box.

    Attributes:
        key: unique name of the global array.
        data: the local tensor, of `local_shape`, or 1-D with `flattened_range`; None if only the declaration
            matters.
        dtype: dtype of the global array; that of data.
        local_shape: shape of the local box, without prepended axes.
        global_shape: shape of the global array, with prepended axes.
        global_offset: first element of the box in the global array, one int per global axis.
        axis_fragmentations: number of equal fragments per global axis; None for an irregular grid.
        replica_id: 0 or all zeros for the main replica. Every element needs exactly one main replica over all
            ranks.
        prepend_axis_num: number of leading global axes, of local size 1, that the local tensor lacks (stacked
            layers).
        allow_shape_mismatch: whether the global shape may differ between checkpoint and request (vocabulary
            padding). A load fills the common elements, and the rest of the request with zeros.
        unpadded_shape: the part of `global_shape` that has values, from the first element on; the rest is
            padding (`allow_shape_mismatch`). It is stored with the array. A load into a larger one keeps
            `data` where nothing is stored; a smaller one is an error. None: not known.
        flattened_range: `slice(start, stop)` of the row-major flattening of the local box: data is that
            slice.
        if_missing: what a load does if the checkpoint has no array `key`: what its mode says (`error`), or
            load nothing and keep `data` (`keep`), for arrays that older checkpoints lack.

    Raises:
        DeclarationError: the fields contradict each other.

    Source: Megatron-Core `dist_checkpointing.mapping.ShardedTensor`; `flattened_range` as up to its 0.15.
    """

    key: str
    data: torch.Tensor | None
    dtype: torch.dtype
    local_shape: tuple[int, ...]
    global_shape: tuple[int, ...]
    global_offset: tuple[int, ...]
    axis_fragmentations: tuple[int, ...] | None = None
    replica_id: ReplicaId = 0
    prepend_axis_num: int = 0
    allow_shape_mismatch: bool = False
    flattened_range: slice | None = None
    if_missing: Literal["error", "keep"] = field(default="error", kw_only=True)
    unpadded_shape: tuple[int, ...] | None = field(default=None, kw_only=True)
    # The other fields at the last check; see `with_data`.
    _checked: tuple[object, ...] = field(default=(object(),), init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        self.local_shape = as_extents(self.key, "local_shape", self.local_shape)
        self.global_shape = as_extents(self.key, "global_shape", self.global_shape)
        self.global_offset = as_extents(self.key, "global_offset", self.global_offset)
        if self.axis_fragmentations is not None:
            fragments = self.axis_fragmentations
            self.axis_fragmentations = as_extents(self.key, "axis_fragmentations", fragments)
        if self.unpadded_shape is not None:
            self.unpadded_shape = as_extents(self.key, "unpadded_shape", self.unpadded_shape)
        self.validate_metadata_integrity()
        self._checked = self.declared()

    @classmethod
    def from_rank_offsets(
        cls,
        key: str,
        data: torch.Tensor,
        *rank_offsets: RankOffset,
        replica_id: ReplicaId = 0,
        prepend_axis_num: int = 0,
        flattened_range: slice | None = None,
        allow_shape_mismatch: bool = False,
    ) -> ShardedTensor:
        """Declare a fragment of an evenly split array by this rank's position along each split axis. Local.

        Args:
            key: unique name of the global array.
            data: the local tensor.
            rank_offsets: `(axis, index, fragments)` for each split axis; prepended axes count as axes.
            replica_id: 0 or all zeros for the main replica.
            prepend_axis_num: number of leading global axes that data lacks.
            flattened_range: as in Megatron-Core's signature, where it is always None. Flat data need the
                shape of their box: call `from_rank_offsets_flat`.
            allow_shape_mismatch: whether the global shape may differ between checkpoint and request.

        >>> t = ShardedTensor.from_rank_offsets("w", torch.zeros(2, 3), (0, 1, 4))
        >>> t.global_shape, t.global_offset
        ((8, 3), (2, 0))

        Raises:
            DeclarationError: an axis is outside of the array or given twice, an index is outside of its
                fragments, or there is a flattened_range.
        """
        if flattened_range is not None:
            raise declaration_error(
                key,
                f"with flattened_range={flattened_range}, data of shape {tuple(data.shape)} is a range of a "
                f"flattened box, whose shape is not given. Call from_rank_offsets_flat(key, data, "
                f"shape_of_the_box, *rank_offsets, flattened_range=...).",
            )
        check_tensor(key, data, "from_rank_offsets('w', tensor, (0, rank, ranks))")
        shape = tuple(data.shape)
        position = grid_position(key, box_of(key, shape, prepend_axis_num), rank_offsets)
        return cls(
            key, data, data.dtype, shape, *position, replica_id, prepend_axis_num, allow_shape_mismatch
        )

    @classmethod
    def from_rank_offsets_flat(
        cls,
        key: str,
        data: torch.Tensor,
        non_flat_local_shape: Sequence[int],
        *rank_offsets: RankOffset,
        flattened_range: slice,
        replica_id: ReplicaId = 0,
        prepend_axis_num: int = 0,
        allow_shape_mismatch: bool = False,
    ) -> ShardedTensor:
        """Declare 1-D data, the `flattened_range` of a local box of shape `non_flat_local_shape`. Local.

        The other arguments and errors are those of `from_rank_offsets`.
        """
        check_tensor(key, data, "from_rank_offsets_flat('w', tensor, (4, 2), flattened_range=slice(0, 3))")
        shape = as_extents(key, "non_flat_local_shape", non_flat_local_shape)
        position = grid_position(key, box_of(key, shape, prepend_axis_num), rank_offsets)
        return cls(
            key,
            data,
            data.dtype,
            shape,
            *position,
            replica_id,
            prepend_axis_num,
            allow_shape_mismatch,
            flattened_range,
        )

    @property
    def box_shape(self) -> tuple[int, ...]:
        """Shape of the local box in the global array: `local_shape` with its prepended axes."""
        return (1,) * self.prepend_axis_num + self.local_shape

    @property
    def has_regular_grid(self) -> bool:
        """Whether the array is split into equal fragments along every axis."""
        return self.axis_fragmentations is not None

    def global_slice(self) -> tuple[int | slice, ...]:
        """Return the index of the local box in the global array: ints for prepended axes, then slices."""
        slices = [slice(o, o + n) for o, n in zip(self.global_offset, self.box_shape, strict=True)]
        return (*self.global_offset[: self.prepend_axis_num], *slices[self.prepend_axis_num :])

    def local_coordinates(self) -> tuple[Ints, ...]:
        """Return the index in the local box of every element of data: one array per local dim.

        >>> t = ShardedTensor.from_rank_offsets_flat("w", torch.zeros(3), (2, 3), flattened_range=slice(2, 5))
        >>> [axis.tolist() for axis in t.local_coordinates()]
        [[0, 1, 1], [2, 0, 1]]
        """
        flat = self.flattened_range or slice(0, math.prod(self.local_shape))
        return tuple(
            np.arange(flat.start, flat.stop, dtype=np.int64) // stride % extent
            for stride, extent in zip(row_major_strides(self.local_shape), self.local_shape, strict=True)
        )

    def global_coordinates(self) -> tuple[Ints, ...]:
        """Return the index in the global array of every element of data: one array per global axis."""
        count = math.prod(data_shape(self.local_shape, self.flattened_range))
        leading = (np.zeros(count, np.int64),) * self.prepend_axis_num
        coordinates = (*leading, *self.local_coordinates())
        return tuple(axis + offset for axis, offset in zip(coordinates, self.global_offset, strict=True))

    def local_chunk_offset_in_global(self) -> tuple[int, ...]:
        """Return the position of this box in the grid of fragments.

        Raises:
            DeclarationError: the grid is irregular (axis_fragmentations is None).
        """
        self._fragments("position")
        return tuple(o // n if n else 0 for o, n in zip(self.global_offset, self.box_shape, strict=True))

    def max_allowed_chunks(self) -> tuple[int, ...]:
        """Return the extent of one fragment along each global axis, the most that a stored chunk may have.

        Raises:
            DeclarationError: the grid is irregular (axis_fragmentations is None).

        Source: Megatron-Core `ShardedTensor.max_allowed_chunks`, name and meaning.
        """
        fragments = self._fragments("extent")
        return tuple(whole // count for whole, count in zip(self.global_shape, fragments, strict=True))

    def _fragments(self, wanted: str) -> tuple[int, ...]:
        if self.axis_fragmentations is None:
            raise declaration_error(
                self.key,
                f"an irregular grid (axis_fragmentations=None) gives its fragments no common {wanted}. Use "
                f"global_offset and local_shape.",
            )
        return self.axis_fragmentations

    def narrow(self, dim: int, start: int, length: int) -> list[ShardedTensor]:
        """Declare `[start, start + length)` of one dim of every rank's box as an array of its own. Local.

        All ranks have to narrow in the same way: the global extent and offset are scaled as the local extent.
        Data of the result are views. The key stays, so the caller has to set one.

        Args:
            dim: a dim of data, without prepended axes.
            start: first index along it.
            length: number of indices.

        Returns:
            One declaration for a whole box. For a flat shard what it has of the narrowed box, possibly
            nothing: one flat range if dim is 0, otherwise up to `2 n - 1` boxes.

        >>> t = ShardedTensor.from_rank_offsets("w", torch.zeros(6, 4), (0, 1, 2))
        >>> [(n.local_shape, n.global_shape, n.global_offset) for n in t.narrow(0, 4, 2)]
        [((2, 4), (4, 4), (2, 0))]

        Raises:
            DeclarationError: there is no such dim or range, or the array is not cut into equal fragments
                along the dim.

        Source: Megatron-Core `ShardedTensor.narrow`; there flat ones along dim 0 only.
        """
        from megackpt.entities.layout import chunks_of_view, whole_view
        from megackpt.plans.geometry import View

        shape, offset = self._narrowed_box(dim, start, length)
        view = View.of(self.local_shape).narrow(dim, start, length)
        box = replace(
            self,
            data=None,
            local_shape=view.shape,
            global_shape=shape,
            global_offset=offset,
            flattened_range=None,
            unpadded_shape=None,  # that of the whole array
        )
        if self.flattened_range is None:
            return [replace(box, data=whole_view(view, self.data))]
        return [declare_chunk(box, chunk) for chunk in chunks_of_view(view, self.data, self.flattened_range)]

    def _narrowed_box(self, dim: int, start: int, length: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the global shape and offset with those of one local dim scaled to `length`."""
        if not 0 <= dim < len(self.local_shape) or not 0 <= start <= start + length <= self.local_shape[dim]:
            raise declaration_error(
                self.key,
                f"[{start}:{start + length}) of dim {dim} is no part of local_shape {self.local_shape}. "
                f"Count dims without prepended axes and stay inside of the extent.",
            )
        axis, extent = dim + self.prepend_axis_num, self.local_shape[dim]
        whole, first = self.global_shape[axis], self.global_offset[axis]
        if not extent or whole % extent or first % extent:
            raise declaration_error(
                self.key,
                f"cannot narrow dim {dim}: the box of extent {extent} at {first} is not one of equal "
                f"fragments of {whole}, so its offset in the narrowed array is not known. Declare it "
                f"directly.",
            )

        def scaled(values: tuple[int, ...]) -> tuple[int, ...]:
            return (*values[:axis], values[axis] // extent * length, *values[axis + 1 :])

        return scaled(self.global_shape), scaled(self.global_offset)

    def without_data(self) -> ShardedTensor:
        """Return the same declaration with `data=None`."""
        return self.with_data(None)

    def with_data(self, data: torch.Tensor | None) -> ShardedTensor:
        """Return the same declaration with other data, checked like a new one.

        Fields that have not changed since their last check are not checked again. At every save and load of a
        large model these checks would be most of the work.

        Raises:
            DeclarationError: the fields contradict each other, or the data.
        """
        # Compared by identity: equal values may be of other types, and values of these types never change.
        if not all(map(is_, self.declared(), self._checked)):
            return replace(self, data=data)
        copy = type(self).__new__(type(self))
        copy.__dict__.update(self.__dict__, data=data)
        if data is not None:
            check_data(self.key, data, self.dtype, self.local_shape, self.flattened_range)
        return copy

    def declared(self) -> tuple[object, ...]:
        """Return all fields but data; they are equal for equal declarations."""
        values: tuple[object, ...] = _FIELDS_BUT_DATA(self)
        if isinstance(self.replica_id, list):  # the same list object may have new items
            return tuple(tuple(f) if isinstance(f, list) else f for f in values)
        return values

    def init_data(
        self, device: torch.device | str = "cpu", init_fn: Callable[..., torch.Tensor] = torch.empty
    ) -> None:
        """Set `data` to `init_fn(shape, dtype=..., device=...)`, if it is None."""
        if self.data is None:
            shape = data_shape(self.local_shape, self.flattened_range)
            self.data = init_fn(shape, dtype=self.dtype, device=device)

    def retarget(
        self,
        *,
        key: str,
        data: torch.Tensor,
        replica_id: ReplicaId | None = None,
        flattened_range: slice | None = None,
    ) -> ShardedTensor:
        """Declare another tensor of the same sharding; see `ShardedBase.retarget`."""
        return replace(
            self,
            key=key,
            data=data,
            dtype=data.dtype,
            replica_id=self.replica_id if replica_id is None else replica_id,
            flattened_range=flattened_range,
        )

    def validate_metadata_integrity(self) -> None:
        """Check the fields against each other.

        Raises:
            DeclarationError: fields contradict each other; the text names the key and the fields.
        """
        check_key(self.key, "ShardedTensor")
        check_replica_id(self.key, self.replica_id)
        if not isinstance(self.dtype, torch.dtype):
            raise declaration_error(self.key, f"dtype must be a torch.dtype, not {self.dtype!r}.")
        check_choice(f"{self.key!r}: if_missing", self.if_missing, ("error", "keep"))
        position = self.global_shape, self.global_offset
        check_box(self.key, self.local_shape, *position, prepended=self.prepend_axis_num)
        if self.axis_fragmentations is not None:
            resizable = self.allow_shape_mismatch
            check_grid(self.key, self.box_shape, *position, self.axis_fragmentations, resizable=resizable)
        if self.unpadded_shape is not None:
            self._check_unpadded(self.unpadded_shape)
        if self.flattened_range is not None:
            check_flattened_range(self.key, self.flattened_range, self.local_shape)
        if self.data is not None:
            check_data(self.key, self.data, self.dtype, self.local_shape, self.flattened_range)

    def _check_unpadded(self, unpadded: tuple[int, ...]) -> None:
        whole = self.global_shape
        if len(unpadded) != len(whole) or any(a > b for a, b in zip(unpadded, whole, strict=True)):
            raise declaration_error(
                self.key,
                f"unpadded_shape {unpadded} is no part of global_shape {whole}. Give at most its extents.",
            )
        if not self.allow_shape_mismatch:
            raise declaration_error(
                self.key, f"unpadded_shape {unpadded} needs allow_shape_mismatch=True: padding may differ."
            )


def declare_chunk(box: ShardedTensor, chunk: ViewChunk) -> ShardedTensor:
    """Declare one chunk of a box that a flat shard has; box is the declaration without data."""
    if chunk.flattened_range is not None:
        return replace(box, data=chunk.data, flattened_range=chunk.flattened_range)
    inside = (0,) * box.prepend_axis_num + chunk.start
    offset = tuple(o + i for o, i in zip(box.global_offset, inside, strict=True))
    return replace(
        box, data=chunk.data, local_shape=chunk.shape, global_offset=offset, axis_fragmentations=None
    )


_FIELDS_BUT_DATA = attrgetter(*(f.name for f in fields(ShardedTensor) if f.init and f.name != "data"))


@dataclass(frozen=True, slots=True, eq=False)
class TorchShardedTensor:
    """A DTensor or a ShardedTensor of torch in a state dict, with the chunks that this rank has of it.

    Attributes:
        key: its path in the state dict, joined with dots.
        data: the tensor itself. A load fills its local tensor or shards, and returns it.
        chunks: the boxes of this rank, as views of the tensor's memory; none on a rank outside of the mesh.
        ranks: number of ranks in the mesh or process group.
    """

    key: str
    data: torch.Tensor
    chunks: tuple[ShardedTensor, ...]
    ranks: int


@dataclass(frozen=True, slots=True, eq=False)
class KeptIfMissing:
    """A plain tensor or a DTensor of a request, whose key is its path; it stays as it is if that is missing.

    Attributes:
        value: the tensor, which a load returns in the place of this object.
    """

    value: torch.Tensor
