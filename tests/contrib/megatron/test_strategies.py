"""Strategies by Megatron-Core's names: what they save and load, and what is not supported."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint

import megackpt
from megackpt.compat.megatron import dist_checkpointing
from megackpt.compat.megatron.dist_checkpointing import (
    core,
    exchange_utils,
    mapping,
    serialization,
)
from megackpt.compat.megatron.dist_checkpointing.strategies import (
    async_utils,
    base,
    fully_parallel,
    tensorstore,
    two_stage,
    zarr,
)
from megackpt.compat.megatron.dist_checkpointing.strategies import torch as torch_dist
from megackpt.errors import UnsupportedError
from megackpt.testing.ranks import RankPool
from tests.contrib.megatron.small_state import small_state

S, F = mapping.ShardedTensor, mapping.ShardedTensorFactory


def test_the_training_loop_s_strategies_save_and_load(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = str(tmp_path / "iter_1")
    with caplog.at_level(logging.WARNING):
        strategy = serialization.get_default_save_sharded_strategy("torch_dist", 1)
    assert isinstance(strategy, torch_dist.TorchDistSaveShardedStrategy)
    assert (strategy.backend, strategy.version, caplog.text) == ("torch_dist", 1, "")
    wrapped = fully_parallel.FullyParallelSaveStrategyWrapper(strategy, None, True)
    assert (wrapped.backend, wrapped.can_handle_sharded_objects) == (strategy.backend, True)
    dist_checkpointing.save(small_state(), path, wrapped)
    assert json.loads((tmp_path / "iter_1" / "metadata.json").read_text())["sharded_backend"] == "torch_dist"
    assert (tmp_path / "iter_1" / ".metadata").exists(), "in the format that was asked for"
    reader = serialization.get_default_load_sharded_strategy(path)
    reader = fully_parallel.FullyParallelLoadStrategyWrapper(reader, None, exchange_algo="gather_rounds")
    assert dist_checkpointing.load(small_state(0.0), path, reader)["model"]["w"].tolist() == [[1.0] * 3] * 2
    assert reader.load(small_state(0.0), path)["step"] == 7
    assert set(reader.load_tensors_metadata(path)) == {"w", "fused.0", "fused.1"}
    wrapped.save(small_state(5.0), path)
    assert dist_checkpointing.load(small_state(), path)["model"]["w"].tolist() == [[5.0] * 3] * 2
    with pytest.raises(ValueError, match="exchange_algo='pigeons' is not known"):
        fully_parallel.FullyParallelLoadStrategyWrapper(reader.base_strategy, exchange_algo="pigeons")


def test_a_format_that_does_not_exist_raises_an_error() -> None:
    with pytest.raises(megackpt.CheckpointingException, match="No strategy saves format"):
        serialization.get_default_save_sharded_strategy("parchment", 1)
    with pytest.raises(megackpt.CheckpointingException, match="no load_common strategy"):
        base.get_default_strategy(base.StrategyAction.LOAD_COMMON, "parchment", 1)


def test_a_registered_strategy_stands_before_our_own() -> None:
    native = serialization.get_default_save_sharded_strategy("megackpt", 1)
    base.register_default_strategy(base.StrategyAction.SAVE_SHARDED, "mine", 1, native)
    try:
        assert serialization.get_default_save_sharded_strategy("mine", 1) is native
    finally:
        base.default_strategies["save_sharded"].clear()


def test_what_is_not_offered_reports_why_and_what_to_use(tmp_path: Path) -> None:
    path = str(tmp_path / "iter_1")
    unsupported_name: list[tuple[str, Any]] = [
        ("Use AsyncCallsQueue", lambda: async_utils.TemporalAsyncCaller()),
        ("tensorstore takes", lambda: zarr.flatten_range(None, None)),
        ("LoadOptions\\(exchange", lambda: exchange_utils.exchange_by_distribution({}, {}, None)),
        ("save\\(\\) writes it", lambda: core.save_config(core.CheckpointingConfig("megackpt"), path)),
        ("never handed there", lambda: torch_dist.MCoreSavePlanner.create_local_plan),
    ]
    for text, call in unsupported_name:
        with pytest.raises(UnsupportedError, match=text) as caught:
            call()
        assert isinstance(caught.value, NotImplementedError)
        assert isinstance(caught.value, megackpt.CheckpointingException)
    assert not (tmp_path / "iter_1").exists(), "nothing may be written before an error"


@pytest.mark.parametrize(
    "strategy",
    [
        lambda: zarr.ZarrSaveShardedStrategy("zarr", 1),
        lambda: zarr.ZarrSaveShardedStrategy("zarr", 3),
        lambda: torch_dist.TorchDistSaveShardedStrategy("torch_dist", 1, thread_count=3),
        lambda: ("torch_dist", 1),
        lambda: ("zarr", 1),
    ],
)
def test_strategies_of_megatrons_names_save_their_format(tmp_path: Path, strategy: Any) -> None:
    path = tmp_path / "iter_1"
    path.mkdir()
    chosen = strategy()
    dist_checkpointing.save(small_state(), str(path), chosen)
    manifest = json.loads((path / "metadata.json").read_text())
    named = chosen if isinstance(chosen, tuple) else (chosen.backend, chosen.version)
    assert (manifest["sharded_backend"], manifest["sharded_backend_version"]) == named
    loaded = dist_checkpointing.load(small_state(), str(path), tensorstore.TensorStoreLoadShardedStrategy())
    assert set(loaded) == set(small_state())


def _data_files(path: Path) -> dict[str, set[str]]:
    """Return the keys in each data file, as torch.distributed.checkpoint lists them."""
    metadata = torch.distributed.checkpoint.FileSystemReader(path).read_metadata()
    names_of: dict[str, set[str]] = {}
    for index, info in metadata.storage_data.items():
        names_of.setdefault(info.relative_path, set()).add(index.fqn)
    return names_of


@pytest.mark.parametrize("is_wrapped", [False, True])
def test_attributes_of_a_default_strategy_take_effect_when_they_are_set(
    tmp_path: Path, is_wrapped: bool
) -> None:
    strategy: Any = serialization.get_default_save_sharded_strategy("torch_dist")
    saver = fully_parallel.FullyParallelSaveStrategyWrapper(strategy) if is_wrapped else strategy
    state = {f"{part}.{i}": torch.full((64,), i) for part in ("model", "optimizer") for i in range(4)}
    state = {key: S.from_rank_offsets(key, tensor) for key, tensor in state.items()}

    def files(name: str) -> list[set[str]]:
        dist_checkpointing.save(state, str(tmp_path / name), saver)
        return list(_data_files(tmp_path / name).values())

    assert len(files("default")) == 2
    strategy.thread_count = 1
    assert len(files("one")) == 1
    strategy.thread_count = 4
    assert len(files("four")) == 4
    strategy.separation_hint = "optimizer"
    prefixes = [{key.split(".")[0] for key in keys} for keys in files("apart")]
    assert sorted(map(sorted, prefixes)) == [["model"]] * 2 + [["optimizer"]] * 2
    strategy.use_cached_ckpt_structure = True
    files("planned")
    files("planned_again")
    assert strategy.save_arguments["plans"].hits == 1
    strategy.thread_count = 0
    with pytest.raises(megackpt.CheckpointingException, match="thread_count is 0"):
        files("none")
    assert not (tmp_path / "none").exists()


def test_a_setting_that_a_strategy_lacks_raises_an_error() -> None:
    strategy = serialization.get_default_save_sharded_strategy("torch_dist")
    with pytest.raises(AttributeError, match=r"no setting 'threads', .* separation_hint, thread_count, use_"):
        strategy.threads = 3  # type: ignore[attr-defined]
    native = serialization.get_default_save_sharded_strategy("megackpt")
    with pytest.raises(AttributeError, match=r"no setting 'thread_count'.* use_cached_ckpt_structure"):
        native.thread_count = 3  # type: ignore[attr-defined]
    wrapped = fully_parallel.FullyParallelSaveStrategyWrapper(strategy)
    with pytest.raises(AttributeError, match=r"no setting 'thread_count'.* base_strategy"):
        wrapped.thread_count = 3  # type: ignore[attr-defined]
    reader = torch_dist.TorchDistLoadShardedStrategy()
    with pytest.raises(AttributeError, match="no setting 'threads'"):
        reader.threads = 3  # type: ignore[attr-defined]
    loading = fully_parallel.FullyParallelLoadStrategyWrapper(reader)
    with pytest.raises(ValueError, match="exchange_algo='pigeons' is not known"):
        loading.exchange_algo = "pigeons"

    class Mine(torch_dist.TorchDistSaveShardedStrategy):
        pass

    own_strategy = Mine("torch_dist", 1)
    own_strategy.anything = 3  # type: ignore[attr-defined]  # a user's class may have attributes of its own
    for wrong in [("megackpt", 1), ("torch_dist", 2)]:
        with pytest.raises(megackpt.CheckpointingException, match="saves format"):
            torch_dist.TorchDistSaveShardedStrategy(*wrong)
    with pytest.raises(megackpt.CheckpointingException, match="needs two files"):
        torch_dist.TorchDistSaveShardedStrategy("torch_dist", 1, thread_count=1, separation_hint="o")


def _save_as_megatron_does(root: Path) -> list[list[int]]:
    """Save twice with a constant structure; then without a wrapper, from main replicas and from any."""
    dist = torch.distributed
    state = {
        str(i): S.from_rank_offsets(f"w{i}", torch.full((64, 64), float(i)), replica_id=dist.get_rank())
        for i in range(8)
    }
    strategy: Any = serialization.get_default_save_sharded_strategy("torch_dist")
    strategy.use_cached_ckpt_structure = True
    strategy.thread_count = 1
    strategy.cached_global_metadata = None
    wrapped = fully_parallel.FullyParallelSaveStrategyWrapper(strategy, dist.group.WORLD, True)
    written = []
    for number, chosen in enumerate([wrapped, wrapped, strategy, strategy]):
        if number == 3:
            strategy.keep_only_main_replica = False
        path = root / f"iter_{number}"
        is_first = number in (0, 2, 3)
        dist_checkpointing.save(state, str(path), chosen, validate_access_integrity=is_first)
        loaded = dist_checkpointing.load({k: e.without_data() for k, e in state.items()}, str(path))
        assert all(torch.equal(loaded[key], e.data) for key, e in state.items())
        written.append(sorted(int(name.split("_")[2]) for name in _data_files(path)))
    assert strategy.save_arguments["plans"].hits == 1
    return written


def test_a_constant_structure_is_planned_once_and_spread_each_time(
    rank_pool: RankPool, tmp_path: Path
) -> None:
    for written in rank_pool.run(_save_as_megatron_does, 2, tmp_path):
        assert written == [[0, 1], [0, 1], [0], [0, 1]]


def test_an_unsupported_class_can_be_named_and_subclassed() -> None:
    class Planner(torch_dist.MCoreSavePlanner):  # type: ignore[misc]
        pass

    with pytest.raises(UnsupportedError, match="Planner of Megatron-Core is not offered"):
        Planner()
    assert not hasattr(Planner, "__wrapped__")


def test_an_async_request_is_plain_data_that_can_be_executed_at_once() -> None:
    done: list[Any] = []
    request = async_utils.AsyncRequest(
        lambda *a, **k: done.append((a, k)), (1, 2, 3), [], {"k": 4}, lambda: "staged"
    )
    request.add_finalize_fn(lambda: done.append("end"))
    request.execute_sync()
    assert done == [((1, "staged", 3), {"k": 4}), "end"]
    with pytest.raises(ValueError, match="takes no more finalize functions"):
        request.freeze().add_finalize_fn(print)
    queue = async_utils.AsyncCallsQueue(persistent=True)
    assert queue.maybe_finalize_async_calls(blocking=True) == []
    assert queue.get_num_unfinalized_calls() == 0
    queue.close()


def test_shards_are_distributed_evenly_over_those_who_hold_them() -> None:
    owned = {f"s{i}": [0, 1, 2] for i in range(30)} | {"only": [2]}
    size = {shard: 10 for shard in owned} | {"only": 100}
    chosen = exchange_utils.distribute_shards_to_ranks(owned, size, 3)
    assert fully_parallel.distribute_shards_to_ranks is exchange_utils.distribute_shards_to_ranks
    load = [sum(size[s] for s, rank in chosen.items() if rank == r) for r in range(3)]
    assert chosen["only"] == 2
    assert max(load) - min(load) <= 10
    with pytest.raises(ValueError, match="'lost' is held by no rank"):
        exchange_utils.distribute_shards_to_ranks({"lost": []}, {"lost": 1}, 1)


def _replicas() -> tuple[dict[str, Any], Any]:
    """Return state that data-parallel ranks 0 and 2, and 1 and 3, share, and this rank's group."""
    dist = torch.distributed
    groups = [dist.new_group([tp, tp + 2]) for tp in range(2)]
    tp, dp = dist.get_rank() % 2, dist.get_rank() // 2
    state: dict[str, Any] = {
        str(i): S.from_rank_offsets(f"w{i}", torch.full((256, 300), 1.0 + i + tp), (0, tp, 2), replica_id=dp)
        for i in range(8)
    }
    state["extra"] = mapping.ShardedObject("extra", {"tp": tp}, (2,), (tp,), replica_id=dp)
    return state, groups[tp]


