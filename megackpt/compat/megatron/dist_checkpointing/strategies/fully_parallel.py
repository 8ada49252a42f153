"""Saves and loads spread over ranks. Source: Megatron-Core `dist_checkpointing.strategies.fully_parallel`.

Here they are plans of the engine, whatever the format: the save wrapper says over which ranks a chunk that
several of them hold may be spread, the load wrapper which ranks read for each other and how they send what
they read.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from megackpt.compat.megatron.dist_checkpointing.exchange_utils import (
    ShardDistribution,
    distribute_shards_to_ranks,
)
from megackpt.compat.megatron.dist_checkpointing.strategies.async_utils import AsyncRequest
from megackpt.compat.megatron.dist_checkpointing.strategies.base import (
    AsyncSaveShardedStrategy,
    LoadShardedStrategy,
    SaveShardedStrategy,
)
from megackpt.compat.megatron.ours import (
    LoadArguments,
    SaveArguments,
    check_load_strategy,
    load_by,
    request_by,
    save_by,
    save_choice,
)
from megackpt.compat.megatron.refusal import refused
from megackpt.errors import DeclarationError
from megackpt.mapping import ShardedStateDict, StateDict
from megackpt.options import Exchange, LoadOptions, SaveOptions

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

EXCHANGE_ALGORITHMS: tuple[Exchange, ...] = ("broadcast", "gather_rounds", "gather_object", "all_to_all")
"""Those of Megatron-Core, and ours, which sends each rank only what it needs."""
__all__ = [
    "EXCHANGE_ALGORITHMS",
    "FullyParallelLoadStrategyWrapper",
    "FullyParallelSaveStrategyWrapper",
    "SaveLoadDistribution",
    "determine_main_replica_uniform_distribution",
    "distribute_main_replicas_with_precomputed_distribution",
    "distribute_shards_to_ranks",
]

_PLANNED = {
    "because": "who writes and reads what is planned by pure functions from the declarations of all ranks.",
    "instead": "Use save() and load(); the plans are megackpt.planning.plan_save and plan_exchange.",
}


class FullyParallelSaveStrategyWrapper(AsyncSaveShardedStrategy):
    """Spreads chunks that several ranks hold over those of them that are in the main replica's group.

    Without a group over all of them. do_cache_distribution has no effect here: `megackpt.Checkpointer` keeps
    plans.
    """

    def __init__(
        self,
        strategy: SaveShardedStrategy,
        parallelization_group: ProcessGroup | None = None,
        do_cache_distribution: bool = False,
    ) -> None:
        self.choice = save_choice(strategy)
        super().__init__(strategy.backend, strategy.version)
        self.base_strategy = strategy
        self.parallelization_group = parallelization_group
        self.do_cache_distribution = do_cache_distribution

    def save(self, sharded_state_dict: ShardedStateDict, checkpoint_dir: str | os.PathLike[str]) -> None:
        """Save a whole checkpoint in the wrapped strategy's format. Collective."""
        save_by(self, sharded_state_dict, checkpoint_dir)

    @property
    def save_arguments(self) -> SaveArguments:
        """What of `megackpt.save`'s arguments this strategy stands for."""
        if self.parallelization_group is None:
            return {}
        return {"options": SaveOptions(spread="group"), "spread_group": self.parallelization_group}

    def async_save(
        self, sharded_state_dict: ShardedStateDict, checkpoint_dir: str | os.PathLike[str]
    ) -> AsyncRequest:
        """Return a request that saves a whole checkpoint when it is scheduled or executed. Local."""
        return request_by(self, sharded_state_dict, checkpoint_dir)

    def apply_saving_parallelization(self, sharded_state_dict: ShardedStateDict) -> None:
        """Do nothing: a plan says who writes a shard, and no entity is changed for it."""

    @property
    def can_handle_sharded_objects(self) -> bool:
        """As the wrapped strategy."""
        return self.base_strategy.can_handle_sharded_objects


class FullyParallelLoadStrategyWrapper(LoadShardedStrategy):
    """Lets the ranks of a group read for each other, every byte once; without a group all ranks.

    exchange_algo is one of Megatron-Core's, or `all_to_all`, which needs the least memory and traffic.
    do_cache_distribution has no effect.

    Raises:
        DeclarationError: exchange_algo is none of these.
    """

    def __init__(
        self,
        strategy: LoadShardedStrategy,
        parallelization_group: ProcessGroup | None = None,
        do_cache_distribution: bool = False,
        exchange_algo: str = "broadcast",
    ) -> None:
        if exchange_algo not in EXCHANGE_ALGORITHMS:
            raise DeclarationError(
                f"exchange_algo={exchange_algo!r} is not known. Give one of {', '.join(EXCHANGE_ALGORITHMS)}."
            )
        check_load_strategy(strategy)
        self.base_strategy = strategy
        self.parallelization_group = parallelization_group
        self.do_cache_distribution = do_cache_distribution
        (self.exchange_algo,) = (known for known in EXCHANGE_ALGORITHMS if known == exchange_algo)

    def load(self, sharded_state_dict: ShardedStateDict, checkpoint_dir: str | os.PathLike[str]) -> StateDict:
        """Return the loaded state dict, common state included. Collective."""
        loaded: StateDict = load_by(self, sharded_state_dict, checkpoint_dir)
        return loaded

    @property
    def load_arguments(self) -> LoadArguments:
        """What of `megackpt.load`'s arguments this strategy stands for."""
        return {
            "options": LoadOptions(exchange=self.exchange_algo),
            "exchange_group": self.parallelization_group,
        }

    def apply_loading_parallelization(self, sharded_state_dict: ShardedStateDict) -> None:
        """Do nothing: a plan says who reads what, and no entity is changed for it."""

    def load_tensors_metadata(self, checkpoint_dir: str | os.PathLike[str]) -> dict[str, Any]:
        """As the wrapped strategy. Local."""
        return self.base_strategy.load_tensors_metadata(checkpoint_dir)

    def load_sharded_metadata(self, checkpoint_dir: str | os.PathLike[str]) -> dict[str, Any]:
        """As the wrapped strategy. Local."""
        return self.base_strategy.load_sharded_metadata(checkpoint_dir)

    def check_backend_compatibility(self, loaded_backend: str) -> None:
        """As the wrapped strategy."""
        self.base_strategy.check_backend_compatibility(loaded_backend)

    def check_version_compatibility(self, loaded_version: int) -> None:
        """As the wrapped strategy."""
        self.base_strategy.check_version_compatibility(loaded_version)

    @property
    def can_handle_sharded_objects(self) -> bool:
        """As the wrapped strategy."""
        return self.base_strategy.can_handle_sharded_objects


SaveLoadDistribution = ShardDistribution  # its name before 0.9
determine_main_replica_uniform_distribution = refused(
    "determine_main_replica_uniform_distribution", **_PLANNED
)
distribute_main_replicas_with_precomputed_distribution = refused(
    "distribute_main_replicas_with_precomputed_distribution", **_PLANNED
)
