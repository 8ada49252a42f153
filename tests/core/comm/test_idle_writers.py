"""Writer processes that wait for a next use, without starting any."""

from __future__ import annotations

from typing import Any

import pytest

from megackpt.engine.background import session
from megackpt.options import AsyncOptions


class FakeWriter:
    """A process that has a kind, and may have ended."""

    def __init__(self, kind: Any, *, is_lost: bool) -> None:
        self.kind, self.is_lost = kind, is_lost
        self.closed_with_free_lock: bool | None = None

    def close(self) -> None:
        is_free = session._LOCK.acquire(blocking=False)
        if is_free:
            session._LOCK.release()
        self.closed_with_free_lock = is_free


@pytest.fixture
def idle(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    writers: list[Any] = []
    monkeypatch.setattr(session, "_IDLE", writers)
    return writers


def test_an_ended_process_is_closed_while_other_threads_can_take_a_process(idle: list[Any]) -> None:
    """To close a process takes seconds if its threads wait for a store."""
    options = AsyncOptions()
    kind = session._kind(options, None)
    lost, other, usable = (
        FakeWriter(kind, is_lost=True),
        FakeWriter("other", is_lost=False),
        FakeWriter(kind, is_lost=False),
    )
    idle += [lost, other, usable]
    assert session._take_writer(options, hook=None) is usable
    assert idle == [other]
    assert lost.closed_with_free_lock is True
    assert other.closed_with_free_lock is None
