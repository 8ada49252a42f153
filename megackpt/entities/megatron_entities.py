"""Sharded entities of Megatron-Core, converted to entities of this library.

They are recognised by the name and module of their class. Megatron-Core is not imported, and need not be
installed. The new entities have the same tensors, so a load fills them in place.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megackpt.entities.base import ReplicaId
from megackpt.entities.factory import ShardedTensorFactory
from megackpt.entities.recognition import MEGATRON_MODULE
from megackpt.entities.sharded_object import LocalNonpersistentObject, ShardedObject
from megackpt.entities.sharded_tensor import ShardedTensor
from megackpt.entities.tree import PathKeys, Steps, add_step, map_leaves, path_of
from megackpt.errors import DeclarationError

_TENSOR_FIELDS = (
    "key",
    "data",
    "dtype",
    "local_shape",
    "global_shape",
    "global_offset",
    "axis_fragmentations",
    "replica_id",
    "prepend_axis_num",
    "allow_shape_mismatch",
)
_OBJECT_FIELDS = ("key", "data", "global_shape", "global_offset", "replica_id")
_FACTORY_FIELDS = ("key", "data", "build_fn", "merge_fn", "replica_id")


def adopt_megatron_entity(steps: Steps, leaf: Any, names: PathKeys) -> Any:
    """Return an entity of Megatron-Core as one of ours; a leaf of another of its classes stays as it is.

    Raises:
        DeclarationError: an entity lacks a field that it has in every version of Megatron-Core, or
            contradicts itself.
    """
    known = _known_class(type(leaf))
    return leaf if known is None else _ADOPT[known](path_of(steps), leaf)


def adopt_megatron_entities(state: Any) -> Any:
    """Return a tree with each entity of Megatron-Core as one of ours; the given tree is not changed."""
    names = PathKeys()
    return map_leaves(lambda steps, leaf: adopt_megatron_entity(steps, leaf, names), state, (), step=add_step)


def _known_class(kind: type) -> str | None:
    """Return the name of the entity class that a class is or derives from; None for other classes."""
    names = (cls.__name__ for cls in kind.__mro__ if cls.__module__ == MEGATRON_MODULE)
    return next((name for name in names if name in _ADOPT), None)


def _tensor(path: str, leaf: Any) -> ShardedTensor:
    # Versions before 0.15 have flat shards. Later ones keep the field, always None, or lack it.
    return ShardedTensor(
        **_fields(path, leaf, _TENSOR_FIELDS), flattened_range=getattr(leaf, "flattened_range", None)
    )


def _object(path: str, leaf: Any) -> ShardedObject:
    return ShardedObject(**_fields(path, leaf, _OBJECT_FIELDS))


def _factory(path: str, leaf: Any) -> ShardedTensorFactory:
    fields = _fields(path, leaf, _FACTORY_FIELDS)
    build = fields["build_fn"]

    def build_ours(key: str, data: Any, replica_id: ReplicaId, flattened_range: slice | None) -> Any:
        return adopt_megatron_entities(build(key, data, replica_id, flattened_range))

    return ShardedTensorFactory(
        **{**fields, "build_fn": build_ours}, flattened_range=getattr(leaf, "flattened_range", None)
    )


def _local(path: str, leaf: Any) -> LocalNonpersistentObject:
    return LocalNonpersistentObject(_fields(path, leaf, ("obj",))["obj"])


def _fields(path: str, leaf: Any, names: tuple[str, ...]) -> dict[str, Any]:
    absent = [name for name in names if not hasattr(leaf, name)]
    if absent:
        raise DeclarationError(
            f"{path}: this {type(leaf).__name__} of Megatron-Core has no {absent[0]!r}, which it has in "
            f"every version from 0.6 to 0.16. Declare it with megackpt.{type(leaf).__name__} instead.",
            key=str(getattr(leaf, "key", "")) or None,
            path=path,
        )
    return {name: getattr(leaf, name) for name in names}


_ADOPT: dict[str, Callable[[str, Any], Any]] = {
    "ShardedTensor": _tensor,
    "ShardedObject": _object,
    "ShardedTensorFactory": _factory,
    "LocalNonpersistentObject": _local,
    "LocalNonpersitentObject": _local,  # its name up to 0.7
}
