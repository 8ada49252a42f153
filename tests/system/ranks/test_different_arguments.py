"""Ranks that were given different arguments: the same error on all of them, at once, and nothing is lost.

Formats that take long to import are compared before any rank imports one.
"""

from __future__ import annotations

import importlib
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch.distributed as dist

from megackpt import (
    Checkpointer,
    CheckpointError,
    KeepBest,
    LoadOptions,
    LocalTier,
    MemoryTier,
    Retention,
    SaveOptions,
    SaveSchedule,
    Tiers,
    load,
    save,
)
from megackpt.testing.ranks import RankPool
from tests.support.states import filled, replica
from tests.support.writers import wait_for_writers

TIMEOUT_S = 200.0  # "at once" is before half of it
SAVED = {"timeout_s": TIMEOUT_S}

Given = dict[str, Any]


def state(value: float = 0.0) -> dict[str, Any]:
    rank = dist.get_rank()
    return {"w": filled(value + rank, 4, rank=rank, ranks=2)}


def different_checkpointers(root: str) -> dict[str, tuple[Given, Given]]:
    """What ranks 0 and 1 are given, by what the error names."""
    here, there = MemoryTier(f"{root}/t"), MemoryTier(f"{root}/u")
    return {
        "root": ({"root": root}, {"root": f"{root}/other"}),
        "async_save": ({"async_save": True}, {}),
        "tiers": ({"tiers": [here]}, {}),
        "tiers 2": ({"tiers": [here]}, {"tiers": [there]}),
        "tiers 3": ({"tiers": [here]}, {"tiers": [LocalTier(here.path)]}),
        "Tiers.root_every": ({}, {"tiers": Tiers(root_every=2)}),
        "SaveSchedule.steps": ({"save_interval": 1}, {}),
        "SaveSchedule.seconds": (
            {"schedule": SaveSchedule(seconds=9)},
            {"schedule": SaveSchedule(seconds=8)},
        ),
        "SaveSchedule.signals": ({"schedule": SaveSchedule(signals=(10,))}, {}),
        "on_error": ({"on_error": "warn"}, {}),
        "verify_after_save": ({}, {"verify_after_save": True}),
        "Retention.keep_last": ({"keep_last": 1}, {"keep_last": 2}),
        "Retention.keep_every": ({"retention": Retention(keep_every=1)}, {}),
        "Retention.keep_best": ({}, {"retention": Retention(keep_best=KeepBest(metric="loss"))}),
    }


def caught(act: Callable[[], object]) -> tuple[str, float]:
    """Return class and text of an error, and after how many seconds it came."""
    began = time.monotonic()
    try:
        return f"none, but {act()!r}", 0.0
    except CheckpointError as error:
        return f"{type(error).__name__}: {error}", time.monotonic() - began


def _make_different_checkpointers(root: str) -> dict[str, tuple[str, float]]:
    with Checkpointer(root, **SAVED) as checkpointer:
        checkpointer.save(1, state())
    results = {}
    for name, pair in different_checkpointers(root).items():
        own = SAVED | pair[dist.get_rank()]
        unlike = Checkpointer(own.pop("root", root), **own)
        begin = unlike.should_save if "SaveSchedule" in name else _begin_save(unlike)
        results[name] = caught(lambda begin=begin: begin(2))  # type: ignore[misc]
        unlike.close()
        dist.barrier()
    assert Checkpointer(root).steps() == (1,)
    return results


def _begin_save(checkpointer: Checkpointer) -> Callable[[int], bool]:
    return lambda step: checkpointer.save(step, state())


def test_checkpointers_that_differ_are_an_error_on_all_ranks_before_anything_is_done(
    rank_pool: RankPool, tmp_path: Path
) -> None:
    results = rank_pool.run(_make_different_checkpointers, 2, str(tmp_path / "run"))
    for name in different_checkpointers(""):
        (first, took), (second, _) = (of_rank[name] for of_rank in results)
        assert first == second
        assert first.startswith(
            f"DeclarationError: Ranks have different Checkpointers: {name.rstrip(' 23')} is "
        )
        assert took < TIMEOUT_S / 2


def _wait_for_different_times(root: str) -> tuple[str, float]:
    return caught(Checkpointer(root, timeout_s=TIMEOUT_S + dist.get_rank()).find_latest)


def test_deadlines_that_differ_are_an_error(rank_pool: RankPool, tmp_path: Path) -> None:
    for message, took in rank_pool.run(_wait_for_different_times, 2, str(tmp_path)):
        assert "SaveOptions.timeout_s is 200.0 on rank 0 and 201.0 on rank 1" in message
        assert took < TIMEOUT_S / 2


