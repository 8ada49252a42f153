"""A writer, or its training process, gets into trouble in an asynchronous save: nobody waits for ever.

The last rank raises, dies or falls asleep; all others must raise an error that names it, before a deadline,
and save again where ranks live. What ranks do when nothing is under way is in test_no_hang.py.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, get_args
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from megackpt import AsyncOptions, Checkpointer, CheckpointError, LocalTier, ShardedTensor
from megackpt.engine.background import saver as async_save
from megackpt.testing.ranks import RankPool
from tests.support.effort import tries_all, with_all
from tests.support.writers import ORDER, GatedStrategy, Order, is_alive, saver_of, wait_for, wait_for_writers

RANKS = 3
TROUBLED = RANKS - 1
PATIENT_S = 60.0  # where nobody is lost, and a busy machine is none
TIMEOUT_S = 6.0
DEADLINE_S = 20 * TIMEOUT_S
"""Until the last rank has raised, which takes little more than the time-out on an idle machine."""

Moment = Literal["staging", "writing"]
Trouble = Literal["raises", "dies", "sleeps"]
Where = Literal["root", "tier"]


class OwnMistakeError(Exception):
    """What goes wrong on one rank."""


class Troubled(Checkpointer):
    _writer_hook = "tests.support.writers:in_trouble"


def state(step: int) -> dict[str, Any]:
    rank, size = dist.get_rank(), dist.get_world_size()
    part = torch.full((64,), float(step))
    return {"w": ShardedTensor.from_rank_offsets("w", part, (0, rank, size)), "step": step}


def started(
    root: Path, timeout_s: float, kind: type[Checkpointer] = Checkpointer, **arguments: Any
) -> Checkpointer:
    """Return a checkpointer whose writers are there: how long they take to start is not of interest here."""
    options = AsyncOptions(nice=0)  # the time-out is short, and the machine may be busy
    checkpointer = kind(root, async_save=options, timeout_s=timeout_s, **arguments)
    wait_for_writers(checkpointer)
    dist.barrier()
    return checkpointer


def save_and_load(root: Path, step: int) -> None:
    """Save with the same writer processes as before, where they live, and load."""
    with started(root, PATIENT_S, Troubled) as checkpointer:
        checkpointer.save(step, state(step))
        checkpointer.wait()
        dist.barrier()
        assert checkpointer.latest() == step
        loaded = checkpointer.load(state(0))
        assert loaded["step"] == step
        assert torch.equal(loaded["w"], torch.full((64,), float(step)))


def end_in_trouble(root: Path, how: Trouble, before: int, location: Where) -> tuple[str, float]:
    """Save with a writer in trouble, then without; return the error, "" for none, and the time until then."""
    good = Checkpointer(root).latest() or save_next(root)
    dist.barrier()
    if dist.get_rank() == TROUBLED:
        Order(trainer=os.getpid(), before=before, how=how).give(root)
    arguments: dict[str, Any] = {}
    if location == "tier":
        tier = LocalTier(root.parent / "node-{node}", keep_last=1)
        arguments = {"tiers": [tier], "every": 10**9, "node": dist.get_rank()}
    checkpointer = started(root, PATIENT_S if how == "raises" else TIMEOUT_S, Troubled, **arguments)
    message = ""
    began = time.monotonic()
    try:
        checkpointer.save(good + 1, state(good + 1))
        checkpointer.wait()
    except CheckpointError as error:
        message = str(error)
    elapsed = time.monotonic() - began
    dist.barrier()
    (root.parent / ORDER).unlink(missing_ok=True)
    checkpointer.close()
    dist.barrier()
    if location == "tier":
        assert checkpointer.latest() == good
    else:
        assert checkpointer.latest() in ((good, good + 1) if message else (good + 1,))
    save_next(root)
    return message, elapsed


def save_next(root: Path) -> int:
    newest = Checkpointer(root).latest() or 0
    dist.barrier()
    save_and_load(root, newest + 1)
    return newest + 1


def raise_at_each_collective(root: Path, location: Where) -> list[str]:
    """Let the writer raise one collective later each time, until there is no other; return the errors."""
    message: list[str] = []
    while True:
        text, _ = end_in_trouble(root, "raises", len(message), location)
        texts: list[str] = [""] * RANKS
        dist.all_gather_object(texts, text)
        if not any(texts):
            return message
        message.append(text)


@with_all("writers that are killed, fail and hang are in test_async_trouble.py and test_tiers_async.py")
@pytest.mark.parametrize("location", get_args(Where))
def test_a_writer_in_trouble_at_any_collective_is_named_on_all_ranks(
    rank_pool: RankPool, tmp_path: Path, location: Where
) -> None:
    root = tmp_path / "root"
    everyone = rank_pool.run(raise_at_each_collective, RANKS, root, location)
    assert len(everyone[0]) >= 5
    assert all(message == everyone[0] for message in everyone)
    for text in everyone[0]:
        assert f"Rank {TROUBLED} failed while" in text
        assert "OwnMistakeError: something of one's own" in text
    moments: list[tuple[Trouble, int]] = [
        (how, number) for how in ("dies", "sleeps") for number in range(len(everyone[0]))
    ]
    for how, number in moments:
        outcomes = rank_pool.run(end_in_trouble, RANKS, root, how, number, location, timeout_s=4 * DEADLINE_S)
        print(how, number, outcomes)
        assert len({text for text, _ in outcomes}) == 1, (how, number)
        for text, elapsed in outcomes:
            assert elapsed < DEADLINE_S, (how, number)
            assert f"rank {TROUBLED}" in text or f"rank(s) {TROUBLED}" in text, (how, number, text)


def act(trouble: Trouble, gate: Path) -> None:
    """Get into trouble in the training of a rank; asleep is who waits until all others have raised."""
    if trouble == "raises":
        raise OwnMistakeError("something of one's own")
    if trouble == "dies":
        os._exit(9)
    wait_for(lambda: len(list(gate.glob("raised.*"))) >= RANKS - 1, 2 * DEADLINE_S)


def train_in_trouble(root: Path, moment: Moment, trouble: Trouble, gate: Path) -> tuple[str, float]:
    """Let the training of the last rank get into trouble; return the error of this one and the time to it."""
    rank = dist.get_rank()
    save_next(root)
    checkpointer = started(root, TIMEOUT_S)
    fill: Callable[..., None] = async_save.copy_rows

    def stage(*arguments: Any) -> None:
        if rank == TROUBLED and moment == "staging":
            act(trouble, gate)
        fill(*arguments)

    began = time.monotonic()
    message = ""
    try:
        strategy = GatedStrategy(gate) if moment == "writing" else None
        with patch.object(async_save, "copy_rows", stage):
            checkpointer.save(2, state(2), sharded_strategy=strategy)
        if moment == "writing":
            wait_for(lambda: all((gate / f"begun.{rank}").exists() for rank in range(RANKS)))
            writer = gate / "troubled-writer"
            if rank == TROUBLED:
                (gate / "new").write_text(str(saver_of(checkpointer).writer_pid))
                (gate / "new").replace(writer)
                act(trouble, gate)
            else:  # the commit is not held up by training that is stuck, but the next save is
                wait_for(writer.exists)
                if trouble == "dies":  # and with it its writer
                    wait_for(lambda: not is_alive(int(writer.read_text())))
                (gate / "go").touch()
        checkpointer.wait()
        checkpointer.save(3, state(3))
        checkpointer.wait()
    except (CheckpointError, OwnMistakeError) as error:
        message = str(error)
    elapsed = time.monotonic() - began
    (gate / f"raised.{rank}").touch()
    saver_of(checkpointer).abandon()
    return message, elapsed


TRAINING: list[tuple[Moment, Trouble]] = [
    ("staging", "raises"),
    ("staging", "dies"),
    ("staging", "sleeps"),
    ("writing", "dies"),
    ("writing", "sleeps"),
]


def test_training_in_trouble_during_a_save_is_named_on_all_other_ranks(
    rank_pool: RankPool, tmp_path: Path
) -> None:
    for number, (moment, trouble) in enumerate(
        TRAINING if tries_all() else [random.Random(0).choice(TRAINING)]
    ):
        root, gate = tmp_path / f"root-{number}", tmp_path / f"gate-{number}"
        gate.mkdir()
        outcomes = rank_pool.outcomes(
            train_in_trouble, RANKS, root, moment, trouble, gate, timeout_s=4 * DEADLINE_S
        )
        print(moment, trouble, [outcome.value for outcome in outcomes])
        for outcome in outcomes[:TROUBLED]:
            assert outcome.error is None, (moment, trouble, outcome.trace)
            text, elapsed = outcome.value
            assert elapsed < DEADLINE_S, (moment, trouble)
            if trouble == "raises":
                assert f"Rank {TROUBLED} failed while copying its state: OwnMistakeError" in text
            else:
                assert f"rank(s) {TROUBLED}" in text, (moment, trouble, text)
        steps = Checkpointer(root).steps()
        assert steps == ((1, 2) if (moment, trouble) == ("writing", "sleeps") else (1,))
        rank_pool.run(save_next, RANKS, root)
