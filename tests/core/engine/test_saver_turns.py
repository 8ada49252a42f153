"""How long an asynchronous save waits for earlier ones, and what closing and forgetting a saver ends."""

from __future__ import annotations

import gc
from types import SimpleNamespace
from typing import Any

import pytest

from megackpt.engine.background import saver as saver_module
from megackpt.engine.background.saver import AsyncSaver
from megackpt.options import AsyncOptions


class Session:
    """A session without a process: writes down how many pending saves were waited for, and its ends."""

    def __init__(self) -> None:
        self.most_pending: list[int] = []
        self.ends: list[bool] = []
        self.jobs: list[Any] = []
        self.writer = SimpleNamespace(wait_until=self.most_pending.append, is_ours=True)

    def wait_staged(self) -> None:
        """Nothing is being copied."""

    def failure(self) -> None:
        """No save has failed."""

    def end(self, *, keeps_writer: bool) -> None:
        """Write down whether the process may be used again."""
        self.ends.append(keeps_writer)


@pytest.fixture
def session(monkeypatch: pytest.MonkeyPatch) -> Session:
    session = Session()
    starting = SimpleNamespace(start=lambda options, hook: session)
    monkeypatch.setattr(saver_module, "WriterSession", starting)
    return session


@pytest.mark.parametrize(
    ("options", "waited_for", "at_the_end"),
    [
        (AsyncOptions(when_busy="wait"), [0], [0]),
        (AsyncOptions(when_busy="queue"), [3], [0]),  # with the next one, four are pending
        (AsyncOptions(when_busy="skip"), [], [0]),
    ],
)
def test_a_save_waits_for_earlier_ones_as_long_as_its_option(
    session: Session, options: AsyncOptions, waited_for: list[int], at_the_end: list[int]
) -> None:
    saver = AsyncSaver(options)
    saver.turn()
    assert session.most_pending == waited_for
    session.most_pending.clear()
    saver.turn(waits=True)
    assert session.most_pending == at_the_end
    saver.close()


def test_a_closed_saver_that_is_forgotten_leaves_the_process_to_its_next_user(session: Session) -> None:
    saver = AsyncSaver(AsyncOptions())
    saver.close()
    del saver
    gc.collect()
    assert session.ends == [True]


def test_a_saver_that_is_forgotten_ends_its_process(session: Session) -> None:
    saver = AsyncSaver(AsyncOptions())
    del saver
    gc.collect()
    assert session.ends == [False]
