"""Plain values are common, per rank or replicated; each kind is stored as what it is declared to be."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from megackpt import (
    FormatError,
    MismatchError,
    PerRankValue,
    ReplicatedValue,
    ShardedTensor,
    load,
    load_common_state_dict,
    load_sharded_metadata,
    save,
)
from megackpt.comm import Group
from megackpt.testing.world import SimulatedWorld
from tests.support.states import filled, replica


def test_per_rank_values_are_never_merged_and_come_back_to_their_ranks(tmp_path: Path) -> None:
    def equal_on_all_and_not(group: Group) -> None:
        state = {
            "seed": PerRankValue("seed", 7),
            "rng": PerRankValue("rng", torch.tensor([group.rank])),
            "step": 3,
        }
        save(state, tmp_path / "c", group=group)

    def back(group: Group) -> Any:
        return load(
            {"seed": PerRankValue("seed", None), "rng": PerRankValue("rng", None)},
            tmp_path / "c",
            group=group,
        )

    SimulatedWorld(3).run(equal_on_all_and_not)
    assert len([k for k in load_sharded_metadata(tmp_path / "c") if k.startswith("seed/")]) == 3
    for rank, loaded in enumerate(SimulatedWorld(3).run(back)):
        assert loaded == {"seed": 7, "rng": torch.tensor([rank]), "step": 3}


def test_per_rank_values_on_another_number_of_ranks_are_an_error_or_kept(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    SimulatedWorld(4).run(
        lambda group: save({"rng": PerRankValue("rng", group.rank)}, tmp_path / "c", group=group)
    )
    with pytest.raises(
        MismatchError, match=r"'rng' was stored for each of \(4,\) ranks and this job has 1.*keep"
    ):
        load({"rng": PerRankValue("rng", "mine")}, tmp_path / "c")
    with caplog.at_level(logging.WARNING):
        assert load({"rng": PerRankValue("rng", "mine", elsewhere="keep")}, tmp_path / "c") == {"rng": "mine"}
    assert "every rank keeps its own value" in caplog.text


def test_a_replicated_value_is_stored_once_from_whichever_ranks_hold_it(tmp_path: Path) -> None:
    def save_on_the_last_two(group: Group) -> None:
        state = {"stage": {"table": ReplicatedValue("table", {"b": 1, "a": [2]})}} if group.rank else {}
        save(state, tmp_path / "c", group=group)

    SimulatedWorld(3).run(save_on_the_last_two)
    assert list(load_sharded_metadata(tmp_path / "c")) == ["table/shard_0_1"]
    assert load({"here": ReplicatedValue("table", None)}, tmp_path / "c") == {"here": {"b": 1, "a": [2]}}
    assert load_common_state_dict(tmp_path / "c") == {}


def test_replicated_values_that_differ_are_named_with_the_ranks(tmp_path: Path) -> None:
    def differ(group: Group) -> None:
        value = {"lr": 0.1 if group.rank < 2 else 0.2}
        save(
            {"v": ReplicatedValue("v", value), "same": ReplicatedValue("same", 1)},
            tmp_path / "c",
            group=group,
        )

    for error in SimulatedWorld(3).outcomes(differ):
        assert isinstance(error, MismatchError)
        assert "'v': ranks 0, 1 and ranks 2 hold different values" in str(error)
        assert "same" not in str(error)
        assert error.key == "v"


def test_without_validation_all_kinds_are_stored_too(tmp_path: Path) -> None:
    def state(rank: int, value: float) -> dict[str, Any]:
        shard = filled(value * (rank + 1), 3, rank=rank, ranks=3)
        shared = replica(value, 2, key="s", rank=rank)
        many = [filled(value, 2, key=f"many{i}", rank=rank, ranks=3) for i in range(200)]
        return {
            "w": shard,
            "s": shared,
            "many": many,
            "r": ReplicatedValue("r", 5),
            "p": PerRankValue("p", rank),
            "c": 1,
        }

    for validate in (True, False):
        directory = tmp_path / str(validate)

        def save_rank(group: Group, directory: Path = directory, validate: bool = validate) -> None:
            save(state(group.rank, 1.0), directory, validate_access_integrity=validate, group=group)

        def load_rank(group: Group, directory: Path = directory) -> Any:
            return load(state(group.rank, 0.0), directory, group=group)

        SimulatedWorld(3).run(save_rank)
        for rank, loaded in enumerate(SimulatedWorld(3).run(load_rank)):
            assert loaded["w"].tolist() == [rank + 1.0] * 3
            assert loaded["s"].tolist() == [1.0, 1.0]
            assert (loaded["r"], loaded["p"], loaded["c"]) == (5, rank, 1)
            assert all(t.tolist() == [1.0, 1.0] for t in loaded["many"])


def test_without_validation_nothing_is_proved(tmp_path: Path) -> None:
    hole = ShardedTensor.from_rank_offsets("w", torch.ones(2), (0, 0, 2))
    save({"w": hole}, tmp_path / "c", validate_access_integrity=False)
    assert load({"w": hole.without_data()}, tmp_path / "c")["w"].tolist() == [1.0, 1.0]
    with pytest.raises(FormatError, match="has no data for some elements"):
        load({"w": ShardedTensor.from_rank_offsets("w", torch.ones(4))}, tmp_path / "c")


@pytest.mark.parametrize("format", ["megackpt", "torch_dist", ("zarr", 1), ("zarr", 3)])
def test_a_tied_weight_under_two_names_is_stored_and_loaded_under_both(
    tmp_path: Path, format: str | tuple[str, int]
) -> None:
    weight = torch.arange(6.0).reshape(2, 3)
    state = {"embedding": {"weight": weight}, "output": {"weight": weight, "rows": weight[1:]}}
    save(state, tmp_path / "c", format)
    tied = torch.zeros(2, 3)
    apart = torch.zeros(2, 3)
    load({"embedding": {"weight": tied}, "output": {"weight": tied}}, tmp_path / "c")
    assert torch.equal(tied, weight)
    load({"output": {"weight": apart, "rows": torch.zeros(1, 3)}}, tmp_path / "c")
    assert torch.equal(apart, weight)
