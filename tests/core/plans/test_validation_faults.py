"""Spoil a valid world in every way we can think of: a save must find it, and say key, place and ranks."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from megackpt import CheckpointError, CoverageError, MismatchError, ShardedObject, ShardedTensor, load, save
from megackpt.comm import Group
from megackpt.storage import MemoryStore
from megackpt.testing.world import SimulatedWorld
from tests.support.declaration_faults import FAULTS
from tests.support.declared_worlds import RANKS, World, is_main, outcomes_of, valid_world


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_found_on_every_rank_and_named_before_anything_is_written(name: str, seed: int) -> None:
    world, store = valid_world(seed), MemoryStore()
    expected = FAULTS[name](world)
    outcomes = outcomes_of(world, store)
    for outcome in outcomes:
        assert isinstance(outcome, CheckpointError), f"{name} was not found"
    raised = [o for o in outcomes if isinstance(o, expected.error)]
    assert raised, f"found as {outcomes[0]!r}"
    for text in expected.message:
        assert any(text in str(error) for error in raised), f"{text!r} is not in {raised[0]}"
    assert len({type(o) for o in outcomes}) == 1
    with pytest.raises(CheckpointError, match="is not a checkpoint"):
        load({}, store)


# Changes after which everything is still saved exactly once. They must pass.


def nothing_changes(w: World) -> None:
    pass


def ranks_swap_their_boxes(w: World) -> None:
    first, second = w.tensor(0, "regular"), w.tensor(6, "regular")
    w.entities[0]["regular"], w.entities[6]["regular"] = (
        replace(first, global_offset=second.global_offset),
        replace(second, global_offset=first.global_offset),
    )


def ranks_swap_their_flat_ranges(w: World) -> None:
    w.entities[0]["flat"], w.entities[1]["flat"] = w.entities[1]["flat"], w.entities[0]["flat"]


def another_replica_is_the_main_one(w: World) -> None:
    for rank, dp in ((0, 1), (1, 0)):
        w.spoil(rank, "uneven", replica_id=(0, 0, dp))


def a_rank_cuts_its_box_in_two(w: World) -> None:
    rows = w.edges[1]
    w.spoil(0, "uneven", local_shape=(1, w.cols))
    rest = replace(w.tensor(0, "uneven"), data=None, local_shape=(rows - 1, w.cols), global_offset=(1, 0))
    rest.init_data()
    w.entities[0]["rest"] = rest


def a_copy_that_is_not_main_is_cut_otherwise(w: World) -> None:
    w.spoil(1, "regular", local_shape=(1, w.cols), axis_fragmentations=None)


def a_flat_range_is_declared_as_the_whole_block_by_one_rank(w: World) -> None:
    w.spoil(0, "flat", flattened_range=None)
    w.spoil(1, "flat", flattened_range=slice(0, 0))


def a_replica_lacks_a_key(w: World) -> None:
    del w.entities[1]["regular"]


def a_rank_with_copies_only_declares_nothing_else(w: World) -> None:
    w.entities[3] = {key: e for key, e in w.entities[3].items() if is_main(e)}


def an_array_without_elements_is_declared_by_one_rank(w: World) -> None:
    w.entities[2]["empty"] = ShardedTensor.from_rank_offsets("empty", torch.zeros(0, 3))


def keys_of_common_state_come_in_another_order(w: World) -> None:
    w.common[4] = dict(reversed(w.common[4].items()))


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    "change",
    [
        nothing_changes,
        ranks_swap_their_boxes,
        ranks_swap_their_flat_ranges,
        another_replica_is_the_main_one,
        a_rank_cuts_its_box_in_two,
        a_copy_that_is_not_main_is_cut_otherwise,
        a_flat_range_is_declared_as_the_whole_block_by_one_rank,
        a_replica_lacks_a_key,
        a_rank_with_copies_only_declares_nothing_else,
        an_array_without_elements_is_declared_by_one_rank,
        keys_of_common_state_come_in_another_order,
    ],
    ids=lambda fn: fn.__name__,
)
def test_what_is_still_saved_exactly_once_raises_no_error(change: Callable[[World], None], seed: int) -> None:
    world, store = valid_world(seed), MemoryStore()
    change(world)
    assert outcomes_of(world, store) == [None] * RANKS
    wanted = copy.copy(valid_world(seed).entities[0])
    assert load({"shards": wanted}, store)["shards"]["regular"] is not None


def test_many_faults_of_each_kind_are_listed_by_their_first_ones_and_a_count() -> None:
    ranks, arrays = 2, 15

    def save_rank(group: Group) -> None:
        def half(key: str, mains: bool) -> ShardedTensor:
            return ShardedTensor.from_rank_offsets(
                key, torch.zeros(2), (0, 0, 2), replica_id=0 if mains else 1
            )

        state = {
            **{f"a{i:02d}": half(f"a{i:02d}", mains=True) for i in range(arrays)},
            "objects": ShardedObject("objects", 0, (30,), (0,)),
        }
        save(state, MemoryStore(), group=group)

    for error in SimulatedWorld(ranks).outcomes(save_rank):
        assert isinstance(error, CoverageError)
        assert error.key == "a00"
        assert error.rank == 0
        missing, twice, objects, objects_twice = str(error).split("Saved ")[1:]
        assert missing.startswith("by no rank")
        assert [line for line in missing.splitlines() if "elements" in line] == [
            f"  'a{i:02d}': elements [2:4] are saved by no rank (global shape (4,)); "
            "ranks 0, 1 declare other chunks"
            for i in range(4)
        ]
        assert "... and 11 more (15 in all)" in missing
        assert twice.startswith("more than once")
        assert "'a03': elements [0:2] are saved by more than one main replica (ranks 0, 1)" in twice
        assert "... and 11 more (15 in all)" in twice
        assert "object 'objects/shard_4_30'" in objects
        assert "... and 25 more (29 in all)" in objects
        assert (
            "object 'objects/shard_0_30' is saved by more than one main replica (ranks 0, 1)" in objects_twice
        )


def test_conflicts_between_ranks_are_listed_all_together() -> None:
    def save_rank(group: Group) -> None:
        state = {
            f"a{i:02d}": ShardedTensor.from_rank_offsets(f"a{i:02d}", torch.zeros(2 + group.rank))
            for i in range(12)
        }
        save(state, MemoryStore(), group=group)

    for error in SimulatedWorld(2).outcomes(save_rank):
        assert isinstance(error, MismatchError)
        assert "'a09': float32 (2,) on ranks 0; float32 (3,) on ranks 1" in str(error)
        assert "... and 2 more (12 in all)" in str(error)
