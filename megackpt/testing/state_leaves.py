"""Leaves of a generated state that stand for one local tensor each: layouts and factories.

A leaf says which ranks have the tensor (whole, in flat ranges, in copies) and what its values are;
`state_dicts` combines leaves. Needs the extra `test`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from hypothesis import strategies as st

from megackpt.engine.data.tensor_bytes import as_bits
from megackpt.entities import (
    LocalNonpersistentObject,
    ReplicaId,
    ShardedBase,
    ShardedLayout,
    ShardedObject,
    ShardedTensor,
    ShardedTensorFactory,
)
from megackpt.testing.identical import difference
from megackpt.testing.layout_programs import FRAGMENTS, LayoutProgram, layout_programs

DTYPES = [torch.float32, torch.bfloat16, torch.float8_e5m2, torch.int8, torch.float64, torch.complex128]

Declare = Callable[[int], Any]
"""Given a rank, what stands in its state dict: an entity, a dict or list of such, or a plain value."""


class GlobalLeaf(Protocol):
    """One leaf of a global state: values, and the ways to lay them out."""

    def distribute(self, draw: st.DrawFn, ranks: int) -> Declare:
        """Choose who holds what among this many ranks."""


@dataclass(frozen=True, slots=True)
class _LocalTensor:
    """What a rank holds of the local tensor of one layer and fragment: all of it, or a flat range."""

    rank: int
    layer: int
    fragment: int
    flat: slice | None
    copy: int

    @property
    def replica_id(self) -> ReplicaId:
        return (0, 0, self.copy)


@st.composite
def _local_tensors(
    draw: st.DrawFn, *, ranks: int, layers: int, fragments: int, numel: int, may_be_flat: bool
) -> list[_LocalTensor]:
    tensors = []
    for layer, fragment in itertools.product(range(layers), range(fragments)):
        ranges: list[slice | None] = [None]
        if may_be_flat and draw(st.booleans()):
            cuts = [0, *sorted(draw(st.lists(st.integers(0, numel), max_size=3))), numel]
            ranges = [slice(a, b) for a, b in itertools.pairwise(cuts)]
        for flat in ranges:
            homes = draw(st.lists(st.integers(0, ranks - 1), min_size=1, max_size=2, unique=True))
            tensors += [_LocalTensor(rank, layer, fragment, flat, copy) for copy, rank in enumerate(homes)]
    return tensors


def _declared(tensors: Sequence[_LocalTensor], entity_of: Callable[[_LocalTensor], Any]) -> Declare:
    """Declare each holding of a rank, in a dict by layer, fragment and range."""

    def declare(rank: int) -> dict[str, Any]:
        own_tensors = [h for h in tensors if h.rank == rank]
        return {f"{i}.{h.layer}.{h.fragment}": entity_of(h) for i, h in enumerate(own_tensors)}

    return declare


@dataclass(frozen=True, slots=True)
class _Parts:
    """The global arrays of a layout's parts, `[layers, ...]`, and the program that makes local tensors."""

    key: str
    program: LayoutProgram
    parts: Mapping[str, torch.Tensor]
    layers: int | None  # None: without a prepended axis

    def distribute(self, draw: st.DrawFn, ranks: int) -> Declare:
        fragments = draw(st.sampled_from([n for n in range(1, FRAGMENTS + 1) if FRAGMENTS % n == 0]))
        numel = math.prod(self.program.local_shape(FRAGMENTS // fragments))
        owned = draw(
            _local_tensors(
                ranks=ranks, layers=self.layers or 1, fragments=fragments, numel=numel, may_be_flat=True
            )
        )
        strided = draw(st.booleans())
        return _declared(owned, lambda h: self._entity(h, fragments, strided=strided))

    def _entity(self, holding: _LocalTensor, fragments: int, *, strided: bool) -> ShardedLayout:
        prepended = 0 if self.layers is None else 1
        layer = [] if self.layers is None else [(0, holding.layer, self.layers)]
        local = self._local(holding, FRAGMENTS // fragments)
        whole = ShardedLayout.of(
            self.key,
            local,
            self.program.layout(FRAGMENTS // fragments, key=self.key),
            *layer,
            (self.program.sharded_axis + prepended, holding.fragment, fragments),
            replica_id=holding.replica_id,
            prepend_axis_num=prepended,
        )
        data = _owned_part(local, holding.flat, strided=strided)
        return whole.retarget(key=self.key, data=data, flattened_range=holding.flat)

    def _local(self, holding: _LocalTensor, owned: int) -> torch.Tensor:
        """Assemble the local tensor as torch would: by copying every part into a view of it."""
        dtype = next(iter(self.parts.values())).dtype
        local = torch.zeros(self.program.local_shape(owned), dtype=dtype)
        for name, view in self.program.views(as_bits(local), owned).items():
            axis = self.program.sharded_axis
            whole = as_bits(self.parts[name])[holding.layer]
            view.copy_(whole.narrow(axis, holding.fragment * view.shape[axis], view.shape[axis]))
        return local


def layout_leaf(draw: st.DrawFn, key: str) -> GlobalLeaf:
    """A random composition of layout operations, with or without an axis of layers before it."""
    program = draw(layout_programs())
    layers = draw(st.sampled_from([None, 1, 2]))
    dtype = draw(st.sampled_from(DTYPES))
    views = program.views(torch.zeros(program.local_shape(FRAGMENTS), dtype=torch.uint8), FRAGMENTS)
    parts = {name: random_bits(draw, (layers or 1, *view.shape), dtype) for name, view in views.items()}
    return _Parts(key, program, parts, layers)


@dataclass(frozen=True, slots=True)
class _Made:
    """A global array `[layers, rows, columns]`, declared by a factory of one kind."""

    key: str
    array: torch.Tensor
    kind: _FactoryKind

    def distribute(self, draw: st.DrawFn, ranks: int) -> Declare:
        layers, rows, columns = self.array.shape
        fragments = draw(st.sampled_from([n for n in range(1, rows + 1) if rows % n == 0]))
        owned = draw(
            _local_tensors(
                ranks=ranks,
                layers=layers,
                fragments=fragments,
                numel=rows // fragments * columns,
                may_be_flat=self.kind.takes_flat,
            )
        )
        strided = draw(st.booleans())

        def entity_of(h: _LocalTensor) -> ShardedBase:
            local = self.array[h.layer].chunk(fragments)[h.fragment]
            distribute = _FactoryPosition(
                tuple(local.shape), ((0, h.layer, layers), (1, h.fragment, fragments))
            )
            factory = self.kind.make(distribute, self.key, local, h.replica_id)
            return factory.retarget(
                key=self.key, data=_owned_part(local, h.flat, strided=strided), flattened_range=h.flat
            )

        return _declared(owned, entity_of)


@dataclass(frozen=True, slots=True)
class _FactoryPosition:
    """Where a factory's local tensor stands: its shape, and its layer and rows as rank offsets."""

    local_shape: tuple[int, ...]
    offsets: tuple[tuple[int, int, int], ...]

    def tensor(
        self, key: str, data: torch.Tensor, replica_id: ReplicaId, flat: slice | None
    ) -> ShardedTensor:
        """Declare a tensor of the local shape, or a flat range of one."""
        shared: Any = {"replica_id": replica_id, "prepend_axis_num": 1}
        if flat is None:
            return ShardedTensor.from_rank_offsets(key, data, *self.offsets, **shared)
        return ShardedTensor.from_rank_offsets_flat(
            key, data, self.local_shape, *self.offsets, flattened_range=flat, **shared
        )


Make = Callable[[_FactoryPosition, str, torch.Tensor, ReplicaId], ShardedTensorFactory]


@dataclass(frozen=True, slots=True)
class _FactoryKind:
    make: Make
    takes_flat: bool


def _inverted(data: torch.Tensor) -> torch.Tensor:
    """All bits turned over: opaque, and its own inverse."""
    bits = as_bits(data)
    if bits.dtype == torch.complex128:
        return torch.view_as_complex(_inverted(torch.view_as_real(bits)))
    return torch.bitwise_not(bits).view(data.dtype)


def _inverting(
    distribute: _FactoryPosition, key: str, data: torch.Tensor, replica_id: ReplicaId
) -> ShardedTensorFactory:
    """Stores another tensor than it is given, element by element."""
    return ShardedTensorFactory(
        key, data, lambda k, t, r, flat: distribute.tensor(k, _inverted(t), r, flat), _inverted, replica_id
    )


def _nested(
    distribute: _FactoryPosition, key: str, data: torch.Tensor, replica_id: ReplicaId
) -> ShardedTensorFactory:
    """Builds a dict of a factory, a list, and a value that is not stored."""

    def build(k: str, t: torch.Tensor, r: ReplicaId, flat: slice | None) -> Any:
        inner = _inverting(distribute, f"{k}.inner", t, r)
        again = inner.retarget(key=f"{k}.inner", data=_inverted(t), flattened_range=flat)
        return {
            "inner": again,
            "plain": [distribute.tensor(f"{k}.plain", t, r, flat)],
            "own": LocalNonpersistentObject(k),
        }

    def join(built: Any) -> torch.Tensor:
        assert isinstance(built["own"], str)
        assert difference(built["plain"][0], _inverted(built["inner"])) is None
        tensor: torch.Tensor = built["plain"][0]
        return tensor

    return ShardedTensorFactory(key, data, build, join, replica_id)


def _laid_out(
    distribute: _FactoryPosition, key: str, data: torch.Tensor, replica_id: ReplicaId
) -> ShardedTensorFactory:
    """Builds a declarative layout: columns in two parts, transposed."""
    columns = distribute.local_shape[1]
    sizes = {"few": columns // 3, "rest": columns - columns // 3}

    def build(k: str, t: torch.Tensor, r: ReplicaId, flat: slice | None) -> Any:
        whole = ShardedLayout.split(
            k,
            torch.empty(distribute.local_shape, dtype=t.dtype),
            1,
            sizes,
            *distribute.offsets,
            prepend_axis_num=1,
        )
        return whole.retarget(key=k, data=t, replica_id=r, flattened_range=flat)

    return ShardedTensorFactory(key, data, build, lambda tensor: tensor, replica_id)


def _transposing(
    distribute: _FactoryPosition, key: str, data: torch.Tensor, replica_id: ReplicaId
) -> ShardedTensorFactory:
    """Stores rows and columns exchanged, in two lists, and an object."""
    (_, layer, layers), (_, fragment, fragments) = distribute.offsets

    def build(k: str, t: torch.Tensor, r: ReplicaId, flat: slice | None) -> Any:
        assert flat is None
        halves = [
            ShardedTensor.from_rank_offsets(
                f"{k}.{name}",
                half.contiguous(),
                (0, layer, layers),
                (2, fragment, fragments),
                replica_id=r,
                prepend_axis_num=1,
            )
            for name, half in zip(("upper", "lower"), t.t().tensor_split(2), strict=True)
        ]
        copies = (fragment, *(r if isinstance(r, tuple) else (r,)))  # one object for all fragments
        columns = ShardedObject(f"{k}.columns", t.shape[1], (layers,), (layer,), copies)
        return [halves, {"columns": columns}]

    return ShardedTensorFactory(
        key,
        data,
        build,
        lambda built: torch.cat([as_bits(h) for h in built[0]]).t().view(data.dtype),
        replica_id,
    )


_FACTORIES = [
    _FactoryKind(_inverting, takes_flat=True),
    _FactoryKind(_nested, takes_flat=True),
    _FactoryKind(_laid_out, takes_flat=True),
    _FactoryKind(_transposing, takes_flat=False),
]


def factory_leaf(draw: st.DrawFn, key: str) -> GlobalLeaf:
    """A factory: opaque, nested, one that builds a layout, or one that transposes and adds an object."""
    shape = draw(st.integers(1, 2)), draw(st.sampled_from([1, 4, 6])), draw(st.integers(0, 5))
    return _Made(
        key, random_bits(draw, shape, draw(st.sampled_from(DTYPES))), draw(st.sampled_from(_FACTORIES))
    )


def random_bits(draw: st.DrawFn, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """A tensor of random bits: every NaN and subnormal number of the dtype may be among them."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    nbytes = math.prod(shape) * dtype.itemsize
    raw_bytes = torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=generator)
    return raw_bytes.view(dtype).reshape(tuple(shape))


def _owned_part(local: torch.Tensor, flat: slice | None, *, strided: bool) -> torch.Tensor:
    """Copy a local tensor, or a flat range of it, into memory of its own, contiguous or not."""
    bits = as_bits(local) if flat is None else as_bits(local).reshape(-1)[flat]
    if not strided or not bits.ndim:
        return bits.clone().view(local.dtype)
    room = torch.zeros((*bits.shape, 2), dtype=bits.dtype).view(local.dtype)
    owned = room[..., 0]
    as_bits(owned).copy_(bits)
    return owned
