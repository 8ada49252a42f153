"""Hypothesis strategies for whole sharded state dicts: all entities mixed, for any world.

They state the law of the library for entities. A `GlobalState` is what is stored, whatever the layout.
`placements` distributes it over a number of ranks, in one of many ways. `DistributedState.declare` gives one
rank's sharded state dict, with its true values. Needs the extra `test`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st

from megackpt.engine.data.tensor_bytes import as_bits
from megackpt.entities import (
    LocalNonpersistentObject,
    ShardedBase,
    ShardedObject,
    ShardedStateDict,
    StateDict,
)
from megackpt.entities.tree import map_leaves
from megackpt.testing.identical import difference
from megackpt.testing.layouts import OwnedChunk, arrays, owned_chunks
from megackpt.testing.state_leaves import Declare, GlobalLeaf, factory_leaf, layout_leaf


@dataclass(frozen=True, slots=True)
class GlobalState:
    """What a checkpoint holds, whatever the layout.

    Attributes:
        tree: nested dicts and lists of GlobalLeaf.
    """

    tree: dict[Any, Any]


@dataclass(frozen=True, slots=True)
class DistributedState:
    """A global state laid out over the ranks of one world.

    Attributes:
        tree: nested dicts and lists of Declare.
    """

    tree: dict[Any, Any]

    def declare(self, rank: int) -> ShardedStateDict:
        """Return a rank's sharded state dict, with fresh tensors that hold the true values."""
        declare_chunks: ShardedStateDict = map_leaves(lambda _, leaf: leaf(rank), self.tree)
        return declare_chunks


@st.composite
def placements(draw: st.DrawFn, state: GlobalState, *, ranks: int) -> DistributedState:
    """Ways to lay a global state out over this many ranks."""
    return DistributedState(map_leaves(lambda _, leaf: leaf.distribute(draw, ranks), state.tree))


@st.composite
def global_states(draw: st.DrawFn, *, max_leaves: int = 6) -> GlobalState:
    """Global states of 1 to max_leaves leaves of all kinds, in nested dicts and lists."""
    count = draw(st.integers(1, max_leaves))
    nodes: list[Any] = [draw(st.sampled_from(_LEAVES))(draw, f"key{i}") for i in range(count)]
    while len(nodes) > 1 and draw(st.booleans()):
        start = draw(st.integers(0, len(nodes) - 1))
        stop = draw(st.integers(start + 1, len(nodes)))
        nodes[start:stop] = [_named(draw, nodes[start:stop]) if draw(st.booleans()) else nodes[start:stop]]
    return GlobalState(_named(draw, nodes))


def blank(declare_chunks: ShardedStateDict) -> ShardedStateDict:
    """Return a request for what was declared, with nothing in it that could pass for an answer.

    Tensors are overwritten in place; objects lose their data; common values become another value.
    """

    def wipe(_: str, leaf: Any) -> Any:
        if isinstance(leaf, ShardedObject):
            return leaf.without_data()
        if isinstance(leaf, ShardedBase):
            as_bits(leaf.data).fill_(1)
            return leaf
        return leaf if isinstance(leaf, LocalNonpersistentObject) else "not loaded"

    return {} if not declare_chunks else dict(map_leaves(wipe, declare_chunks))


def values_of(declare_chunks: ShardedStateDict) -> StateDict:
    """Return the plain state dict that a load of what was declared must give."""

    def value(_: str, leaf: Any) -> Any:
        if isinstance(leaf, LocalNonpersistentObject):
            return leaf.unwrap()
        return leaf.data if isinstance(leaf, ShardedBase) else leaf

    values: StateDict = map_leaves(value, declare_chunks)
    return values


def state_difference(loaded: StateDict, expected: StateDict) -> str | None:
    """Say where two plain state dicts differ in class or bits, dicts in any order; None if nowhere."""
    return difference(_in_order_of(expected, loaded), expected, path="state")


def _in_order_of(pattern: Any, tree: Any) -> Any:
    if type(pattern) is dict and type(tree) is dict and pattern.keys() == tree.keys():
        keys = {key: key for key in tree}  # a key equal to the pattern's need not be of its class
        return {keys[key]: _in_order_of(child, tree[key]) for key, child in pattern.items()}
    if type(pattern) is list and type(tree) is list and len(pattern) == len(tree):
        return [_in_order_of(p, t) for p, t in zip(pattern, tree, strict=True)]
    return tree


