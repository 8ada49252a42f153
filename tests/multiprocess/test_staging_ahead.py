"""Asynchronous saves copy while ranks still agree on the plan: on a guess, which may be wrong."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from megackpt import Checkpointer, ShardedTensor, StorageError
from megackpt.comm import Numbers, run_and_compare, world_group
from megackpt.engine.background import saver
from megackpt.testing.ranks import RankPool
from tests.async_saves import OPTIONS, part
from tests.states import replica

pytestmark = pytest.mark.multiprocess


def shared(key: str, value: float) -> ShardedTensor:
    return replica(value, 50, 7, key=key, rank=dist.get_rank())


def data_of(entity: ShardedTensor) -> torch.Tensor:
    assert entity.data is not None
    return entity.data


def save_the_same_again(root: Path) -> None:
    with (
        mock.patch.object(saver, "fill", wraps=saver.fill) as filled,  # after ranks have agreed
        Checkpointer(root, async_save=True, save_options=OPTIONS) as checkpointer,
    ):
        for step in (1, 2, 3):
            state: dict[str, Any] = {"w": part(float(step)), "n": step, "s": shared("s", float(step))}
            checkpointer.save(step, state)
            state["w"].data.zero_()
            checkpointer.wait()
            loaded = checkpointer.load({"w": part(0.0), "s": shared("s", 0.0)})
            assert torch.equal(loaded["w"], data_of(part(float(step))))
            assert torch.equal(loaded["s"], data_of(shared("s", float(step))))
            assert loaded["n"] == step
        assert filled.call_count == 1  # of the first save, which found no plan and no memory


def test_a_state_whose_structure_is_that_of_an_earlier_save_is_copied_once(
    rank_pool: RankPool, tmp_path: Path
) -> None:
    rank_pool.run(save_the_same_again, 2, tmp_path)


def save_what_another_rank_has_changed(root: Path) -> None:
    def state(value: float, keys: str) -> dict[str, ShardedTensor]:
        return {key: shared(key, value + ord(key)) for key in keys}

    with Checkpointer(root, async_save=True, save_options=OPTIONS) as checkpointer:
        for step, of_1 in enumerate(("abcd", "ad", "abcd", "c", "ad"), 1):
            keys = (
                "abcd" if dist.get_rank() == 0 else of_1
            )  # rank 0 declares the same, and writes other parts
            checkpointer.save(step, state(float(step), keys))
            loaded = checkpointer.load(state(0.0, keys))
            for key in keys:
                assert torch.equal(loaded[key], data_of(shared(key, float(step + ord(key))))), (step, key)


def test_what_was_copied_on_a_wrong_guess_is_copied_anew(rank_pool: RankPool, tmp_path: Path) -> None:
    rank_pool.run(save_what_another_rank_has_changed, 2, tmp_path)


def meet_while_something_else_goes_on() -> None:
    group, rank = world_group(timeout_s=60), dist.get_rank()
    seen: list[int] = []

    def fail() -> Numbers:
        if rank == 1:
            raise StorageError("no room")
        return Numbers((1,), (rank,))

    for _ in range(2):
        found = run_and_compare(
            group,
            lambda: Numbers((1,), (rank,)),
            equal=1,
            largest=1,
            doing="meeting",
            meanwhile=lambda: seen.append(rank),
        )
        assert found == Numbers((1,), (2,))
    with pytest.raises(ZeroDivisionError) if rank == 0 else nullcontext():  # and it meets the others
        run_and_compare(
            group, lambda: Numbers(()), equal=0, doing="meeting", meanwhile=lambda: seen.append(1 // rank)
        )
    before = len(seen)
    with pytest.raises(StorageError, match="Rank 1 failed while meeting: no room"):
        run_and_compare(group, fail, equal=1, largest=1, doing="meeting", meanwhile=lambda: seen.append(rank))
    assert len(seen) - before == int(rank != 1)


def test_ranks_meet_whatever_becomes_of_what_they_do_meanwhile(rank_pool: RankPool) -> None:
    rank_pool.run(meet_while_something_else_goes_on, 3)
