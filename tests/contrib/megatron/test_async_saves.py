"""Asynchronous saves by Megatron-Core's names: requests, a queue, and what is done after each."""

from __future__ import annotations

import gc
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from megackpt import CheckpointError, DeclarationError, RankFailedError
from megackpt.contrib.megatron import dist_checkpointing
from megackpt.contrib.megatron.dist_checkpointing.strategies import async_utils, fully_parallel, nvrx
from megackpt.contrib.megatron.dist_checkpointing.strategies import torch as torch_dist
from megackpt.contrib.megatron.dist_checkpointing.strategies.async_utils import AsyncCallsQueue, AsyncRequest
from megackpt.testing.ranks import RankPool
from tests.contrib.megatron.small_state import small_state
from tests.contrib.megatron.test_installing import run_python
from tests.support.dcp_alone import ALONE
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
    wrapped = fully_parallel.FullyParallelSaveStrategyWrapper(
        torch_dist.TorchDistSaveShardedStrategy("torch_dist", 1)
    )
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


def execute_at_once(root: Path) -> None:
    path = root / "iter_4"
    request = dist_checkpointing.save(state(4.0), str(path), async_sharded_save=True)
    assert not dist_checkpointing.check_is_distributed_checkpoint(str(path))
    request.execute_sync()
    check(path, 4.0)


def fail_on_one_rank(root: Path) -> None:
    """One rank's own function fails; then a save into a place where a file is in the way."""
    (root / "file").write_text("in the way")
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


@pytest.mark.parametrize("on_ranks", [train_and_save, execute_at_once, fail_on_one_rank])
def test_saves_later_and_at_once_and_failures_on_all_ranks(
    on_ranks: Any, rank_pool: RankPool, tmp_path: Path
) -> None:
    rank_pool.run(on_ranks, 2, tmp_path)


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


def test_an_async_request_is_plain_data_that_can_be_executed_at_once() -> None:
    done: list[Any] = []
    request = AsyncRequest(lambda *a, **k: done.append((a, k)), (1, 2, 3), [], {"k": 4}, lambda: "staged")
    request.add_finalize_fn(lambda: done.append("end"))
    request.execute_sync()
    assert done == [((1, "staged", 3), {"k": 4}), "end"]
    with pytest.raises(ValueError, match="takes no more finalize functions"):
        request.freeze().add_finalize_fn(print)
    queue = AsyncCallsQueue(persistent=True)
    assert queue.maybe_finalize_async_calls(blocking=True) == []
    assert queue.get_num_unfinalized_calls() == 0
    queue.close()


@pytest.mark.filterwarnings("ignore:torch.distributed is (disabled|unavailable)")
@pytest.mark.parametrize("strategy", ["nvrx", "mcore"])
def test_an_asynchronous_save_by_the_classes_of_get_async_strategy(tmp_path: Path, strategy: str) -> None:
    path = str(tmp_path / "iter_1")
    name, modules = torch_dist.get_async_strategy(strategy)
    assert name == "mcore"
    assert torch_dist.get_async_strategy(strategy, "AsyncRequest")[1] is AsyncRequest
    modules["AsyncCallsQueue"].warmup_persistent_caller(0, cpu_priority=10, io_priority=3, mp_mode="spawn")
    assert modules["get_write_results_queue"](mp_mode="fork") is modules["_results_queue"] is None
    queue = modules["AsyncCallsQueue"](persistent=True)
    writer = torch_dist.TorchDistSaveShardedStrategy(cpu_shm_mode=True)
    assert (writer.backend, writer.version) == ("torch_dist", 1)
    done: list[int] = []
    request = dist_checkpointing.save(
        small_state(), path, writer, async_sharded_save=True, async_strategy=strategy
    )
    assert request is not None
    request.add_finalize_fn(lambda: done.append(1))
    queue.schedule_async_request(request)
    queue.maybe_finalize_async_calls(blocking=True)
    queue.close()
    assert done == [1]
    reader = modules["CachedMetadataFileSystemReader"](path)
    assert "w" in reader.read_metadata().state_dict_metadata
    assert reader.read_metadata() is modules["CachedMetadataFileSystemReader"](path).read_metadata()
    modules["CachedMetadataFileSystemReader"].clear_metadata_cache()
    whole = {"w": torch.zeros(2, 3)}
    torch.distributed.checkpoint.load(whole, storage_reader=reader, **ALONE)
    assert whole["w"].tolist() == [[1.0] * 3] * 2
    with pytest.raises(DeclarationError, match="async_strategy='pigeons' is not known"):
        torch_dist.get_async_strategy("pigeons")


