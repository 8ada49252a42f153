"""One rank, or its writer, raises, dies or falls asleep at any step of a save or a load: none waits for ever.

A step is what ranks meet after. The last rank, or its writer, gets into trouble right before it does its part
of one; all others must raise an error that names it, and save again where ranks live.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal, get_args
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

import megackpt
from megackpt import (
    AsyncOptions,
    Checkpointer,
    CheckpointError,
    LoadOptions,
    LocalTier,
    RankFailedError,
    SaveOptions,
)
from megackpt.engine.background import saver as async_save
from megackpt.testing.ranks import RankPool
from tests.support.effort import tries_all, with_all
from tests.support.states import filled, replica
from tests.support.writers import (
    ORDER,
    GatedStrategy,
    Order,
    OwnMistakeError,
    is_alive,
    saver_of,
    wait_for,
    wait_for_writers,
)

RANKS = 3
TROUBLED = RANKS - 1
PATIENT_S = 60.0  # where nobody is lost, and a busy machine is none
TIMEOUT_S = 4.0
DEADLINE_S = 20 * TIMEOUT_S
"""Until the last rank has raised, which takes little more than the time-out on an idle machine."""

Trouble = Literal["raises", "dies", "sleeps"]
Work = Literal["save", "overwrite", "load", "exchange"]


def work(kind: Work, directory: Path, *, timeout_s: float = PATIENT_S) -> None:
    """Save or load, on every rank; one tensor is sharded, the other replicated."""
    rank, size = dist.get_rank(), dist.get_world_size()
    state = {"w": filled(1.0, 64, rank=rank, ranks=size), "r": replica(2.0, 64, rank=rank), "step": 1}
    if kind in ("save", "overwrite"):
        megackpt.save(state, directory / kind, options=SaveOptions(timeout_s=timeout_s))
    else:
        options = LoadOptions(timeout_s=timeout_s, exchange="direct" if kind == "load" else "all_to_all")
        megackpt.load(state, directory / "overwrite", options=options)


@contextmanager
def in_trouble(before: int, act: Callable[[], None]) -> Iterator[list[int]]:
    """Within the block this rank's step of that number begins with an act; yields how many were begun."""
    begun = [0]

    def begin_step(doing: str) -> None:
        begun[0] += 1
        if begun[0] - 1 == before:
            act()

    with patch("megackpt.comm.collectives.begin_step", begin_step):
        yield begun


def save_first(directory: Path) -> None:
    work("overwrite", directory)


def raise_at_each_step(kind: Work, directory: Path) -> list[str]:
    """Do the work again and again, with the mistake one step later each time; return what was raised."""
    message: list[str] = []

    def mistake() -> None:
        if dist.get_rank() == TROUBLED:
            raise OwnMistakeError("something of one's own")

    for number in range(100):
        with in_trouble(number, mistake) as begun:
            try:
                work(kind, directory)
            except CheckpointError as error:
                message.append(str(error))
            steps = torch.tensor(begun)
            dist.broadcast(steps, src=TROUBLED)  # rank 0 has steps of its own
            if int(steps) <= number:
                return message
    raise AssertionError("the work has no end")


def count_steps(kind: Work, directory: Path) -> int:
    with in_trouble(-1, lambda: None) as begun:
        work(kind, directory)
    return begun[0]


def end_in_trouble(kind: Work, directory: Path, number: int, trouble: Trouble, raised: Path) -> float:
    """Do the work once; return how long it took until an error that names the troubled rank was raised."""

    def act() -> None:
        if dist.get_rank() != TROUBLED:
            return
        if trouble == "dies":
            os._exit(9)
        wait_for(lambda: len(list(raised.iterdir())) == RANKS - 1, 2 * DEADLINE_S)

    began = time.monotonic()
    with in_trouble(number, act):
        if dist.get_rank() == TROUBLED:
            with suppress(CheckpointError):
                work(kind, directory, timeout_s=TIMEOUT_S)
            return 0.0
        with pytest.raises(RankFailedError) as caught:
            work(kind, directory, timeout_s=TIMEOUT_S)
    elapsed = time.monotonic() - began
    (raised / str(dist.get_rank())).write_text(str(caught.value))
    return elapsed


@pytest.mark.parametrize(
    "kind", get_args(Work)[:3]
)  # an exchange has rounds of its own: see test_exchange.py
def test_a_rank_that_raises_at_any_step_is_named_on_all(
    rank_pool: RankPool, tmp_path: Path, kind: Work
) -> None:
    rank_pool.run(save_first, RANKS, tmp_path)
    everyone = rank_pool.run(raise_at_each_step, RANKS, kind, tmp_path)
    assert len(everyone[0]) >= 2
    assert all(message == everyone[0] for message in everyone)
    for text in everyone[0]:
        assert f"Rank {TROUBLED} failed while" in text
        assert "OwnMistakeError: something of one's own" in text


