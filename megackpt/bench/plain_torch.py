"""`torch.save` and `torch.load` of what each rank holds: the least that anybody does."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from megackpt.bench import page_cache
from megackpt.bench.state import GridLayout, RankState
from megackpt.errors import UnsupportedError


class PlainTorch:
    """One file per rank, flushed; loaded through a memory map and copied into the tensors."""

    name = "torch"
    thread_counts: tuple[int, ...] = ()
    threads = 1
    can_save_async = False

    def unsupported_reason(self, saved_at: GridLayout, loaded_at: GridLayout) -> str | None:
        """A rank gets what it has saved."""
        return None if saved_at == loaded_at else "torch.save cannot be loaded at another layout"

    def declare(self, state: RankState) -> dict[str, torch.Tensor]:
        """The tensors by key."""
        return {shard.key: shard.data for shard in state.shards}

    def save(self, declared: dict[str, torch.Tensor], directory: Path) -> None:
        """Save a file of this rank."""
        with (directory / f"rank-{dist.get_rank()}.pt").open("wb") as file:
            torch.save(declared, file)
            file.flush()
            os.fsync(file.fileno())
        dist.barrier()
        if dist.get_rank() == 0:
            page_cache.flush(directory)

    def load(self, declared: dict[str, torch.Tensor], directory: Path) -> None:
        """Load it."""
        path = directory / f"rank-{dist.get_rank()}.pt"
        loaded = torch.load(path, mmap=True, weights_only=True)
        for key, tensor in declared.items():
            tensor.copy_(loaded[key])

    def save_async(self, declared: dict[str, torch.Tensor], directory: Path) -> Callable[[], Path]:
        """There is none."""
        raise UnsupportedError("torch.save has no asynchronous form.")
