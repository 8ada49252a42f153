"""torch.distributed.checkpoint over megackpt: saves in the background."""

from __future__ import annotations

from multiprocessing import get_context
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

import megackpt
from megackpt.integrations.dcp import (
    MegackptSavePlanner,
    MegackptStorageWriter,
)
from megackpt.testing.ranks import RankPool
from tests.contrib.torch.worlds import six_sharded


def _save_in_background(root: str) -> list[tuple[list[float], int, list[float]]]:
    results = []
    for by in ("stock", "own"):
        planner = DefaultSavePlanner() if by == "stock" else MegackptSavePlanner()
        state, entity = six_sharded(1.0), torch.full((2,), 1.0)
        if by == "own":
            state["e"] = megackpt.ShardedTensor.from_rank_offsets(
                "e", entity, (0, dist.get_rank(), dist.get_world_size())
            )
        writer = MegackptStorageWriter(f"{root}/{by}")
        future = dcp.async_save(state, storage_writer=writer, planner=planner)
        with torch.no_grad():
            state["w"].to_local().zero_()  # training goes on
        entity.zero_()
        future.result()
        asked = megackpt.ShardedTensor.from_rank_offsets(
            "e", torch.full((2,), 1.0), (0, dist.get_rank(), dist.get_world_size())
        )
        loaded = megackpt.load({**six_sharded(0.0), **({"e": asked} if by == "own" else {})}, f"{root}/{by}")
        results.append((loaded["w"].full_tensor().tolist(), loaded["epoch"], asked.data.tolist()))
    return results


def test_a_save_in_the_background_stores_the_state_at_the_call(rank_pool: RankPool, tmp_path: Path) -> None:
    assert rank_pool.run(_save_in_background, 2, str(tmp_path)) == [[([1.0] * 6, 1, [1.0, 1.0])] * 2] * 2


def _fail_in_background(path: str) -> None:
    state = {**six_sharded(), "code": object()}
    future = dcp.async_save(state, storage_writer=MegackptStorageWriter(path))
    future.result()


def test_a_save_that_fails_in_the_background_raises_when_asked_for(
    rank_pool: RankPool, tmp_path: Path
) -> None:
    for outcome in rank_pool.outcomes(_fail_in_background, 2, str(tmp_path / "step")):
        assert isinstance(outcome.error, CheckpointException)
        assert "code: A value of type object has no codec" in str(outcome.error)
    assert not megackpt.check_is_distributed_checkpoint(tmp_path / "step")


def _save_from_another_process(path: str, rendezvous: str) -> None:
    """Runs in a process of its own: those of the pool must not have children."""
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=0, world_size=1)
    state = six_sharded(1.0)
    future = dcp.async_save(
        state,
        storage_writer=MegackptStorageWriter(path),
        planner=MegackptSavePlanner(),
        async_checkpointer_type=state_dict_saver.AsyncCheckpointerType.PROCESS,
    )
    state["w"].to_local().zero_()
    future.result()
    dist.destroy_process_group()


@pytest.mark.skipif(
    not hasattr(state_dict_saver, "AsyncCheckpointerType"), reason="this torch saves in threads only"
)
def test_a_save_in_a_process_of_its_own_stores_the_state_at_the_call(tmp_path: Path) -> None:
    path = str(tmp_path / "step")
    process = get_context("spawn").Process(
        target=_save_from_another_process, args=(path, str(tmp_path / "store"))
    )
    process.start()
    process.join(timeout=120)
    assert process.exitcode == 0
    assert torch.equal(megackpt.load_plain_tensors(path)["w"], torch.ones(6))
