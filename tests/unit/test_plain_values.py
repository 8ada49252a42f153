"""Plain values are common, per rank or replicated; each kind is stored as what it is declared to be."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from megackpt import (
    MismatchError,
    PerRank,
    Replicated,
    load,
    load_common_state_dict,
    load_sharded_metadata,
    save,
)
from megackpt.comm import Group
from megackpt.testing.world import SimulatedWorld


def test_per_rank_values_are_never_merged_and_come_back_to_their_ranks(tmp_path: Path) -> None:
    def equal_on_all_and_not(group: Group) -> None:
        state = {"seed": PerRank("seed", 7), "rng": PerRank("rng", torch.tensor([group.rank])), "step": 3}
        save(state, tmp_path / "c", group=group)

    def back(group: Group) -> Any:
        return load({"seed": PerRank("seed", None), "rng": PerRank("rng", None)}, tmp_path / "c", group=group)

    SimulatedWorld(3).run(equal_on_all_and_not)
    assert len([k for k in load_sharded_metadata(tmp_path / "c") if k.startswith("seed/")]) == 3
    for rank, loaded in enumerate(SimulatedWorld(3).run(back)):
        assert loaded == {"seed": 7, "rng": torch.tensor([rank]), "step": 3}


def test_per_rank_values_on_another_number_of_ranks_are_an_error_or_kept(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    SimulatedWorld(4).run(
        lambda group: save({"rng": PerRank("rng", group.rank)}, tmp_path / "c", group=group)
    )
    with pytest.raises(
        MismatchError, match=r"'rng' was stored for each of \(4,\) ranks and this job has 1.*keep"
    ):
        load({"rng": PerRank("rng", "mine")}, tmp_path / "c")
    with caplog.at_level(logging.WARNING):
        assert load({"rng": PerRank("rng", "mine", elsewhere="keep")}, tmp_path / "c") == {"rng": "mine"}
    assert "every rank keeps its own value" in caplog.text


def test_a_replicated_value_is_stored_once_from_whichever_ranks_hold_it(tmp_path: Path) -> None:
    def save_on_the_last_two(group: Group) -> None:
        state = {"stage": {"table": Replicated("table", {"b": 1, "a": [2]})}} if group.rank else {}
        save(state, tmp_path / "c", group=group)

    SimulatedWorld(3).run(save_on_the_last_two)
    assert list(load_sharded_metadata(tmp_path / "c")) == ["table/shard_0_1"]
    assert load({"here": Replicated("table", None)}, tmp_path / "c") == {"here": {"b": 1, "a": [2]}}
    assert load_common_state_dict(tmp_path / "c") == {}


def test_replicated_values_that_differ_are_named_with_the_ranks(tmp_path: Path) -> None:
    def differ(group: Group) -> None:
        value = {"lr": 0.1 if group.rank < 2 else 0.2}
        save({"v": Replicated("v", value), "same": Replicated("same", 1)}, tmp_path / "c", group=group)

    for error in SimulatedWorld(3).outcomes(differ):
        assert isinstance(error, MismatchError)
        assert "'v': ranks 0, 1 and ranks 2 hold different values" in str(error)
        assert "same" not in str(error)
        assert error.key == "v"
