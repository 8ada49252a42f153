"""Checkpointers and maps: runs that begin with a Hugging Face folder, and steps in another family's names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megackpt import Checkpointer, LoadOptions, MapError, MissingKeyError
from megackpt.checkpointer import LocalTier
from tests.core.views.test_mapped_loads import CONFIG, EMBEDDING, THEIR_EMBEDDING, request, write_folder


def test_a_run_begins_with_a_folder_and_then_saves_its_own_steps(tmp_path: Path) -> None:
    stored, state = write_folder(tmp_path / "hf"), request()
    options = LoadOptions(on_corrupt="fallback", copies=(tmp_path / "copies_of_steps",))
    with Checkpointer(tmp_path / "run", load_options=options) as run:
        assert run.find_latest() is None
        with pytest.raises(MissingKeyError):  # without a map, names of the model are asked for
            run.load_from(dict(state), tmp_path / "hf", strict="raise_unexpected")
        loaded = run.load_from(state, tmp_path / "hf", maps="auto")
        assert loaded.keys() == state.keys()
        assert all(loaded[key] is state[key] for key in state)
        assert run.last_load is None
        assert run.last_report is not None
        assert EMBEDDING in run.last_report.loaded
        assert torch.equal(state[EMBEDDING], stored[THEIR_EMBEDDING])
        state[EMBEDDING] += 1
        run.save(5, state)
    with Checkpointer(tmp_path / "run") as resumed:
        assert resumed.find_latest() == 5
        again = resumed.load(request())
        assert resumed.last_load is not None
        assert resumed.last_load.step == 5
        assert resumed.last_report is resumed.last_load.report is not None
    assert torch.equal(again[EMBEDDING], stored[THEIR_EMBEDDING] + 1)


@pytest.mark.parametrize("in_tier", [False, True])
def test_a_step_in_another_familys_names_is_loaded_by_a_map(tmp_path: Path, in_tier: bool) -> None:
    stored = write_folder(tmp_path / "hf")
    tiers: list[Any] = [LocalTier(tmp_path / "tier")] if in_tier else []
    with Checkpointer(tmp_path / "run", tiers=tiers) as run:
        run.save(3, stored, to_root=not in_tier)
        state = request()
        run.load(state, maps="llama", config=CONFIG)
        assert torch.equal(state[EMBEDDING], stored[THEIR_EMBEDDING])
        with pytest.raises(MapError, match="config"):
            run.load(request(), 3, maps="auto")  # a step has no config.json
