"""One rank raises, dies or falls asleep at any step of a save or a load: no other rank waits for ever.

A step is what ranks meet after. The last rank gets into trouble right before it does its part of one; all
others must raise an error that names it, before a deadline.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Literal
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

import megackpt
from megackpt import CheckpointError, LoadOptions, RankFailedError, SaveOptions
from megackpt.testing.ranks import RankPool
from tests.support.effort import tries_all
from tests.support.states import filled, replica
from tests.support.writers import wait_for

RANKS = 3
TROUBLED = RANKS - 1
PATIENT_S = 60.0  # where nobody is lost, and a busy machine is none
TIMEOUT_S = 4.0
DEADLINE_S = 20 * TIMEOUT_S
"""Until the last rank has raised, which takes little more than the time-out on an idle machine."""

Trouble = Literal["raises", "dies", "sleeps"]
Work = Literal["save", "overwrite", "load", "exchange"]


class OwnMistakeError(Exception):
    """What goes wrong on one rank."""


def work(kind: Work, directory: Path, *, timeout_s: float = PATIENT_S) -> None:
    """Save or load, on every rank; one tensor is sharded, the other replicated."""
    rank, size = dist.get_rank(), dist.get_world_size()
    state = {
        "w": filled(1.0, 64, rank=rank, ranks=size),
        "r": replica(2.0, 64, rank=rank),
        "step": 1,
    }
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


KINDS: tuple[Work, ...] = ("save", "overwrite", "load", "exchange")


@pytest.mark.parametrize("kind", KINDS[:3])  # an exchange has rounds of its own: see test_exchange.py
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
        for kind in KINDS
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
