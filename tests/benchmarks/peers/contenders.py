"""The libraries to compare with, by name or `module:class`, and what the cases of a comparison ask of one."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist

from megackpt.cli.benchmark.contenders import Contender, Ours
from megackpt.cli.benchmark.state import GridLayout, RankState
from megackpt.entities import ShardedStateDict
from megackpt.errors import DeclarationError, UnsupportedError
from megackpt.run.checkpointer import Checkpointer

PEERS = ("dcp", "mcore", "torch")
"""Names of other libraries that can save the same state. A peer from elsewhere is given as `module:class`."""


class AsyncContender(Contender, Protocol):
    """A contender that can save asynchronously."""

    def save_async(self, declared: Any, directory: Path) -> Callable[[], Path]:
        """Begin to save, and return once the state may change again.

        What is returned waits for the end, and returns where the checkpoint is.
        """


class Peer(AsyncContender, Protocol):
    """Another library.

    Attributes:
        thread_counts: numbers of writing threads that it can be given; none where it has none to set.
        threads: the one that it uses; settable where there are several.
        can_save_async: whether `save_async` raises no error.
    """

    thread_counts: tuple[int, ...]
    threads: int
    can_save_async: bool


class OursAsync(Ours):
    """megackpt, also asynchronously: by a Checkpointer that is kept, as in a training script.

    It keeps the memory for copies, too.
    """

    def __init__(self, backend: str) -> None:
        super().__init__(backend)
        self._checkpointer: Checkpointer | None = None
        self._step = 0

    def save_async(self, declared: ShardedStateDict, directory: Path) -> Callable[[], Path]:
        """`Checkpointer.save` with async_save; one Checkpointer for all of them."""
        if self._checkpointer is None:
            self._checkpointer = Checkpointer(
                directory.parent / f"{self.backend}-steps", keep_last=1, async_save=True
            )
        self._step += 1
        self._checkpointer.save(self._step, declared, sharded_strategy=self.backend)
        return self._finish

    def close(self) -> None:
        """Let go of what asynchronous saves keep. Collective."""
        checkpointer, self._checkpointer = self._checkpointer, None
        if checkpointer is not None:
            checkpointer.close()

    def _finish(self) -> Path:
        assert self._checkpointer is not None
        self._checkpointer.wait()
        return self._checkpointer.directory(self._step)


def make_peer(name: str) -> Peer:
    """Return the peer of a name of PEERS, or an instance of the class that `module:class` names."""
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


def _import_class(name: str) -> Callable[[], Peer]:
    module, _, attribute = name.partition(":")
    try:
        peer: Callable[[], Peer] = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise DeclarationError(
            f"The peer {name!r} cannot be imported: {error}. Give `module:class`, with the module on "
            f"PYTHONPATH."
        ) from error
    return peer


def flush(directory: Path) -> None:
    """Make all files below a directory, and their names, durable, on rank 0 once all are there. Collective.

    What is durable already takes no time.
    """
    dist.barrier()
    if dist.get_rank():
        return
    for path in [*directory.rglob("*"), directory, directory.parent]:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


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
        flush(directory)

    def load(self, declared: dict[str, torch.Tensor], directory: Path) -> None:
        """Load it."""
        path = directory / f"rank-{dist.get_rank()}.pt"
        loaded = torch.load(path, mmap=True, weights_only=True)
        for key, tensor in declared.items():
            tensor.copy_(loaded[key])

    def save_async(self, declared: dict[str, torch.Tensor], directory: Path) -> Callable[[], Path]:
        """Raise an error: torch.save is synchronous."""
        raise UnsupportedError("torch.save has no asynchronous form. Leave the case async out for this peer.")
