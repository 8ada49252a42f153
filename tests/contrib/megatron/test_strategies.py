"""Strategies by Megatron-Core's names: what they save and load, what is not supported, and steps of loads."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint

import megackpt
from megackpt.contrib.megatron import dist_checkpointing
from megackpt.contrib.megatron.dist_checkpointing import core, exchange_utils, mapping, serialization
from megackpt.contrib.megatron.dist_checkpointing.dict_utils import nested_values
from megackpt.contrib.megatron.dist_checkpointing.strategies import (
    async_utils,
    base,
    fully_parallel,
    tensorstore,
    two_stage,
    zarr,
)
from megackpt.contrib.megatron.dist_checkpointing.strategies import torch as torch_dist
from megackpt.errors import CheckpointingException, UnsupportedError
from megackpt.storage import MemoryStore
from megackpt.testing.ranks import RankPool
from megackpt.testing.world import SimulatedWorld
from tests.contrib.megatron.small_state import lines_of, small_state

S = mapping.ShardedTensor
LOAD, CONFIG = base.StrategyAction.LOAD_COMMON, core.CheckpointingConfig("megackpt")
exchange = exchange_utils.exchange_by_distribution
Saver, Rejected = torch_dist.TorchDistSaveShardedStrategy, CheckpointingException


def test_the_training_loop_s_strategies_save_and_load(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = str(tmp_path / "iter_1")
    with caplog.at_level(logging.WARNING):
        strategy = serialization.get_default_save_sharded_strategy("torch_dist", 1)
    assert isinstance(strategy, Saver)
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


def default(backend: str = "torch_dist") -> Any:
    return serialization.get_default_save_sharded_strategy(backend)


def reader(**options: Any) -> Any:
    return fully_parallel.FullyParallelLoadStrategyWrapper(
        torch_dist.TorchDistLoadShardedStrategy(), **options
    )


class Planner(torch_dist.MCoreSavePlanner):  # type: ignore[misc]
    """A class that is not offered can be named, and be the base of another."""


@pytest.mark.parametrize(
    ("error", "text", "call"),
    [
        (Rejected, "No strategy saves format", lambda _: default("parchment")),
        (Rejected, "no load_common strategy", lambda _: base.get_default_strategy(LOAD, "parchment", 1)),
        (Rejected, "saves format", lambda _: Saver("megackpt", 1)),
        (Rejected, "saves format", lambda _: Saver("torch_dist", 2)),
        (Rejected, "it is only read", lambda _: zarr.ZarrSaveShardedStrategy("zarr", 1)),
        (Rejected, "it is only read", lambda _: serialization.get_default_save_sharded_strategy("zarr", 1)),
        (
            Rejected,
            "it is only read",
            lambda path: dist_checkpointing.save(small_state(), path, ("zarr", 1)),
        ),
        (Rejected, "needs two files", lambda _: Saver(thread_count=1, separation_hint="o")),
        (ValueError, "exchange_algo='pigeons' is not known", lambda _: reader(exchange_algo="pigeons")),
        (
            ValueError,
            "exchange_algo='pigeons' is not known",
            lambda _: setattr(reader(), "exchange_algo", "pigeons"),
        ),
        (UnsupportedError, "Use AsyncCallsQueue", lambda _: async_utils.TemporalAsyncCaller()),
        (UnsupportedError, "tensorstore takes", lambda _: zarr.flatten_range(None, None)),
        (UnsupportedError, r"LoadOptions\(exchange", lambda _: exchange({}, {}, None)),
        (UnsupportedError, r"save\(\) writes it", lambda path: core.save_config(CONFIG, path)),
        (UnsupportedError, "never handed there", lambda _: torch_dist.MCoreSavePlanner.create_local_plan),
        (UnsupportedError, "Planner of Megatron-Core is not offered", lambda _: Planner()),
    ],
)
def test_what_is_not_offered_reports_why_and_what_to_use(
    error: type[Exception], text: str, call: Any, tmp_path: Path
) -> None:
    with pytest.raises(error, match=text):
        call(str(tmp_path / "iter_1"))
    assert list(tmp_path.iterdir()) == [], "nothing may be written before an error"


def test_what_is_not_offered_is_not_implemented_and_an_error_of_checkpointing() -> None:
    assert issubclass(UnsupportedError, NotImplementedError)
    assert issubclass(UnsupportedError, Rejected)
    assert not hasattr(Planner, "__wrapped__")


@pytest.mark.parametrize(
    ("strategy", "name", "text"),
    [
        (default(), "threads", r"no setting 'threads', .* separation_hint, thread_count, use_"),
        (default("megackpt"), "thread_count", r"no setting 'thread_count'.* use_cached_ckpt_structure"),
        (
            fully_parallel.FullyParallelSaveStrategyWrapper(default()),
            "thread_count",
            r"no setting 'thread_count'.* base_strategy",
        ),
        (torch_dist.TorchDistLoadShardedStrategy(), "threads", "no setting 'threads'"),
    ],
    ids=["torch_dist", "megackpt", "wrapper", "reader"],
)
def test_a_setting_that_a_strategy_lacks_raises_an_error(strategy: Any, name: str, text: str) -> None:
    with pytest.raises(AttributeError, match=text):
        setattr(strategy, name, 3)


def test_a_class_of_a_user_may_have_attributes_of_its_own() -> None:
    class Mine(Saver):
        pass

    strategy: Any = Mine("torch_dist", 1)
    strategy.anything = 3


def test_a_registered_strategy_stands_before_our_own() -> None:
    native = serialization.get_default_save_sharded_strategy("megackpt", 1)
    base.register_default_strategy(base.StrategyAction.SAVE_SHARDED, "mine", 1, native)
    try:
        assert serialization.get_default_save_sharded_strategy("mine", 1) is native
    finally:
        base.default_strategies["save_sharded"].clear()


@pytest.mark.parametrize(
    "strategy",
    [
        lambda: zarr.ZarrSaveShardedStrategy("zarr", 3),
        lambda: Saver("torch_dist", 1, thread_count=3),
        lambda: ("torch_dist", 1),
        lambda: ("zarr", 3),
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
    strategy = default()
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
    with pytest.raises(Rejected, match="thread_count is 0"):
        files("none")
    assert not (tmp_path / "none").exists()


def _save_as_megatron_does(root: Path) -> list[list[int]]:
    """Save twice with a constant structure; then without a wrapper, from main replicas and from any."""
    dist = torch.distributed
    state = {
        str(i): S.from_rank_offsets(f"w{i}", torch.full((64, 64), float(i)), replica_id=dist.get_rank())
        for i in range(8)
    }
    strategy = default()
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


def test_pg_cache_path_and_its_kin_are_accepted(tmp_path: Path) -> None:
    cached = {"pg_cache_path": str(tmp_path / "cache"), "pg_cache_create": True}
    saver = fully_parallel.FullyParallelSaveStrategyWrapper(
        Saver("torch_dist", 1), None, False, "torch_dist", 1, False, **cached
    )
    path = str(tmp_path / "a")
    dist_checkpointing.save(small_state(), path, saver)
    saver.pg_cache_create = False
    loader = fully_parallel.FullyParallelLoadStrategyWrapper(
        torch_dist.TorchDistLoadShardedStrategy(), None, False, "broadcast", True, **cached
    )
    assert dist_checkpointing.load(small_state(0.0), path, loader)["step"] == 7
    assert fully_parallel.determine_main_replica_uniform_distribution({}, None, True, **cached) is None
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("algorithm", fully_parallel.EXCHANGE_ALGORITHMS)
def test_every_exchange_algo_means_all_to_all_and_loads_the_same_bits(algorithm: str) -> None:
    store = MemoryStore()
    megackpt.save(small_state(), store)
    wrapped = reader(exchange_algo=algorithm)
    assert wrapped.exchange_algo == algorithm
    assert wrapped.load_arguments["options"].exchange == "all_to_all"
    loaded = SimulatedWorld(3).run(
        lambda group: megackpt.load(small_state(0.0), store, group=group, **wrapped.load_arguments)
    )
    assert all(state["model"]["w"].tolist() == [[1.0] * 3] * 2 for state in loaded)


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


def summary_of(reader: Any) -> list[str]:
    """Return the lines that a two-stage strategy logs of its load times. Collective."""
    two_stage.logger.setLevel(logging.INFO)
    with lines_of(two_stage.logger) as lines:
        reader.summarize_load_times()
    return lines


def _save_and_load_fully_parallel(path: str) -> None:
    state, group = _replicas()
    writer = fully_parallel.FullyParallelSaveStrategyWrapper(
        serialization.get_default_save_sharded_strategy("megackpt", 1), group
    )
    dist_checkpointing.save(state, path, writer)
    wanted = {key: e.without_data() for key, e in state.items() if key != "extra"}
    wanted["extra"] = mapping.ShardedObject("extra", None, (2,), state["extra"].global_offset)
    base_reader = serialization.get_default_load_sharded_strategy(path)
    reader = fully_parallel.FullyParallelLoadStrategyWrapper(base_reader, group, exchange_algo="broadcast")
    loaded = dist_checkpointing.load(wanted, path, reader)
    assert all(torch.equal(loaded[key], state[key].data) for key in state if key != "extra")
    assert loaded["extra"] == state["extra"].data


def test_fully_parallel_strategies_save_and_load_within_their_group(
    rank_pool: RankPool, tmp_path: Path
) -> None:
    rank_pool.run(_save_and_load_fully_parallel, 4, str(tmp_path / "c"))
    written = sorted(f.stat().st_size for f in (tmp_path / "c" / "data").iterdir())
    assert len(written) == 4, "both replicas of a group write"
    assert written[-1] <= 1.05 * written[0]


def state(fill: float) -> dict[str, Any]:
    """Ranks 0 and 2, and 1 and 3, hold the same half of `w`, and share the flat ranges of `flat`."""
    tp, dp = torch.distributed.get_rank() % 2, torch.distributed.get_rank() // 2
    flat = slice(0, 5) if dp == 0 else slice(5, 12)
    return {
        "layers": [{"w": S.from_rank_offsets("w", torch.full((3, 4), fill + tp), (0, tp, 2), replica_id=dp)}],
        "half": S.from_rank_offsets(
            "half", torch.full((2,), fill).bfloat16(), replica_id=torch.distributed.get_rank()
        ),
        "scalar": S.from_rank_offsets("scalar", torch.tensor(fill), replica_id=torch.distributed.get_rank()),
        "flat": S.from_rank_offsets_flat(
            "flat", (fill * torch.arange(12.0) + tp)[flat], (3, 4), (0, tp, 2), flattened_range=flat
        ),
        "rng": mapping.ShardedObject("rng", {"tp": tp}, (2,), (tp,), replica_id=dp),
    }


class Counted(two_stage.TwoStageDataParallelLoadShardedStrategy):
    """Replaces one step, so that all of them are taken."""

    read: list[str]

    def load_tensor_from_storage(self, checkpoint_dir: Any, ten_meta: Any) -> Any:
        self.read.append(ten_meta.sharded_tensor_no_data.key)
        if self.read[-1] == getattr(self, "failing", None):
            raise OSError("the disk is gone")
        return super().load_tensor_from_storage(checkpoint_dir, ten_meta)


def take_the_steps(path: str) -> tuple[Any, list[str]]:
    rank = torch.distributed.get_rank()
    groups = [torch.distributed.new_group([tp, tp + 2]) for tp in range(2)]
    group, dp = groups[rank % 2], rank // 2
    expected = state(3.0)
    dist_checkpointing.save(state(3.0), path)

    strategy = two_stage.TwoStageDataParallelLoadShardedStrategy(group)
    assert (strategy.dp_group_ranks, strategy.dp_group_rank) == ((rank % 2, rank % 2 + 2), dp)
    wanted = {key: value for key, value in state(0.0).items() if key != "rng"}
    filled = wanted["layers"][0]["w"].data
    plan = strategy._build_load_plan(wanted)
    assert [meta.sharded_tensor_no_data.key for meta in plan] == ["flat", "half", "scalar", "w"]
    assert [(meta.global_rank, meta.dist_group_rank) for meta in plan] == [(rank % 2, 0)] * 4
    assert [meta.data_size for meta in plan] == [48, 4, 4, 48]
    assert all(meta.dist_group_ranks == strategy.dp_group_ranks for meta in plan)
    whole = strategy.load_tensor_from_storage(path, plan[0])
    assert torch.equal(whole, (3 * torch.arange(12.0) + rank % 2).reshape(3, 4)), "of a flat range all"
    strategy._exchange_loaded_tensors(plan, wanted, path)
    check(wanted, expected)
    assert wanted["layers"][0]["w"] is filled, "filled in place"

    counted: Any = Counted(group)
    counted.read = []
    loaded = dist_checkpointing.load(state(0.0), path, counted)
    check(loaded, expected)
    assert loaded["rng"] == {"tp": rank % 2}
    assert counted.read == (["flat", "half", "scalar", "w"] if dp == 0 else []), "one of two ranks reads"
    counted.failing = "half"
    with pytest.raises(megackpt.CheckpointError, match="the disk is gone"):
        dist_checkpointing.load(state(0.0), path, counted)

    if rank == 0:
        two_stage.timers["only on rank 0"].append(2.0)
    strategy.maybe_init_gloo_group()
    loaded = dist_checkpointing.load(state(0.0), path, strategy)
    check(loaded, expected)
    assert loaded["rng"] == {"tp": rank % 2}
    lines = summary_of(strategy)
    assert two_stage.timers["load"][0] > 0.0
    two_stage.timers.clear()
    return strategy.times, lines


def check(loaded: Any, expected: Any) -> None:
    for key in ("half", "scalar", "flat"):
        assert torch.equal(loaded[key], expected[key].data), key
    assert torch.equal(loaded["layers"][0]["w"], expected["layers"][0]["w"].data)
    assert not [leaf for leaf in nested_values(loaded) if isinstance(leaf, S)]


def test_a_two_stage_load_reads_once_in_a_group_and_its_steps_can_be_taken_by_themselves(
    rank_pool: RankPool, tmp_path: Path
) -> None:
    all_times, lines = zip(*rank_pool.run(take_the_steps, 4, str(tmp_path / "c")), strict=True)
    times = all_times[0]
    assert all(other == times for other in all_times)
    assert times.read.max >= times.read.min == 0.0, "one of two ranks reads"
    assert lines[0][0].startswith("two-stage load: read: min 0.000 s, mean ")
    names = [line.split(":")[0] for line in lines[0][1:]]
    assert set(names) >= {"load", "_build_load_plan", "_exchange_loaded_tensors", "deduplicate_chunks"}
    assert "only on rank 0: max 2.0000 s, avg 0.5000 s" in lines[0]
    assert [len(other) for other in lines[1:]] == [1, 1, 1]


def test_a_timer_counts_calls_that_return(caplog: pytest.LogCaptureFixture) -> None:
    @two_stage.timed(verbose=True)
    def measured(fails: bool) -> int:
        """Do it."""
        if fails:
            raise ValueError("no")
        return 7

    two_stage.timers.clear()
    with caplog.at_level(logging.DEBUG):
        assert measured(False) == 7
    with pytest.raises(ValueError, match="no"):
        measured(True)
    assert list(two_stage.timers) == ["measured"]
    assert len(two_stage.timers.pop("measured")) == 1
    assert caplog.text.count("measured took") == 1
    assert measured.__doc__ == "Do it."
