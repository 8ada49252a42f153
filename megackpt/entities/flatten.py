"""Flattening of a sharded state dict into tensors, objects and common state, and the way back after a load.

One walk visits each leaf once. Adapters turn leaves of other libraries into entities (see `adapter_of`).
The user's tree and its entities are never changed: factories and layouts are expanded into new entities, and
an entity is copied before anything fills it.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Container, Mapping, Set
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch

from megackpt.entities.base import Expansion, ShardedBase, ShardedStateDict
from megackpt.entities.plain_tensors import declare_whole, is_plain_tensor
from megackpt.entities.recognition import (
    MEGATRON_MODULE,
    XLA_PACKAGE,
    is_torch_sharded,
    is_torch_sharded_class,
    is_xla_class,
)
from megackpt.entities.sharded_object import (
    LocalNonpersistentObject,
    PerRankValue,
    ReplicatedValue,
    ShardedObject,
)
from megackpt.entities.sharded_tensor import KeptIfMissing, ShardedTensor, TorchShardedTensor
from megackpt.entities.tree import (
    ABSENT,
    PathKeys,
    Steps,
    add_step,
    dotted,
    iter_leaves,
    map_leaves,
    merge,
    path_of,
    without_positions,
)
from megackpt.errors import DeclarationError, UnserializableError

# Adapters turn leaves of other libraries into entities. They are chosen by the class of a leaf.
#
# Each is imported only where a state dict holds a leaf of its library: `torch_sharded`, `xla`,
# `megatron_entities`.

Adapter: TypeAlias = Callable[[Steps, Any, PathKeys], Any]
"""Takes the steps of a leaf, the leaf, and what names leaves without a key; returns the entity that declares
it, or the leaf itself if it declares nothing."""


def adapter_of(kind: type) -> Adapter | None:
    """Return the adapter for leaves of a class; None if its library has no adapter."""
    # XLA before DTensor: from torch_xla 2.9 on its tensors are of a class that is derived from DTensor.
    is_loaded = f"{XLA_PACKAGE}.distributed.spmd" in sys.modules
    if is_xla_class(kind) or (is_loaded and issubclass(kind, torch.Tensor)):
        from megackpt.entities.xla import adopt_xla_tensor

        return adopt_xla_tensor
    if is_torch_sharded_class(kind):
        from megackpt.entities.torch_sharded import adopt_torch_sharded_tensor

        return adopt_torch_sharded_tensor
    return megatron_adapter_of(kind)


def megatron_adapter_of(kind: type) -> Adapter | None:
    """Return what turns sharded entities of Megatron-Core into ours; None for other classes than theirs."""
    if all(cls.__module__ != MEGATRON_MODULE for cls in kind.__mro__):
        return None
    from megackpt.entities.megatron_entities import adopt_megatron_entity

    return adopt_megatron_entity


DroppedKeys = Set[str]
"""Keys that were not loaded."""


@dataclass(slots=True, eq=False)
class EntityLeaf:
    """A leaf whose loaded value is the data of an entity.

    Attributes:
        entity: has the data when the load is done.
        keys: what it is stored as.
    """

    entity: ShardedTensor | ShardedObject | TorchShardedTensor
    keys: tuple[str, ...]

    def loaded(self, dropped: DroppedKeys) -> Any:
        """Return the loaded value; ABSENT if nothing was loaded for one of the keys."""
        if dropped and any(key in dropped for key in self.keys):
            return ABSENT
        data = self.entity.data
        return ABSENT if data is None and isinstance(self.entity, ShardedTensor) else data


@dataclass(slots=True, eq=False)
class LocalLeaf:
    """A leaf that is not stored; a load answers it with the local value."""

    leaf: LocalNonpersistentObject

    def loaded(self, dropped: DroppedKeys) -> Any:
        """Return the local value."""
        return self.leaf.unwrap()


@dataclass(slots=True, eq=False)
class ExpandedLeaf:
    """A leaf that is stored as other entities: a layout, or what a factory has built.

    Attributes:
        key: of the leaf.
        expansion: merges the loaded values.
        parts: those of the expansion, with a leaf of these classes for each entity.
    """

    key: str
    expansion: Expansion
    parts: Any

    @property
    def keys(self) -> tuple[str, ...]:
        """What is stored for it, also for parts that are expanded again."""
        leaves = [leaf for _, leaf in iter_leaves([self.parts])]
        return tuple(key for leaf in leaves if not isinstance(leaf, LocalLeaf) for key in leaf.keys)

    def is_dropped(self, dropped: DroppedKeys) -> bool:
        """Return whether nothing is loaded for one of its keys."""
        return any(key in dropped for key in self.keys)

    def loaded(self, dropped: DroppedKeys) -> Any:
        """Return what the expansion merges; ABSENT if nothing was loaded for one of its entities."""
        # Each value is computed once: it may be of a factory whose merge_fn works in place.
        values = {id(leaf): leaf.loaded(dropped) for _, leaf in iter_leaves([self.parts])}
        if any(value is ABSENT for value in values.values()):
            return ABSENT
        return self.expansion.merge(map_leaves(lambda _, leaf: values[id(leaf)], self.parts))


ShardedLeaf = EntityLeaf | LocalLeaf | ExpandedLeaf


@dataclass(frozen=True, slots=True)
class FlattenedState:
    """A sharded state dict as lists of entities and common state.

    Attributes:
        tensors: every ShardedTensor, with factories and layouts expanded, in the order of the tree.
        objects: every ShardedObject, also per-rank and replicated values, in the order of the tree.
        per_rank: the per-rank values, by key.
        replicated: keys of replicated values, whose main replica is not chosen yet.
        on_some_ranks: keys of DTensors and of torch's ShardedTensors whose mesh or process group does not
            have all ranks. Other ranks may hold replicas that are not marked as such by a replica id.
        common: the tree without sharded and non-persistent leaves.
        tree: the tree with all leaves, as the user has given it.
        leaves: how each leaf of the tree that is not common state is answered after a load, by its steps.
    """

    tensors: tuple[ShardedTensor, ...]
    objects: tuple[ShardedObject, ...]
    per_rank: Mapping[str, PerRankValue]
    replicated: frozenset[str]
    on_some_ranks: frozenset[str]
    common: Any
    tree: Any
    leaves: Mapping[Steps, ShardedLeaf]

    @property
    def entities(self) -> list[ShardedTensor | ShardedObject]:
        """All entities, in the order of a declaration: tensors, then objects."""
        return [*self.tensors, *self.objects]

    def transformed(self, dropped: DroppedKeys) -> dict[str, str]:
        """Return by key what the factories say that a load makes of stored arrays, if none is dropped."""
        return {
            leaf.key: leaf.expansion.how
            for leaf in self.leaves.values()
            if isinstance(leaf, ExpandedLeaf) and leaf.expansion.how and not leaf.is_dropped(dropped)
        }

    def advice(self) -> dict[str, str]:
        """Return by key of an array what its factory advises if it cannot be loaded as it is requested."""
        return {
            key: leaf.expansion.advice
            for leaf in self.leaves.values()
            if isinstance(leaf, ExpandedLeaf) and leaf.expansion.advice
            for key in leaf.keys
        }

    def unflatten(self, stored_common: Any, dropped: DroppedKeys) -> Any:
        """Return the loaded state dict: the common state of a checkpoint, with the loaded leaves in it."""
        values = {steps: leaf.loaded(dropped) for steps, leaf in self.leaves.items()}

        def loaded_leaf(steps: Steps, _: Any) -> Any:
            value = values.get(steps, ABSENT)
            return ABSENT if value is ABSENT else _LoadedLeaf(value)

        loaded = map_leaves(loaded_leaf, self.tree, (), step=add_step)
        merged = stored_common if loaded is ABSENT else merge(stored_common, loaded)
        return map_leaves(lambda _, leaf: leaf.value if isinstance(leaf, _LoadedLeaf) else leaf, merged)


def flatten_state(
    sharded_state_dict: ShardedStateDict,
    *,
    rank: int,
    ranks: int,
    stored: Container[str] = (),
    common: Container[Steps] = (),
    in_host_memory: bool = False,
) -> FlattenedState:
    """Flatten a sharded state dict. Local.

    Args:
        sharded_state_dict: of this rank.
        rank: number of this rank.
        ranks: number of ranks.
        stored: for a load, the keys of global arrays of the checkpoint: a plain tensor of the state dict
            with such a key is filled with the whole array.
        common: for a load, the steps of tensors that are not, because common state has them.
        in_host_memory: for a load, replace tensors on devices by new ones in host memory.

    Raises:
        DeclarationError: it is not a dict; an entity is inside of a tuple or set, or has no data to save; or
            two tensors without a key get the same key from their paths.
        UnserializableError: the state dict contains itself.
    """
    if not isinstance(sharded_state_dict, dict):
        raise DeclarationError(
            f"A sharded state dict must be a dict, not {type(sharded_state_dict).__name__}. Give it a key: "
            f"{{'model': ...}}."
        )
    collector = _LeafCollector(rank, ranks, stored=stored, common=common, in_host_memory=in_host_memory)
    try:
        common_state = map_leaves(collector.collect, sharded_state_dict, (), step=add_step)
    except RecursionError as error:
        raise UnserializableError(
            "The state dict contains itself, or is nested too deeply to be walked. Remove the cycle."
        ) from error
    return FlattenedState(
        tensors=tuple(collector.tensors),
        objects=tuple(collector.objects),
        per_rank=collector.per_rank,
        replicated=frozenset(collector.replicated),
        on_some_ranks=frozenset(collector.on_some_ranks),
        common={} if common_state is ABSENT else without_positions(common_state),
        tree=sharded_state_dict,
        leaves=collector.leaves,
    )


# The most frequent class is the first: isinstance with the exact class does not ask the abstract base.
_NOT_COMMON = (
    ShardedTensor,
    ShardedBase,
    LocalNonpersistentObject,
    PerRankValue,
    ReplicatedValue,
    TorchShardedTensor,
)


@dataclass(frozen=True, slots=True)
class _LoadedLeaf:
    """Wraps a loaded leaf while trees are merged, so that a dict or list in it is not merged."""

    value: Any


class _LeafCollector:
    """Collects the entities of the leaves, and how each leaf is answered after a load."""

    def __init__(
        self,
        rank: int,
        ranks: int,
        *,
        stored: Container[str],
        common: Container[Steps],
        in_host_memory: bool,
    ) -> None:
        self.tensors: list[ShardedTensor] = []
        self.objects: list[ShardedObject] = []
        self.per_rank: dict[str, PerRankValue] = {}
        self.replicated: set[str] = set()
        self.on_some_ranks: set[str] = set()
        self.leaves: dict[Steps, ShardedLeaf] = {}  # in the order of the tree
        self._rank = rank
        self._ranks = ranks
        self._stored = stored
        self._common = common
        self._in_host_memory = in_host_memory
        self._names = PathKeys()  # of leaves without a key
        self._adapters: dict[type, Any] = {}

    def collect(self, steps: Steps, leaf: Any) -> Any:
        """Collect a leaf; return it if it is common state, else ABSENT."""
        entity = self._adopted(steps, leaf)
        if isinstance(entity, _NOT_COMMON):
            self.leaves[steps] = self._add(steps, entity)
            return ABSENT
        if isinstance(leaf, _HIDING):
            _check_no_hidden_entities(leaf, path_of(steps))
        return leaf

    def _adopted(self, steps: Steps, leaf: Any) -> Any:
        """Return the entity that declares a leaf; the leaf itself if it is one, or is common state."""
        if type(leaf) is KeptIfMissing:
            return self._kept_if_missing(steps, leaf.value)
        kind = type(leaf)
        if kind not in self._adapters:
            self._adapters[kind] = adapter_of(kind)
        adapter = self._adapters[kind]
        entity = leaf if adapter is None else adapter(steps, leaf, self._names)
        # A save has no stored keys: it decides later which plain tensors become arrays.
        if entity is not leaf or not self._stored or not is_plain_tensor(leaf):
            return entity
        if steps in self._common or dotted(steps) not in self._stored:
            return leaf
        return declare_whole(self._names.key_of(steps), leaf)

    def _kept_if_missing(self, steps: Steps, tensor: torch.Tensor) -> ShardedTensor | TorchShardedTensor:
        adapter = adapter_of(type(tensor))
        if adapter is None:
            return replace(declare_whole(self._names.key_of(steps), tensor), if_missing="keep")
        entity: TorchShardedTensor = adapter(steps, tensor, self._names)
        chunks = tuple(replace(chunk, if_missing="keep") for chunk in entity.chunks)
        return replace(entity, chunks=chunks)

    def _add(self, steps: Steps, leaf: Any) -> ShardedLeaf:
        match leaf:
            case ShardedTensor():
                return self._add_tensor(leaf)
            case LocalNonpersistentObject():
                return LocalLeaf(leaf)
            case TorchShardedTensor():
                return self._add_torch_sharded(leaf)
            case ShardedObject():
                return self._add_object(replace(leaf))
            case PerRankValue():
                self._check_declared_once(steps, leaf.key)
                self.per_rank[leaf.key] = leaf
                return self._add_object(leaf.on(self._rank, self._ranks))
            case ReplicatedValue():
                self._check_declared_once(steps, leaf.key)
                self.replicated.add(leaf.key)
                return self._add_object(leaf.on(self._rank))
        return self._add_expanded(steps, leaf)

    def _check_declared_once(self, steps: Steps, key: str) -> None:
        if key in self.per_rank or key in self.replicated:
            path = path_of(steps)
            raise DeclarationError(
                f"{path}: a rank declares the plain value {key!r} twice. Give each value a key of its own.",
                key=key,
                path=path,
            )

    def _add_tensor(self, tensor: ShardedTensor) -> ShardedLeaf:
        data = tensor.data
        if data is not None:
            host = self._on_host(data)
            # A load keeps elements of such a tensor, so their values come along.
            if host is not data and tensor.unpadded_shape is not None and not data.is_meta:
                host.copy_(data.detach())
            data = host
        target = tensor.with_data(data)
        self.tensors.append(target)
        return EntityLeaf(target, (target.key,))

    def _on_host(self, data: torch.Tensor) -> torch.Tensor:
        if not self._in_host_memory or data.device.type == "cpu":
            return data
        return torch.empty_like(data, device="cpu", requires_grad=False)

    def _add_torch_sharded(self, tensor: TorchShardedTensor) -> ShardedLeaf:
        self.tensors.extend(tensor.chunks)
        if tensor.ranks < self._ranks:
            self.on_some_ranks.add(tensor.key)
        return EntityLeaf(tensor, (tensor.key,))

    def _add_object(self, target: ShardedObject) -> ShardedLeaf:
        self.objects.append(target)
        return EntityLeaf(target, (target.key,))

    def _add_expanded(self, steps: Steps, entity: ShardedBase) -> ShardedLeaf:
        expansion = entity.expand(self._on_host)
        if expansion is None:
            path = path_of(steps)
            raise DeclarationError(
                f"{path}: {type(entity).__name__} is not an entity that can be saved.", path=path
            )

        def leaf_of(inner: Steps, leaf: Any) -> ShardedLeaf:
            # A factory of Megatron-Core builds entities of Megatron-Core.
            adapter = megatron_adapter_of(type(leaf))
            built = leaf if adapter is None else adapter(inner, leaf, self._names)
            if not isinstance(built, _NOT_COMMON):
                raise DeclarationError(
                    f"{path_of(inner)}: the factory of {entity.key!r} built a {type(leaf).__name__}. It must "
                    f"build sharded entities only, in dicts or lists.",
                    key=entity.key,
                )
            return self._add(inner, built)

        return ExpandedLeaf(entity.key, expansion, map_leaves(leaf_of, expansion.parts, steps, step=add_step))


_HIDING = (tuple, set, frozenset, deque)
"""Containers that are leaves. An entity in one of them would be missed."""


def _check_no_hidden_entities(leaf: Any, path: str) -> None:
    if not isinstance(leaf, _HIDING):
        return
    for inner in leaf:
        if isinstance(inner, _NOT_COMMON) or is_torch_sharded(inner):
            raise DeclarationError(
                f"{path}: a {type(inner).__name__} is inside of a {type(leaf).__name__}. Use a list or a "
                f"dict for sharded entities.",
                path=path,
            )
        for _, deeper in iter_leaves([inner]):
            _check_no_hidden_entities(deeper, path)
            if deeper is not inner and (isinstance(deeper, _NOT_COMMON) or is_torch_sharded(deeper)):
                _check_no_hidden_entities((deeper,), path)
