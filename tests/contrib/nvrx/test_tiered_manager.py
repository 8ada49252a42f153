"""Megatron-LM's local checkpoints in tiers: saved, found and loaded as its checkpointing module does."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megackpt import Checkpointer, MemoryTier, SaveOptions, Tiers
from megackpt.compat.megatron.dist_checkpointing import mapping
from megackpt.compat.megatron.dist_checkpointing.strategies.async_utils import AsyncCallsQueue
from megackpt.compat.megatron.dist_checkpointing.tensor_aware_state_dict import MCoreTensorAwareStateDict
from megackpt.errors import DeclarationError, NotACheckpointError
from megackpt.integrations.megatron_lm import TieredCheckpointManager
from megackpt.testing.ranks import RankPool
from tests.contrib.megatron.small_state import small_state
from tests.support.effort import with_all

S = mapping.ShardedTensor
TO_ROOT = 2  # multiples of this iteration go to the root, too


def _manager(base: Path, *, async_save: bool = False) -> TieredCheckpointManager:
    rank = dist.get_rank() if dist.is_initialized() else 0
    checkpointer = Checkpointer(
        base / "root",
        tiers=Tiers([MemoryTier(base / "node-{node}")], root_every=TO_ROOT, node=rank),
        async_save=async_save,
        save_options=SaveOptions(plain_tensors="common"),
    )
    return TieredCheckpointManager(checkpointer)


def _state(iteration: int) -> dict[str, Any]:
    """Rows of a weight, a replica, and common state with a tensor as a gradient scaler's."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    weight = (torch.arange(24.0).reshape(8, 3) + 100 * iteration).chunk(ranks)[rank].clone()
    return {
        "w": S.from_rank_offsets("w", weight, (0, rank, ranks)),
        "same": S.from_rank_offsets("same", torch.full((3,), float(iteration)), replica_id=rank),
        "scaler": {"scale": torch.tensor(float(iteration))},
        "iteration": iteration,
    }


def _train(base: str, is_async: bool) -> list[int]:
    """Save iterations 1 to 3 as Megatron-LM does; the state changes as soon as a save is scheduled."""
    manager, queue, finalized = _manager(Path(base), async_save=is_async), AsyncCallsQueue(), []
    assert manager.find_latest() == -1
    for iteration in (1, 2, 3):
        state = _state(iteration)
        kept, _ = MCoreTensorAwareStateDict.from_state_dict(state, "fully_parallel")
        request = manager.save(kept, iteration, is_async=is_async)
        assert (request is not None) == is_async
        if request is not None:
            request.add_finalize_fn(lambda iteration=iteration: finalized.append(iteration))
            queue.schedule_async_request(request)
            state["w"].data.zero_()
            queue.maybe_finalize_async_calls(blocking=iteration == 3)
    queue.close()
    assert manager.find_latest() == 3
    manager.checkpointer.close()
    return finalized


def _resume(base: str) -> int:
    """Load as Megatron-LM does: common state first, then everything; return the iteration."""
    manager = _manager(Path(base))
    latest = manager.find_latest()
    stored, identity = manager.load()
    assert identity == (latest, dist.get_rank(), "")
    assert stored.to_state_dict(None)["iteration"] == latest
    expected = _state(latest)
    request = {key: value for key, value in _state(0).items() if key in ("w", "same")}
    loaded = stored.to_state_dict(request, algo="fully_parallel", parallelization_group=dist.group.WORLD)
    for key in request:
        assert torch.equal(loaded[key], expected[key].data), key
    assert (loaded["scaler"], loaded["iteration"]) == (expected["scaler"], latest)
    return latest


@with_all("the other tests have one process")
@pytest.mark.parametrize("is_async", [False, True])
def test_steps_are_saved_found_and_loaded_at_other_layouts_also_without_the_tiers(
    rank_pool: RankPool, tmp_path: Path, is_async: bool
) -> None:
    finalized = rank_pool.run(_train, 2, str(tmp_path), is_async)
    assert finalized == [[1, 2, 3] if is_async else []] * 2
    assert rank_pool.run(_resume, 2, str(tmp_path)) == [3, 3]
    shutil.rmtree(tmp_path / "node-0")  # a node is lost; the other one has a copy of its bytes
    assert rank_pool.run(_resume, 2, str(tmp_path)) == [3, 3]
    assert rank_pool.run(_resume, 4, str(tmp_path)) == [3] * 4
    for directory in tmp_path.glob("node-*"):
        shutil.rmtree(directory)
    assert rank_pool.run(_resume, 4, str(tmp_path)) == [2] * 4


def test_factories_and_objects_come_back(tmp_path: Path) -> None:
    manager = _manager(tmp_path)
    with pytest.raises(NotACheckpointError, match="no iteration is complete"):
        manager.load()
    assert manager.local_ckpt_dir == str(tmp_path / "node-{node}")
    manager.save(MCoreTensorAwareStateDict.from_state_dict(small_state())[0], 5)
    loaded = manager.load()[0].to_state_dict(small_state(0.0))
    assert loaded["model"]["w"].tolist() == [[1.0] * 3] * 2
    assert loaded["model"]["fused"].tolist() == [1.0, 1.0, 2.0, 2.0]
    assert (loaded["model"]["extra"], loaded["step"], loaded["local"]) == ({"seen": 1.0}, 7, "mine")


def test_what_cannot_be_saved_is_an_error(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(DeclarationError, match="plain_tensors='common'"):
        TieredCheckpointManager(Checkpointer(tmp_path))
    manager = _manager(tmp_path)
    kept, _ = MCoreTensorAwareStateDict.from_state_dict(small_state())
    with pytest.raises(DeclarationError, match="async_save=True"):
        manager.save(kept, 1, is_async=True)
    with pytest.raises(DeclarationError, match="a MCoreTensorAwareStateDict of megackpt"):
        manager.save(small_state(), 1)  # type: ignore[arg-type]
    tiers = Tiers([MemoryTier(tmp_path / "tier", every=10)], root_every=10)
    options = SaveOptions(plain_tensors="common")
    rarely = TieredCheckpointManager(Checkpointer(tmp_path / "rare", tiers=tiers, save_options=options))
    rarely.save(kept, 1)
    assert "Iteration 1 is not saved" in caplog.text
    assert rarely.find_latest() == -1
