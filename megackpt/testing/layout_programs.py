"""Hypothesis strategies for declarative layouts: random compositions of their operations.

The same program runs on a `Layout`, which computes with integers, and on a tensor, where torch's own views
are the reference.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from hypothesis import strategies as st

from megackpt.entities import Layout

FRAGMENTS = 6
"""Into how many fragments the sharded axis can be cut; a world uses any divisor of it."""


@dataclass(frozen=True, slots=True)
class Extent:
    """An extent of the local tensor: fixed, or so much for each fragment that the rank holds."""

    size: int
    sharded: bool = False

    def at(self, owned: int) -> int:
        """Return the extent on a rank that holds this many of the FRAGMENTS fragments."""
        return self.size * owned if self.sharded else self.size


@dataclass(frozen=True, slots=True)
class Operation:
    """One step of a program.

    Attributes:
        kind: `unflatten`, `transpose`, `split`, `interleave` or `stack`.
        axis: the axis it works on (not of a transpose).
        sizes: extents of the new axes, or of the parts; of a stack the count alone.
        order: the order of a transpose.
    """

    kind: str
    axis: int = 0
    sizes: tuple[Extent, ...] = ()
    order: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class LayoutProgram:
    """A composition of layout operations that works whatever number of fragments a rank holds.

    Attributes:
        dims: factors of each dim of the local tensor.
        operations: the steps.
        sharded_axis: the stored axis along which ranks hold different fragments.
    """

    dims: tuple[tuple[Extent, ...], ...]
    operations: tuple[Operation, ...]
    sharded_axis: int

    def local_shape(self, owned: int) -> tuple[int, ...]:
        """Shape of the local tensor of a rank that holds this many fragments."""
        return tuple(math.prod(e.at(owned) for e in factors) for factors in self.dims)

    def layout(self, owned: int, *, key: str) -> Layout:
        """Run the program on a Layout."""
        layout = Layout.of(self.local_shape(owned), key=key)
        for op in self.operations:
            layout = _run_on_layout(op, layout, [e.at(owned) for e in op.sizes])
        return layout

    def views(self, local: torch.Tensor, owned: int) -> dict[str, torch.Tensor]:
        """Run the program on a local tensor: the parts by name, as views that torch makes."""
        views = {"": local}
        for op in self.operations:
            views = _run_on_views(op, views, [e.at(owned) for e in op.sizes])
        return views


def _run_on_layout(op: Operation, layout: Layout, sizes: list[int]) -> Layout:
    named = {f"p{i}": size for i, size in enumerate(sizes)}
    match op.kind:
        case "unflatten":
            return layout.unflatten(op.axis, sizes)
        case "transpose":
            return layout.transpose(op.order)
        case "split":
            return layout.split(op.axis, named)
        case "interleave":
            return layout.interleave(op.axis, named)
    return layout.stack(op.axis, sizes[0])


def _run_on_views(
    op: Operation, views: Mapping[str, torch.Tensor], sizes: list[int]
) -> dict[str, torch.Tensor]:
    def each_part(change: Callable[[torch.Tensor], torch.Tensor]) -> dict[str, torch.Tensor]:
        return {name: change(view) for name, view in views.items()}

    match op.kind:
        case "unflatten":
            return each_part(lambda v: _unflatten(v, op.axis, sizes))
        case "transpose":
            return each_part(lambda v: v.permute(op.order))
        case "split":
            return _split(views, op.axis, sizes)
        case "interleave":
            return _split(each_part(lambda v: _unflatten(v, op.axis, (-1, sum(sizes)))), op.axis + 1, sizes)
    return each_part(lambda v: _unflatten(v, op.axis, (sizes[0], -1)).movedim(op.axis, 0))


def _split(views: Mapping[str, torch.Tensor], axis: int, sizes: list[int]) -> dict[str, torch.Tensor]:
    return {
        f"{outer}.p{i}" if outer else f"p{i}": part
        for outer, view in views.items()
        for i, part in enumerate(torch.split(view, sizes, axis))
    }


def _unflatten(view: torch.Tensor, axis: int, sizes: Sequence[int]) -> torch.Tensor:
    unflattened: torch.Tensor = view.unflatten(axis, tuple(sizes))
    return unflattened


_Axis = tuple[Extent, ...]  # the factors of an axis; none once it is cut, as its parts then differ


@st.composite
def layout_programs(draw: st.DrawFn, *, max_factors: int = 5, max_operations: int = 5) -> LayoutProgram:
    """Compositions of up to max_operations; tensors of 1 to 3 dims with max_factors factors in all."""
    factors = [Extent(draw(st.integers(1, 3))) for _ in range(draw(st.integers(1, max_factors)))]
    which = draw(st.integers(0, len(factors) - 1))
    factors[which] = Extent(draw(st.integers(1, 2)), sharded=True)
    cuts = sorted({0, *draw(st.lists(st.integers(0, len(factors)), max_size=2)), len(factors)})
    dims = tuple(tuple(factors[a:b]) for a, b in itertools.pairwise(cuts))
    axes: list[_Axis] = list(dims)
    sharded = next(i for i, axis in enumerate(axes) if any(e.sharded for e in axis))
    operations: list[Operation] = []
    for _ in range(draw(st.integers(0, max_operations))):
        op = _operation(draw, axes, few_parts=_parts(operations) <= 3)
        operations.append(op)
        axes, sharded = _after(op, axes, sharded)
    return LayoutProgram(dims, tuple(operations), sharded)


def _operation(draw: st.DrawFn, axes: Sequence[_Axis], *, few_parts: bool) -> Operation:
    composite = [a for a, axis in enumerate(axes) if len(axis) > 1]
    whole = [a for a, axis in enumerate(axes) if axis]
    kinds = ["transpose"] + ["unflatten", "stack"] * bool(composite) + ["split"] * bool(whole and few_parts)
    kind = draw(st.sampled_from(kinds + ["interleave"] * bool(composite and few_parts)))
    if kind == "transpose":
        return Operation(kind, order=tuple(draw(st.permutations(range(len(axes))))))
    axis = draw(st.sampled_from(whole if kind == "split" else composite))
    if kind == "unflatten":
        return Operation(kind, axis, axes[axis])
    if kind == "stack":
        return Operation(kind, axis, axes[axis][:1])
    cut = axes[axis] if kind == "split" else axes[axis][1:]
    extent = math.prod(e.size for e in cut)
    points = sorted(draw(st.integers(0, extent)) for _ in range(draw(st.integers(1, 2))))
    ends = [0, *points, extent]
    is_sharded = any(e.sharded for e in cut)
    return Operation(kind, axis, tuple(Extent(b - a, is_sharded) for a, b in itertools.pairwise(ends)))


def _after(op: Operation, axes: list[_Axis], sharded: int) -> tuple[list[_Axis], int]:
    """Return the factors of the axes after an operation, and which axis is the sharded one then."""
    order = list(op.order) if op.kind == "transpose" else list(range(len(axes)))
    new: dict[int, list[_Axis]] = {a: [axis] for a, axis in enumerate(axes)}
    old = axes[op.axis]
    if op.kind == "unflatten":
        new[op.axis] = [(e,) for e in old]
    elif op.kind == "split":
        new[op.axis] = [()]
    elif op.kind == "interleave":
        new[op.axis] = [old[:1], ()]
    elif op.kind == "stack":
        new[op.axis] = [old[:1], old[1:]]
    spread = [(a, i) for a in order for i in range(len(new[a]))]
    if op.kind == "stack":
        spread.insert(0, spread.pop(spread.index((op.axis, 0))))
    within = 0
    if sharded == op.axis and len(new[sharded]) > 1:
        position = next(i for i, e in enumerate(old) if e.sharded)
        within = min(position, len(new[sharded]) - 1)
    return [new[a][i] for a, i in spread], spread.index((sharded, within))


def _parts(operations: Sequence[Operation]) -> int:
    return math.prod(len(op.sizes) for op in operations if op.kind in ("split", "interleave"))