def test_requests_and_priorities_by_newer_names() -> None:
    assert nvrx.has_nvrx_async_support()
    request = nvrx.make_nvrx_async_request(AsyncRequest, print, (1,), [], preload_fn=None)
    assert (request.async_fn_args, request.async_fn_kwargs) == ((1,), {})
    assert not nvrx.is_nvrx_min_version("99.0.0")
    assert gc.isenabled()
    with async_utils._disable_gc():
        assert not gc.isenabled()
    assert gc.isenabled()
    done = run_python(
        "import os; from megackpt.contrib.megatron.dist_checkpointing.strategies import async_utils\n"
        "before = os.nice(0); async_utils._set_process_qos(before + 3, 3); assert os.nice(0) == before + 3\n"
        "async_utils._set_process_qos(0, None); assert os.nice(0) == before + 3"
    )
    assert done.returncode == 0, done.stderr


def _save_dcp_later(path: str, breaks: bool) -> str:
    rank = dist.get_rank()
    _, modules = torch_dist.get_async_strategy("nvrx")
    state = {"mine": {f"w{rank}": torch.full((3,), float(rank))}, "step": 7}
    writer = modules["FileSystemWriterAsync"](path, thread_count=2, use_msc=False)
    planned = modules["save_state_dict_async_plan"](state, writer, None, 0, planner=None, enable_cache=True)
    function, preload, arguments = writer.get_save_function_and_args()
    request = nvrx.make_nvrx_async_request(
        modules["AsyncRequest"],
        function,
        arguments,
        [lambda: modules["save_state_dict_async_finalize"](*planned)],
        preload_fn=preload,
    )
    state["mine"][f"w{rank}"].zero_()
    if breaks and rank == 1:
        for number in range(2):
            Path(path, f"__1_{number}.distcp").mkdir()
    queue = modules["AsyncCallsQueue"]()
    queue.schedule_async_request(request)
    try:
        queue.close()
    except CheckpointException as error:
        return f"ranks {sorted(error.failures)}"
    return "saved"


@pytest.mark.filterwarnings("ignore:torch.distributed is (disabled|unavailable)")
def test_torch_s_own_format_is_saved_in_stages_as_megatron_does_for_fsdp(
    rank_pool: RankPool, tmp_path: Path
) -> None:
    path = tmp_path / "iter_1"
    assert rank_pool.run(_save_dcp_later, 2, str(path), False) == ["saved", "saved"]
    assert not dist_checkpointing.check_is_distributed_checkpoint(str(path))
    whole = {"mine": {"w0": torch.ones(3), "w1": torch.zeros(3)}, "step": 0}
    torch.distributed.checkpoint.load(whole, checkpoint_id=path, **ALONE)
    assert [tensor.tolist() for tensor in whole["mine"].values()] == [[0.0] * 3, [1.0] * 3]
    assert whole["step"] == 7
    broken = tmp_path / "iter_2"
    broken.mkdir()
    assert rank_pool.run(_save_dcp_later, 2, str(broken), True) == ["ranks [1]"] * 2
    assert not (broken / ".metadata").exists()
    writer = torch_dist.get_async_strategy("mcore", "FileSystemWriterAsync")[1](tmp_path / "x")
    with pytest.raises(DeclarationError, match="Nothing was written"):
        writer.retrieve_write_results()
