"""Renaming the keys of sharded entities.

Owns key prefixes; the state dict's own nesting is never touched.
"""

from __future__ import annotations

from typing import Any

from megackpt.mapping.base import ShardedBase
from megackpt.mapping.tree import iter_leaves


def add_prefix_for_sharding(sharded_state_dict: Any, prefix: str) -> None:
    """Put `prefix` before the key of every sharded entity, in place.

    Source: Megatron-Core `dist_checkpointing.utils.add_prefix_for_sharding`.
    """
    for _, leaf in iter_leaves(sharded_state_dict):
        if isinstance(leaf, ShardedBase):
            leaf.key = prefix + leaf.key
