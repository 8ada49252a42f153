"""`LoadOptions(complete=True)`: what no rank requests, or two, is an error on every rank before any read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megackpt import KeyRule, LoadOptions, Policy, ShardedObject, ShardedTensor, load, save
from megackpt.errors import (
    CheckpointError,
    CommonStateError,
    CoverageError,
    DeclarationError,
    MismatchError,
    MissingKeyError,
)
from megackpt.testing.world import SimulatedRank, SimulatedWorld

COMPLETE = LoadOptions(complete=True)
UNTOUCHED = -1.0


def rows(start: int, count: int = 1, *, replica: int = 0, key: str = "w", of: int = 4) -> ShardedTensor:
    """Declare rows of a `[of, 3]` array, filled with a value that a load would overwrite."""
    data = torch.full((count, 3), UNTOUCHED)
    return ShardedTensor(key, data, data.dtype, (count, 3), (of, 3), (start, 0), replica_id=replica)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    whole = ShardedTensor.from_rank_offsets("w", torch.arange(12.0).view(4, 3))
    bias = ShardedTensor.from_rank_offsets("b", torch.ones(2))
    save({"w": whole, "b": bias, "step": 3, "plain": torch.ones(2), "stages": "EttL"}, tmp_path / "c")
    return tmp_path / "c"


def bias(group: SimulatedRank) -> ShardedTensor:
    return ShardedTensor.from_rank_offsets("b", torch.zeros(2), replica_id=group.rank)


def load_on_two_ranks(path: Path, state_of: Callable[[SimulatedRank], dict[str, Any]]) -> list[Any]:
    """Load on two ranks; check that an error is the same on both, and that nothing was read before it."""
    states: dict[int, dict[str, Any]] = {}

    def one_rank(group: SimulatedRank) -> dict[str, Any]:
        states[group.rank] = state_of(group)
        return load(states[group.rank], path, group=group, options=COMPLETE)

    outcomes = SimulatedWorld(2).outcomes(one_rank)
    if any(isinstance(outcome, Exception) for outcome in outcomes):
        assert len({(type(outcome), str(outcome)) for outcome in outcomes}) == 1
        for state in states.values():
            assert all(torch.all(t.data == UNTOUCHED) for name, t in state.items() if name.startswith("w"))
    return outcomes


def test_a_complete_load_is_a_load(checkpoint: Path) -> None:
    first, second = load_on_two_ranks(
        checkpoint,
        lambda group: {
            "w": rows(2 * group.rank, 2),
            "w_of_the_other": rows(2 - 2 * group.rank, 2, replica=1),
            "b": bias(group),
            "plain": torch.zeros(2),
            "step": 0,
            "stages": "Et|tL",
        },
    )
    assert torch.cat((first["w"], second["w"])).flatten().tolist() == list(range(12))
    assert torch.equal(first["w_of_the_other"], second["w"])
    assert first["plain"].tolist() == [1, 1]
    assert (first["step"], first["stages"]) == (3, "EttL")  # the stored ones


def test_flat_ranges_of_a_box_are_one_request_of_it(checkpoint: Path) -> None:
    def state_of(group: SimulatedRank) -> dict[str, Any]:
        flat = slice(0, 7) if group.rank == 0 else slice(7, 12)
        data = torch.full((flat.stop - flat.start,), UNTOUCHED)
        part = ShardedTensor("w", data, data.dtype, (4, 3), (4, 3), (0, 0), flattened_range=flat)
        return {"w": part, "b": bias(group)}

    first, second = load_on_two_ranks(checkpoint, state_of)
    assert torch.cat((first["w"], second["w"])).tolist() == list(range(12))


def test_plain_tensors_that_arrays_answer_are_whole_on_every_rank(checkpoint: Path) -> None:
    outcomes = load_on_two_ranks(checkpoint, lambda group: {"w": torch.zeros(4, 3), "b": bias(group)})
    assert all(outcome["w"].flatten().tolist() == list(range(12)) for outcome in outcomes)


def error_of(path: Path, state_of: Callable[[SimulatedRank], dict[str, Any]]) -> CheckpointError:
    error = load_on_two_ranks(path, state_of)[0]
    assert isinstance(error, CheckpointError)
    return error


def test_rows_that_no_rank_requests_are_named(checkpoint: Path) -> None:
    error = error_of(checkpoint, lambda group: {"w": rows(3 * group.rank), "b": bias(group)})
    assert isinstance(error, CoverageError)
    assert "'w': elements [1:3, 0:3] are requested by no rank (global shape (4, 3))" in str(error)
    assert "Requested by no rank:" in str(error)


def test_rows_that_two_ranks_request_are_named(checkpoint: Path) -> None:
    error = error_of(checkpoint, lambda group: {"w": rows(group.rank, 3), "b": bias(group)})
    assert isinstance(error, CoverageError)
    assert "'w': elements [1:3, 0:3] are requested by more than one main replica (ranks 0, 1)" in str(error)


def test_rows_that_only_replicas_request_are_named(checkpoint: Path) -> None:
    error = error_of(checkpoint, lambda group: {"w": rows(0, 4, replica=1), "b": bias(group)})
    assert isinstance(error, CoverageError)
    assert "requested by no rank" in str(error)
    assert "ranks 0, 1 declare replicas, but no rank has the main one" in str(error)


def test_a_key_that_no_rank_requests_is_named(checkpoint: Path) -> None:
    error = error_of(checkpoint, lambda group: {"w": rows(2 * group.rank, 2)})
    assert isinstance(error, MissingKeyError)
    assert "'b'" in str(error)
    assert "KeyRule(keys=..., missing=Policy.IGNORE)" in str(error)


def test_a_rule_leaves_keys_to_the_checkpoint(checkpoint: Path) -> None:
    options = LoadOptions(complete=True, rules=(KeyRule(keys="b", missing=Policy.IGNORE),))
    assert load({"w": rows(0, 4)}, checkpoint, options=options)["w"][3].tolist() == [9, 10, 11]


def test_excluded_arrays_are_not_proved(checkpoint: Path) -> None:
    options = LoadOptions(complete=True, exclude=("w",))
    state = load({"w": rows(0, 2), "b": ShardedTensor.from_rank_offsets("b", torch.zeros(2))}, checkpoint,
                 options=options)  # fmt: skip
    assert torch.all(state["w"] == UNTOUCHED)


def test_ranks_that_disagree_about_common_state_are_named(checkpoint: Path) -> None:
    # Replicas of another stage table: the arrays are covered, but the ranks belong to different models.
    error = error_of(
        checkpoint,
        lambda group: {
            "w": rows(0, 4, replica=group.rank),
            "b": bias(group),
            "stages": ["Ett|L", "Et|tL"][group.rank],
        },
    )
    assert isinstance(error, CommonStateError)
    assert "'stages' on rank(s) 1" in str(error)


def test_another_number_of_layers_than_stored_is_an_error(checkpoint: Path) -> None:
    error = error_of(checkpoint, lambda group: {"w": rows(3 * group.rank, 3, of=6), "b": bias(group)})
    assert isinstance(error, MismatchError)
    assert "'w': stored as float32 (4, 3), asked for as float32 (6, 3)" in str(error)


def test_ranks_with_different_options_are_an_error(checkpoint: Path) -> None:
    def one_rank(group: SimulatedRank) -> dict[str, Any]:
        return load({"w": rows(0, 4)}, checkpoint, group=group, options=LoadOptions(complete=group.rank == 0))

    for outcome in SimulatedWorld(2).outcomes(one_rank):
        assert isinstance(outcome, MismatchError)
        assert "LoadOptions.complete" in str(outcome)


def test_objects_are_loaded_without_proof(tmp_path: Path) -> None:
    save({"o": ShardedObject("o", 5, (1,), (0,))}, tmp_path / "c")

    def one_rank(group: SimulatedRank) -> dict[str, Any]:
        return load({"o": ShardedObject("o", 0, (1,), (0,))}, tmp_path / "c", group=group, options=COMPLETE)

    assert [state["o"] for state in SimulatedWorld(2).run(one_rank)] == [5, 5]


def test_complete_is_a_flag() -> None:
    with pytest.raises(DeclarationError, match="complete"):
        LoadOptions(complete="yes")  # type: ignore[arg-type]
