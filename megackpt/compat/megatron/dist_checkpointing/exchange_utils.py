"""Loaded shards, exchanged between ranks.

Source: Megatron-Core `dist_checkpointing.exchange_utils`, for the names.
"""

from __future__ import annotations

import torch

from megackpt.compat.megatron.refusal import refused

_PLANNED = {
    "because": "every rank reads what it needs, and who writes what is planned by pure functions.",
    "instead": "Use save() and load(); the plans are megackpt.planning.plan_save and plan_load.",
}


def is_float8tensor(tensor: torch.Tensor) -> bool:
    """Say whether a tensor is one that Transformer Engine keeps in 8 bits, by its class; none is imported."""
    return any(
        cls.__module__.startswith("transformer_engine") and "Float8" in cls.__name__
        for cls in type(tensor).__mro__
    )


ShardDistribution = refused("ShardDistribution", **_PLANNED)
determine_main_replica_uniform_distribution = refused(
    "determine_main_replica_uniform_distribution", **_PLANNED
)
distribute_shards_to_ranks = refused("distribute_shards_to_ranks", **_PLANNED)
exchange_by_distribution = refused("exchange_by_distribution", **_PLANNED)
exchange_loaded_objects_gather_object = refused("exchange_loaded_objects_gather_object", **_PLANNED)
exchange_loaded_tensors_broadcast = refused("exchange_loaded_tensors_broadcast", **_PLANNED)
exchange_loaded_tensors_gather_object = refused("exchange_loaded_tensors_gather_object", **_PLANNED)
exchange_loaded_tensors_gather_rounds = refused("exchange_loaded_tensors_gather_rounds", **_PLANNED)
