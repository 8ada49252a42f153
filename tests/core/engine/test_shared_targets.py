"""Targets of a load that share memory: loaded where their stored values are equal, else rejected by name."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException

from megackpt import LoadOptions, MismatchError, ShardedTensor, load, save
from megackpt.comm import Group
from megackpt.engine.loading.shared_targets import sharing
from megackpt.integrations.dcp import MegackptStorageReader
from megackpt.storage import MemoryStore
from megackpt.testing.world import SimulatedWorld

MODES: tuple[Any, ...] = ("direct", "gather_object", "gather_rounds", "broadcast", "all_to_all", "two_stage")


def whole(key: str, data: torch.Tensor, **fields: Any) -> ShardedTensor:
    return ShardedTensor.from_rank_offsets(key, data, **fields)


def stored(*values: torch.Tensor) -> MemoryStore:
    store = MemoryStore()
    save({key: whole(key, value) for key, value in zip("abcdef", values, strict=False)}, store)
    return store


@pytest.mark.parametrize("mode", MODES)
def test_two_keys_into_one_tensor_raise_an_error_on_every_rank_where_their_values_differ(mode: Any) -> None:
    store = stored(torch.ones(4), torch.zeros(4), torch.ones(4))

    def into_one(group: Group, second: str) -> torch.Tensor:
        target = torch.full((4,), -7.0)
        other = target if group.rank == 1 else torch.empty(4)
        asked = {"first": whole("a", target), "second": whole(second, other)}
        loaded = load(asked, store, options=LoadOptions(exchange=mode), group=group)
        assert loaded["first"] is target
        return target

    errors = SimulatedWorld(2).outcomes(lambda group: into_one(group, "b"))
    assert {type(error) for error in errors} == {MismatchError}
    assert len({str(error) for error in errors}) == 1
    assert "'a' and 'b' were loaded into the same memory" in str(errors[0])
    for target in SimulatedWorld(2).run(lambda group: into_one(group, "c")):
        assert target.tolist() == [1.0] * 4  # a tied weight that was saved under both names


def test_views_that_overlap_are_compared_element_by_element() -> None:
    store = stored(torch.tensor([0.0, 1, 2, 3]), torch.tensor([2.0, 3, 4]), torch.tensor([9.0, 3, 4]))
    buffer = torch.full((5,), -7.0)
    load({"a": whole("a", buffer[:4]), "b": whole("b", buffer[2:])}, store)
    assert buffer.tolist() == [0, 1, 2, 3, 4]
    with pytest.raises(MismatchError, match="'a' and 'c' were loaded into the same memory") as raised:
        load({"a": whole("a", buffer[:4]), "c": whole("c", buffer[2:])}, store)
    assert raised.value.key == "a"


def test_boxes_of_one_key_that_share_memory_raise_an_error() -> None:
    store = stored(torch.arange(8.0))
    target = torch.zeros(4)
    parts = [ShardedTensor.from_rank_offsets("a", target, (0, rank, 2)) for rank in (0, 1)]
    with pytest.raises(MismatchError, match="'a' and 'a' were loaded into the same memory"):
        load({"halves": parts}, store)
    load({"once": parts[0], "again": parts[0]}, store)
    assert target.tolist() == [0, 1, 2, 3]


def test_plain_tensors_of_common_state_count_too() -> None:
    store = MemoryStore()
    save({"x": torch.ones(3), "y": torch.zeros(3), "z": torch.ones(3), "a": whole("a", torch.ones(3))}, store)
    target = torch.full((3,), -7.0)
    with pytest.raises(MismatchError, match="'x' and 'y' were loaded into the same memory"):
        load({"x": target, "y": target}, store)
    with pytest.raises(MismatchError, match="'a' and 'y' were loaded into the same memory"):
        load({"y": target, "a": whole("a", target)}, store)
    load({"x": target, "z": target, "a": whole("a", target)}, store)
    assert target.tolist() == [1.0] * 3
    load({"x": target, "y": torch.empty(2)}, store)  # of another shape: not filled in place


def test_nans_are_equal_to_themselves_and_grad_does_not_matter() -> None:
    store = stored(torch.tensor([float("nan"), 1.0]), torch.tensor([float("nan"), 1.0]))
    weight = torch.nn.Parameter(torch.zeros(2))
    load({"a": whole("a", weight), "b": whole("b", weight)}, store)
    assert weight[1] == 1


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_dcp_load_into_one_tensor_raises_an_error(tmp_path: Path) -> None:
    save({key: whole(key, torch.full((2,), float(i))) for i, key in enumerate("ab")}, tmp_path)
    target = torch.zeros(2)
    with pytest.raises(CheckpointException, match="'a' and 'b' were loaded into the same memory"):
        dcp.load({"a": target, "b": target}, storage_reader=MegackptStorageReader(tmp_path), no_dist=True)


def test_what_does_not_share_memory_is_read_into_as_it_is() -> None:
    flat = torch.zeros(64)
    apart = [flat[:16], flat[16:32], flat[32:32], flat[:0]]
    fused = flat[32:].view(4, 2, 4)  # columns of two weights, one next to the other in each row
    apart += [fused[:, 0], fused[:, 1]]
    assert sharing(apart) == {}
    assert sharing([*apart, flat[15:17]]) == {0: 6, 6: 0, 1: 6}
    assert sharing([fused[:, 0], fused[:, :, 3]]) == {0: 1, 1: 0}
    assert sharing([flat, flat.view(torch.int32), torch.empty(3, device="meta")]) == {0: 1, 1: 0}
    twice = torch.from_numpy(flat.numpy())  # another storage, the same memory
    assert sharing([flat[:3], twice[2:]]) == {0: 1, 1: 0}


def test_many_targets_are_looked_through_in_time() -> None:
    flat = torch.zeros(40_000)
    began = time.process_time()
    assert sharing(list(flat.split(4))) == {}
    assert len(sharing([flat, *flat.split(4)])) == 10_001
    assert time.process_time() - began < 2
