"""A second save of the same structure finds its plan; one of another structure, or another value, is seen."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from megackpt import (
    CoverageError,
    DeclarationError,
    MismatchError,
    PlanCache,
    ReplicatedValue,
    SaveOptions,
    ShardedObject,
    ShardedTensor,
    load,
    save,
)
from megackpt.comm import Group
from megackpt.options import Policy
from megackpt.storage import MemoryStore
from megackpt.testing.world import SimulatedRank, SimulatedWorld
from tests.support.groups import MessagesOnly
from tests.support.states import filled, replica

RANKS = 4


def state(rank: int, number: int, *, rows: int = 2) -> dict[str, Any]:
    """Declare a sharded tensor, a replicated one and an object whose encoding grows with the number."""
    return {
        "w": filled(number + rank, rows, 3, rank=rank, ranks=RANKS),
        "r": replica(number, 5, rank=rank),
        "o": ShardedObject("o", "x" * (number * 10 + rank), (RANKS,), (rank,)),
        "seed": ReplicatedValue("seed", {"n": number}),
        "step": number,
    }


class Run:
    """A world whose ranks keep their plan caches between saves."""

    def __init__(self, options: SaveOptions | None = None) -> None:
        self.world = SimulatedWorld(RANKS)
        self.plans = [PlanCache() for _ in range(RANKS)]
        self.store = MemoryStore()
        self.options = options

    def save(self, number: int, **kwargs: Any) -> None:
        self.save_states([state(rank, number, **kwargs) for rank in range(RANKS)])

    def save_states(self, states: list[dict[str, Any]]) -> None:
        def save_rank(group: Group) -> None:
            plans = self.plans[group.rank]
            save(states[group.rank], self.store, group=group, plans=plans, options=self.options)

        self.world.run(save_rank)

    def check(self, number: int, **kwargs: Any) -> None:
        def load_rank(group: Group) -> None:
            expected = state(group.rank, number, **kwargs)
            wanted = state(group.rank, 99, **kwargs)
            wanted["o"].data = wanted["seed"].value = None
            loaded = load(wanted, self.store, group=group)
            assert torch.equal(loaded["w"], expected["w"].data)
            assert torch.equal(loaded["r"], expected["r"].data)
            assert loaded["o"] == expected["o"].data
            assert loaded["seed"] == {"n": number}
            assert loaded["step"] == number

        self.world.run(load_rank)

    @property
    def hits(self) -> set[int]:
        return {plans.hits for plans in self.plans}


def test_an_unchanged_structure_is_planned_once_whatever_its_values_and_objects() -> None:
    run = Run()
    for number in range(1, 5):
        run.save(number)
        run.check(number)
    assert run.hits == {3}


def test_a_hit_exchanges_one_small_message() -> None:
    run = Run()
    run.save(1)
    counted: list[int] = []

    class Counting(MessagesOnly):
        def all_gather(self, data: bytes) -> list[bytes]:
            counted.append(len(data))
            return super().all_gather(data)

    def save_rank(group: Group) -> None:
        save(state(group.rank, 3), run.store, group=Counting(group), plans=run.plans[group.rank])

    run.world.run(save_rank)
    assert max(counted) < 1024


def test_two_structures_in_turn_both_keep_their_plans() -> None:
    run = Run()
    for number, rows in itertools.product(range(1, 4), (2, 3)):
        run.save(number, rows=rows)
        run.check(number, rows=rows)
    assert run.hits == {4}


def test_a_plan_that_only_some_ranks_keep_is_made_anew() -> None:
    run = Run()
    run.save(1)
    run.plans[2] = PlanCache()
    run.save(2)
    run.check(2)
    run.save(3)
    run.check(3)
    assert run.hits == {1}


def test_a_changed_declaration_is_proved_anew() -> None:
    run = Run()
    run.save(1)
    states = [state(rank, 2) for rank in range(RANKS)]
    del states[1]["w"]
    with pytest.raises(CoverageError, match="'w'"):
        run.save_states(states)


@pytest.mark.parametrize(("key", "before", "after"), [("r", 1, 0), ("o", 0, 1)])
def test_a_replica_id_that_changes_in_place_is_seen(key: str, before: int, after: int) -> None:
    run = Run()
    states = [state(rank, 1) for rank in range(RANKS)]
    states[1][key].replica_id = [before]  # the same list in both saves
    run.save_states(states)
    states[1][key].replica_id[0] = after
    with pytest.raises(CoverageError, match=f"'{key}"):
        run.save_states(states)


@pytest.mark.parametrize("key", ["step", "seed"])
def test_values_that_differ_between_ranks_are_seen_on_a_hit(key: str) -> None:
    run = Run()
    run.save(1)
    states = [state(rank, 2) for rank in range(RANKS)]
    states[1][key] = state(1, 3)[key]
    with pytest.raises(MismatchError, match=key):
        run.save_states(states)


def test_the_oldest_of_too_many_plans_goes_first() -> None:
    run = Run()
    run.plans = [PlanCache(capacity=2) for _ in range(RANKS)]
    for rows in (1, 2, 3):
        run.save(1, rows=rows)
    assert all(len(plans.names) == 2 for plans in run.plans)
    run.save(2, rows=1)
    assert run.hits == {0}
    run.save(2, rows=3)
    assert run.hits == {1}


def test_an_assumed_structure_is_not_compared_between_ranks_but_with_what_a_rank_holds() -> None:
    run = Run(SaveOptions(assume_constant_structure=True))
    run.save(1)
    run.save(2)
    run.check(2)
    assert run.hits == {1}
    with pytest.raises(DeclarationError, match="'w': the structure of the state dict has changed"):
        run.save(3, rows=3)
    run.check(2)


@pytest.mark.parametrize(
    "other",
    [
        [filled(0, 2, 3, dtype=torch.int32)],  # of the same size in bytes
        [filled(0, 3, 2)],
        [filled(0, 2, 3), filled(0, 1, key="more")],
    ],
)
def test_an_assumed_structure_that_differs_in_anything_raises_an_error(other: list[ShardedTensor]) -> None:
    arguments: Any = {"options": SaveOptions(assume_constant_structure=True), "plans": PlanCache()}
    save({"list": [filled(1, 2, 3)]}, MemoryStore(), **arguments)
    with pytest.raises(DeclarationError, match="structure of the state dict has changed"):
        save({"list": other}, MemoryStore(), **arguments)


def test_a_plan_of_other_ranks_is_not_taken() -> None:
    plans, stores = [PlanCache() for _ in range(RANKS)], [MemoryStore(), MemoryStore(), MemoryStore()]

    def declared_state(number: int, replica_id: int = 0) -> dict[str, ShardedTensor]:
        return {key: replica(number, 5, key=key, rank=replica_id) for key in "abcd"}

    def run(group: SimulatedRank) -> None:
        for number, ranks in enumerate([(0, 1, 2, 3), (1, 2), (2, 1)]):
            if group.rank in ranks:
                part = group.subgroup(ranks) if number else group
                # The main replica is the same in every group.
                state = declared_state(number, int(group.rank != 1))
                save(state, stores[number], group=part, plans=plans[group.rank])

    SimulatedWorld(RANKS).run(run)
    assert {cache.hits for cache in plans} == {0}
    for number, store in enumerate(stores):
        loaded = load(declared_state(99), store)
        assert all(torch.equal(value, torch.full((5,), number)) for value in loaded.values())


def test_ranks_that_swap_their_shards_are_not_what_was_planned_for() -> None:
    run = Run(SaveOptions(assume_constant_structure=True))
    run.save(1)
    with pytest.raises(DeclarationError, match="has changed"):
        run.save_states([state(rank ^ 1, 1) for rank in range(RANKS)])


def options(**fields: Any) -> dict[str, Any]:
    return {"options": SaveOptions(**fields)}


@pytest.mark.parametrize(
    ("differs", "text"),
    [
        (
            {"sharded_strategy": "torch_dist"},
            "format is .'megackpt', 1. on rank 0 and .'torch_dist', 1. on rank 1",
        ),
        ({"sharded_strategy": "nonsense"}, "Rank 1.*No strategy saves format 'nonsense'"),
        (
            {"validate_access_integrity": False},
            "validate_access_integrity is True on rank 0 and False on rank 1",
        ),
        ({"plans": PlanCache()}, "plans given is False on rank 0 and True on rank 1"),
        (options(spread="none"), "SaveOptions.spread is 'world' on rank 0 and 'none' on rank 1"),
        (
            options(compare_replicas=Policy.ERROR),
            "SaveOptions.compare_replicas is 'ignore' on rank 0 and 'error' on rank 1",
        ),
        (
            options(sample_replicas=Policy.IGNORE),
            "SaveOptions.sample_replicas is 'error' on rank 0 and 'ignore' on rank 1",
        ),
        (
            options(plain_tensors="arrays"),
            "SaveOptions.plain_tensors is 'auto' on rank 0 and 'arrays' on rank 1",
        ),
        (options(spread="group"), "Rank 1.*spread_group is not given"),
    ],
)
def test_ranks_that_save_differently_get_the_same_error_at_once(differs: dict[str, Any], text: str) -> None:
    store = MemoryStore()

    def save_rank(group: Group) -> None:
        save(state(group.rank, 1), store, group=group, **(differs if group.rank == 1 else {}))

    outcomes = SimulatedWorld(RANKS).outcomes(save_rank)
    assert len({str(outcome) for outcome in outcomes}) == 1
    assert all(isinstance(outcome, DeclarationError) for outcome in outcomes)
    with pytest.raises(DeclarationError, match=f"(?s){text}"):
        raise outcomes[0]
