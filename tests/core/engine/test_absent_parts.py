"""Common state of modules that only some ranks have: stored once, compared among these ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megackpt import LoadOptions, SaveOptions, load, load_common_state_dict, save
from megackpt.comm import Group
from megackpt.engine.saving.plan_cache import PlanCache
from megackpt.entities import ShardedTensor
from megackpt.errors import CommonStateError
from megackpt.plans.validation.equality import absent_parts
from megackpt.testing.world import SimulatedWorld

RANKS = 5
ENCODER, DECODER = (1, 2), (2, 4)  # rank 0 has neither, rank 2 both

OF_ENCODER = {"groups": {"plain": {"lr": 0.5, "betas": (0.9, 0.95)}}, "step": 7, "scale": torch.tensor(2.0)}
OF_DECODER = {"groups": [{"lr": 0.25}], "more": {"empty": {}, "of": {"each": None}}}


def state_of(rank: int, **others: Any) -> dict[str, Any]:
    weight = torch.full((2,), float(rank))
    state: dict[str, Any] = {
        "w": ShardedTensor.from_rank_offsets("w", weight, (0, rank, RANKS)),
        "step": 3,
        "optimizers": {"kind": "adamw"},
    }
    if rank in ENCODER:
        state["optimizers"]["encoder"] = OF_ENCODER
    if rank in DECODER:
        state["decoder"] = OF_DECODER
    return state | others


@pytest.mark.parametrize("format_", [None, "torch_dist", ("zarr", 3)])
@pytest.mark.parametrize("plans", [False, True])
def test_a_part_that_some_ranks_lack_is_stored_once_with_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, format_: Any, plans: bool
) -> None:
    caches = [PlanCache() if plans else None for _ in range(RANKS)]

    def save_thrice(group: Group) -> None:
        for step in range(3):
            # The last save assumes that its structure, and so its parts, are those of the one before.
            options = SaveOptions(assume_constant_structure=plans and step == 2)
            cache = caches[group.rank]
            state = state_of(group.rank, number=step)
            save(state, tmp_path / str(step), format_, group=group, options=options, plans=cache)

    SimulatedWorld(RANKS).run(save_thrice)
    for step in range(3):
        common = load_common_state_dict(tmp_path / str(step))
        assert common["number"] == step
        assert common["optimizers"]["kind"] == "adamw"
        assert common["decoder"]["groups"] == [{"lr": 0.25}]
        assert common["optimizers"]["encoder"]["groups"] == OF_ENCODER["groups"]
        assert common["optimizers"]["encoder"]["scale"] == 2.0
    times = 1 if plans else 3
    assert caplog.text.count("'decoder' of common state is on some ranks only: rank(s) 0, 1, 3") == times
    assert caplog.text.count("'optimizers.encoder' of common state") == times

    def load_all(group: Group) -> Any:
        return load(state_of(group.rank), tmp_path / "2", group=group, options=LoadOptions(complete=True))

    for rank, loaded in enumerate(SimulatedWorld(RANKS).run(load_all)):
        assert torch.equal(loaded["w"], torch.full((2,), float(rank)))
        assert loaded["decoder"]["groups"] == [{"lr": 0.25}]


DIFFERENT: dict[str, tuple[int, Any, str]] = {
    "a value of the ranks that have the part": (4, {"groups": [{"lr": 0.5}]}, "decoder.groups[0].lr"),
    "an entry of the part": (4, {"more": 1}, "decoder.more"),
    "a value instead of the part": (0, 3, "'decoder' on rank(s) 1, 2, 3, 4"),
}


@pytest.mark.parametrize("case", DIFFERENT)
def test_ranks_that_have_a_part_are_compared(tmp_path: Path, case: str) -> None:
    rank, part, message = DIFFERENT[case]

    def differ(group: Group) -> None:
        save(state_of(group.rank, **({"decoder": part} if group.rank == rank else {})), tmp_path, group=group)

    for error in SimulatedWorld(RANKS).outcomes(differ):
        assert isinstance(error, CommonStateError)
        assert message in str(error)


def test_a_value_that_a_rank_lacks_in_a_part_that_it_has_is_an_error(tmp_path: Path) -> None:
    def differ(group: Group) -> None:
        save(state_of(group.rank) | ({"extra": 1} if group.rank == 3 else {}), tmp_path, group=group)

    for error in SimulatedWorld(RANKS).outcomes(differ):
        assert isinstance(error, CommonStateError)
        assert "'extra' on rank(s) 3 (missing on rank 0)" in str(error)


def test_rank_0_may_have_nothing(tmp_path: Path) -> None:
    def save_and_load(group: Group) -> Any:
        state = {} if group.rank == 0 else {"teacher": {"groups": {"all": {"lr": 0.5}}}}
        save(state, tmp_path, group=group)
        return load(state, tmp_path, group=group, options=LoadOptions(complete=True))

    for loaded in SimulatedWorld(3).run(save_and_load):
        assert loaded == {"teacher": {"groups": {"all": {"lr": 0.5}}}}


def test_a_part_inside_of_an_absent_one_goes_with_it() -> None:
    whole = {"a": "", "a.b": "a", "a.b.c": "a.b", "d": ""}
    assert absent_parts([{"d": ""}, whole, whole]) == {"a": 1}
    assert absent_parts([{"a": "", "d": ""}, {"a": "", "a.b": "a"}, whole]) == {"a.b": 1, "d": 0}
    assert absent_parts([whole, whole]) == {}