@pytest.mark.parametrize("trouble", ["dies", "sleeps"])
def test_a_rank_that_is_lost_at_any_step_is_named_before_the_deadline(
    rank_pool: RankPool, tmp_path: Path, trouble: Trouble
) -> None:
    rank_pool.run(save_first, RANKS, tmp_path)
    moments = [
        (kind, number)
        for kind in get_args(Work)
        for number in range(rank_pool.run(count_steps, RANKS, kind, tmp_path)[TROUBLED])
    ]
    if not tries_all():
        moments = random.Random(0).sample(moments, 1)
    for kind, number in moments:
        raised = tmp_path / f"raised-{kind}-{number}"
        raised.mkdir()
        outcomes = rank_pool.outcomes(
            end_in_trouble, RANKS, kind, tmp_path, number, trouble, raised, timeout_s=4 * DEADLINE_S
        )
        for outcome in outcomes[:TROUBLED]:
            assert outcome.error is None, (kind, number, outcome.trace)
            assert outcome.value < DEADLINE_S, (kind, number)
        # A rank that was not waiting for the lost one itself may be told of the one that was.
        texts = [file.read_text() for file in raised.iterdir()]
        assert any(f"rank(s) {TROUBLED}" in text for text in texts), (kind, number, texts)


ASYNC_TIMEOUT_S = 6.0
ASYNC_DEADLINE_S = 20 * ASYNC_TIMEOUT_S
"""Until the last rank has raised, which takes little more than the time-out on an idle machine."""

Moment = Literal["staging", "writing"]
Where = Literal["root", "tier"]


class Troubled(Checkpointer):
    _writer_hook = "tests.support.writers:in_trouble"


def state(step: int) -> dict[str, Any]:
    rank, size = dist.get_rank(), dist.get_world_size()
    return {"w": filled(float(step), 64, rank=rank, ranks=size), "step": step}


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


def end_with_a_writer_in_trouble(root: Path, how: Trouble, before: int, location: Where) -> tuple[str, float]:
    """Save with a writer in trouble, then without; return the error, "" for none, and the time until then."""
    good = Checkpointer(root).latest() or save_next(root)
    dist.barrier()
    if dist.get_rank() == TROUBLED:
        Order(trainer=os.getpid(), before=before, how=how).give(root)
    arguments: dict[str, Any] = {}
    if location == "tier":
        tier = LocalTier(root.parent / "node-{node}", keep_last=1)
        arguments = {"tiers": [tier], "every": 10**9, "node": dist.get_rank()}
    checkpointer = started(root, PATIENT_S if how == "raises" else ASYNC_TIMEOUT_S, Troubled, **arguments)
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
        text, _ = end_with_a_writer_in_trouble(root, "raises", len(message), location)
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
        outcomes = rank_pool.run(
            end_with_a_writer_in_trouble, RANKS, root, how, number, location, timeout_s=4 * ASYNC_DEADLINE_S
        )
        print(how, number, outcomes)
        assert len({text for text, _ in outcomes}) == 1, (how, number)
        for text, elapsed in outcomes:
            assert elapsed < ASYNC_DEADLINE_S, (how, number)
            assert f"rank {TROUBLED}" in text or f"rank(s) {TROUBLED}" in text, (how, number, text)


def act(trouble: Trouble, gate: Path) -> None:
    """Get into trouble in the training of a rank; asleep is who waits until all others have raised."""
    if trouble == "raises":
        raise OwnMistakeError("something of one's own")
    if trouble == "dies":
        os._exit(9)
    wait_for(lambda: len(list(gate.glob("raised.*"))) >= RANKS - 1, 2 * ASYNC_DEADLINE_S)


def train_in_trouble(root: Path, moment: Moment, trouble: Trouble, gate: Path) -> tuple[str, float]:
    """Let the training of the last rank get into trouble; return the error of this one and the time to it."""
    rank = dist.get_rank()
    save_next(root)
    checkpointer = started(root, ASYNC_TIMEOUT_S)
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
            train_in_trouble, RANKS, root, moment, trouble, gate, timeout_s=4 * ASYNC_DEADLINE_S
        )
        print(moment, trouble, [outcome.value for outcome in outcomes])
        for outcome in outcomes[:TROUBLED]:
            assert outcome.error is None, (moment, trouble, outcome.trace)
            text, elapsed = outcome.value
            assert elapsed < ASYNC_DEADLINE_S, (moment, trouble)
            if trouble == "raises":
                assert f"Rank {TROUBLED} failed while copying its state: OwnMistakeError" in text
            else:
                assert f"rank(s) {TROUBLED}" in text, (moment, trouble, text)
        steps = Checkpointer(root).steps()
        assert steps == ((1, 2) if (moment, trouble) == ("writing", "sleeps") else (1,))
        rank_pool.run(save_next, RANKS, root)
