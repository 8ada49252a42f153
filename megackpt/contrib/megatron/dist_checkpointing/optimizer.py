"""Optimizer states sharded like their parameters, by our own functions.

Source: Megatron-Core `dist_checkpointing.optimizer`, for the names.
"""

from __future__ import annotations

from megackpt.training.optim import (
    get_optim_param_to_id_map,
    get_param_id_to_sharded_param_map,
    make_sharded_optimizer_tensor,
    optim_state_to_sharding_state,
)

__all__ = [
    "KEEP_VARS_HINT",
    "get_optim_param_to_id_map",
    "get_param_id_to_sharded_param_map",
    "make_sharded_optimizer_tensor",
    "optim_state_to_sharding_state",
]

KEEP_VARS_HINT = (
    " The sharded state dict must hold the parameters themselves: build it with keep_vars=True, and use a "
    "ShardedTensorFactory where a parameter is stored in another form."
)
"""What Megatron-Core's optimizers append to their errors."""
