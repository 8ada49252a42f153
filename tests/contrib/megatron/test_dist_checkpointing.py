"""`dist_checkpointing` in Megatron-Core's signatures: saving, loading, looking into, validating."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

import megackpt
from megackpt.compat.megatron import dist_checkpointing
from megackpt.compat.megatron.dist_checkpointing import (
    core,
    mapping,
    serialization,
    state_dict_utils,
    validation,
)
from megackpt.testing.ranks import RankPool
from tests.contrib.megatron.small_state import small_state
from tests.contrib.megatron.user_world import FilePerRank

S, F = mapping.ShardedTensor, mapping.ShardedTensorFactory


def test_an_unmodified_call_saves_and_loads(tmp_path: Path) -> None:
    path = str(tmp_path / "iter_1")
    state = small_state()
    dist_checkpointing.save(state, path)
    assert isinstance(state["model"]["fused"], F), "the caller's dict must stay as it was"
    loaded = dist_checkpointing.load(small_state(0.0), path)
    assert loaded["step"] == 7
    assert loaded["local"] == "mine"
    assert loaded["model"]["extra"] == {"seen": 1.0}
    assert loaded["model"]["w"].tolist() == [[1.0] * 3] * 2
    assert loaded["model"]["fused"].tolist() == [1.0, 1.0, 2.0, 2.0]
    assert dist_checkpointing.check_is_distributed_checkpoint(path)
    assert not dist_checkpointing.check_is_distributed_checkpoint(str(tmp_path))


def test_arguments_keep_the_order_of_megatron_core_0_16(tmp_path: Path) -> None:
    path = str(tmp_path / "iter_1")
    assert (
        dist_checkpointing.save(small_state(), path, None, None, True, False, lambda c: {}, {"v": 1}) is None
    )
    wanted = {**small_state(0.0), "new": S.from_rank_offsets("new", torch.zeros(1))}
    del wanted["model"]["w"]
    loaded, missing, unexpected = dist_checkpointing.load(wanted, path, None, None, True, "return_all")
    assert (missing, unexpected) == ({"w"}, {"new"})
    assert "new" not in loaded


def test_strict_takes_the_modes_of_megatron_core(tmp_path: Path) -> None:
    path = str(tmp_path / "iter_1")
    dist_checkpointing.save(small_state(), path)
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
    state = small_state()
    group = object()  # Megatron-Core puts a process group there, which nobody could store
    described = {"version": 3, "dp_cp_group": group}
    dist_checkpointing.save(state, path, (backend, 1), content_metadata=described)
    assert "content_metadata" not in state, "the caller's dict must stay as it was"
    assert dist_checkpointing.load_content_metadata(path) == {"version": 3}
    loaded = dist_checkpointing.load(small_state(), path)
    assert dist_checkpointing.load_content_metadata(preloaded_state_dict=loaded) == {"version": 3}
    assert megackpt.load_content_metadata(path) == {"version": 3}
    with pytest.raises(ValueError, match="neither checkpoint_dir nor preloaded_state_dict"):
        dist_checkpointing.load_content_metadata()


@pytest.mark.parametrize("deferred", [False, True])
def test_tensors_that_are_not_sharded_stay_in_common_state(tmp_path: Path, deferred: bool) -> None:
    path, state = str(tmp_path / "iter_1"), small_state() | {"rng": torch.arange(4)}
    request = dist_checkpointing.save(state, path, ("megackpt", 1), async_sharded_save=deferred)
    if request is not None:
        request.execute_sync()
    assert set(dist_checkpointing.load_tensors_metadata(path)) == {"w", "fused.0", "fused.1"}
    assert dist_checkpointing.load_common_state_dict(path)["rng"].tolist() == [0, 1, 2, 3]
    megackpt.save({"rng": torch.arange(4)}, tmp_path / "ours")
    loaded = dist_checkpointing.load({}, str(tmp_path / "ours"))
    assert loaded["rng"].tolist() == [0, 1, 2, 3]


def test_looking_into_a_checkpoint(tmp_path: Path) -> None:
    path = str(tmp_path / "iter_1")
    dist_checkpointing.save(small_state(), path)
    assert dist_checkpointing.load_common_state_dict(path) == {"step": 7}
    assert set(dist_checkpointing.load_tensors_metadata(path)) == {"w", "fused.0", "fused.1"}
    assert "extra/shard_0_1" in serialization.load_sharded_metadata(path)
    assert dist_checkpointing.load_plain_tensors(path)["fused.1"].tolist() == [2.0, 2.0]
    config = core.maybe_load_config(path)
    assert config == core.CheckpointingConfig("megackpt", 1, "megackpt", 1)
    assert core.maybe_load_config(str(tmp_path)) is None
    dist_checkpointing.remove_sharded_tensors(path, "fused.")
    assert set(dist_checkpointing.load_tensors_metadata(path)) == {"w"}


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
    stranger = FilePerRank()
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


def test_integrity_is_proved_over_all_ranks_and_fails_on_all(rank_pool: RankPool) -> None:
    assert rank_pool.run(_validate, 2, False, False) == ["", ""]
    assert all(
        "'w': elements [2:4] are saved by no rank" in t for t in rank_pool.run(_validate, 2, True, False)
    )
    assert all("'common' on rank(s) 1" in t for t in rank_pool.run(_validate, 2, False, True))


def _save_other_common_state(path: str) -> list[str]:
    rank = torch.distributed.get_rank()
    state = {
        "w": S.from_rank_offsets("w", torch.full((2,), float(rank)), (0, rank, 2)),
        "wd": float(rank),
    }
    warned: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: warned.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("megackpt.compat.megatron")
    logger.addHandler(handler)
    dist_checkpointing.save(state, path)
    logger.removeHandler(handler)
    return warned


def test_common_state_that_ranks_disagree_about_is_that_of_rank_0_and_one_warning_names_the_path(
    rank_pool: RankPool, tmp_path: Path
) -> None:
    path = str(tmp_path / "iter_1")
    (warning,), of_rank_1 = rank_pool.run(_save_other_common_state, 2, path)
    assert "'wd' on rank(s) 1" in warning
    assert of_rank_1 == []
    assert dist_checkpointing.load_common_state_dict(path) == {"wd": 0.0}
    assert megackpt.load_plain_tensors(path)["w"].tolist() == [0.0, 0.0, 1.0, 1.0]


def test_every_entity_can_be_asked_whether_its_fields_agree() -> None:
    factory = mapping.ShardedTensorFactory("w", torch.zeros(2), lambda *a: [], lambda built: built)
    for entity in (factory, mapping.ShardedObject("o", 1, (1,), (0,))):
        entity.validate_metadata_integrity()
    factory.build_fn = None  # type: ignore[assignment]
    with pytest.raises(megackpt.CheckpointError, match="build_fn must be a function"):
        factory.validate_metadata_integrity()
