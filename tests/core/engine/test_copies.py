"""Copies that are not equal are found: by every save, with a cached plan too, and within how many saves.

Common state of modules that only some ranks have is stored once, and compared among these ranks.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megackpt import (
    Checkpointer,
    LoadOptions,
    MismatchError,
    PerRankValue,
    SaveOptions,
    ShardedObject,
    ShardedTensor,
    load,
    load_common_state_dict,
    save,
)
from megackpt.comm import Group
from megackpt.engine.data.samples import run_positions, sample_digests
from megackpt.errors import CommonStateError
from megackpt.options import Policy
from megackpt.plans.validation.equality import absent_parts
from megackpt.run import PlanCache
from megackpt.testing.world import SimulatedWorld
from tests.support.groups import MessagesOnly
from tests.support.states import filled, replica, sharded
from tests.support.worlds import Run, State, error_of_all, loading, saving

SAVES = 64  # within so many saves a drift of one element in FRACTION is found
FRACTION = 4096
SEQUENCE = 1024  # and one of neighbouring elements, of one in so many
RANKS = 3
WARN, IGNORE = SaveOptions(sample_replicas=Policy.WARN), SaveOptions(sample_replicas=Policy.IGNORE)


def copies(rank: int, *, ranks: int = RANKS) -> State:
    """Tensors of several kinds that all ranks declare, an object too, and what belongs to one rank."""
    generator = torch.Generator().manual_seed(5)
    return {
        "matrix": replica_of("matrix", torch.randn(96, 128, generator=generator), rank),
        "half": replica_of("half", torch.randn(50_000, generator=generator).bfloat16(), rank),
        "columns": replica_of("columns", torch.randn(64, 90, generator=generator).t(), rank),
        "scale": replica_of("scale", torch.tensor(2.0), rank),
        "mask": replica_of("mask", torch.ones(3, 5, dtype=torch.bool), rank),
        "flat": ShardedTensor.from_rank_offsets_flat(
            "flat", torch.arange(500.0), (500, 1), flattened_range=slice(0, 500), replica_id=rank
        ),
        "own": filled(rank, 40, key="own", rank=rank, ranks=ranks),
        "stream": ShardedObject("stream", {"seed": 7, "state": [1, 2]}, (1,), (0,), replica_id=rank),
        "position": PerRankValue("position", {"rank": rank}),
    }


def replica_of(key: str, data: torch.Tensor, rank: int) -> ShardedTensor:
    return sharded(key, data, replica_id=rank)


def drifted(key: str, *ranks: int) -> Callable[[int], State]:
    """Change every element of one tensor on some ranks."""

    def make(rank: int) -> State:
        state = copies(rank)
        if rank in ranks:
            data = state[key].data
            state[key].data = ~data if data.dtype == torch.bool else data + 1
        return state

    return make


TENSORS = ["matrix", "half", "columns", "scale", "mask", "flat"]


@pytest.mark.parametrize("key", TENSORS)
@pytest.mark.parametrize("ranks", [(0,), (1,), (1, 2)])
def test_a_copy_of_which_every_element_drifts_is_found_at_the_next_save(
    key: str, ranks: tuple[int, ...]
) -> None:
    run = Run(RANKS)
    for _ in range(3):
        assert run.save(copies) is None
    error = run.save(drifted(key, *ranks))
    assert isinstance(error, MismatchError)
    assert f"'{key}' [" in str(error)
    assert "tp_sharding = {'name': dim}" in str(error)
    assert "Policy.WARN" in str(error)
    assert str(error).count("\n  '") == 1
    assert error.key == key
    if len(ranks) == 1:
        assert f"rank {ranks[0]} differs from the majority" in str(error)
    assert run.save(copies) is None
    assert run.hits == {4}


@pytest.mark.parametrize("format_", ["torch_dist", "zarr", None])
def test_every_format_and_an_assumed_structure_compare(format_: str | None) -> None:
    pytest.importorskip("tensorstore") if format_ == "zarr" else None
    arguments = {"sharded_strategy": format_} if format_ else {}
    run = Run(RANKS, options=SaveOptions(assume_constant_structure=True), **arguments)
    for make in (copies, copies):
        assert run.save(make) is None
    assert "'half'" in str(run.save(drifted("half", 2)))


def test_equal_drifts_of_two_tensors_do_not_cancel_each_other_out() -> None:
    def make(rank: int, value: float) -> State:
        # As the second copy of an embedding, whose main replica is on another rank.
        word = torch.full((300,), value if rank == 0 else 1.0)
        return {
            "first": sharded("first", word, replica_id=rank),
            "second": sharded("second", word.clone(), replica_id=1 - rank),
        }

    run = Run(2)
    assert run.save(lambda rank: make(rank, 1.0)) is None
    assert run.save(lambda rank: make(rank, 1.0)) is None
    error = str(run.save(lambda rank: make(rank, 2.0)))
    assert "'first'" in error
    assert "'second'" in error


def with_stream(value: Callable[[int], Any]) -> Callable[[int], State]:
    def make(rank: int) -> State:
        return {**copies(rank), "stream": ShardedObject("stream", value(rank), (1,), (0,), replica_id=rank)}

    return make


class NoCodec:
    """An object that cannot be saved."""


@pytest.mark.parametrize(
    "value",
    [
        lambda rank: {"seed": 7, "state": [1, 2 + (rank == 2)]},
        lambda rank: torch.Generator().manual_seed(100 + rank).get_state(),
        lambda rank: 1 if rank == 2 else None,
        lambda rank: NoCodec() if rank == 2 else 1,
    ],
    ids=["leaf", "stream", "class", "no codec"],
)
@pytest.mark.parametrize("saves", [0, 1, 2])
def test_objects_that_differ_are_named_at_once(value: Callable[[int], Any], saves: int) -> None:
    run = Run(RANKS)
    for _ in range(saves):
        assert run.save(copies) is None
    error = run.save(with_stream(value))
    assert isinstance(error, MismatchError)
    assert "Ranks declare the same object" in str(error)
    assert "'stream' [0:1]: " in str(error)
    assert "rank 2" in str(error)
    assert "PerRankValue(key, value)" in str(error)
    assert "SaveOptions(sample_replicas=Policy.WARN)" in str(error)
    assert error.key == "stream"
    assert "matrix" not in str(error)


def tensor_and_stream(rank: int) -> State:
    return {**drifted("half", 1)(rank), "stream": with_stream(lambda rank: rank)(rank)["stream"]}


def test_tensors_and_objects_that_differ_are_one_error() -> None:
    for saves in (0, 1):
        run = Run(RANKS)
        for _ in range(saves):
            run.save(copies)
        error = str(run.save(tensor_and_stream))
        assert "'half' [0:50000]: rank 1 differs" in error
        assert "'stream' [0:1]: no majority" in error


def test_values_that_are_equal_whatever_the_order_of_their_keys_are_saved() -> None:
    def value(rank: int) -> Any:
        return dict(sorted({"a": 1, "b": float("nan"), "c": torch.ones(3)}.items(), reverse=rank == 1))

    run = Run(RANKS)
    for _ in range(3):
        assert run.save(with_stream(value)) is None


@pytest.mark.parametrize("saves", [0, 1])
def test_a_warning_names_what_differs_and_the_main_replica_is_stored(
    saves: int, caplog: pytest.LogCaptureFixture
) -> None:
    run = Run(RANKS, options=WARN)
    for _ in range(saves):
        run.save(copies)
    with caplog.at_level(logging.WARNING):
        assert run.save(tensor_and_stream) is None
    assert "'half' [0:50000]: rank 1 differs" in caplog.text
    assert "'stream' [0:1]: no majority" in caplog.text
    assert "Of each object, the main replica is stored." in caplog.text
    wanted = {"stream": ShardedObject("stream", None, (1,), (0,))}
    assert load(wanted, run.store)["stream"] == 0


def test_nothing_is_compared_if_it_is_ignored() -> None:
    run = Run(RANKS, options=IGNORE)
    for make in (copies, drifted("matrix", 1), with_stream(lambda rank: rank)):
        assert run.save(make) is None


def test_a_plan_that_a_save_without_comparisons_has_made_serves_one_that_compares() -> None:
    run = Run(RANKS, options=IGNORE)
    assert run.save(copies) is None
    run.arguments["options"] = SaveOptions()
    assert run.save(copies) is None
    assert "'matrix'" in str(run.save(drifted("matrix", 1)))
    assert run.hits == {2}


def test_a_comparison_takes_no_collective_and_no_longer_message() -> None:
    sent = {}
    for options in (IGNORE, SaveOptions()):
        run = Run(RANKS, options=options)
        run.save(copies)
        before = run.world.messages[0], run.world.bytes_sent[0]
        run.save(copies)
        after = run.world.messages[0], run.world.bytes_sent[0]
        sent[options] = after[0] - before[0], after[1] - before[1]
    assert sent[IGNORE] == sent[SaveOptions()]


def test_a_group_of_a_user_compares_too() -> None:
    run = Run(RANKS)
    for make in (copies, copies):
        assert run.save(make, group_of=MessagesOnly) is None
    assert "'matrix'" in str(run.save(drifted("matrix", 1), group_of=MessagesOnly))


def test_ranks_that_take_different_plans_for_the_fitting_one_find_nothing_that_is_equal() -> None:
    # Rank 1 declares the same in both structures, so it expects the plan of the last save.
    def make(number: int) -> Callable[[int], State]:
        return lambda rank: {
            "copy": replica(3.0, 50, key="copy", rank=rank),
            **({f"own {number}": filled(1, 4, key=f"own {number}")} if rank == 0 else {}),
        }

    run = Run(2)
    for number in (0, 1, 0, 1, 1, 0):
        assert run.save(make(number)) is None
    assert run.hits == {4}

    def differing(rank: int) -> State:
        return {**make(1)(rank), "copy": replica(3.0 + rank, 50, key="copy", rank=rank)}

    assert "'copy' [0:50]" in str(run.save(differing))


def test_a_rank_that_has_counted_other_saves_plans_anew_and_compares() -> None:
    run = Run(RANKS)
    run.save(copies)
    run.plans[1].use(run.plans[1].names[0])  # as after an interrupt on the other ranks
    for make in (copies, copies):
        assert run.save(make) is None
    assert {len(plans.names) for plans in run.plans} == {1}
    assert "'matrix'" in str(run.save(drifted("matrix", 1)))


def test_a_checkpointer_finds_a_drift_in_any_save(tmp_path: Any) -> None:
    def run(group: Group) -> str:
        with Checkpointer(tmp_path, group=group) as checkpointer:
            for step in (1, 2):
                checkpointer.save(step, copies(group.rank))
            with pytest.raises(MismatchError) as caught:
                checkpointer.save(3, drifted("half", 1)(group.rank))
            assert checkpointer.steps() == (1, 2)
            return str(caught.value)

    (message,) = set(SimulatedWorld(RANKS).run(run))
    assert "'half' [0:50000]: rank 1 differs from the majority, ranks 0, 2" in message


# How fast samples find a drift. Of tensors alone, since a save compares their digests.

SHAPES = [(4096,), (64, 64), (10_000,), (257, 129), (300, 1000), (3, 100, 500), (1024, 512)]
DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.int8]


def saves_until_found(tensor: torch.Tensor, changed: torch.Tensor, first: int) -> int:
    """Return the number of saves until the sample of a changed tensor differs; above SAVES if none does."""
    for saves in range(1, SAVES + 1):
        before, after = sample_digests([tensor, changed], first + saves)
        if before != after:
            return saves
    return SAVES + 1


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_one_element_in_4096_that_drifts_is_found_within_64_saves(
    shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    seeded = random.Random(f"{shape} {dtype}")
    tensor = torch.zeros(shape, dtype=dtype)
    for _ in range(5):
        changed = tensor.clone()
        for at in seeded.sample(range(tensor.numel()), max(1, tensor.numel() // FRACTION)):
            changed.view(-1)[at] = 1
        assert saves_until_found(tensor, changed, seeded.randrange(2**64)) <= SAVES


@pytest.mark.parametrize("elements", [4700, 9999, 65_537, 10**6, 2**24, 11_008 * 4096])
@pytest.mark.parametrize("run", [16, 64, 256])
def test_any_64_saves_sample_every_sequence_of_a_1024th(elements: int, run: int) -> None:
    seeded = random.Random(elements * run)
    for first in (0, 960, 2000, *(seeded.randrange(2**64) for _ in range(10))):
        starts = [
            start + distance * np.arange(18)
            for number in range(first, first + SAVES)
            for start, distance in [run_positions(elements, run, number)]
        ]
        sampled = np.sort(np.concatenate(starts))
        assert sampled[0] >= 0
        assert sampled[-1] + run <= elements
        unsampled = np.diff(np.concatenate(([-run], sampled, [elements]))) - run
        assert unsampled.max() < max(1, elements / SEQUENCE)


@pytest.mark.parametrize(("rows", "columns"), [(4096, 4096), (11_008, 4096), (4096, 1024), (32_000, 2048)])
def test_a_column_that_drifts_is_found_within_64_saves(rows: int, columns: int) -> None:
    seen = np.zeros(columns, np.bool_)
    for number in range(SAVES):
        start, distance = run_positions(rows * columns, 64, number)
        seen[(start + distance * np.arange(18)[:, None] + np.arange(64)) % columns] = True
    assert seen.all()


def test_a_drift_of_one_element_in_4096_is_found_by_saves() -> None:
    def make(changes: int) -> Callable[[int], State]:
        def of_rank(rank: int) -> State:
            data = torch.zeros(200, 200)
            if rank == 1:
                data.view(-1)[random.Random(3).sample(range(40_000), changes)] = 1
            return {"w": replica_of("w", data, rank)}

        return of_rank

    run = Run(2, first=11)
    assert run.save(make(0)) is None
    outcomes = [run.save(make(40_000 // FRACTION)) for _ in range(SAVES)]
    assert any(isinstance(outcome, MismatchError) for outcome in outcomes)
    # A save that has found nothing is committed.
    assert run.save(make(0)) is None


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(90_000.0).reshape(300, 300),
        torch.arange(6000.0).bfloat16().reshape(2, 30, 100),
        torch.arange(5000.0).reshape(50, 100).to(torch.complex64),
        torch.arange(5000).reshape(50, 100) % 3 == 0,
        torch.arange(20.0).reshape(4, 5),
    ],
    ids=lambda tensor: f"{tensor.dtype} {tuple(tensor.shape)}",
)
def test_the_sample_of_a_tensor_is_that_of_its_values_whatever_its_strides(tensor: torch.Tensor) -> None:
    other = tensor.transpose(-1, -2).contiguous().transpose(-1, -2)
    within = torch.cat([tensor, tensor])[: len(tensor)]
    lazy = [tensor.conj().clone().resolve_conj().conj()] if tensor.is_complex() else []
    for number in (0, 1, 77):
        (expected,) = sample_digests([tensor], number)
        for same in (other, within, *lazy):
            assert sample_digests([same], number)[0] == expected


def test_many_tensors_have_the_digests_that_each_has_alone() -> None:
    tensors = [entity.data for entity in copies(0).values() if isinstance(entity, ShardedTensor)]
    tensors += [torch.zeros(0, 3), torch.zeros(5000), torch.zeros(1152), torch.zeros(1152).reshape(18, 64)]
    alone = [sample_digests([tensor], 9)[0] for tensor in tensors]
    assert sample_digests(tensors, 9).tolist() == alone
    assert sample_digests([], 9).tolist() == []
    assert not any(tensor.requires_grad for tensor in tensors)


def test_factors_of_each_chunk_add_up_to_nothing_and_only_copies_have_any() -> None:
    seeded = random.Random(1)
    for _ in range(20):
        ranks = seeded.randint(2, 6)
        # Of each key some ranks have a copy, the main replica among them is any of these.
        owners = {f"k{i}": seeded.sample(range(ranks), seeded.randint(1, ranks)) for i in range(5)}

        def make(rank: int, owners: dict[str, list[int]] = owners) -> State:
            own = {key: ranks.index(rank) for key, ranks in owners.items() if rank in ranks}
            return {
                key: replica(1.0, 4, key=key, rank=number)
                if int(key[1:]) % 2
                else ShardedObject(key, 1, (1,), (0,), replica_id=number)
                for key, number in own.items()
            }

        run = Run(ranks)
        assert run.save(make) is None
        totals: dict[str, int] = {}
        for rank, plans in enumerate(run.plans):
            cached = plans.peek(plans.names[0])
            table = cached.declared.table
            for row, factor in enumerate(cached.replica_factors.tolist()):
                key = table.arrays[int(table.array[row])].key
                assert (factor != 0) == (len(owners[key]) > 1), (key, rank, owners)
                totals[key] = totals.get(key, 0) + factor
        assert all(total % 2**64 == 0 for total in totals.values())


ALL_RANKS = 5
ENCODER, DECODER = (1, 2), (2, 4)  # rank 0 has neither, rank 2 both

OF_ENCODER = {"groups": {"plain": {"lr": 0.5, "betas": (0.9, 0.95)}}, "step": 7, "scale": torch.tensor(2.0)}
OF_DECODER = {"groups": [{"lr": 0.25}], "more": {"empty": {}, "of": {"each": None}}}


def state_of(rank: int, **others: Any) -> dict[str, Any]:
    weight = torch.full((2,), float(rank))
    state: dict[str, Any] = {
        "w": ShardedTensor.from_rank_offsets("w", weight, (0, rank, ALL_RANKS)),
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
    caches = [PlanCache() if plans else None for _ in range(ALL_RANKS)]

    def save_thrice(group: Group) -> None:
        for step in range(3):
            # The last save assumes that its structure, and so its parts, are those of the one before.
            options = SaveOptions(assume_constant_structure=plans and step == 2)
            cache = caches[group.rank]
            state = state_of(group.rank, number=step)
            save(state, tmp_path / str(step), format_, group=group, options=options, plans=cache)

    SimulatedWorld(ALL_RANKS).run(save_thrice)
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
    load_all = loading(state_of, tmp_path / "2", options=LoadOptions(complete=True))
    for rank, loaded in enumerate(SimulatedWorld(ALL_RANKS).run(load_all)):
        assert torch.equal(loaded["w"], torch.full((2,), float(rank)))
        assert loaded["decoder"]["groups"] == [{"lr": 0.25}]


DIFFERENT: dict[str, tuple[int, State, str]] = {
    "a value of the ranks that have the part": (
        4,
        {"decoder": {"groups": [{"lr": 0.5}]}},
        "decoder.groups[0].lr",
    ),
    "an entry of the part": (4, {"decoder": {"more": 1}}, "decoder.more"),
    "a value instead of the part": (0, {"decoder": 3}, "'decoder' on rank(s) 1, 2, 3, 4"),
    "a value next to the part": (3, {"extra": 1}, "'extra' on rank(s) 3 (missing on rank 0)"),
}


@pytest.mark.parametrize("case", DIFFERENT)
def test_ranks_that_have_a_part_are_compared(tmp_path: Path, case: str) -> None:
    rank, others, message = DIFFERENT[case]
    differ = saving(lambda r: state_of(r, **(others if r == rank else {})), tmp_path)
    assert message in str(error_of_all(ALL_RANKS, differ, CommonStateError))


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
