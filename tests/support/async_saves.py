"""What tests of asynchronous saves share: small states, and Checkpointers that save them behind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megackpt import (
    AsyncOptions,
    Checkpointer,
    SaveOptions,
    ShardedTensor,
)
from megackpt.comm import SingleProcess
from megackpt.engine.background.saver import AsyncSaver
from megackpt.storage import Store
from tests.support.states import filled

OPTIONS = SaveOptions(timeout_s=20)


def part(value: float, rows: int = 1000) -> ShardedTensor:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    return filled(value + rank, rows, 10, rank=rank, ranks=ranks)


def saver_of(checkpointer: Checkpointer) -> AsyncSaver:
    saver = checkpointer._async_saving and checkpointer._async_saving.saver
    assert saver is not None
    return saver


def wait_for_writers(checkpointer: Checkpointer) -> None:
    """Return when the writer process of this rank is there: how long it takes to start is not tested."""
    saver_of(checkpointer)._session.running().wait_ready()


def single_process_checkpointer(
    root: Path | Store, *, async_save: bool | AsyncOptions = True, **arguments: Any
) -> Checkpointer:
    return Checkpointer(root, async_save=async_save, group=SingleProcess(), **arguments)


def ones() -> dict[str, ShardedTensor]:
    return {"w": ShardedTensor.from_rank_offsets("w", torch.ones(4))}


def is_alive(process: int) -> bool:
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):  # gone before it was opened, or while it was read
        return False
    return state != "Z"


def made(directory: Path) -> Path:
    directory.mkdir()
    return directory
