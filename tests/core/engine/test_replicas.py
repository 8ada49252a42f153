"""Replicas that differ are found, all or in a sample; a save of a known structure finds its plan."""

from __future__ import annotations

import itertools
import logging
import math
import re
import struct
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from megackpt import (
    CoverageError,
    DeclarationError,
    MismatchError,
    ReplicatedValue,
    SaveOptions,
    ShardedObject,
    ShardedTensor,
    load,
    save,
)
from megackpt.comm import Group
from megackpt.engine.data.samples import fixed_samples
from megackpt.options import Policy
from megackpt.plans.validation.equality import REPLICA_DIGEST, find_divergences
from megackpt.run import PlanCache
from megackpt.storage import MemoryStore
from megackpt.testing.world import SimulatedRank, SimulatedWorld
from megackpt.training.parallel import ParallelGroups, ParallelLayout, ShardedModule
from tests.support.groups import MessagesOnly
from tests.support.states import filled, replica, sharded
from tests.support.worlds import Run, State, error_of_all, saving

RANKS = 4
Change = Callable[[int, dict[str, torch.Tensor]], None]
ERROR = SaveOptions(compare_replicas=Policy.ERROR)


def state(rank: int, change: Change) -> dict[str, object]:
    """Two shards, each on two ranks; a whole array, a flat range and an object on all four."""
    data = {
        "halves": torch.full((3, 2), 1.0 + rank // 2),
        "whole": torch.tensor([0.0, math.nan, 2.0]).bfloat16(),
        "flat": torch.arange(5.0),
    }
    change(rank, data)
    return {
        "halves": sharded("halves", data["halves"], (0, rank // 2, 2), replica_id=rank % 2),
        "whole": sharded("whole", data["whole"], replica_id=rank),
        "flat": ShardedTensor.from_rank_offsets_flat(
            "flat", data["flat"], (5, 1), flattened_range=slice(0, 5), replica_id=rank
        ),
        "o": ShardedObject("o", {"n": data["flat"][0].item()}, (1,), (0,), replica_id=rank),
    }


def nothing(rank: int, data: dict[str, torch.Tensor]) -> None:
    """Change nothing."""


def test_equal_copies_are_saved_also_where_they_are_not_numbers() -> None:
    store = MemoryStore()
    SimulatedWorld(RANKS).run(saving(lambda rank: state(rank, nothing), store, options=ERROR))
    assert "metadata.json" in store.names()


def changing(key: str, at: Any, value: float, *ranks: int) -> Change:
    """Change one element on some ranks."""

    def change(rank: int, data: dict[str, torch.Tensor]) -> None:
        if rank in ranks:
            data[key][at] = value

    return change


def change_nan(rank: int, data: dict[str, torch.Tensor]) -> None:
    if rank == 3:
        data["whole"].view(torch.int16)[1] = struct.unpack("<h", b"\xc1\x7f")[0]


change_one = changing("whole", 0, -0.0, 2)  # equal, but not in its bits
DIFFERENT: list[tuple[Change, str]] = [
    (change_one, r"'whole' \[0:3\]: rank 2 differs from the majority, ranks 0, 1, 3"),
    (change_nan, r"'whole' \[0:3\]: rank 3 differs from the majority"),
    (
        changing("halves", (2, 1), 1.0000001, 1),
        r"'halves' \[0:3, 0:2\]: no majority: rank 0 \| rank 1 hold different bits",
    ),
    (
        changing("flat", 0, 7, 1, 3),
        r"'flat' .*no majority: ranks 0, 2 \| ranks 1, 3.*\n.*'o' \[0:1\]: no majority",
    ),
]


@pytest.mark.parametrize(("change", "message"), DIFFERENT, ids=["one", "nan", "half", "object"])
def test_copies_that_differ_are_named_on_all_ranks_and_nothing_is_written(
    change: Change, message: str
) -> None:
    store = MemoryStore()
    error = error_of_all(RANKS, saving(lambda rank: state(rank, change), store, options=ERROR), MismatchError)
    assert re.search(message, str(error))
    assert store.names() == []


def test_warn_logs_the_same_text_and_saves(caplog: pytest.LogCaptureFixture) -> None:
    store, options = MemoryStore(), SaveOptions(compare_replicas=Policy.WARN)
    with caplog.at_level(logging.WARNING):
        SimulatedWorld(RANKS).run(saving(lambda rank: state(rank, change_one), store, options=options))
    assert [r for r in caplog.records if "rank 2 differs from the majority" in r.getMessage()]
    asked = sharded("halves", torch.zeros(6, 2))
    assert load({"halves": asked}, store)["halves"][5, 0] == 2


def test_divergences_are_those_of_a_slow_comparison() -> None:
    generator = np.random.default_rng(7)
    for _ in range(50):
        message = [
            np.array(
                [
                    (bytes([0, name] * 8), bytes([0, generator.integers(2)] * 8))
                    for name in generator.permutation(6)[: generator.integers(7)]
                ],
                REPLICA_DIGEST,
            )
            for _ in range(generator.integers(1, 6))
        ]
        expected = {}
        for name in {bytes(c["name"]) for of_rank in message for c in of_rank}:
            camps: dict[bytes, list[int]] = {}
            for rank, of_rank in enumerate(message):
                for claim in of_rank:
                    if bytes(claim["name"]) == name:
                        camps.setdefault(bytes(claim["digest"]), []).append(rank)
            if len(camps) > 1:
                expected[name] = sorted(map(tuple, camps.values()))
        assert {d.name: sorted(d.groups) for d in find_divergences(message)} == expected


class Forgets(ShardedModule):
    """Cuts `proj` over tp, as `gate`, and declares only the latter."""

    tp_sharding = {"gate": 0}  # noqa: RUF012

    def __init__(self, groups: ParallelGroups) -> None:
        super().__init__(groups)
        whole = torch.arange(4096.0).reshape(64, 64)
        self.gate = nn.Parameter(whole.chunk(groups.tp.size)[groups.tp.rank])
        self.proj = nn.Parameter(whole.chunk(groups.tp.size)[groups.tp.rank].clone())
        self.norm = nn.Parameter(torch.ones(64))


def test_a_parameter_that_tp_cuts_undeclared_is_named_with_its_ranks_and_the_remedy() -> None:
    def state_of(rank: int) -> Any:
        model = Forgets(ParallelGroups.offline(ParallelLayout(tp=2, dp=2), rank))
        return model.sharded_state_dict(prefix="model.")

    store = MemoryStore()
    error = error_of_all(4, saving(state_of, store), MismatchError)
    assert "'model.proj' [0:32, 0:64]: no majority: ranks 0, 2 | ranks 1, 3 hold" in str(error)
    assert "tp_sharding = {'name': dim}" in str(error)
    assert "norm" not in str(error)
    assert error.key == "model.proj"
    assert store.names() == []


def declared_state(rank: int, data: torch.Tensor) -> dict[str, ShardedTensor]:
    return {"w": sharded("w", data, replica_id=rank)}


@pytest.mark.parametrize("location", [slice(0, 1), slice(4900, 5100), slice(9999, 10_000)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex128, torch.float8_e5m2])
def test_the_begin_the_middle_and_the_end_are_sampled(location: slice, dtype: torch.dtype) -> None:
    def make(rank: int) -> dict[str, Any]:
        data = torch.zeros(10_000)
        data[location] = rank
        return declared_state(rank, data.to(dtype).view(100, 100))

    error = error_of_all(2, saving(make, MemoryStore()), MismatchError)
    assert "'w' [0:100, 0:100]" in str(error)


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.tensor(3.0),
        lambda: torch.zeros(0, 4),
        lambda: torch.arange(24.0).reshape(2, 3, 4).transpose(0, 2),
        lambda: torch.arange(90_000.0).reshape(300, 300).t(),
        lambda: torch.zeros(1).expand(5000),
        lambda: torch.zeros(6)[::2][:1],
        lambda: torch.zeros(2, 6)[:1, ::2][:, :1],
        lambda: torch.ones(7, dtype=torch.complex64).conj(),
        lambda: torch.tensor([float("nan"), -0.0]),
        lambda: torch.zeros(1, 5, 1, dtype=torch.bool)[:, ::2],
        lambda: torch.zeros(3, 1_000_000, dtype=torch.uint8)[:, ::3],
    ],
)
def test_equal_replicas_of_any_kind_are_saved(make: Callable[[], torch.Tensor]) -> None:
    SimulatedWorld(2).run(saving(lambda rank: declared_state(rank, make()), MemoryStore()))


def test_the_sample_of_a_tensor_that_is_not_contiguous_is_that_of_its_values() -> None:
    tensor = torch.arange(90_000.0).reshape(300, 300)
    assert fixed_samples([tensor.t()]) == fixed_samples([tensor.t().contiguous()])
    assert len(fixed_samples([tensor])[0]) <= 3 * 1024
    assert fixed_samples([]) == []


def test_what_is_not_the_same_chunk_may_differ() -> None:
    def make(rank: int) -> dict[str, Any]:
        flat = ShardedTensor.from_rank_offsets_flat(
            "f", torch.full((3,), float(rank)), (6,), flattened_range=slice(3 * rank, 3 * rank + 3)
        )
        return {"x": filled(rank, 2, key="x", rank=rank, ranks=2), "f": flat}

    SimulatedWorld(2).run(saving(make, MemoryStore()))


def test_of_two_declarations_of_one_rank_the_main_replica_is_saved() -> None:
    store = MemoryStore()
    save({"main": replica(1.0, 3, key="w"), "other": replica(2.0, 3, key="w", rank=1)}, store)
    assert load({"w": filled(0, 3)}, store)["w"].tolist() == [1, 1, 1]


def numbered_state(rank: int, number: int, *, rows: int = 2) -> dict[str, Any]:
    """Declare a sharded tensor, a replicated one and an object whose encoding grows with the number."""
    return {
        "w": filled(number + rank, rows, 3, rank=rank, ranks=RANKS),
        "r": replica(number, 5, rank=rank),
        "o": ShardedObject("o", "x" * (number * 10 + rank), (RANKS,), (rank,)),
        "seed": ReplicatedValue("seed", {"n": number}),
        "step": number,
    }


def numbered(number: int, **kwargs: Any) -> Callable[[int], State]:
    return lambda rank: numbered_state(rank, number, **kwargs)


def check(run: Run, number: int, **kwargs: Any) -> None:
    """Load what was saved last, and compare it with what has this number."""

    def load_rank(group: Group) -> None:
        expected = numbered_state(group.rank, number, **kwargs)
        wanted = numbered_state(group.rank, 99, **kwargs)
        wanted["o"].data = wanted["seed"].value = None
        loaded = load(wanted, run.store, group=group)
        assert torch.equal(loaded["w"], expected["w"].data)
        assert torch.equal(loaded["r"], expected["r"].data)
        assert loaded["o"] == expected["o"].data
        assert loaded["seed"] == {"n": number}
        assert loaded["step"] == number

    run.world.run(load_rank)


def save_and_check(run: Run, number: int, **kwargs: Any) -> None:
    assert run.save(numbered(number, **kwargs)) is None
    check(run, number, **kwargs)


def test_an_unchanged_structure_is_planned_once_whatever_its_values_and_objects() -> None:
    run = Run(RANKS)
    for number in range(1, 5):
        save_and_check(run, number)
    assert run.hits == {3}


def test_a_hit_exchanges_one_small_message() -> None:
    run = Run(RANKS)
    run.save(numbered(1))
    counted: list[int] = []

    class Counting(MessagesOnly):
        def all_gather(self, data: bytes) -> list[bytes]:
            counted.append(len(data))
            return super().all_gather(data)

    assert run.save(numbered(3), group_of=Counting) is None
    assert max(counted) < 1024


def test_two_structures_in_turn_both_keep_their_plans() -> None:
    run = Run(RANKS)
    for number, rows in itertools.product(range(1, 4), (2, 3)):
        save_and_check(run, number, rows=rows)
    assert run.hits == {4}


def test_a_plan_that_only_some_ranks_keep_is_made_anew() -> None:
    run = Run(RANKS)
    run.save(numbered(1))
    run.plans[2] = PlanCache()
    save_and_check(run, 2)
    save_and_check(run, 3)
    assert run.hits == {1}


def test_a_changed_declaration_is_proved_anew() -> None:
    run = Run(RANKS)
    run.save(numbered(1))
    states = [numbered_state(rank, 2) for rank in range(RANKS)]
    del states[1]["w"]
    error = run.save(states.__getitem__)
    assert isinstance(error, CoverageError)
    assert error.key == "w"


@pytest.mark.parametrize(("key", "before", "after"), [("r", 1, 0), ("o", 0, 1)])
def test_a_replica_id_that_changes_in_place_is_seen(key: str, before: int, after: int) -> None:
    run = Run(RANKS)
    states = [numbered_state(rank, 1) for rank in range(RANKS)]
    states[1][key].replica_id = [before]  # the same list in both saves
    assert run.save(states.__getitem__) is None
    states[1][key].replica_id[0] = after
    error = run.save(states.__getitem__)
    assert isinstance(error, CoverageError)
    assert f"'{key}" in str(error)


@pytest.mark.parametrize("key", ["step", "seed"])
def test_values_that_differ_between_ranks_are_seen_on_a_hit(key: str) -> None:
    run = Run(RANKS)
    run.save(numbered(1))
    states = [numbered_state(rank, 2) for rank in range(RANKS)]
    states[1][key] = numbered_state(1, 3)[key]
    error = run.save(states.__getitem__)
    assert isinstance(error, MismatchError)
    assert key in str(error)


def test_the_oldest_of_too_many_plans_goes_first() -> None:
    run = Run(RANKS)
    run.plans = [PlanCache(capacity=2) for _ in range(RANKS)]
    for rows in (1, 2, 3):
        run.save(numbered(1, rows=rows))
    assert all(len(plans.names) == 2 for plans in run.plans)
    run.save(numbered(2, rows=1))
    assert run.hits == {0}
    run.save(numbered(2, rows=3))
    assert run.hits == {1}


def test_an_assumed_structure_is_not_compared_between_ranks_but_with_what_a_rank_holds() -> None:
    run = Run(RANKS, options=SaveOptions(assume_constant_structure=True))
    run.save(numbered(1))
    save_and_check(run, 2)
    assert run.hits == {1}
    error = run.save(numbered(3, rows=3))
    assert isinstance(error, DeclarationError)
    assert "'w': the structure of the state dict has changed" in str(error)
    check(run, 2)


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
                declaration = declared_state(number, int(group.rank != 1))
                save(declaration, stores[number], group=part, plans=plans[group.rank])

    SimulatedWorld(RANKS).run(run)
    assert {cache.hits for cache in plans} == {0}
    for number, store in enumerate(stores):
        loaded = load(declared_state(99), store)
        assert all(torch.equal(value, torch.full((5,), number)) for value in loaded.values())


def test_ranks_that_swap_their_shards_are_not_what_was_planned_for() -> None:
    run = Run(RANKS, options=SaveOptions(assume_constant_structure=True))
    run.save(numbered(1))
    error = run.save(lambda rank: numbered_state(rank ^ 1, 1))
    assert isinstance(error, DeclarationError)
    assert "has changed" in str(error)


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
        save(numbered_state(group.rank, 1), store, group=group, **(differs if group.rank == 1 else {}))

    assert re.search(f"(?s){text}", str(error_of_all(RANKS, save_rank, DeclarationError)))
