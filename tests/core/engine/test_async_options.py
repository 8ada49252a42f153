"""What asynchronous saving rejects before anything is started."""

from __future__ import annotations

from typing import Any

import pytest

from megackpt import AsyncOptions, DeclarationError, StorageError
from megackpt.engine.background.prepared_save import sendable
from megackpt.engine.background.staging_memory import StagingMemory
from megackpt.formats.native import NativeSaveStrategy
from tests.support.writers import FullDiskStrategy


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"when_busy": "drop"}, "when_busy='drop' is not known. Give one of wait, queue, skip"),
        ({"staging_bytes": 0}, "staging_bytes is 0"),
        ({"nice": 20}, "nice is 20; give a number from 0 to 19"),
        ({"ionice": "realtime"}, "Give one of idle, low"),
        ({"start_timeout_s": -1}, "start_timeout_s is -1"),
    ],
)
def test_options_out_of_range_are_errors(bad: dict[str, Any], message: str) -> None:
    with pytest.raises(DeclarationError, match=message):
        AsyncOptions(**bad)


class Unsendable(NativeSaveStrategy):
    def __init__(self) -> None:
        self.made = (n for n in range(3))


def test_a_strategy_that_cannot_be_sent_to_the_writer_raises_an_error() -> None:
    class Local(NativeSaveStrategy):
        pass

    with pytest.raises(DeclarationError, match=r"Local is defined in .* a function.* Define it in a module"):
        sendable(Local())
    with pytest.raises(DeclarationError, match=r"Unsendable cannot be sent .* cannot pickle 'generator'"):
        sendable(Unsendable())
    strategy = FullDiskStrategy()
    assert sendable(strategy) is strategy


def test_memory_that_cannot_be_allocated_is_an_error_with_what_to_do() -> None:
    arena = StagingMemory()
    with pytest.raises(
        StorageError, match=r"cannot be allocated .* AsyncOptions.staging_bytes a smaller number"
    ):
        arena.resize(1 << 62)
    arena.resize(10)
    assert arena.nbytes == 4096
    arena.close()
