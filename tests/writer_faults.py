"""What tests do to writer processes: strategies and stores that those can import."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megackpt.errors import StorageError
from megackpt.formats.native import NativeSaveStrategy
from megackpt.storage import Store

LIMIT_S = 60.0


def wait_for(claim: Callable[[], bool]) -> None:
    """Return when a claim holds."""
    deadline = time.monotonic() + LIMIT_S
    while not claim():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def refusing(store: Store) -> Store:
    """A hook of a writer process."""
    raise StorageError(f"{os.path.basename(store.location)} is refused by the hook")


class GatedStrategy(NativeSaveStrategy):
    """Touches `begun.RANK` in a directory when it is to write, and waits for a file `go` there."""

    def __init__(self, gate: Path) -> None:
        self.gate = gate

    def write_chunks(self, *args: Any, **kwargs: Any) -> bytes:
        (self.gate / f"begun.{kwargs['rank']}").touch()
        wait_for((self.gate / "go").exists)
        return super().write_chunks(*args, **kwargs)


class FullDiskStrategy(NativeSaveStrategy):
    """Fails on rank 1."""

    def write_chunks(self, *args: Any, **kwargs: Any) -> bytes:
        if kwargs["rank"] == 1:
            raise StorageError("the disk of rank 1 is full")
        return super().write_chunks(*args, **kwargs)


class HungStrategy(NativeSaveStrategy):
    """Does not return on rank 1."""

    def write_chunks(self, *args: Any, **kwargs: Any) -> bytes:
        if kwargs["rank"] == 1:
            time.sleep(600)
        return super().write_chunks(*args, **kwargs)


class KilledStrategy(NativeSaveStrategy):
    """Kills its process on rank 1."""

    def write_chunks(self, *args: Any, **kwargs: Any) -> bytes:
        if kwargs["rank"] == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().write_chunks(*args, **kwargs)
