"""Asynchronous saves by Megatron-Core's names: requests, a queue, and what is done after each."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megackpt import CheckpointError, RankFailedError
from megackpt.compat.megatron import dist_checkpointing
from megackpt.compat.megatron.dist_checkpointing.strategies.async_utils import AsyncCallsQueue, AsyncRequest
from megackpt.compat.megatron.dist_checkpointing.strategies.fully_parallel import (
    FullyParallelSaveStrategyWrapper,
)
from megackpt.compat.megatron.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
from megackpt.testing.ranks import RankPool
from tests.support.states import filled


def state(value: float) -> dict[str, Any]:
    """A state in which ranks disagree about common state, as Megatron's optimizers make them."""
    rank, size = dist.get_rank(), dist.get_world_size()
    shard = filled(value, 8, rank=rank, ranks=size)
    return {"w": shard, "iteration": int(value), "stage": rank}


def check(path: Path, value: float) -> None:
    loaded = dist_checkpointing.load({"w": state(-1.0)["w"]}, str(path))
    assert torch.equal(loaded["w"], torch.full((8,), value))
    assert loaded["iteration"] == int(value)
    assert loaded["stage"] == 0


def train_and_save(root: Path) -> None:
    queue = AsyncCallsQueue(persistent=True)
    done: list[int] = []
    wrapped = FullyParallelSaveStrategyWrapper(TorchDistSaveShardedStrategy("torch_dist", 1))
    for number, strategy in enumerate([None, wrapped, ("megackpt", 1)]):
        path = root / f"iter_{number}"
        path.mkdir(exist_ok=True)
        saved = state(float(number))
        request = dist_checkpointing.save(saved, str(path), strategy, async_sharded_save=True)
        request.add_finalize_fn(lambda number=number: done.append(number))
        assert queue.schedule_async_request(request) == number
        saved["w"].data.fill_(-1)  # training goes on
    assert queue.get_num_unfinalized_calls() == 3 - len(done)
    ended = queue.maybe_finalize_async_calls(blocking=False)
    ended += queue.maybe_finalize_async_calls(blocking=True)
    assert ended == done == [0, 1, 2]
    assert queue.get_num_unfinalized_calls() == 0
    queue.close()
    for number in range(3):
        check(root / f"iter_{number}", float(number))


def execute_at_once(path: Path) -> None:
    request = dist_checkpointing.save(state(4.0), str(path), async_sharded_save=True)
    assert not dist_checkpointing.check_is_distributed_checkpoint(str(path))
    request.execute_sync()
    check(path, 4.0)


def fail_on_one_rank(root: Path) -> None:
    """One rank's own function fails; then a save into a place where a file is in the way."""
    queue = AsyncCallsQueue()

    def work(value: int) -> None:
        if dist.get_rank() == 1:
            raise ValueError("the user's own mistake")

    queue.schedule_async_request(AsyncRequest(work, (1,), [lambda: pytest.fail("not after a failure")]))
    with pytest.raises(RankFailedError, match=r"Rank 1 failed while .* the user's own mistake"):
        queue.maybe_finalize_async_calls(blocking=True)
    assert queue.get_num_unfinalized_calls() == 0
    request = dist_checkpointing.save(state(1.0), str(root / "file" / "iter_1"), async_sharded_save=True)
    request.add_finalize_fn(lambda: pytest.fail("not after a failure"))
    queue.schedule_async_request(request)
    with pytest.raises(CheckpointError, match="file"):
        queue.maybe_finalize_async_calls(blocking=True)
    request = dist_checkpointing.save(state(2.0), str(root / "iter_2"), async_sharded_save=True)
    queue.schedule_async_request(request)
    queue.maybe_finalize_async_calls(blocking=True)
    meet_a_failure_in_the_next_request(queue, root)
    queue.close()
    check(root / "iter_2", 2.0)


def meet_a_failure_in_the_next_request(queue: AsyncCallsQueue, root: Path) -> None:
    failing = dist_checkpointing.save(state(3.0), str(root / "file" / "iter_3"), async_sharded_save=True)
    failing.add_finalize_fn(lambda: pytest.fail("not after a failure"))
    queue.schedule_async_request(failing)
    request = dist_checkpointing.save(state(4.0), str(root / "iter_4"), async_sharded_save=True)
    with pytest.raises(CheckpointError, match="file"):
        queue.schedule_async_request(request)
    assert queue.get_num_unfinalized_calls() == 0
    number = queue.schedule_async_request(request)
    assert queue.maybe_finalize_async_calls(blocking=True) == [number]
    check(root / "iter_4", 4.0)


def test_a_queue_saves_while_training_goes_on_and_finalizes_in_order(
    rank_pool: RankPool, tmp_path: Path
) -> None:
    rank_pool.run(train_and_save, 2, tmp_path)


def test_a_request_can_be_executed_at_once(rank_pool: RankPool, tmp_path: Path) -> None:
    rank_pool.run(execute_at_once, 2, tmp_path / "iter_4")


def test_a_failure_is_raised_on_all_ranks_and_the_queue_goes_on(rank_pool: RankPool, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    rank_pool.run(fail_on_one_rank, 2, tmp_path)


def test_other_functions_are_called_in_a_thread_in_order() -> None:
    queue = AsyncCallsQueue()
    messages: list[Any] = []
    go = threading.Event()

    def work(first: str, staged: str, *, last: str) -> None:
        assert go.wait(60)
        messages.append((first, staged, last))

    request = AsyncRequest(work, ("a", None), [lambda: messages.append("end")], {"last": "c"}, lambda: "b")
    assert queue.schedule_async_request(request) == 0
    assert queue.schedule_async_request(AsyncRequest(None, (), [])) == 1
    assert queue.maybe_finalize_async_calls() == []
    assert queue.get_num_unfinalized_calls() == 2
    go.set()
    assert queue.maybe_finalize_async_calls(blocking=True, no_dist=True) == [0, 1]
    assert messages == [("a", "b", "c"), "end"]
    queue.close()
