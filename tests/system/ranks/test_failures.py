"""When one rank fails, dies or hangs, every rank raises one error that names it, before the deadline.

When one rank receives a signal, all save the same step and exit with the same code.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

import megackpt
from megackpt import (
    Checkpointer,
    CheckpointError,
    IntegrityError,
    LoadOptions,
    MissingKeyError,
    RankFailedError,
    SaveOptions,
    SaveSchedule,
    ShardedTensor,
    ShardedTensorFactory,
)
from megackpt.comm import missing_ranks
from megackpt.testing.ranks import Outcome, RankPool
from tests.support.states import filled
from tests.support.writers import wait_for


def shard(value: float = 1.0, numel: int = 4096) -> ShardedTensor:
    rank, size = dist.get_rank(), dist.get_world_size()
    return filled(value, numel, rank=rank, ranks=size)


def errors_of(outcomes: list[Outcome]) -> list[BaseException | None]:
    """Return what ranks have raised; who waits for ever raises a TimeoutError of the pool."""
    return [outcome.error for outcome in outcomes]


def save_well(directory: Path) -> None:
    megackpt.save({"w": shard(1.0)}, directory)


def save_while_rank_1_sleeps(directory: Path) -> None:
    options = SaveOptions(timeout_s=3)
    megackpt.save({"w": shard()}, directory, options=options)  # agree on the group
    raised = [directory.with_name(f"raised.{rank}") for rank in (0, 2)]
    if dist.get_rank() == 1:
        wait_for(lambda: all(file.exists() for file in raised))
    try:
        megackpt.save({"w": shard()}, directory, options=options)
    finally:
        directory.with_name(f"raised.{dist.get_rank()}").touch()


def load_a_key_that_only_rank_3_misspells(directory: Path) -> None:
    tensor = shard()
    if dist.get_rank() == 3:
        tensor.key = "v"
    megackpt.load({"w": tensor}, directory)


def load_unlike_the_other(directory: Path, case: str) -> None:
    first = dist.get_rank() == 0
    arguments: dict[str, Any] = {"options": LoadOptions(timeout_s=60)}
    group = dist.new_group([0, 1])
    if case == "cpu_transfer":
        arguments["options"] = LoadOptions(timeout_s=60, exchange="two_stage", cpu_transfer=not first)
    elif case == "direct with a group":
        arguments["exchange_group"] = group if first else None
    elif case == "group of one":
        arguments["options"] = LoadOptions(timeout_s=60, exchange="all_to_all")
        arguments["exchange_group"] = group if first else None
    elif case == "other groups":
        single_process_checkpointer = [dist.new_group([rank]) for rank in range(2)]
        arguments["options"] = LoadOptions(timeout_s=60, exchange="all_to_all")
        arguments["exchange_group"] = group if first else single_process_checkpointer[1]
    elif case == "no group at all":
        arguments["options"] = LoadOptions(timeout_s=60, exchange="all_to_all")
        arguments["exchange_group"] = group if first else "tp"
    elif case == "strict":
        arguments["strict"] = "raise_all" if first else "assume_ok_unexpected"
    elif case == "no mode":
        arguments["strict"] = "raise_all" if first else "lenient"
    megackpt.load({"w": shard()}, directory, **arguments)


UNLIKE = {
    "cpu_transfer": "ranks 0 and 1 differ in cpu_transfer",
    "direct with a group": "Rank 0 failed while preparing the load: exchange_group is given",
    "group of one": "ranks 0 and 1 differ in whether they give an exchange_group",
    "other groups": "the exchange_group of rank 0 is not that of each of its members",
    "no group at all": "Rank 1 failed while preparing the load: exchange_group is 'tp'",
    "strict": "ranks 0 and 1 differ in what they do about missing keys",
    "no mode": "Rank 1 failed while preparing the load: strict='lenient' is not a mode",
}


@pytest.mark.parametrize("case", UNLIKE)
def test_ranks_that_give_unlike_arguments_to_a_load_raise_the_same_error_at_once(
    rank_pool: RankPool, tmp_path: Path, case: str
) -> None:
    rank_pool.run(save_well, 2, tmp_path / "c")
    errors = errors_of(rank_pool.outcomes(load_unlike_the_other, 2, tmp_path / "c", case))
    assert all(isinstance(error, CheckpointError) for error in errors)
    assert str(errors[0]) == str(errors[1])
    assert UNLIKE[case] in str(errors[0])


def load_everything(directory: Path) -> float:
    tensor = shard(0.0)
    megackpt.load({"w": tensor}, directory)
    assert tensor.data is not None
    return float(tensor.data.sum())


def test_a_rank_that_is_stuck_is_named_before_the_deadline(rank_pool: RankPool, tmp_path: Path) -> None:
    errors = errors_of(rank_pool.outcomes(save_while_rank_1_sleeps, 3, tmp_path / "c"))
    for rank in (0, 2):
        assert isinstance(errors[rank], RankFailedError)
        assert "No answer from rank(s) 1 within 3 s" in str(errors[rank])
        assert "Raise timeout_s" in str(errors[rank])
    assert isinstance(errors[1], CheckpointError)


def test_a_load_that_fails_on_one_rank_fails_on_all(rank_pool: RankPool, tmp_path: Path) -> None:
    rank_pool.run(save_well, 4, tmp_path / "c")
    for error in errors_of(rank_pool.outcomes(load_a_key_that_only_rank_3_misspells, 4, tmp_path / "c")):
        assert isinstance(error, MissingKeyError)
        assert error.key == "v"
        assert "Rank 3 failed while preparing the load" in str(error)


def test_damage_in_the_chunk_of_one_rank_is_raised_on_all(rank_pool: RankPool, tmp_path: Path) -> None:
    rank_pool.run(save_well, 4, tmp_path / "c")
    file = next((tmp_path / "c" / "data").glob("*-00002.safetensors"))
    content = bytearray(file.read_bytes())
    content[-1] ^= 128
    file.write_bytes(content)
    for error in errors_of(rank_pool.outcomes(load_everything, 4, tmp_path / "c")):
        assert isinstance(error, IntegrityError)
        assert error.rank == 2
        assert file.name in str(error)


def save_while_rank_1_is_late(directory: Path) -> None:
    asking = [directory / f"asking.{rank}" for rank in (0, 2)]

    def build(key: str, data: torch.Tensor, replica_id: Any, flat: Any) -> Any:
        if dist.get_rank() == 1:
            wait_for(lambda: all(file.exists() for file in asking))
        return shard()

    def ask(*arguments: Any, **options: Any) -> Any:
        (directory / f"asking.{dist.get_rank()}").touch()
        return find_missing(*arguments, **options | {"timeout_s": 60.0})  # until rank 1 has come

    find_missing = missing_ranks._missing_and_late
    factory = ShardedTensorFactory("f", torch.zeros(1), build, lambda x: x)
    with patch.object(missing_ranks, "_missing_and_late", ask):
        megackpt.save({"f": factory}, directory / "c", options=SaveOptions(timeout_s=3))


def test_a_rank_that_comes_after_the_deadline_is_named(rank_pool: RankPool, tmp_path: Path) -> None:
    outcomes = rank_pool.outcomes(save_while_rank_1_is_late, 3, tmp_path)
    for outcome in outcomes:
        assert isinstance(outcome.error, RankFailedError), outcome.trace
        if outcome.rank != 1:
            assert "rank(s) 1, which answered only later, within 3 s" in str(outcome.error)
            assert outcome.error.rank == 1


def train_until_a_signal(
    root: Path, send: dict[int, tuple[int, int]]
) -> tuple[list[int], int | None, list[float]]:
    """Train until a signal ends it; send is by step: to which rank, which signal. Return what was saved."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    weight = torch.zeros(100)
    saved = []

    def state() -> dict[str, object]:
        return {"w": ShardedTensor.from_rank_offsets("w", weight, (0, rank, ranks))}

    with Checkpointer(
        root,
        schedule=SaveSchedule(steps=1000, signals=(signal.SIGTERM, signal.SIGUSR1), agree_s=0.05),
        timeout_s=30.0,
    ) as checkpointer:
        for step in range(1, 600):
            weight += 1
            time.sleep(0.002)
            if step in send and send[step][0] == rank:
                os.kill(os.getpid(), send[step][1])
            if checkpointer.maybe_save(step, state):
                saved.append(step)
            if checkpointer.exit_requested:
                break
        loaded = checkpointer.load(
            {"w": ShardedTensor.from_rank_offsets("w", torch.zeros(100), (0, rank, ranks))}
        )
        return saved, checkpointer.exit_code, loaded["w"].unique().tolist()


def test_a_signal_to_one_rank_saves_on_all_and_sigterm_ends_all(rank_pool: RankPool, tmp_path: Path) -> None:
    send = {20: (1, signal.SIGUSR1), 200: (2, signal.SIGTERM)}
    outcomes = rank_pool.run(train_until_a_signal, 3, tmp_path, send)
    assert outcomes[0] == outcomes[1] == outcomes[2]
    (first, last), code, values = outcomes[0]
    print(f"signals at steps 20 and 200, saved at {first} and {last}")
    assert 20 <= first < 200 <= last < 400
    assert code == 143
    assert values == [float(last)]
    assert Checkpointer(tmp_path).steps() == (first, last)
