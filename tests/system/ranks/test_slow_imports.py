"""Formats that take long to import: ranks compare what they were given before any of them imports one."""

from __future__ import annotations

import importlib
import sys
import time
from collections.abc import Iterator, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch.distributed as dist

from megackpt import Checkpointer, CheckpointError, SaveOptions, load, save
from megackpt.testing.ranks import RankPool
from tests.support.states import filled
from tests.support.writers import wait_for_writers

TIMEOUT_S = 10.0
IMPORT_S = 20.0

Choice = Any
UNLIKE: tuple[tuple[Choice, Choice], ...] = (
    ("torch_dist", None),
    (None, "torch_dist"),
    ("megackpt", ("zarr", 1)),
    (("zarr", 3), "torch_dist"),
)


class SlowImports(MetaPathFinder):
    """Imports formats as from a slow file system."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname in ("megackpt.formats.torch_dist", "megackpt.formats.zarr"):
            time.sleep(IMPORT_S)
        return None


@pytest.fixture
def fresh_pool() -> Iterator[RankPool]:
    """Ranks that have imported no format yet."""
    pool = RankPool()
    yield pool
    pool.close()


def state(value: float) -> dict[str, Any]:
    rank = dist.get_rank()
    return {"w": filled(value + rank, 4, rank=rank, ranks=2)}


def imported() -> list[str]:
    return [name for name in ("torch_dist", "zarr") if f"megackpt.formats.{name}" in sys.modules]


def save_unlike(root: str) -> list[tuple[str, float]]:
    sys.meta_path.insert(0, SlowImports())
    rank = dist.get_rank()
    options = SaveOptions(timeout_s=TIMEOUT_S)
    save(state(0.0), f"{root}/warm", options=options)
    results = []
    for number, choices in enumerate(UNLIKE):
        dist.barrier()
        began = time.monotonic()
        try:
            save(state(1.0), f"{root}/{number}", choices[rank], options=options)
            results.append(("nothing", 0.0))
        except CheckpointError as error:
            results.append((f"{type(error).__name__}: {error}", time.monotonic() - began))
    checkpointer = Checkpointer(f"{root}/run", async_save=True, timeout_s=TIMEOUT_S)
    wait_for_writers(checkpointer)
    dist.barrier()
    began = time.monotonic()
    try:
        checkpointer.save(1, state(1.0), sharded_strategy=UNLIKE[0][rank])
    except CheckpointError as error:
        results.append((f"{type(error).__name__}: {error}", time.monotonic() - began))
    checkpointer.close()
    assert imported() == []
    del sys.meta_path[0]
    return results


def save_equal(root: str) -> None:
    """Save in formats that no rank has imported, and in one that rank 0 has."""
    if dist.get_rank() == 0:
        importlib.import_module("megackpt.formats.zarr.version_3")
    dist.barrier()
    for choice in ("torch_dist", "zarr"):
        for value in (1.0, 2.0):
            save(state(value), f"{root}/{choice}", choice, options=SaveOptions(timeout_s=60))
            assert load(state(0.0), f"{root}/{choice}")["w"].eq(value + dist.get_rank()).all()
    assert imported() == ["torch_dist", "zarr"]


def test_ranks_that_chose_different_formats_learn_it_before_a_slow_import(
    fresh_pool: RankPool, tmp_path: Path
) -> None:
    first, second = fresh_pool.run(save_unlike, 2, str(tmp_path))
    names = {None: ["megackpt", 1], "megackpt": ["megackpt", 1], "torch_dist": ["torch_dist", 1]}
    for (message, took), (other, _), choices in zip(first, second, (*UNLIKE, UNLIKE[0]), strict=True):
        choices_of_ranks = [names.get(choice) or list(choice) for choice in choices]
        assert message == other
        assert message.startswith(
            "DeclarationError: Ranks save differently: "
            f"format is {choices_of_ranks[0]} on rank 0 and {choices_of_ranks[1]} on rank 1"
        )
        print(f"{message[:100]} after {took:.2f} s")
    assert not list(tmp_path.glob("[0-9]/metadata.json"))
    fresh_pool.run(save_equal, 2, str(tmp_path / "equal"))
