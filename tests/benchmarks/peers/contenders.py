"""Peers: makes the libraries to compare with, by name or by `module:class`."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from megackpt.cli.benchmark import page_cache
from megackpt.cli.benchmark.contenders import Contender
from megackpt.cli.benchmark.state import GridLayout, RankState
from megackpt.errors import DeclarationError, UnsupportedError

PEERS = ("dcp", "mcore", "torch")
"""Names of other libraries that can save the same state. A peer from elsewhere is given as `module:class`."""


def make_peer(name: str) -> Contender:
    """Return the contender of a name of PEERS, or an instance of the class that `module:class` names."""
    if ":" in name:
        return _import_class(name)()
    if name == "dcp":
        from tests.benchmarks.peers.dcp import TorchDistributed

        return TorchDistributed()
    if name == "mcore":
        from tests.benchmarks.peers.megatron import MegatronCore

        return MegatronCore()

    return PlainTorch()


def check_peers(names: Sequence[str]) -> None:
    """Raise an error for a peer given as `module:class` that cannot be imported."""
    for name in names:
        if ":" in name:
            _import_class(name)


def _import_class(name: str) -> Callable[[], Contender]:
    module, _, attribute = name.partition(":")
    try:
        peer: Callable[[], Contender] = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise DeclarationError(
            f"The peer {name!r} cannot be imported: {error}. Give `module:class`, with the module on "
            f"PYTHONPATH."
        ) from error
    return peer


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
        """Raise an error: torch.save is synchronous."""
        raise UnsupportedError("torch.save has no asynchronous form. Leave the case async out for this peer.")
