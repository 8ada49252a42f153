"""Megatron-Core's own `dist_checkpointing`, format torch_dist, fully parallel.

Owns its settings, the best that its documents name: replicas spread over all ranks at saves, each byte read
once and broadcast at loads, as many writing processes per rank as were fastest in a trial (see `peers`), and
everything kept that it can keep between saves of the same structure (plans, metadata, who saves what).

Owns also the one thing that it needs on ranks whose state is in host memory, here as on a machine with GPUs:
torch takes the device "cuda" for the CPU while Megatron-Core's code runs. That code is as it was installed.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

from megackpt.bench import page_cache
from megackpt.bench.state import GridLayout, RankState
from megackpt.errors import MissingExtraError


@dataclass(frozen=True, slots=True)
class _Declared:
    """A rank's tensors, and what tells their structure from that of others."""

    tensors: dict[str, Any]
    structure: tuple[GridLayout, tuple[tuple[str, tuple[int, ...]], ...]]


class MegatronCore:
    """Megatron-Core; rank 0 syncs what it leaves to the system."""

    name = "mcore"
    thread_counts: tuple[int, ...] = (1, 2, 4)
    can_save_behind = True

    def __init__(self) -> None:
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

    def refusal(self, saved_at: GridLayout, loaded_at: GridLayout) -> str | None:
        """What a rank holds has to be rectangles."""
        if saved_at.is_flat or loaded_at.is_flat:
            return "Megatron-Core has no flattened_range since 0.13: flat optimizer shards cannot be declared"
        return None

    def declare(self, state: RankState) -> _Declared:
        """Declare each piece by its place on the grid."""
        tp, tp_rank = state.layout.tp, state.layout.place(state.rank)[0]
        tensors = {
            p.key: self._library.ShardedTensor.from_rank_offsets(
                p.key,
                p.data,
                *([] if p.tp_axis is None else [(p.tp_axis, tp_rank, tp)]),
                replica_id=p.replica,
            )
            for p in state.pieces
        }
        shapes = tuple((p.key, p.block_shape) for p in state.pieces)
        return _Declared(tensors, (state.layout, shapes))

    def save(self, declared: _Declared, directory: Path) -> None:
        """`dist_checkpointing.save`."""
        with _cuda_is_the_cpu():
            self._library.save(declared.tensors, str(directory), self._strategy(declared))
        _flush(directory)

    def load(self, declared: _Declared, directory: Path) -> None:
        """`dist_checkpointing.load`; what comes as a tensor of its own is copied into the one declared."""
        targets = {key: entity.data for key, entity in declared.tensors.items()}
        strategy = self._parallel.FullyParallelLoadStrategyWrapper(
            self._torch_dist.TorchDistLoadShardedStrategy(), dist.group.WORLD
        )
        with _cuda_is_the_cpu():
            loaded = self._library.load(declared.tensors, str(directory), strategy)
        for key, target in targets.items():
            if loaded[key].data_ptr() != target.data_ptr():
                target.copy_(loaded[key])

    def save_behind(self, declared: _Declared, directory: Path) -> Callable[[], Path]:
        """Schedule `dist_checkpointing.save(async_sharded_save=True)` on a queue, which forks."""
        with _cuda_is_the_cpu():
            request = self._library.save(
                declared.tensors, str(directory), self._strategy(declared), async_sharded_save=True
            )
            self._queue.schedule_async_request(request)
        return partial(self._finalize, directory)

    def _finalize(self, directory: Path) -> Path:
        with _cuda_is_the_cpu():
            self._queue.maybe_finalize_async_calls(blocking=True)
        _flush(directory)
        return directory

    def _strategy(self, declared: _Declared) -> Any:
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


class _HostMemory(TorchFunctionMode):
    """While it is entered, torch functions take the device "cuda" for the CPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.cuda:
            return args[0]
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = torch.device("cpu")
        if func is torch.Tensor.to:
            args = tuple(torch.device("cpu") if str(a).startswith("cuda") else a for a in args)
        return func(*args, **kwargs)


@contextlib.contextmanager
def _cuda_is_the_cpu() -> Iterator[None]:
    with (
        mock.patch.object(torch.cuda, "synchronize", return_value=None),
        mock.patch.object(torch.cuda, "current_device", return_value=torch.device("cpu")),
        _HostMemory(),
    ):
        yield


def _flush(directory: Path) -> None:
    dist.barrier()
    if dist.get_rank() == 0:
        page_cache.flush(directory)
