"""Saves and loads spread over ranks. Source: Megatron-Core `dist_checkpointing.strategies.fully_parallel`.

Here they are plans of the engine, whatever the format: the save wrapper says over which ranks a chunk that
several of them hold may be spread, the load wrapper which ranks read for each other and how they send what
they read.
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch.distributed as dist

from megackpt.contrib.megatron.dist_checkpointing.dict_utils import nested_values
from megackpt.contrib.megatron.dist_checkpointing.exchange_utils import (
    ShardDistribution,
    determine_main_replica_uniform_distribution,
    distribute_shards_to_ranks,
    shard_id,
)
from megackpt.contrib.megatron.dist_checkpointing.strategies.async_utils import AsyncRequest
from megackpt.contrib.megatron.dist_checkpointing.strategies.base import (
    AsyncSaveShardedStrategy,
    LoadShardedStrategy,
    SaveShardedStrategy,
)
from megackpt.contrib.megatron.our_strategies import (
    LoadArguments,
    SaveArguments,
    is_loaded_by_us,
    is_saved_by_us,
    load_by,
    request_by,
    save_by,
    save_choice,
)
from megackpt.contrib.megatron.settings import OPTIONS, KnownSettings
from megackpt.engine.saving.plan_cache import PlanCache
from megackpt.entities import ShardedStateDict, ShardedTensor, StateDict, is_main_replica
from megackpt.errors import DeclarationError, UnsupportedError
from megackpt.formats.registry import SaveChoice
from megackpt.options import OTHER_NAMES_OF_ALL_TO_ALL, Exchange

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

EXCHANGE_ALGORITHMS: tuple[Exchange, ...] = (*OTHER_NAMES_OF_ALL_TO_ALL, "all_to_all")
"""Names of Megatron-Core, and ours. All mean `all_to_all`, which sends each rank only what it needs."""
__all__ = [
    "EXCHANGE_ALGORITHMS",
    "FullyParallelLoadStrategyWrapper",
    "FullyParallelSaveStrategyWrapper",
    "SaveLoadDistribution",
    "determine_main_replica_uniform_distribution",
    "distribute_main_replicas_with_precomputed_distribution",
    "distribute_shards_to_ranks",
]


class FullyParallelSaveStrategyWrapper(KnownSettings, AsyncSaveShardedStrategy):
    """Spreads chunks that several ranks hold over those of them that are in the main replica's group.

    Without a group, it spreads them over all ranks that hold them. Attributes may be set later; the next save
    uses them. A user's strategy inside it gets the tensors with other replica ids: 0 on the rank that writes
    a shard, 1 on the others.

    Attributes:
        base_strategy: the strategy that says in which format, and how.
        parallelization_group: the group.
        do_cache_distribution: keep the plan of each structure that was saved, as `use_cached_ckpt_structure`
            of the wrapped strategy does.
        validate_access_integrity: only kept; that of `save` counts.
        pg_cache_path, pg_cache_create: only kept. Newer versions of Megatron-Core write distributions into
            files there, and take them in later runs. Here they are computed anew, with one exchange of
            declarations, so a file that no longer fits the model cannot be taken.
    """

    SETTINGS: ClassVar[tuple[str, ...]] = (
        "backend",
        "version",
        "base_strategy",
        "parallelization_group",
        "do_cache_distribution",
        "validate_access_integrity",
        "pg_cache_path",
        "pg_cache_create",
    )

    def __init__(
        self,
        strategy: SaveShardedStrategy,
        parallelization_group: ProcessGroup | None = None,
        do_cache_distribution: bool = False,
        backend: str | None = None,
        version: int | None = None,
        validate_access_integrity: bool = True,
        pg_cache_path: str | None = None,
        pg_cache_create: bool = False,
    ) -> None:
        if is_saved_by_us(strategy):
            save_choice(strategy)  # raises at once what is out of range
        super().__init__(backend or strategy.backend, version or strategy.version)
        self.base_strategy = strategy
        self.parallelization_group = parallelization_group
        self.do_cache_distribution = do_cache_distribution
        self.validate_access_integrity = validate_access_integrity
        self.pg_cache_path, self.pg_cache_create = pg_cache_path, pg_cache_create
        self._plans = PlanCache()
        self._distribution: ShardDistribution | None = None

    @property
    def choice(self) -> SaveChoice:
        """What `megackpt.save` takes as its strategy: the wrapped one's.

        Raises:
            UnsupportedError: a subclass has an `apply_saving_parallelization`, which would not be called.
        """
        ours = FullyParallelSaveStrategyWrapper.apply_saving_parallelization
        _check_is_ours(self, "apply_saving_parallelization", ours)
        return save_choice(self.base_strategy)

    def save(self, sharded_state_dict: ShardedStateDict, checkpoint_dir: str | os.PathLike[str]) -> None:
        """Save a whole checkpoint in the wrapped strategy's format. Collective."""
        if is_saved_by_us(self.base_strategy):
            save_by(self, sharded_state_dict, checkpoint_dir)
            return
        self.apply_saving_parallelization(sharded_state_dict)
        self.base_strategy.save(sharded_state_dict, checkpoint_dir)

    @property
    def save_arguments(self) -> SaveArguments:
        """The arguments of `megackpt.save` that the current settings of this strategy give."""
        arguments = dict(getattr(self.base_strategy, "save_arguments", {}))
        if self.do_cache_distribution:
            arguments.setdefault("plans", self._plans)
        options = arguments.get("options", OPTIONS.save_options)
        if self.parallelization_group is None:
            return arguments | {"options": replace(options, spread="world")}
        spread = {"options": replace(options, spread="group"), "spread_group": self.parallelization_group}
        return arguments | spread

    def async_save(
        self,
        sharded_state_dict: ShardedStateDict,
        checkpoint_dir: str | os.PathLike[str],
        async_strategy: str = "nvrx",
    ) -> AsyncRequest:
        """Return a request that saves a whole checkpoint when it is scheduled or executed.

        Local. Around a user's strategy it is collective, and returns that strategy's request.

        Raises:
            UnsupportedError: the user's strategy has no async_save.
        """
        if is_saved_by_us(self.base_strategy):
            return request_by(self, sharded_state_dict, checkpoint_dir)
        if not isinstance(self.base_strategy, AsyncSaveShardedStrategy):
            raise UnsupportedError(
                f"{self.base_strategy} has no async_save, so it cannot save asynchronously. Derive it from "
                f"AsyncSaveShardedStrategy, or save without async_sharded_save."
            )
        self.apply_saving_parallelization(sharded_state_dict)
        return self.base_strategy.async_save(sharded_state_dict, checkpoint_dir)

    def apply_saving_parallelization(self, sharded_state_dict: ShardedStateDict) -> None:
        """Set the replica ids of tensors, in place, so that each is written by one rank of the group.

        Collective over the group. A save in a format of ours does not need it: its plan says who writes.
        """
        distribution = self._distribution if self.do_cache_distribution else None
        if distribution is None:
            group = self.parallelization_group
            distribution = determine_main_replica_uniform_distribution(sharded_state_dict, group)
        distribute_main_replicas_with_precomputed_distribution(
            sharded_state_dict, self.parallelization_group, distribution
        )
        self._distribution = distribution

    @property
    def can_handle_sharded_objects(self) -> bool:
        """As the wrapped strategy."""
        return self.base_strategy.can_handle_sharded_objects


