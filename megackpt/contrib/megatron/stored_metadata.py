"""The arrays and objects of a checkpoint as Megatron-Core lists them, without data."""

from __future__ import annotations

import os
from typing import Any

from megackpt.engine.checkpoint.opening import open_checkpoint
from megackpt.entities import ShardedBase, ShardedTensor
from megackpt.run.local import stored_entities
from megackpt.storage import opened_store


def stored_metadata(checkpoint_dir: str | os.PathLike[str]) -> dict[str, ShardedBase]:
    """Return global arrays and objects without data. Local.

    As in Megatron-Core, tensors that common state holds by value are none of these.
    """
    with opened_store(checkpoint_dir) as store:
        return stored_entities(open_checkpoint(store))


def stored_tensors(checkpoint_dir: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the global arrays without data, by key; see `stored_metadata`. Local."""
    entities = stored_metadata(checkpoint_dir)
    return {key: entity for key, entity in entities.items() if isinstance(entity, ShardedTensor)}
