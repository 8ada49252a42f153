"""Megatron-Core's own `dist_checkpointing`, format torch_dist, fully parallel.

The settings are the best that its documents name: saves spread replicas over all ranks, loads read each
byte once and broadcast it. Everything is kept between saves of the same structure that can be kept: plans,
metadata, and who saves what. Its code calls torch.cuda, also where tensors are in host memory.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megackpt.cli.benchmark.state import GridLayout, RankState
from megackpt.errors import MissingExtraError, UnsupportedError
from tests.benchmarks.peers.contenders import flush


@dataclass(frozen=True, slots=True)
class _DeclaredState:
    """A rank's tensors, and what tells their structure from that of others."""

    tensors: dict[str, Any]
    structure: tuple[GridLayout, tuple[tuple[str, tuple[int, ...]], ...]]


class MegatronCore:
    """Megatron-Core; rank 0 syncs what it leaves to the system."""

    name = "mcore"
    thread_counts: tuple[int, ...] = (1, 2, 4)
    can_save_async = True

    needs_cuda = True

    def __init__(self) -> None:
        if self.needs_cuda and not torch.cuda.is_available():
            raise UnsupportedError(
                "--vs mcore needs a CUDA device: Megatron-Core's strategies call torch.cuda. Without "
                "one, give its stand-in: `--vs tests.benchmarks.mcore_on_cpu:MegatronCoreOnCpu`."
            )
        self.threads = 2
        self._saving: dict[Any, Any] = {}  # strategies, by structure and threads
        try:
            library = importlib.import_module("megatron.core.dist_checkpointing")
            strategies = "megatron.core.dist_checkpointing.strategies"
            queues = importlib.import_module(f"{strategies}.async_utils")
            self._torch_dist = importlib.import_module(f"{strategies}.torch")
            self._parallel = importlib.import_module(f"{strategies}.fully_parallel")
        except ImportError as error:
            raise MissingExtraError(
                f"--vs mcore needs megatron-core, which cannot be imported ({error}). Install "
                f"megackpt[megatron], or leave it out."
            ) from error
        self._library = library
        self._queue: Any = queues.AsyncCallsQueue()

    def unsupported_reason(self, saved_at: GridLayout, loaded_at: GridLayout) -> str | None:
        """Each rank must have rectangles of the arrays."""
        if saved_at.is_flat or loaded_at.is_flat:
            return "Megatron-Core has no flattened_range since 0.13: flat optimizer shards cannot be declared"
        return None

    def declare(self, state: RankState) -> _DeclaredState:
        """Declare each shard by the coordinates of its rank."""
        tp, tp_rank = state.layout.tp, state.layout.coordinates_of(state.rank)[0]
        tensors = {
            p.key: self._library.ShardedTensor.from_rank_offsets(
                p.key,
                p.data,
                *([] if p.tp_axis is None else [(p.tp_axis, tp_rank, tp)]),
                replica_id=p.replica,
            )
            for p in state.shards
        }
        shapes = tuple((p.key, p.box_shape) for p in state.shards)
        return _DeclaredState(tensors, (state.layout, shapes))

    def save(self, declared: _DeclaredState, directory: Path) -> None:
        """`dist_checkpointing.save`."""
        self._library.save(declared.tensors, str(directory), self._strategy(declared))
        flush(directory)

    def load(self, declared: _DeclaredState, directory: Path) -> None:
        """`dist_checkpointing.load`; what comes as a tensor of its own is copied into the one declared."""
        targets = {key: entity.data for key, entity in declared.tensors.items()}
        strategy = self._parallel.FullyParallelLoadStrategyWrapper(
            self._torch_dist.TorchDistLoadShardedStrategy(), dist.group.WORLD
        )
        loaded = self._library.load(declared.tensors, str(directory), strategy)
        for key, target in targets.items():
            if loaded[key].data_ptr() != target.data_ptr():
                target.copy_(loaded[key])

    def save_async(self, declared: _DeclaredState, directory: Path) -> Callable[[], Path]:
        """Schedule `dist_checkpointing.save(async_sharded_save=True)` on a queue, which forks."""
        request = self._library.save(
            declared.tensors, str(directory), self._strategy(declared), async_sharded_save=True
        )
        self._queue.schedule_async_request(request)
        return partial(self._finalize, directory)

    def _finalize(self, directory: Path) -> Path:
        self._queue.maybe_finalize_async_calls(blocking=True)
        flush(directory)
        return directory

    def _strategy(self, declared: _DeclaredState) -> Any:
        """Return the strategy that has saved this structure before: it has kept plans and metadata."""
        kept = (*declared.structure, self.threads)
        if kept not in self._saving:
            base = self._torch_dist.TorchDistSaveShardedStrategy(
                "torch_dist", 1, thread_count=self.threads, cached_metadata=True
            )
            self._saving[kept] = self._parallel.FullyParallelSaveStrategyWrapper(
                base, dist.group.WORLD, do_cache_distribution=True
            )
        return self._saving[kept]
