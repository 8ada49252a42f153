"""A sharded state dict taken apart: entities to move, common values, and how to put the result together.

Owns the walk over the user's tree. It never changes the tree or its entities: factories and layouts are
expanded beside them, and entities are copied before anything fills them.
"""

from __future__ import annotations

from collections.abc import Callable, Set
from dataclasses import dataclass, replace
from typing import Any

from megackpt.errors import DeclarationError
from megackpt.mapping import (
    LocalNonpersistentObject,
    ShardedBase,
    ShardedLayout,
    ShardedObject,
    ShardedStateDict,
    ShardedTensor,
    ShardedTensorFactory,
)
from megackpt.mapping.foreign import adopt
from megackpt.mapping.tree import ABSENT, iter_leaves, map_leaves, merge

Dropped = Set[str]
"""Keys for which nothing was loaded."""
Finish = Callable[
    [Dropped], Any
]  # called after the load; returns the loaded leaf, or ABSENT if it was dropped


@dataclass(frozen=True, slots=True)
class Expanded:
    """What a sharded state dict stands for.

    Attributes:
        tensors: every ShardedTensor, factories and layouts expanded, in the order of the tree.
        objects: every ShardedObject, likewise.
        common: the tree without sharded and non-persistent leaves.
        finish: given the common state of a checkpoint and the keys that were not loaded, the loaded state
            dict.
    """

    tensors: tuple[ShardedTensor, ...]
    objects: tuple[ShardedObject, ...]
    common: Any
    finish: Callable[[Any, Dropped], Any]

    @property
    def entities(self) -> list[ShardedTensor | ShardedObject]:
        """Tensors, then objects: the slots of a declaration."""
        return [*self.tensors, *self.objects]


def expand(sharded_state_dict: ShardedStateDict) -> Expanded:
    """Take a sharded state dict apart. Local.

    Raises:
        DeclarationError: it is not a dict, or an entity stands inside of a tuple or set, or has no data to
            save.
    """
    if not isinstance(sharded_state_dict, dict):
        raise DeclarationError(
            f"A sharded state dict must be a dict, not {type(sharded_state_dict).__name__}."
        )
    sharded_state_dict = adopt(sharded_state_dict)
    tensors: list[ShardedTensor] = []
    objects: list[ShardedObject] = []

    def finish_of(path: str, leaf: Any) -> Any:
        if isinstance(leaf, LocalNonpersistentObject):
            return lambda _: leaf.unwrap()
        if isinstance(leaf, ShardedBase):
            return _finish_entity(leaf, path, tensors, objects)
        _refuse_hidden_entities(leaf, path)
        return ABSENT

    finishes = map_leaves(finish_of, sharded_state_dict)
    common = map_leaves(
        lambda _, leaf: ABSENT if isinstance(leaf, (ShardedBase, LocalNonpersistentObject)) else leaf,
        sharded_state_dict,
    )

    def finish(stored_common: Any, dropped: Dropped) -> Any:
        loaded = ABSENT if finishes is ABSENT else map_leaves(lambda _, leaf: leaf(dropped), finishes)
        return stored_common if loaded is ABSENT else merge(stored_common, loaded)

    return Expanded(tuple(tensors), tuple(objects), {} if common is ABSENT else common, finish)


def _finish_entity(
    entity: ShardedBase, path: str, tensors: list[ShardedTensor], objects: list[ShardedObject]
) -> Finish:
    """Add what one entity stands for to the lists, and return how to get its loaded value."""
    if isinstance(entity, ShardedTensor):
        held = replace(entity)
        tensors.append(held)
        return lambda dropped: ABSENT if held.key in dropped else held.data
    if isinstance(entity, ShardedLayout):
        if entity.data is None:
            raise DeclarationError(
                f"{path}: the layout {entity.key!r} has no data to save or fill.", key=entity.key
            )
        parts = entity.tensors()
        tensors.extend(parts)
        return lambda dropped: ABSENT if any(part.key in dropped for part in parts) else entity.data
    if isinstance(entity, ShardedObject):
        filled = replace(entity)
        objects.append(filled)
        return lambda dropped: ABSENT if filled.key in dropped else filled.data
    if isinstance(entity, ShardedTensorFactory):
        return _finish_factory(entity, path, tensors, objects)
    raise DeclarationError(
        f"{path}: {type(entity).__name__} is not an entity that can be saved.", key=entity.key
    )


def _finish_factory(
    factory: ShardedTensorFactory, path: str, tensors: list[ShardedTensor], objects: list[ShardedObject]
) -> Finish:
    def finish_of(inner: str, leaf: Any) -> Finish:
        if isinstance(leaf, LocalNonpersistentObject):
            return lambda _: leaf.unwrap()
        if not isinstance(leaf, ShardedBase):
            raise DeclarationError(
                f"{inner}: the factory of {factory.key!r} built a {type(leaf).__name__}. It must build "
                f"sharded entities "
                f"only, in dicts or lists.",
                key=factory.key,
            )
        return _finish_entity(leaf, inner, tensors, objects)

    finishes = map_leaves(finish_of, factory.build(), path)

    def finish(dropped: Dropped) -> Any:
        built = map_leaves(lambda _, leaf: leaf(dropped), finishes)
        is_partial = any(leaf(dropped) is ABSENT for _, leaf in iter_leaves([finishes]))
        return ABSENT if is_partial else factory.merge_fn(built)

    return finish


def _refuse_hidden_entities(leaf: Any, path: str) -> None:
    if isinstance(leaf, (tuple, set, frozenset)):
        for _, inner in iter_leaves(list(leaf), path):
            if isinstance(inner, (ShardedBase, LocalNonpersistentObject)):
                raise DeclarationError(
                    f"{path}: a {type(inner).__name__} stands inside of a {type(leaf).__name__}. Use a "
                    f"list or a dict "
                    f"for sharded entities.",
                    path=path,
                )