def _named(draw: st.DrawFn, nodes: Sequence[Any]) -> dict[Any, Any]:
    names = draw(st.lists(st.sampled_from(_NAMES), min_size=len(nodes), max_size=len(nodes), unique=True))
    return dict(zip(names, nodes, strict=True))


_NAMES = ["weight", "a.b", "", "0", "é/ü", "exp_avg", "x[0]", "$t", 0, 1, 7, -1, (1, "t"), True, None, 2.5]


# --- Arrays: any cut into boxes and flat ranges of them --------------------


@dataclass(frozen=True, slots=True)
class _Array:
    """A global array, declared by ShardedTensors."""

    key: str
    array: torch.Tensor

    def distribute(self, draw: st.DrawFn, ranks: int) -> Declare:
        owned = draw(owned_chunks(tuple(self.array.shape), ranks=ranks))
        return lambda rank: [h.declare(self.key, self.array) for h in _on(rank, owned)]


def _on(rank: int, owned: Sequence[OwnedChunk]) -> Iterator[OwnedChunk]:
    return (h for h in owned if h.rank == rank)


def _array(draw: st.DrawFn, key: str) -> _Array:
    return _Array(key, draw(arrays(max_extent=5)))


# --- Objects, values that are not stored, and common ones --------------------


@dataclass(frozen=True, slots=True)
class _Objects:
    """An array of objects; each on one or two ranks."""

    key: str
    shape: tuple[int, ...]
    objects: Mapping[tuple[int, ...], Any]

    def distribute(self, draw: st.DrawFn, ranks: int) -> Declare:
        homes = {
            offset: draw(st.lists(st.integers(0, ranks - 1), min_size=1, max_size=2, unique=True))
            for offset in self.objects
        }

        def declare(rank: int) -> list[ShardedObject]:
            return [
                ShardedObject(self.key, value, self.shape, offset, homes[offset].index(rank))
                for offset, value in self.objects.items()
                if rank in homes[offset]
            ]

        return declare


def _objects(draw: st.DrawFn, key: str) -> _Objects:
    shape = tuple(draw(st.lists(st.integers(1, 3), max_size=2)))
    return _Objects(key, shape, {offset: draw(common_values()) for offset in np.ndindex(*shape)})


@dataclass(frozen=True, slots=True)
class _Local:
    """A value that is not stored: every rank of every world has one of its own."""

    def distribute(self, draw: st.DrawFn, ranks: int) -> Declare:
        own = [draw(common_values()) for _ in range(ranks)]
        return lambda rank: LocalNonpersistentObject(own[rank])


@dataclass(frozen=True, slots=True)
class _Common:
    """A value that is equal on all ranks."""

    value: Any

    def distribute(self, draw: st.DrawFn, ranks: int) -> Declare:
        return lambda rank: self.value


_SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),  # NaN, -0.0 and subnormal ones too
    st.text(st.characters(exclude_categories=["Cs"]), max_size=8),
    st.binary(max_size=8),
    st.complex_numbers(allow_nan=False),
    st.sampled_from([torch.bfloat16, torch.device("cpu"), torch.Size([2, 3])]),
)


@st.composite
def common_values(draw: st.DrawFn) -> Any:
    """Values that are equal on all ranks: scalars, tensors and arrays, and containers of a few of them."""
    kind = draw(st.sampled_from(["scalar", "tensor", "strided", "array", "container"]))
    if kind == "scalar":
        return draw(_SCALARS)
    if kind in ("tensor", "strided"):
        tensor = draw(arrays(max_dims=2, max_extent=3))
        return tensor.mT if kind == "strided" and tensor.ndim == 2 else tensor
    if kind == "array":
        return np.frombuffer(
            draw(st.binary(min_size=8, max_size=8)), draw(st.sampled_from(["<f4", "u1", "i8"]))
        )
    inner = draw(st.lists(_SCALARS, max_size=3))
    make: Any = draw(
        st.sampled_from([list, tuple, _numbered, OrderedDict.fromkeys, lambda i: {"a": {}, "b": [], "c": i}])
    )
    return make(inner)


def _numbered(inner: Sequence[Any]) -> dict[Any, Any]:
    return dict(enumerate(inner))


_LEAVES: list[Callable[[st.DrawFn, str], GlobalLeaf]] = [
    _array,
    layout_leaf,
    factory_leaf,
    _objects,
    lambda draw, key: _Local(),
    lambda draw, key: _Common(draw(common_values())),
]