def _save_and_load_fully_parallel(path: str, kind: str) -> dict[str, Any]:
    state, group = _replicas()
    writer = fully_parallel.FullyParallelSaveStrategyWrapper(
        serialization.get_default_save_sharded_strategy("megackpt", 1), group
    )
    dist_checkpointing.save(state, path, writer)
    wanted = {key: e.without_data() for key, e in state.items() if key != "extra"}
    wanted["extra"] = mapping.ShardedObject("extra", None, (2,), state["extra"].global_offset)
    reader: Any
    if kind == "two_stage":
        reader = two_stage.TwoStageDataParallelLoadShardedStrategy(group)
        reader.maybe_init_gloo_group()
    else:
        base_reader = serialization.get_default_load_sharded_strategy(path)
        reader = fully_parallel.FullyParallelLoadStrategyWrapper(base_reader, group, exchange_algo=kind)
    loaded = dist_checkpointing.load(wanted, path, reader)
    assert all(torch.equal(loaded[key], state[key].data) for key in state if key != "extra")
    assert loaded["extra"] == state["extra"].data
    if kind != "two_stage":
        return {}
    text: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: text.append(record.getMessage())  # type: ignore[method-assign]
    two_stage.logger.addHandler(handler)
    two_stage.logger.setLevel(logging.INFO)
    reader.summarize_load_times()
    two_stage.logger.removeHandler(handler)
    return {"log": text, "times": reader.times}


@pytest.mark.parametrize("kind", [*fully_parallel.EXCHANGE_ALGORITHMS, "two_stage"])
def test_fully_parallel_and_two_stage_strategies_save_and_load_within_their_group(
    rank_pool: RankPool, tmp_path: Path, kind: str
) -> None:
    manifest = rank_pool.run(_save_and_load_fully_parallel, 4, str(tmp_path / "c"), kind)
    written = sorted(f.stat().st_size for f in (tmp_path / "c" / "data").iterdir())
    assert len(written) == 4, "both replicas of a group write"
    assert written[-1] <= 1.05 * written[0]
    if kind == "two_stage":
        assert all(answer["times"] == manifest[0]["times"] for answer in manifest)
        assert manifest[0]["times"].read.max >= manifest[0]["times"].read.min == 0.0, "one of two ranks reads"
        assert manifest[0]["log"][0].startswith("two-stage load: read: min 0.000 s, mean ")
