"""A descriptor is closed once, also if Ctrl-C comes right after: its number may be another file's by then."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from megackpt.engine.background.staging_memory import StagingMemory
from megackpt.storage import LocalStore


@pytest.fixture
def interrupts(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], list[int]]:
    """Return a function that lets the n-th close raise KeyboardInterrupt once it has closed."""
    close = os.close

    def at(number: int) -> list[int]:
        closed: list[int] = []

        def closing(descriptor: int) -> None:
            close(descriptor)
            closed.append(descriptor)
            if len(closed) == number:
                raise KeyboardInterrupt

        monkeypatch.setattr(os, "close", closing)
        return closed

    return at


@pytest.mark.parametrize("number", [1, 2, 3, 4])
def test_a_path_is_walked_without_closing_a_directory_twice(
    tmp_path: Path, interrupts: Callable[[int], list[int]], number: int
) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "b" / "file").write_bytes(b"content")
    store = LocalStore(tmp_path)
    closed = interrupts(number)
    with pytest.raises(KeyboardInterrupt):  # an OSError in its place: a number that was closed before
        store.read("a/b/file", max_bytes=100)
    assert len(closed) >= number


def test_staging_memory_is_closed_once(interrupts: Callable[[int], list[int]]) -> None:
    memory = StagingMemory()
    closed = interrupts(1)
    with pytest.raises(KeyboardInterrupt):
        memory.close()
    memory.close()
    assert len(closed) == 1
