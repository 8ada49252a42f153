"""Megatron-Core's `dist_checkpointing` over our core.

Source: Megatron-Core 0.16.1, `megatron/core/dist_checkpointing/__init__.py`, for the names.
"""

from megackpt.contrib.megatron.dist_checkpointing.core import check_is_distributed_checkpoint
from megackpt.contrib.megatron.dist_checkpointing.mapping import (
    LocalNonpersistentObject,
    LocalNonpersitentObject,
    ShardedObject,
    ShardedTensor,
)
from megackpt.contrib.megatron.dist_checkpointing.serialization import (
    load,
    load_common_state_dict,
    load_content_metadata,
    load_plain_tensors,
    load_tensors_metadata,
    remove_sharded_tensors,
    save,
)

__all__ = [
    "LocalNonpersistentObject",
    "LocalNonpersitentObject",
    "ShardedObject",
    "ShardedTensor",
    "check_is_distributed_checkpoint",
    "load",
    "load_common_state_dict",
    "load_content_metadata",
    "load_plain_tensors",
    "load_tensors_metadata",
    "remove_sharded_tensors",
    "save",
]
