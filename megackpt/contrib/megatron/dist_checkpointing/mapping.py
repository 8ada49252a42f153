"""The sharded entities, which are our own.

Source: Megatron-Core `dist_checkpointing.mapping`, for the names.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch

from megackpt.contrib.megatron.dist_checkpointing.dict_utils import dict_list_map_inplace
from megackpt.entities import (
    LocalNonpersistentObject,
    ReplicaId,
    ShardedBase,
    ShardedObject,
    ShardedStateDict,
    ShardedTensor,
    ShardedTensorFactory,
    StateDict,
    is_main_replica,
)
from megackpt.errors import CheckpointingException, DeclarationError

__all__ = [
    "CheckpointingException",
    "CommonStateDict",
    "FactoryBuildFn",
    "FactoryMergeFn",
    "LocalNonpersistentObject",
    "LocalNonpersitentObject",
    "ReplicaId",
    "ShardedBase",
    "ShardedObject",
    "ShardedStateDict",
    "ShardedTensor",
    "ShardedTensorFactory",
    "StateDict",
    "apply_factories",
    "apply_factory_merges",
    "is_main_replica",
]

CommonStateDict: TypeAlias = dict[str, Any]
FactoryBuildFn: TypeAlias = Callable[[str, torch.Tensor, ReplicaId, "slice | None"], ShardedStateDict]
FactoryMergeFn: TypeAlias = Callable[[StateDict], torch.Tensor]
LocalNonpersitentObject = LocalNonpersistentObject  # as Megatron-Core spelled it up to 0.8


def apply_factories(sharded_state_dict: ShardedStateDict) -> None:
    """Replace every factory by what it builds, in place. Local.

    `save` and `load` do this in a copy of the dict; the given dict stays as it is.
    """
    dict_list_map_inplace(
        lambda x: x.build() if isinstance(x, ShardedTensorFactory) else x, sharded_state_dict
    )


def apply_factory_merges(x1: StateDict, x2: ShardedStateDict, key: tuple[str, ...] = ()) -> Any:
    """In x1, replace the value at the path of each factory of x2 by its merged tensor, in place. Local.

    x2 holds factories only; a dict of it may stand for a list of x1, by position.

    Raises:
        DeclarationError: x2 has a path that x1 lacks.
    """
    if isinstance(x2, ShardedTensorFactory):
        return x2.merge_fn(x1)
    if isinstance(x1, list) and isinstance(x2, list) and len(x1) != len(x2):
        raise DeclarationError(f"At {key}: lists of {len(x1)} and {len(x2)} elements cannot be merged.")
    if not isinstance(x1, (dict, list)) or not isinstance(x2, (dict, list)):
        raise DeclarationError(
            f"At {key}: {type(x2).__name__} is not a factory to merge with {type(x1).__name__}."
        )
    for step, inner in x2.items() if isinstance(x2, dict) else enumerate(x2):
        present = step in x1 if isinstance(x1, dict) else isinstance(step, int) and step < len(x1)
        if not present:
            raise DeclarationError(f"At {key}: there is a factory at {step!r}, where nothing was loaded.")
        x1[step] = apply_factory_merges(x1[step], inner, (*key, step))
    return x1
