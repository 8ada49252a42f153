"""Optimizers whose state is declared shard by shard, so that saving it needs no communication."""

from megackpt.training.optim.distributed import DistributedOptimizer
from megackpt.training.optim.mixed_precision import MixedPrecisionOptimizer, WholeMatrixOptimizer
from megackpt.training.optim.remainders import (
    declare_remainder_masters,
    join_master,
    restore_remainder_masters,
    split_master,
)
from megackpt.training.optim.sharded_state import (
    get_optim_param_to_id_map,
    get_param_id_to_sharded_param_map,
    make_sharded_optimizer_tensor,
)
from megackpt.training.optim.torch_state import initialise_state, optim_state_to_sharding_state

__all__ = [
    "DistributedOptimizer",
    "MixedPrecisionOptimizer",
    "WholeMatrixOptimizer",
    "declare_remainder_masters",
    "get_optim_param_to_id_map",
    "get_param_id_to_sharded_param_map",
    "initialise_state",
    "join_master",
    "make_sharded_optimizer_tensor",
    "optim_state_to_sharding_state",
    "restore_remainder_masters",
    "split_master",
]