class FullyParallelLoadStrategyWrapper(KnownSettings, LoadShardedStrategy):
    """Lets the ranks of a group read for each other, every byte once; without a group all ranks.

    Attributes may be set later; the next load uses them. Around a user's strategy, each rank loads its whole
    request with that strategy, and ranks exchange nothing.

    Attributes:
        base_strategy: the strategy that reads.
        parallelization_group: the group.
        do_cache_distribution: only kept: a plan of a load costs one exchange of requests, and every load
            makes its own.
        exchange_algo: `all_to_all`, or a name of Megatron-Core, which means the same.
        per_rank_object_load: only kept: objects are exchanged as tensors are.
        pg_cache_path, pg_cache_create: only kept, see `FullyParallelSaveStrategyWrapper`.
        cached_global_metadata: that of the wrapped strategy.

    Raises:
        DeclarationError: exchange_algo is none of these.
    """

    SETTINGS: ClassVar[tuple[str, ...]] = (
        "base_strategy",
        "parallelization_group",
        "do_cache_distribution",
        "exchange_algo",
        "per_rank_object_load",
        "pg_cache_path",
        "pg_cache_create",
    )

    def __init__(
        self,
        strategy: LoadShardedStrategy,
        parallelization_group: ProcessGroup | None = None,
        do_cache_distribution: bool = False,
        exchange_algo: str = "broadcast",
        per_rank_object_load: bool = False,
        pg_cache_path: str | None = None,
        pg_cache_create: bool = False,
    ) -> None:
        is_loaded_by_us(strategy)  # raises at once what is no load strategy
        self.base_strategy = strategy
        self.parallelization_group = parallelization_group
        self.do_cache_distribution = do_cache_distribution
        self.exchange_algo = exchange_algo
        self.per_rank_object_load = per_rank_object_load
        self.pg_cache_path, self.pg_cache_create = pg_cache_path, pg_cache_create

    @property
    def exchange_algo(self) -> str:
        """How ranks send what they have read: the name that was given."""
        return self._exchange_algo

    @exchange_algo.setter
    def exchange_algo(self, algorithm: str) -> None:
        known: list[Exchange] = [name for name in EXCHANGE_ALGORITHMS if name == algorithm]
        if not known:
            raise DeclarationError(
                f"exchange_algo={algorithm!r} is not known. Give one of {', '.join(EXCHANGE_ALGORITHMS)}."
            )
        self._exchange_algo = known[0]

    @property
    def cached_global_metadata(self) -> Any:
        """That of the wrapped strategy."""
        return getattr(self.base_strategy, "cached_global_metadata", None)

    def load(
        self,
        sharded_state_dict: ShardedStateDict,
        checkpoint_dir: str | os.PathLike[str],
        async_strategy: str = "mcore",
    ) -> StateDict:
        """Return the loaded state dict, common state included. Collective.

        Around a user's strategy, it returns that strategy's result.
        """
        if not is_loaded_by_us(self.base_strategy):
            self.apply_loading_parallelization(sharded_state_dict)
            return self.base_strategy.load(sharded_state_dict, checkpoint_dir)
        loaded: StateDict = load_by(self, sharded_state_dict, checkpoint_dir)
        return loaded

    @property
    def load_arguments(self) -> LoadArguments:
        """The arguments of `megackpt.load` that the current settings of this strategy give.

        Raises:
            UnsupportedError: a subclass has an `apply_loading_parallelization`, which would not be called.
        """
        ours = FullyParallelLoadStrategyWrapper.apply_loading_parallelization
        _check_is_ours(self, "apply_loading_parallelization", ours)
        options = getattr(self.base_strategy, "load_arguments", {}).get("options", OPTIONS.load_options)
        return {
            "options": replace(options, exchange=self._exchange_algo),
            "exchange_group": self.parallelization_group,
        }

    @property
    def stream_ckpt_dequant(self) -> bool:
        """As the wrapped strategy; True where it has no such attribute."""
        return bool(getattr(self.base_strategy, "stream_ckpt_dequant", True))

    def apply_loading_parallelization(self, sharded_state_dict: ShardedStateDict) -> None:
        """Do nothing: the plan of a load says who reads what, and no entity is changed for it."""

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


