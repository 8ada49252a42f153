"""How one local tensor is made of named components, and views of its elements.

A fused gate/up or QKV weight has, on every rank, the rank's share of each component one after the other.
Stored under one key, the shares of all ranks would interleave, and a load at another tensor-parallel size
would read them in the wrong order. A `Layout` tells which elements each component has, and through which axes
it is stored. It only splits, permutes and cuts axes, so every component is a strided view of the local
tensor, and of any flat shard of it. `ShardedLayout` gives each component its position in a global array of
its own.

`Layout` describes, without a tensor. `whole_view` and `chunks_of_view` return the elements, which share the
memory of the local tensor: a load fills the views, and by that the tensor of the user.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from megackpt.entities.base import as_extents
from megackpt.errors import DeclarationError, GeometryError
from megackpt.plans.geometry import View


@dataclass(frozen=True, slots=True)
class Layout:
    """Named components of a local tensor, each a view with axes of its own.

    Every operation applies to all components made so far, and counts their present axes. A component that is
    split again is named `outer.inner`.

    Attributes:
        local_shape: shape of the local tensor.
        views: the components by name; a tensor that is not split is one component with an empty name.
        key: the key of the entity, for errors.

    >>> qkv = Layout.of((12, 5)).interleave(0, {"q": 2, "k": 1, "v": 1})  # 3 groups of 2 + 1 + 1 rows
    >>> {name: view.shape for name, view in qkv.views.items()}
    {'q': (3, 2, 5), 'k': (3, 1, 5), 'v': (3, 1, 5)}
    >>> Layout.of((5, 8)).stack(1, 2).views[""].shape  # two experts side by side, each [5, 4]
    (2, 5, 4)
    """

    local_shape: tuple[int, ...]
    views: Mapping[str, View]
    key: str = "layout"

    @classmethod
    def of(cls, local_shape: Sequence[int], *, key: str = "layout") -> Layout:
        """Return the layout of a tensor that is not split."""
        shape = as_extents(key, "local_shape", local_shape)
        return cls(shape, {"": View.of(shape)}, key)

    def unflatten(self, axis: int, sizes: Sequence[int]) -> Layout:
        """Split an axis into several, row-major; one size may be -1, for the rest of the extent.

        Raises:
            DeclarationError: a component has no such axis, or the sizes do not multiply to its extent.
        """
        return self._map_views(lambda view: view.unflatten(axis, sizes))

    def transpose(self, order: Sequence[int]) -> Layout:
        """Put the axes in another order: the new axis i is the old axis `order[i]`.

        Raises:
            DeclarationError: order does not name every axis once.
        """
        return self._map_views(lambda view: view.transpose(order))

    def split(self, axis: int, sizes: Mapping[str, int]) -> Layout:
        """Cut an axis into named components of these extents, in order.

        Raises:
            DeclarationError: there is no such axis, the sizes do not add up to its extent, or a name is
                empty.
        """
        components: dict[str, View] = {}
        for outer, view in self.views.items():
            self._check_sizes(view, axis, sizes)
            position = 0
            for name, size in sizes.items():
                components[f"{outer}.{name}" if outer else name] = view.narrow(axis, position, size)
                position += size
        return replace(self, views=components)

    def interleave(self, axis: int, sizes: Mapping[str, int]) -> Layout:
        """Cut an axis along which a pattern of named components repeats: q q k v q q k v.

        The repetitions become a new axis before it, along which grouped-query heads are sharded.

        Raises:
            DeclarationError: there is no such axis, or its extent is not a multiple of the pattern's.
        """
        pattern = sum(sizes.values())
        for view in self.views.values():
            extent = view.shape[axis] if 0 <= axis < len(view.shape) else 0
            if pattern < 1 or extent % pattern:
                raise self._error(
                    f"the pattern {dict(sizes)} does not repeat along axis {axis} of {view.shape}."
                )
        return self.unflatten(axis, (-1, pattern)).split(axis + 1, sizes)

    def stack(self, axis: int, count: int) -> Layout:
        """Cut an axis into `count` equal slabs, and stack them along a new first axis.

        Raises:
            DeclarationError: there is no such axis, or its extent is not a multiple of count.
        """
        slabs = self.unflatten(axis, (count, -1))
        axes = range(len(next(iter(slabs.views.values())).axes))
        return slabs.transpose((axis, *(a for a in axes if a != axis)))

    def _map_views(self, change: Callable[[View], View]) -> Layout:
        try:
            return replace(self, views={name: change(view) for name, view in self.views.items()})
        except GeometryError as error:
            raise self._error(str(error)) from error

    def _check_sizes(self, view: View, axis: int, sizes: Mapping[str, int]) -> None:
        if not isinstance(sizes, Mapping) or not all(type(n) is int for n in (axis, *sizes.values())):
            raise self._error(
                f"axis {axis!r} and sizes {sizes!r} are not an int and ints by name. Give them as "
                f"0, {{'gate': 4, 'up': 4}}."
            )
        extent = view.shape[axis] if 0 <= axis < len(view.shape) else None
        if sum(sizes.values()) != extent or min(sizes.values(), default=-1) < 0:
            raise self._error(
                f"components {dict(sizes)} do not add up to axis {axis} of the shape {view.shape}. Give the "
                f"local size of every component, in order."
            )
        if not all(isinstance(name, str) and name for name in sizes):
            raise self._error(
                f"the components {dict(sizes)} need non-empty names: each is stored under its own."
            )

    def _error(self, what: str) -> DeclarationError:
        return DeclarationError(f"{self.key!r}: {what}", key=self.key)


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