def _call_differently(root: str) -> dict[str, tuple[str, float]]:
    rank = dist.get_rank()

    def saved(**arguments: Any) -> Callable[[], object]:
        step = arguments.pop("step", 2)
        return lambda: Checkpointer(root, **SAVED).save(step, state(), **arguments)

    def both() -> object:
        checkpointer = Checkpointer(root, **SAVED)
        return checkpointer.load(state()) if rank else checkpointer.save(2, state())

    options = SaveOptions(timeout_s=TIMEOUT_S)
    loading = LoadOptions(timeout_s=TIMEOUT_S)
    Checkpointer(root, **SAVED).save(1, state())
    acts: dict[str, Callable[[], object]] = {
        "step is 2 on rank 0 and 3 on rank 1": saved(step=2 + rank),
        "to_root is True on rank 0 and False on rank 1": saved(to_root=not rank),
        "'storing metrics'": saved(metrics=None if rank else {"loss": 1.0}),
        "'looking for the newest checkpoint'": both,
        f"checkpoint_dir is '{root}-0' on rank 0 and '{root}-1' on rank 1": lambda: save(
            state(), f"{root}-{rank}", options=options
        ),
        f"'connecting all ranks with timeout_s={TIMEOUT_S + 3:g}'": lambda: save(
            state(), f"{root}-2", options=SaveOptions(timeout_s=TIMEOUT_S + 3 * rank)
        ),
        f"Ranks load different checkpoints: {root}/iter_0000001 on rank 0 and": lambda: load(
            state(), f"{root}/iter_000000{1 + rank}", options=loading
        ),
    }
    Checkpointer(root, **SAVED).save(2, state())
    results = {}
    for name, act in acts.items():
        results[name] = caught(act)
        dist.barrier()
    assert Checkpointer(root).steps() == (1, 2)
    return results


def test_calls_that_differ_are_an_error_on_all_ranks_that_names_the_difference(
    rank_pool: RankPool, tmp_path: Path
) -> None:
    results = rank_pool.run(_call_differently, 2, str(tmp_path / "run"))
    for of_rank in results:
        for name, (message, took) in of_rank.items():
            assert name in message, (name, message)
            assert took < TIMEOUT_S / 2, name


def _load_differently(directory: str) -> dict[str, tuple[str, float]]:
    rank = dist.get_rank()
    both, own = dist.new_group([0, 1]), [dist.new_group([other]) for other in range(2)]

    def loaded(exchange: Any = "auto", *, key: str = "w", more: Given | None = None, **arguments: Any) -> Any:
        options = LoadOptions(timeout_s=TIMEOUT_S, exchange=exchange, **more or {})
        asked = {"w": replica(0.0, 1 << 20, key=key, rank=rank)}
        return lambda: load(asked, directory, options=options, **arguments)

    grouped = {"exchange_group": None if rank else both}
    save({"w": replica(1.0, 1 << 20, key="w", rank=rank)}, directory)
    acts: dict[str, Callable[[], object]] = {
        "ranks 0 and 1 differ in cpu_transfer": loaded("two_stage", more={"cpu_transfer": rank == 1}),
        "MismatchError: .*exchange='all_to_all' and 'two_stage'": loaded(("all_to_all", "two_stage")[rank]),
        "MismatchError: .*ranks plan different exchanges": loaded(
            "all_to_all", more={"exchange_bytes": (1 + rank) << 20}
        ),
        "Rank 0 failed while preparing the load: exchange_group is given": loaded(**grouped),
        "ranks 0 and 1 differ in whether they give an exchange_group": loaded("all_to_all", **grouped),
        "the exchange_group of rank 0 is not that of each of its members": loaded(
            "all_to_all", exchange_group=own[1] if rank else both
        ),
        "Rank 1 failed while preparing the load: exchange_group is 'tp'": loaded(
            "all_to_all", exchange_group="tp" if rank else both
        ),
        "ranks 0 and 1 differ in what they do about missing keys": loaded(
            strict=("raise_all", "assume_ok_unexpected")[rank]
        ),
        "Rank 1 failed while preparing the load: strict='lenient' is not a mode": loaded(
            strict=("raise_all", "lenient")[rank]
        ),
        "MissingKeyError: Rank 1 failed while preparing the load: .*'v'": loaded(key="wv"[rank]),
    }
    return {name: caught(act) for name, act in acts.items()}


def test_loads_that_differ_are_the_same_error_on_all_ranks(rank_pool: RankPool, tmp_path: Path) -> None:
    first, second = rank_pool.run(_load_differently, 2, str(tmp_path))
    for name, (message, took) in first.items():
        assert re.search(name, message, re.DOTALL), (name, message)
        assert message == second[name][0]
        assert took < TIMEOUT_S / 2, name


IMPORTING_TIMEOUT_S = 10.0
IMPORT_S = 20.0

Choice = Any
UNLIKE: tuple[tuple[Choice, Choice], ...] = (
    ("torch_dist", None),
    (None, "torch_dist"),
    ("megackpt", ("zarr", 3)),
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


def imported() -> list[str]:
    return [name for name in ("torch_dist", "zarr") if f"megackpt.formats.{name}" in sys.modules]


def save_unlike(root: str) -> list[tuple[str, float]]:
    sys.meta_path.insert(0, SlowImports())
    rank = dist.get_rank()
    options = SaveOptions(timeout_s=IMPORTING_TIMEOUT_S)
    save(state(0.0), f"{root}/warm", options=options)
    results = []
    for number, choices in enumerate(UNLIKE):
        dist.barrier()
        directory, choice = f"{root}/{number}", choices[rank]
        results.append(caught(lambda: save(state(1.0), directory, choice, options=options)))  # noqa: B023
    checkpointer = Checkpointer(f"{root}/run", async_save=True, timeout_s=IMPORTING_TIMEOUT_S)
    wait_for_writers(checkpointer)
    dist.barrier()
    choice = UNLIKE[0][rank]
    results.append(caught(lambda: checkpointer.save(1, state(1.0), sharded_strategy=choice)))
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
