"""Replicas compared at a save: copies are compared bit by bit, and the error names what differs."""

from __future__ import annotations

import logging
import math
import struct
from collections.abc import Callable

import numpy as np
import pytest
import torch

from megackpt import CheckpointError, MismatchError, SaveOptions, ShardedObject, ShardedTensor, load, save
from megackpt.comm import Group
from megackpt.options import Policy
from megackpt.storage import MemoryStore
from megackpt.testing.world import SimulatedWorld
from megackpt.validation.replicas import REPLICA_DIGEST, find_divergences

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
        "halves": ShardedTensor.from_rank_offsets(
            "halves", data["halves"], (0, rank // 2, 2), replica_id=rank % 2
        ),
        "whole": ShardedTensor.from_rank_offsets("whole", data["whole"], replica_id=rank),
        "flat": ShardedTensor.from_rank_offsets_flat(
            "flat", data["flat"], (5, 1), flattened_range=slice(0, 5), replica_id=rank
        ),
        "o": ShardedObject("o", {"n": data["flat"][0].item()}, (1,), (0,), replica_id=rank),
    }


def outcome(change: Change, options: SaveOptions = ERROR) -> tuple[list[object], MemoryStore]:
    store = MemoryStore()

    def save_rank(group: Group) -> None:
        save(state(group.rank, change), store, options=options, group=group)

    return SimulatedWorld(RANKS).outcomes(save_rank), store


def nothing(rank: int, data: dict[str, torch.Tensor]) -> None:
    """Change nothing."""


def test_equal_copies_are_saved_also_where_they_are_not_numbers() -> None:
    outcomes, store = outcome(nothing)
    assert not any(isinstance(o, BaseException) for o in outcomes)
    assert "metadata.json" in store.names()


def change_one(rank: int, data: dict[str, torch.Tensor]) -> None:
    if rank == 2:
        data["whole"][0] = -0.0  # equal, but not in its bits


def change_half(rank: int, data: dict[str, torch.Tensor]) -> None:
    if rank == 1:
        data["halves"][2, 1] = 1.0000001


def change_nan(rank: int, data: dict[str, torch.Tensor]) -> None:
    if rank == 3:
        payload = struct.unpack("<h", b"\xc1\x7f")[0]
        data["whole"].view(torch.int16)[1] = payload


def change_object(rank: int, data: dict[str, torch.Tensor]) -> None:
    if rank in (1, 3):
        data["flat"][0] = 7


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (change_one, r"'whole' \[0:3\]: rank 2 differs from the majority, ranks 0, 1, 3"),
        (change_nan, r"'whole' \[0:3\]: rank 3 differs from the majority"),
        (change_half, r"'halves' \[0:3, 0:2\]: no majority: rank 0 \| rank 1 hold different bits"),
        (change_object, r"'flat' .*no majority: ranks 0, 2 \| ranks 1, 3.*\n.*'o' \[0:1\]: no majority"),
    ],
)
def test_copies_that_differ_are_named_on_all_ranks_and_nothing_is_written(
    change: Change, message: str
) -> None:
    outcomes, store = outcome(change)
    assert store.names() == []
    for failure in outcomes:
        with pytest.raises(MismatchError, match=message):
            raise failure  # type: ignore[misc]
    assert len({str(failure) for failure in outcomes}) == 1


def test_warn_logs_the_same_text_and_saves(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        outcomes, store = outcome(change_one, SaveOptions(compare_replicas=Policy.WARN))
    assert not any(isinstance(o, BaseException) for o in outcomes)
    assert [r for r in caplog.records if "rank 2 differs from the majority" in r.getMessage()]
    asked = ShardedTensor.from_rank_offsets("halves", torch.zeros(6, 2))
    assert load({"halves": asked}, store)["halves"][5, 0] == 2


def test_nothing_is_compared_unless_asked() -> None:
    outcomes, _ = outcome(change_one, SaveOptions(sample_replicas=Policy.IGNORE))
    assert not any(isinstance(o, BaseException) for o in outcomes)


def test_ranks_that_do_not_all_compare_raise_an_error() -> None:
    def save_rank(group: Group) -> None:
        options = ERROR if group.rank == 1 else SaveOptions()
        save(state(group.rank, nothing), MemoryStore(), options=options, group=group)

    for failure in SimulatedWorld(RANKS).outcomes(save_rank):
        assert isinstance(failure, CheckpointError)
        assert "SaveOptions.compare_replicas is 'ignore' on rank 0 and 'error' on rank 1" in str(failure)


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
