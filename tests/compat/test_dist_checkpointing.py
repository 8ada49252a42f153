"""`dist_checkpointing` in Megatron-Core's signatures: what it does, and what it refuses."""

from __future__ import annotations

import json
import logging
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import megackpt
from megackpt.compat.megatron import dist_checkpointing
from megackpt.compat.megatron.dist_checkpointing import (
    core,
    exchange_utils,
    mapping,
    serialization,
    state_dict_utils,
    utils,
    validation,
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

S, F = mapping.ShardedTensor, mapping.ShardedTensorFactory


def _halves(key: str, data: Any, replica_id: Any, flattened_range: Any) -> list[Any]:
    whole = S.from_rank_offsets(key, data, replica_id=replica_id)
    return [part for i in range(2) for part in whole.narrow(0, 2 * i, 2)]


def _state(fill: float = 1.0) -> dict[str, Any]:
    first, second = torch.full((2, 3), fill), torch.full((4,), fill)
    second[2:] += 1
    return {
        "model": {
            "w": S.from_rank_offsets("w", first),
            "fused": F(
                "fused", second, lambda *a: [_named(p, i) for i, p in enumerate(_halves(*a))], torch.cat
            ),
            "extra": mapping.ShardedObject("extra", {"seen": fill}, (1,), (0,)),
        },
        "local": mapping.LocalNonpersistentObject("mine"),
        "step": 7,
    }


def _named(part: Any, number: int) -> Any:
    part.key = f"{part.key}.{number}"
    return part


def test_an_unmodified_call_saves_and_loads(tmp_path: Path) -> None:
    path = str(tmp_path / "iter_1")
    state = _state()
    dist_checkpointing.save(state, path)
    assert isinstance(state["model"]["fused"], F), "the caller's dict must stay as it was"
    loaded = dist_checkpointing.load(_state(0.0), path)
    assert loaded["step"] == 7
    assert loaded["local"] == "mine"
    assert loaded["model"]["extra"] == {"seen": 1.0}
    assert loaded["model"]["w"].tolist() == [[1.0] * 3] * 2
    assert loaded["model"]["fused"].tolist() == [1.0, 1.0, 2.0, 2.0]
    assert dist_checkpointing.check_is_distributed_checkpoint(path)
    assert not dist_checkpointing.check_is_distributed_checkpoint(str(tmp_path))


def test_arguments_keep_the_order_of_megatron_core_0_16(tmp_path: Path) -> None:
    path = str(tmp_path / "iter_1")
    assert dist_checkpointing.save(_state(), path, None, None, True, False, lambda c: {}, {"v": 1}) is None
    wanted = {**_state(0.0), "new": S.from_rank_offsets("new", torch.zeros(1))}
    del wanted["model"]["w"]
    loaded, missing, unexpected = dist_checkpointing.load(wanted, path, None, None, True, "return_all")
    assert (missing, unexpected) == ({"w"}, {"new"})
    assert "new" not in loaded


def test_strict_takes_the_modes_of_megatron_core(tmp_path: Path) -> None:
    path = str(tmp_path / "iter_1")
    dist_checkpointing.save(_state(), path)
    wanted = {"new": S.from_rank_offsets("new", torch.zeros(1))}
    with pytest.raises(megackpt.CheckpointingException, match="new"):
        dist_checkpointing.load(wanted, path)
    assert "new" not in dist_checkpointing.load(wanted, path, strict=validation.StrictHandling.IGNORE_ALL)
    with pytest.raises(ValueError, match="strict='sloppy' is not a mode"):
        dist_checkpointing.load(wanted, path, strict="sloppy")


@pytest.mark.parametrize("backend", ["torch_dist", "megackpt"])
def test_content_metadata_is_found_in_the_checkpoint_and_in_a_loaded_state_dict(
    backend: str, tmp_path: Path
) -> None:
    path = str(tmp_path / "iter_1")
    state = _state()
    group = object()  # Megatron-Core puts a process group there, which nobody could store
    described = {"version": 3, "dp_cp_group": group}
    dist_checkpointing.save(state, path, (backend, 1), content_metadata=described)
    assert "content_metadata" not in state, "the caller's dict must stay as it was"
    assert dist_checkpointing.load_content_metadata(path) == {"version": 3}
    loaded = dist_checkpointing.load(_state(), path)
    assert dist_checkpointing.load_content_metadata(preloaded_state_dict=loaded) == {"version": 3}
    assert megackpt.load_content_metadata(path) == {"version": 3}
    with pytest.raises(ValueError, match="checkpoint_dir or preloaded_state_dict"):
        dist_checkpointing.load_content_metadata()


def test_looking_into_a_checkpoint(tmp_path: Path) -> None:
    path = str(tmp_path / "iter_1")
    dist_checkpointing.save(_state(), path)
    assert dist_checkpointing.load_common_state_dict(path) == {"step": 7}
    assert set(dist_checkpointing.load_tensors_metadata(path)) == {"w", "fused.0", "fused.1"}
    assert "extra/shard_0_1" in serialization.load_sharded_metadata(path)
    assert dist_checkpointing.load_plain_tensors(path)["fused.1"].tolist() == [2.0, 2.0]
    config = core.maybe_load_config(path)
    assert config == core.CheckpointingConfig("megackpt", 1, "megackpt", 1)
    assert core.maybe_load_config(str(tmp_path)) is None
    dist_checkpointing.remove_sharded_tensors(path, "fused.")
    assert set(dist_checkpointing.load_tensors_metadata(path)) == {"w"}


def test_the_training_loop_s_strategies_save_and_load(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = str(tmp_path / "iter_1")
    with caplog.at_level(logging.WARNING):
        strategy = serialization.get_default_save_sharded_strategy("torch_dist", 1)
    is_native = strategy.backend == "megackpt"
    assert ("saved in the native format" in caplog.text) == is_native, "another format than asked for is said"
    wrapped = fully_parallel.FullyParallelSaveStrategyWrapper(strategy, None, True)
    assert (wrapped.backend, wrapped.can_handle_sharded_objects) == (strategy.backend, True)
    dist_checkpointing.save(_state(), path, wrapped)
    reader = serialization.get_default_load_sharded_strategy(path)
    reader = fully_parallel.FullyParallelLoadStrategyWrapper(reader, None, exchange_algo="gather_rounds")
    assert dist_checkpointing.load(_state(0.0), path, reader)["model"]["w"].tolist() == [[1.0] * 3] * 2
    assert reader.load(_state(0.0), path)["step"] == 7
    assert set(reader.load_tensors_metadata(path)) == {"w", "fused.0", "fused.1"}
    wrapped.save(_state(5.0), path)
    assert dist_checkpointing.load(_state(), path)["model"]["w"].tolist() == [[5.0] * 3] * 2
    with pytest.raises(ValueError, match="exchange_algo='pigeons' is not known"):
        fully_parallel.FullyParallelLoadStrategyWrapper(reader.base_strategy, exchange_algo="pigeons")


def test_a_format_that_does_not_exist_is_refused() -> None:
    with pytest.raises(megackpt.CheckpointingException, match="No strategy saves format"):
        serialization.get_default_save_sharded_strategy("parchment", 1)
    with pytest.raises(megackpt.CheckpointingException, match="no load_common strategy"):
        base.get_default_strategy(base.StrategyAction.LOAD_COMMON, "parchment", 1)


def test_a_registered_strategy_stands_before_our_own() -> None:
    mine = serialization.get_default_save_sharded_strategy("megackpt", 1)
    base.register_default_strategy(base.StrategyAction.SAVE_SHARDED, "mine", 1, mine)
    try:
        assert serialization.get_default_save_sharded_strategy("mine", 1) is mine
    finally:
        base.default_strategies["save_sharded"].clear()


class _Stranger(base.SaveShardedStrategy):
    def save(self, sharded_state_dict: Any, checkpoint_dir: Any) -> None:
        """Write somewhere."""


def test_what_is_not_offered_says_why_and_what_to_use(tmp_path: Path) -> None:
    path = str(tmp_path / "iter_1")
    refused: list[tuple[str, Any]] = [
        (
            "asynchronous|synchronously",
            lambda: dist_checkpointing.save(_state(), path, async_sharded_save=True),
        ),
        ("saves are synchronous", lambda: async_utils.AsyncCallsQueue().schedule_async_request(None)),
        ("saves are synchronous", lambda: async_utils.TemporalAsyncCaller()),
        ("Implement megackpt.formats", lambda: dist_checkpointing.save(_state(), path, _Stranger("x", 1))),
        ("Implement megackpt.formats", lambda: dist_checkpointing.load(_state(), path, _Stranger("x", 1))),
        ("tensorstore takes", lambda: zarr.flatten_range(None, None)),
        ("Use load()", lambda: two_stage.timed()),
        (
            "Use load()",
            lambda: two_stage.TwoStageDataParallelLoadShardedStrategy(None).deduplicate_chunks([]),
        ),
        ("LoadOptions\\(exchange", lambda: exchange_utils.exchange_by_distribution({}, {}, None)),
        ("save\\(\\) writes it", lambda: core.save_config(core.CheckpointingConfig("megackpt"), path)),
        ("never handed there", lambda: torch_dist.MCoreSavePlanner.create_local_plan),
    ]
    for text, call in refused:
        with pytest.raises(UnsupportedError, match=text) as caught:
            call()
        assert isinstance(caught.value, NotImplementedError)
        assert isinstance(caught.value, megackpt.CheckpointingException)
    assert not (tmp_path / "iter_1").exists(), "nothing may be written before a refusal"


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
    dist_checkpointing.save(_state(), str(path), chosen)
    said = json.loads((path / "metadata.json").read_text())
    named = chosen if isinstance(chosen, tuple) else (chosen.backend, chosen.version)
    assert (said["sharded_backend"], said["sharded_backend_version"]) == named
    loaded = dist_checkpointing.load(_state(), str(path), tensorstore.TensorStoreLoadShardedStrategy())
    assert set(loaded) == set(_state())


def test_a_refused_class_can_be_named_and_subclassed() -> None:
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


def test_factories_are_applied_and_merged_in_place() -> None:
    state = {"a": [F("k", torch.arange(4.0), _halves, torch.cat)], "b": 1}
    factories = {"a": {0: state["a"][0]}}
    mapping.apply_factories(state)
    assert [t.data.tolist() for t in state["a"][0]] == [[0.0, 1.0], [2.0, 3.0]]
    loaded = {"a": [[torch.ones(2), torch.zeros(2)]], "b": 1}
    assert mapping.apply_factory_merges(loaded, factories) is loaded
    assert loaded["a"][0].tolist() == [1.0, 1.0, 0.0, 0.0]
    with pytest.raises(ValueError, match="where nothing was loaded"):
        mapping.apply_factory_merges({"a": []}, factories)
    with pytest.raises(ValueError, match="lists of 1 and 0"):
        mapping.apply_factory_merges({"a": [1]}, {"a": []})
    with pytest.raises(ValueError, match="no factory to be merged"):
        mapping.apply_factory_merges({"a": 1}, {"a": 2})


def test_state_dicts_are_taken_apart_without_changing_them() -> None:
    state = {**_state(), "content_metadata": {"v": 1, "dp_cp_group": object()}}
    sharded, common = state_dict_utils.save_preprocess(state)
    assert [t.key for t in sharded["model"]["fused"]] == ["fused.0", "fused.1"]
    assert common == {"step": 7, "content_metadata": {"v": 1}}
    wanted, local, factories = state_dict_utils.load_preprocess(state)
    assert (wanted["step"], local) == (7, {"local": "mine"})
    assert factories["model"]["fused"].data is None
    assert isinstance(state["model"]["fused"], F)
    assert state["model"]["fused"].data is not None


def test_flat_shards_without_elements_are_filtered_out() -> None:
    flat = partial(S.from_rank_offsets_flat, non_flat_local_shape=(2, 2))
    state = {
        "none": flat("a", torch.zeros(0), flattened_range=slice(2, 2)),
        "some": flat("b", torch.zeros(2), flattened_range=slice(2, 4)),
        "else": 1,
    }
    assert set(state_dict_utils.filter_out_empty_flatten_tensor(state)) == {"some", "else"}


def test_keys_are_renamed_in_place() -> None:
    state = {
        "a": S.from_rank_offsets("x.a", torch.zeros(1)),
        "b": [mapping.ShardedObject("x.b", 1, (1,), (0,))],
        "c": "x.c",
    }
    utils.add_prefix_for_sharding(state, "p.")
    utils.replace_prefix_for_sharding(state, "p.x.", "q.")
    utils.apply_prefix_mapping(state, {"q.a": "r", "q": "s", "r": "t"})
    assert (state["a"].key, state["b"][0].key, state["c"]) == ("r", "s.b", "x.c")
    with pytest.raises(ValueError, match=r"'s.b' does not begin with 'r'"):
        utils.replace_prefix_for_sharding(state, "r", "u")
    assert state["a"].key == "r", "no key may change where one does not fit"


def test_entities_are_picked_out_by_kind() -> None:
    state = _state()
    assert set(utils.extract_sharded_tensors(state)[0]["model"]) == {"w"}
    assert set(utils.extract_sharded_tensors_and_factories(state)[0]["model"]) == {"w", "fused"}
    assert set(utils.extract_sharded_tensors_or_nonpersistent(state)[0]) == {"model", "local"}
    assert utils.extract_sharded_base(state)[1] == {"local": state["local"], "step": 7}
    assert set(utils.extract_nonpersistent(state)[0]) == {"local"}
    assert list(utils.zip_strict([1], [2])) == [(1, 2)]
    with pytest.raises(ValueError, match=r"\[1, 0\] elements"):
        utils.zip_strict([1], [])


def test_logging_nests_names_and_loggers(caplog: pytest.LogCaptureFixture) -> None:
    mine = logging.getLogger("mine")
    with caplog.at_level(logging.DEBUG):
        with utils.logger_stack("outer", mine), utils.debug_time("inner"):
            utils.debug_msg("hello")
        with utils.debug_time("slow", mine, threshold=0.0), utils.debug_time("never", mine, threshold=1e9):
            pass
    lines = [(r.name, r.levelname, r.getMessage().split(" took")[0]) for r in caplog.records]
    assert lines == [
        ("mine", "DEBUG", "outer.inner hello"), ("mine", "DEBUG", "outer.inner"), ("mine", "WARNING", "slow"),
    ]  # fmt: skip


def test_validation_helpers(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    assert validation.parse_strict_flag("log_all") is validation.StrictHandling.LOG_ALL
    left = validation.adjust_non_strict_load({"a": S.from_rank_offsets("k", torch.zeros(1))}, {"k"})
    assert left == {}
    report = validation.maybe_report_missing_and_unexpected_keys
    report(set(), set())
    report({"m"}, set(), raise_error=False)
    assert "1 keys are in the checkpoint and not asked for: ['m']" in caplog.text
    with pytest.raises(KeyError, match=r"asked for and not in the checkpoint: \['u'\]"):
        report(set(), {"u"})
    with pytest.raises(FileNotFoundError, match="is not a checkpoint"):
        validation.verify_checkpoint_and_load_strategy(str(tmp_path))
    stranger = _Stranger("x", 1)
    with pytest.raises(megackpt.CheckpointingException, match="can handle ShardedObjects"):
        validation.validate_sharded_objects_handling(stranger, stranger)


def _halves_of_w(rank: int, lost: bool, common: int) -> dict[str, Any]:
    part = S.from_rank_offsets("w", torch.zeros(2), (0, rank, 2))
    part.replica_id = int(lost and rank == 1)
    return {"w": part, "common": common}


def _validate(lost: bool, differ: bool) -> str:
    rank = torch.distributed.get_rank()
    try:
        state = _halves_of_w(rank, lost, rank if differ else 0)
        sharded, common = state_dict_utils.save_preprocess(state)
        assert set(sharded) == {"w"}
        assert common == {"common": 0}
    except megackpt.CheckpointingException as error:
        return str(error)
    return ""


@pytest.mark.multiprocess
def test_integrity_is_proved_over_all_ranks_and_fails_on_all(rank_pool: RankPool) -> None:
    assert rank_pool.run(_validate, 2, False, False) == ["", ""]
    assert all(
        "'w': elements [2:4] are saved by no rank" in t for t in rank_pool.run(_validate, 2, True, False)
    )
    assert all("'common' on rank(s) 1" in t for t in rank_pool.run(_validate, 2, False, True))


def test_shards_are_distributed_evenly_over_those_who_hold_them() -> None:
    held = {f"s{i}": [0, 1, 2] for i in range(30)} | {"only": [2]}
    size = {shard: 10 for shard in held} | {"only": 100}
    chosen = exchange_utils.distribute_shards_to_ranks(held, size, 3)
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


@pytest.mark.multiprocess
@pytest.mark.parametrize("kind", [*fully_parallel.EXCHANGE_ALGORITHMS, "two_stage"])
def test_fully_parallel_and_two_stage_strategies_save_and_load_within_their_group(
    rank_pool: RankPool, tmp_path: Path, kind: str
) -> None:
    said = rank_pool.run(_save_and_load_fully_parallel, 4, str(tmp_path / "c"), kind)
    written = sorted(f.stat().st_size for f in (tmp_path / "c" / "data").iterdir())
    assert len(written) == 4, "both replicas of a group write"
    assert written[-1] <= 1.05 * written[0]
    if kind == "two_stage":
        assert all(answer["times"] == said[0]["times"] for answer in said)
        assert said[0]["times"].read.max >= said[0]["times"].read.min == 0.0, "one of two ranks reads"
        assert said[0]["log"][0].startswith("two-stage load: read: min 0.000 s, mean ")


def _save_other_common_state(path: str) -> bool:
    rank = torch.distributed.get_rank()
    state = {
        "w": S.from_rank_offsets("w", torch.full((2,), float(rank)), (0, rank, 2)),
        "wd": float(rank),
    }
    warned: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: warned.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("megackpt.compat.megatron.dist_checkpointing.serialization")
    logger.addHandler(handler)
    dist_checkpointing.save(state, path)
    logger.removeHandler(handler)
    return any("'wd' on rank(s) 1" in text for text in warned)


def test_common_state_that_ranks_disagree_about_is_that_of_rank_0_and_a_warning_says_where(
    rank_pool: RankPool, tmp_path: Path
) -> None:
    path = str(tmp_path / "iter_1")
    assert all(rank_pool.run(_save_other_common_state, 2, path))
    assert dist_checkpointing.load_common_state_dict(path) == {"wd": 0.0}
    assert megackpt.load_plain_tensors(path)["w"].tolist() == [0.0, 0.0, 1.0, 1.0]


def test_every_entity_can_be_asked_whether_its_fields_agree() -> None:
    factory = mapping.ShardedTensorFactory("w", torch.zeros(2), lambda *a: [], lambda found: found)
    for entity in (factory, mapping.ShardedObject("o", 1, (1,), (0,))):
        entity.validate_metadata_integrity()
    factory.build_fn = None  # type: ignore[assignment]
    with pytest.raises(megackpt.CheckpointError, match="build_fn must be a function"):
        factory.validate_metadata_integrity()