def _check_is_ours(wrapper: Any, name: str, ours: Any) -> None:
    """Check that a subclass has not replaced a method that a plan of the engine makes needless.

    Raises:
        UnsupportedError: it has.
    """
    if getattr(type(wrapper), name) is not ours:
        raise UnsupportedError(
            f"{type(wrapper).__name__}.{name} would not be called: a plan of all ranks says who writes and "
            f"reads what. Leave it out, or wrap a strategy of your own."
        )


SaveLoadDistribution = ShardDistribution  # its name before 0.9


def distribute_main_replicas_with_precomputed_distribution(
    sharded_state_dict: ShardedStateDict,
    parallelization_group: ProcessGroup | None,
    precomputed_distribution: ShardDistribution | None,
) -> None:
    """Set the replica id of each tensor, in place: 0 where this rank was chosen for it, 1 elsewhere. Local.

    The group, None for all ranks, is that for which the distribution was made.

    Raises:
        DeclarationError: there is no distribution for a group of several ranks, or it lacks a shard whose
            main replica is here.
    """
    if not dist.is_initialized() or dist.get_world_size(parallelization_group) == 1:
        return
    if precomputed_distribution is None:
        raise DeclarationError(
            "precomputed_distribution is None, and the group has several ranks. Give the result of "
            "determine_main_replica_uniform_distribution."
        )
    rank = dist.get_rank(parallelization_group)
    chosen = precomputed_distribution.main_rank_for_shard
    has_main: set[Any] = set()
    for tensor in nested_values(sharded_state_dict):
        if not isinstance(tensor, ShardedTensor):
            continue
        shard = shard_id(tensor)
        if shard not in chosen and is_main_replica(tensor.replica_id):
            raise _unknown_shard(tensor.key)
        is_chosen = chosen.get(shard) == rank and shard not in has_main
        tensor.replica_id = 0 if is_chosen else 1
        has_main.add(shard)


def _unknown_shard(key: str) -> DeclarationError:
    return DeclarationError(
        f"{key!r} was not there when the distribution was made. Make it anew, or do not set "
        f"do_cache_distribution where the structure changes.",
        key=key,
    )
