"""Saves and loads spread over ranks. Source: Megatron-Core `dist_checkpointing.strategies.fully_parallel`.

A save of ours always spreads replicated chunks over the ranks that hold them, balanced by bytes, so the save
wrapper adds nothing. A load of ours reads what each rank needs, so the load wrapper gives the same tensors,
but reads bytes that several ranks need several times.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from megackpt.compat.megatron.dist_checkpointing.strategies.async_utils import refuse_async
from megackpt.compat.megatron.dist_checkpointing.strategies.base import (
    AsyncSaveShardedStrategy,
    LoadShardedStrategy,
    SaveShardedStrategy,
)
from megackpt.compat.megatron.ours import check_load_strategy, save_choice
from megackpt.compat.megatron.refusal import refused
from megackpt.errors import DeclarationError
from megackpt.mapping import ShardedStateDict, StateDict

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

EXCHANGE_ALGORITHMS = ("broadcast", "gather_rounds", "gather_object")
_PLANNED = {
    "because": "who writes and reads what is planned by pure functions from the declarations of all ranks.",
    "instead": "Use save() and load(); the plans are megackpt.planning.plan_save and plan_load.",
}


class FullyParallelSaveStrategyWrapper(AsyncSaveShardedStrategy):
    """Stands for the strategy that it wraps.

    The group is not needed: replicas are spread over all ranks that hold them. Plans are not cached in this
        version.
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
        """Save as the wrapped strategy does. Collective."""
        self.base_strategy.save(sharded_state_dict, checkpoint_dir)

    def async_save(self, sharded_state_dict: ShardedStateDict, checkpoint_dir: str | os.PathLike[str]) -> Any:
        """Refuse, until this library saves asynchronously.

        Raises:
            UnsupportedError: always.
        """
        refuse_async("FullyParallelSaveStrategyWrapper.async_save")

    def apply_saving_parallelization(self, sharded_state_dict: ShardedStateDict) -> None:
        """Do nothing: a plan says who writes a shard, and no entity is changed for it."""

    @property
    def can_handle_sharded_objects(self) -> bool:
        """As the wrapped strategy."""
        return self.base_strategy.can_handle_sharded_objects


class FullyParallelLoadStrategyWrapper(LoadShardedStrategy):
    """Stands for the strategy that it wraps.

    Raises:
        DeclarationError: exchange_algo is not one of Megatron-Core's.
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
        self.exchange_algo = exchange_algo

    def load(self, sharded_state_dict: ShardedStateDict, checkpoint_dir: str | os.PathLike[str]) -> StateDict:
        """Load as the wrapped strategy does. Collective."""
        return self.base_strategy.load(sharded_state_dict, checkpoint_dir)

    def apply_loading_parallelization(self, sharded_state_dict: ShardedStateDict) -> None:
        """Do nothing: every rank reads what it needs."""

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


SaveLoadDistribution = refused("SaveLoadDistribution", **_PLANNED)
determine_main_replica_uniform_distribution = refused(
    "determine_main_replica_uniform_distribution", **_PLANNED
)
distribute_main_replicas_with_precomputed_distribution = refused(
    "distribute_main_replicas_with_precomputed_distribution", **_PLANNED
)
distribute_shards_to_ranks = refused("distribute_shards_to_ranks", **_PLANNED)
