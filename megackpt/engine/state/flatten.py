"""A sharded state dict taken apart: entities to move, common values, and how to put the result together.

Owns the walk over the user's tree. It never changes the tree or its entities: factories and layouts are
expanded beside them, and entities are copied before anything fills them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Container, Mapping, Set
from dataclasses import dataclass, replace
from typing import Any

import torch

from megackpt.errors import DeclarationError, UnserializableError
from megackpt.mapping import (
    LocalNonpersistentObject,
    PerRankValue,
    ReplicatedValue,
    ShardedBase,
    ShardedLayout,
    ShardedObject,
    ShardedStateDict,
    ShardedTensor,
    ShardedTensorFactory,
)
from megackpt.mapping.plain_tensors import declare_whole_tensors, has_tensors
from megackpt.mapping.recognition import (
    is_megatron_class,
    is_torch_sharded,
    is_torch_sharded_class,
    may_have_xla,
)
from megackpt.mapping.sharded_tensor import TorchShardedTensor
from megackpt.mapping.tree import (
    ABSENT,
    PathKeys,
    Steps,
    iter_leaves,
    leaf_types,
    map_leaves,
    merge,
    without_positions,
)

Dropped = Set[str]
"""Keys for which nothing was loaded."""
Finish = Callable[[Dropped], Any]
"""Called after the load: returns the loaded leaf, or ABSENT if it was dropped."""


@dataclass(frozen=True, slots=True)
class FlattenedState:
    """What a sharded state dict stands for.

    Attributes:
        tensors: every ShardedTensor, factories and layouts expanded, in the order of the tree.
        objects: every ShardedObject, likewise; per-rank and replicated values are among them.
        per_rank: the per-rank values, by key.
        replicated: keys of replicated values; which rank's is the main replica is not decided yet.
        part_of_ranks: keys of DTensors and of torch's ShardedTensors whose mesh or process group is not all
            ranks: others may hold copies that no replica id tells apart.
        common: the tree without sharded and non-persistent leaves.
        finish: given the common state of a checkpoint and the keys that were not loaded, the loaded state
            dict.
    """

    tensors: tuple[ShardedTensor, ...]
    objects: tuple[ShardedObject, ...]
    per_rank: Mapping[str, PerRankValue]
    replicated: frozenset[str]
    part_of_ranks: frozenset[str]
    common: Any
    finish: Callable[[Any, Dropped], Any]

    @property
    def entities(self) -> list[ShardedTensor | ShardedObject]:
        """Tensors, then objects: the entities of a declaration."""
        return [*self.tensors, *self.objects]


def flatten_state(
    sharded_state_dict: ShardedStateDict,
    *,
    rank: int,
    ranks: int,
    stored: Container[str] = (),
    common: Container[Steps] = (),
    in_host_memory: bool = False,
) -> FlattenedState:
    """Take a sharded state dict apart, as that of one rank among ranks. Local.

    For a load, stored has the keys under which plain tensors of the state dict are global arrays of the
    checkpoint: those are asked for whole, but for those at steps in common. in_host_memory replaces tensors
    that are elsewhere by new ones.

    Raises:
        DeclarationError: it is not a dict, or an entity stands inside of a tuple or set, or has no data to
            save; or two tensors without a key get the same from their paths.
    """
    if not isinstance(sharded_state_dict, dict):
        raise DeclarationError(
            f"A sharded state dict must be a dict, not {type(sharded_state_dict).__name__}."
        )
    try:
        kinds = leaf_types(sharded_state_dict)
        names = PathKeys()
        ours = _with_sharded_tensors(_with_own_entities(sharded_state_dict, kinds), kinds, names)
        state = (
            declare_whole_tensors(ours, stored, common=common, names=names) if has_tensors(kinds) else ours
        )
    except RecursionError as error:
        raise UnserializableError(
            "The state dict contains itself, or is nested too deeply to be walked. Remove the cycle."
        ) from error
    collector = _LeafCollector(rank, ranks, in_host_memory=in_host_memory)
    finishes: list[Finish] = []  # in the order of the tree

    def taken(path: str, leaf: Any) -> Any:
        if isinstance(leaf, _NOT_COMMON):
            finishes.append(collector.add(path, leaf))
            return ABSENT
        _refuse_hidden_entities(leaf, path)
        return leaf

    rest = map_leaves(taken, state)

    def finish(stored_common: Any, dropped: Dropped) -> Any:
        values = iter([finish_one(dropped) for finish_one in finishes])

        def finished(_: str, leaf: Any) -> Any:
            value = next(values) if isinstance(leaf, _NOT_COMMON) else ABSENT
            return ABSENT if value is ABSENT else _Loaded(value)

        loaded = map_leaves(finished, state)
        merged = stored_common if loaded is ABSENT else merge(stored_common, loaded)
        return map_leaves(lambda _, leaf: leaf.value if isinstance(leaf, _Loaded) else leaf, merged)

    return FlattenedState(
        tuple(collector.tensors),
        tuple(collector.objects),
        collector.per_rank,
        frozenset(collector.replicated),
        frozenset(collector.part_of_ranks),
        {} if rest is ABSENT else without_positions(rest),
        finish,
    )


# The most frequent class first: an isinstance of the very class of a value does not ask the abstract base.
_NOT_COMMON = (
    ShardedTensor,
    ShardedBase,
    LocalNonpersistentObject,
    PerRankValue,
    ReplicatedValue,
    TorchShardedTensor,
)


@dataclass(frozen=True, slots=True)
class _Loaded:
    """Holds a loaded leaf while trees are merged: a dict or list in it is not to be merged."""

    value: Any


class _LeafCollector:
    """Collects what the leaves stand for; each `add` returns how to get the loaded leaf."""

    def __init__(self, rank: int, ranks: int, *, in_host_memory: bool) -> None:
        self.tensors: list[ShardedTensor] = []
        self.objects: list[ShardedObject] = []
        self.per_rank: dict[str, PerRankValue] = {}
        self.replicated: set[str] = set()
        self.part_of_ranks: set[str] = set()
        self._rank = rank
        self._ranks = ranks
        self._in_host_memory = in_host_memory

    def add(self, path: str, leaf: Any) -> Finish:
        """Add any leaf that is not common state."""
        match leaf:
            case ShardedTensor():
                return self._add_tensor(leaf)
            case LocalNonpersistentObject():
                return lambda _: leaf.unwrap()
            case TorchShardedTensor():
                return self._add_torch_sharded(leaf)
            case ShardedLayout():
                return self._add_layout(path, leaf)
            case ShardedObject():
                return self._add_object(replace(leaf))
            case PerRankValue():
                self._refuse_twice(path, leaf.key)
                self.per_rank[leaf.key] = leaf
                return self._add_object(leaf.on(self._rank, self._ranks))
            case ReplicatedValue():
                self._refuse_twice(path, leaf.key)
                self.replicated.add(leaf.key)
                return self._add_object(leaf.on(self._rank))
            case ShardedTensorFactory():
                return self._add_factory(path, leaf)
        raise DeclarationError(
            f"{path}: {type(leaf).__name__} is not an entity that can be saved.", path=path
        )

    def _refuse_twice(self, path: str, key: str) -> None:
        if key in self.per_rank or key in self.replicated:
            raise DeclarationError(
                f"{path}: a rank declares the plain value {key!r} twice. Give each value a key of its own.",
                key=key,
                path=path,
            )

    def _add_tensor(self, tensor: ShardedTensor) -> Finish:
        held = tensor.with_data(self._placed(tensor.data))
        self.tensors.append(held)
        return lambda dropped: ABSENT if held.key in dropped or held.data is None else held.data

    def _placed(self, data: torch.Tensor | None) -> torch.Tensor | None:
        if not self._in_host_memory or data is None or data.device.type == "cpu":
            return data
        return torch.empty_like(data, device="cpu", requires_grad=False)

    def _add_torch_sharded(self, held: TorchShardedTensor) -> Finish:
        self.tensors.extend(held.chunks)
        if held.ranks < self._ranks:
            self.part_of_ranks.add(held.key)
        return lambda dropped: ABSENT if held.key in dropped else held.data

    def _add_layout(self, path: str, layout: ShardedLayout) -> Finish:
        if layout.data is None:
            raise DeclarationError(
                f"{path}: the layout {layout.key!r} has no data to save or fill.", key=layout.key
            )
        layout = replace(layout, data=self._placed(layout.data))
        parts = layout.tensors()
        self.tensors.extend(parts)
        return lambda dropped: ABSENT if any(part.key in dropped for part in parts) else layout.data

    def _add_object(self, filled: ShardedObject) -> Finish:
        self.objects.append(filled)
        return lambda dropped: ABSENT if filled.key in dropped else filled.data

    def _add_factory(self, path: str, factory: ShardedTensorFactory) -> Finish:
        def finish_of(inner: str, leaf: Any) -> Finish:
            if not isinstance(leaf, _NOT_COMMON):
                raise DeclarationError(
                    f"{inner}: the factory of {factory.key!r} built a {type(leaf).__name__}. It must build "
                    f"sharded entities only, in dicts or lists.",
                    key=factory.key,
                )
            return self.add(inner, leaf)

        finishes = map_leaves(finish_of, _built(factory), path)

        def finish(dropped: Dropped) -> Any:
            # Each leaf is finished once: it may be a factory whose merge_fn works in place.
            loaded = {id(leaf): leaf(dropped) for _, leaf in iter_leaves([finishes])}
            if any(value is ABSENT for value in loaded.values()):
                return ABSENT
            return factory.merge_fn(map_leaves(lambda _, leaf: loaded[id(leaf)], finishes))

        return finish


def _built(factory: ShardedTensorFactory) -> Any:
    """Return what a factory builds, with Megatron-Core's entities as ours."""
    built = factory.build()
    return _with_own_entities(built, leaf_types(built))


