"""In which order a step is removed, and what is durable by then."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest
import torch

from megackpt import Checkpointer, ShardedTensor
from megackpt.engine.checkpoint.step_roots import step_directories
from megackpt.engine.checkpoint.steps import step_name
from megackpt.formats.strategy import MANIFEST
from megackpt.storage import LocalStore, MemoryStore

Done = list[str | list[str]]


@pytest.mark.parametrize("kind", [LocalStore, MemoryStore])
def test_that_a_step_is_no_checkpoint_any_more_is_durable_before_other_files_go(
    tmp_path: Path, kind: type[LocalStore] | type[MemoryStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Else a loss of power could leave the commit of a step, of which other files are gone.
    root = tmp_path if kind is LocalStore else MemoryStore()
    with Checkpointer(root) as checkpointer:
        checkpointer.save(1, {"w": ShardedTensor.from_rank_offsets("w", torch.ones(3))})
    done: Done = []
    delete, sync = kind.delete, kind.sync

    def recorded_delete(self: LocalStore, names: Iterable[str]) -> None:
        listed = list(names)
        done.append([name.rpartition("/")[2] for name in listed])
        delete(self, listed)

    def recorded_sync(self: LocalStore) -> None:
        done.append("sync")
        sync(self)

    monkeypatch.setattr(kind, "delete", recorded_delete)
    monkeypatch.setattr(kind, "sync", recorded_sync)
    step_directories(root, objects=None).remove(step_name(1))
    assert done[:2] == [[MANIFEST], "sync"]
    assert len(done[2]) >= 2
    assert Checkpointer(root).scan().incomplete == ()