# Adapters of other libraries are imported where a state dict has leaves of their classes.


def _with_own_entities(state: Any, kinds: Set[type]) -> Any:
    """Return the tree with Megatron-Core's entities as ours; kinds are the classes of its leaves."""
    if not any(map(is_megatron_class, kinds)):
        return state
    from megackpt.mapping.megatron_entities import adopt_megatron_entities

    return adopt_megatron_entities(state, kinds)


def _with_sharded_tensors(state: Any, kinds: Set[type], names: PathKeys) -> Any:
    """Return the tree with the sharded tensors of torch and torch_xla as entities."""
    # XLA first: from torch_xla 2.9 on its tensors are of a class that is derived from DTensor.
    if may_have_xla(kinds):
        from megackpt.mapping.xla import adopt_xla_tensors

        state = adopt_xla_tensors(state, kinds, names)
    if any(map(is_torch_sharded_class, kinds)):
        from megackpt.mapping.torch_sharded import adopt_torch_sharded_tensors

        state = adopt_torch_sharded_tensors(state, kinds, names)
    return state


def _refuse_hidden_entities(leaf: Any, path: str) -> None:
    if not isinstance(leaf, (tuple, set, frozenset, deque)):
        return
    for inner in leaf:
        if isinstance(inner, _NOT_COMMON) or is_torch_sharded(inner):
            raise DeclarationError(
                f"{path}: a {type(inner).__name__} stands inside of a {type(leaf).__name__}. Use a list "
                f"or a dict for "
                f"sharded entities.",
                path=path,
            )
        for _, deeper in iter_leaves([inner]):
            _refuse_hidden_entities(deeper, path)
            if deeper is not inner and (isinstance(deeper, _NOT_COMMON) or is_torch_sharded(deeper)):
                _refuse_hidden_entities((deeper,), path)
