"""`dist_checkpointing` in Megatron-Core's signatures: saving, loading, looking into, validating."""

from __future__ import annotations

import inspect
import logging
import re
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.api import CheckpointException

import megackpt
from megackpt import LoadOptions, MissingKeyError, Policy, SaveOptions
from megackpt.contrib.megatron import dist_checkpointing, our_strategies, settings
from megackpt.contrib.megatron.dist_checkpointing import (
    core,
    mapping,
    serialization,
    state_dict_utils,
    validation,
)
from megackpt.contrib.megatron.dist_checkpointing.strategies import async_utils, fully_parallel, tensorstore
from megackpt.contrib.megatron.dist_checkpointing.strategies import torch as torch_dist
from megackpt.errors import (
    CheckpointingException,
    DeclarationError,
    IntegrityError,
    MismatchError,
    NotACheckpointError,
)
from megackpt.run import check_is_distributed_checkpoint
from megackpt.testing.ranks import RankPool
from tests.contrib.megatron.small_state import lines_of, small_state
from tests.support.dcp_alone import ALONE

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


def _validate(loses_a_half: bool, differs: bool) -> str:
    rank = torch.distributed.get_rank()
    part = S.from_rank_offsets("w", torch.zeros(2), (0, rank, 2))
    part.replica_id = int(loses_a_half and rank == 1)
    try:
        sharded, common = state_dict_utils.save_preprocess({"w": part, "common": rank if differs else 0})
        assert set(sharded) == {"w"}
        assert common == {"common": 0}
    except CheckpointingException as error:
        return str(error)
    return ""


def test_integrity_is_proved_over_all_ranks_and_fails_on_all(rank_pool: RankPool) -> None:
    assert rank_pool.run(_validate, 2, False, False) == ["", ""]
    for faults, text in (
        ((True, False), "'w': elements [2:4] are saved by no rank"),
        ((False, True), "'common' on rank(s) 1"),
    ):
        assert all(text in error for error in rank_pool.run(_validate, 2, *faults))


def _save_other_common_state(path: str) -> list[str]:
    rank = torch.distributed.get_rank()
    state = {"w": S.from_rank_offsets("w", torch.full((2,), float(rank)), (0, rank, 2)), "wd": float(rank)}
    with lines_of(logging.getLogger("megackpt.contrib.megatron")) as warned:
        dist_checkpointing.save(state, path)
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


BY_POSITION: dict[str, tuple[Any, Any]] = {
    "0.16.1": ((None, None, True, False, lambda common: {}, {"v": 1}), (None, None, True, "return_all")),
    "0.18.2": (
        (None, None, True, False, None, {"v": 1}, "nvrx", True),
        (None, None, True, "return_all", True, None),
    ),
    "0.19.0": ((None, True, False, None, {"v": 1}, "nvrx", True), (None, True, "return_all", True, None)),
}
"""Arguments of save and of load after the directory, as each version orders them."""


@pytest.mark.parametrize("version", BY_POSITION)
def test_calls_by_position_follow_the_installed_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    monkeypatch.setattr(settings.metadata, "version", lambda name: version)
    monkeypatch.delitem(sys.modules, "megatron.core", raising=False)
    path, (save, load) = str(tmp_path / "here"), BY_POSITION[version]
    assert dist_checkpointing.save(small_state(), path, *save) is None
    wanted = {**small_state(0.0), "new": S.from_rank_offsets("new", torch.zeros(1))}
    del wanted["model"]["w"]
    assert (Path(path) / "integrity.json").exists() == (version != "0.16.1")
    assert serialization.load_content_metadata(path) == {"v": 1}
    loaded, missing, unexpected = dist_checkpointing.load(wanted, path, *load)
    assert (missing, unexpected) == ({"w"}, {"new"})
    assert "new" not in loaded
    others = {"0.19.0": ["0.16.1", "0.18.2"]}.get(version, ["0.19.0"])
    for other in others:
        with pytest.raises(
            DeclarationError, match=rf"fourth argument .*Megatron-Core {version} \(which is inst"
        ):
            dist_checkpointing.save(small_state(), str(tmp_path / other), *BY_POSITION[other][0])
    assert [path.name for path in tmp_path.iterdir()] == ["here"]
    loaded = dist_checkpointing.load(
        small_state(0.0), path, common_strategy=None, validate_access_integrity=False
    )
    assert loaded["step"] == 7
    assert list(inspect.signature(serialization.load).parameters)[3] == "common_strategy"


def test_without_megatron_core_calls_have_the_order_of_the_newest_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def version(name: str) -> str:
        raise settings.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(settings.metadata, "version", version)
    monkeypatch.delitem(sys.modules, "megatron.core", raising=False)
    dist_checkpointing.save(small_state(), str(tmp_path / "a"), None, False)
    with pytest.raises(DeclarationError, match=r"Megatron-Core 0\.19\.2 \(the newest known one"):
        dist_checkpointing.save(small_state(), str(tmp_path / "b"), None, None)
    # A checkout that was not installed has its version in the module.
    monkeypatch.setitem(sys.modules, "megatron.core", types.SimpleNamespace(__version__="0.16.1+abc"))
    dist_checkpointing.save(small_state(), str(tmp_path / "b"), None, None, False)
    with pytest.raises(DeclarationError, match=r"Megatron-Core 0\.16\.1\+abc \(which is imported"):
        dist_checkpointing.save(small_state(), str(tmp_path / "c"), None, True)


@pytest.mark.parametrize("validate", [True, False])
def test_a_request_for_a_part_loads_with_any_validate_access_integrity(
    tmp_path: Path, validate: bool
) -> None:
    # Megatron-Core raises for it with True: no rank asks for the other half.
    path = str(tmp_path / "a")
    dist_checkpointing.save({"w": S.from_rank_offsets("w", torch.arange(8.0))}, path)
    half = {"w": S.from_rank_offsets("w", torch.zeros(4), (0, 1, 2))}
    loaded = dist_checkpointing.load(half, path, validate_access_integrity=validate)
    assert torch.equal(loaded["w"], torch.arange(4.0, 8.0))


def test_integrity_json_finds_a_changed_file_and_a_lost_one(tmp_path: Path) -> None:
    path = tmp_path / "iter_1"
    dist_checkpointing.save(small_state(), str(path), ("torch_dist", 1))
    with pytest.raises(IntegrityError, match=r"has no integrity\.json"):
        dist_checkpointing.load(small_state(), str(path), verify_integrity=True)
    dist_checkpointing.save(small_state(), str(path), ("torch_dist", 1), verify_integrity=True)
    assert dist_checkpointing.load(small_state(), str(path), verify_integrity=True)["step"] == 7
    file = next(path.glob("*.distcp"))
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(IntegrityError, match=r"1 of .* files differ .*its SHA-256 is"):
        validation.verify_integrity_manifest(str(path))
    file.unlink()
    with pytest.raises(CheckpointingException, match="cannot be read"):
        dist_checkpointing.load(small_state(), str(path), verify_integrity=True)
    (path / "integrity.json").write_text('{"algorithm": "crc", "files": {}}')
    with pytest.raises(megackpt.FormatError, match="does not list files"):
        validation.verify_integrity_manifest(str(path))


def _verify_and_load(path: str) -> list[str]:
    rank, errors = torch.distributed.get_rank(), []
    part = S.from_rank_offsets("w", torch.full((2,), float(rank)), (0, rank, 2))
    request = dist_checkpointing.save({"w": part}, path, None, async_sharded_save=True, verify_integrity=True)
    queue = async_utils.AsyncCallsQueue()
    queue.schedule_async_request(request)
    queue.close()
    validation.verify_integrity_manifest(path)
    pair = torch.distributed.new_group([0, 1])
    if rank < 2:
        alone = S.from_rank_offsets("w", torch.zeros(1), (0, rank, 4))
        loaded = dist_checkpointing.load({"w": alone}, path, process_group=pair, verify_integrity=True)
        assert loaded["w"].tolist() == [0.0]
        local, everyone = validation.determine_global_metadata({"w": alone}, process_group=pair)
        assert [entity.global_offset for of_rank in everyone for entity in of_rank] == [(0,), (1,)]
        assert local[0].global_offset == (rank,)
    torch.distributed.barrier()
    if rank == 0:
        for file in Path(path).rglob("*"):
            if file.is_file() and file.name not in ("metadata.json", "integrity.json"):
                file.unlink()
    torch.distributed.barrier()
    for call in (
        lambda: validation.verify_integrity_manifest(path),
        lambda: dist_checkpointing.load_plain_tensors(path if rank == 1 else path + "-not-there"),
    ):
        try:
            call()
        except megackpt.CheckpointError as error:
            errors.append(type(error).__name__)
    return errors


def test_integrity_and_process_groups_over_ranks_and_errors_on_all(
    rank_pool: RankPool, tmp_path: Path
) -> None:
    results = rank_pool.run(_verify_and_load, 2, str(tmp_path / "iter_1"))
    assert results[0] == results[1], "an error of one rank is raised on all"
    assert results[0][0] == "IntegrityError"
    assert len(results[0]) == 2


@pytest.mark.filterwarnings("ignore:torch.distributed is (disabled|unavailable)")
def test_a_bare_dcp_directory_is_none_of_megatron_s_distributed_checkpoints(tmp_path: Path) -> None:
    dcp = tmp_path / "dcp"
    torch.distributed.checkpoint.save({"w": torch.ones(2)}, checkpoint_id=dcp, **ALONE)
    assert not dist_checkpointing.check_is_distributed_checkpoint(str(dcp))
    assert core.maybe_load_config(dcp) is None
    assert check_is_distributed_checkpoint(dcp), "megackpt itself reads it"
    with pytest.raises(NotACheckpointError, match=r"no metadata\.json"):
        validation.verify_checkpoint(str(dcp))
    store = megackpt.storage.open_store(dcp)
    assert not dist_checkpointing.check_is_distributed_checkpoint(store)
    core.save_config(core.CheckpointingConfig("torch_dist"), str(dcp))  # as tools of Megatron-LM do
    assert core.maybe_load_config(dcp) == core.CheckpointingConfig("torch_dist")
    wanted = {"w": S.from_rank_offsets("w", torch.zeros(2))}
    assert torch.equal(dist_checkpointing.load(wanted, str(dcp))["w"], torch.ones(2))
    ours = str(tmp_path / "ours")
    dist_checkpointing.save(small_state(), ours)
    with pytest.raises(megackpt.errors.UnsupportedError, match="the commit of such a checkpoint"):
        core.save_config(core.CheckpointingConfig("torch_dist"), ours)
    assert dist_checkpointing.load({}, ours)["step"] == 7
    dist_checkpointing.save(small_state(), str(tmp_path / "c"), ("torch_dist", 1))
    assert dist_checkpointing.check_is_distributed_checkpoint(tmp_path / "c")
    validation.verify_checkpoint(str(tmp_path / "c"))
    (tmp_path / "c" / "metadata.json").write_text("{}")
    with pytest.raises(megackpt.FormatError, match="does not name a sharded_backend"):
        dist_checkpointing.check_is_distributed_checkpoint(str(tmp_path / "c"))


def test_strict_takes_the_modes_and_raises_torch_s_error_too(tmp_path: Path) -> None:
    path = str(tmp_path / "iter_1")
    dist_checkpointing.save(small_state(), path)
    unknown = {"new": S.from_rank_offsets("new", torch.zeros(1))}
    for caught in (
        CheckpointingException,
        CheckpointException,
        megackpt.MissingKeyError,
        KeyError,
    ):
        with pytest.raises(caught, match="new"):
            dist_checkpointing.load(unknown, path)
    assert "new" not in dist_checkpointing.load(unknown, path, strict=validation.StrictHandling.IGNORE_ALL)
    with pytest.raises(ValueError, match="strict='sloppy' is not a mode"):
        dist_checkpointing.load(unknown, path, strict="sloppy")
    with pytest.raises(CheckpointException) as raised:
        dist_checkpointing.load({"w": S.from_rank_offsets("w", torch.zeros(5, 3))}, path)
    assert isinstance(raised.value, MismatchError)
    assert [type(error) for error, _ in raised.value.failures.values()] == [MismatchError]
    with pytest.raises(megackpt.MissingKeyError) as plain:
        megackpt.load(unknown, path)
    assert not isinstance(plain.value, CheckpointException), "only the face of Megatron-Core does so"


MODES = validation.StrictHandling
RAISES = {MODES.RAISE_UNEXPECTED, MODES.RAISE_ALL}
ALL = {MODES.RAISE_ALL, MODES.LOG_ALL, MODES.RETURN_ALL}
ON_UNEXPECTED = {
    "raised": {MODES.ASSUME_OK_UNEXPECTED, *RAISES},
    "logged": {MODES.LOG_UNEXPECTED, MODES.LOG_ALL},
    "returned": {MODES.RETURN_UNEXPECTED, MODES.RETURN_ALL},
}
# Where a key is stored in another shape, only the load finds it. Modes compare keys.
ON_ANOTHER_SHAPE: dict[str, set[Any]] = {"raised": set(MODES), "logged": set(), "returned": set()}
# What a request adds to `a` and `o`, or an empty dict for leaving `o` out.
DIFFERENCES: dict[str, tuple[dict[str, Any], dict[str, set[Any]]]] = {
    "a tensor that is not stored": ({"new": S.from_rank_offsets("new", torch.zeros(1))}, ON_UNEXPECTED),
    "an object that is not stored": ({"new": mapping.ShardedObject("new", 1, (1,), (0,))}, ON_UNEXPECTED),
    "an object of a smaller grid": ({"o": mapping.ShardedObject("o", 1, (1,), (0,))}, ON_ANOTHER_SHAPE),
    "an object of a larger grid": ({"o": mapping.ShardedObject("o", 1, (4,), (3,))}, ON_ANOTHER_SHAPE),
    "an object of more dims": ({"o": mapping.ShardedObject("o", 1, (2, 1), (0, 0))}, ON_ANOTHER_SHAPE),
    "a tensor of another shape": ({"a": S.from_rank_offsets("a", torch.zeros(5))}, ON_ANOTHER_SHAPE),
    "an object that nobody asks for": (
        {},
        {"raised": {MODES.RAISE_ALL}, "logged": {MODES.LOG_ALL}, "returned": {MODES.RETURN_ALL}},
    ),
}


@pytest.mark.parametrize("mode", list(MODES), ids=lambda mode: mode.value)
@pytest.mark.parametrize("difference", DIFFERENCES)
def test_each_mode_of_strict_raises_logs_and_returns_what_megatron_core_does(
    difference: str, mode: Any, tmp_path: Path
) -> None:
    """Source: the same table of Megatron-Core 0.16.1 and 0.20, tried on one rank with torch_dist."""
    path = str(tmp_path / "iter_1")
    objects = {i: mapping.ShardedObject("o", f"object {i}", (2,), (i,)) for i in range(2)}
    dist_checkpointing.save({"a": S.from_rank_offsets("a", torch.ones(4)), "objects": objects}, path)
    added, outcomes = DIFFERENCES[difference]
    request = {"a": S.from_rank_offsets("a", torch.zeros(4)), **added}
    if added and "o" not in added:
        request["o"] = mapping.ShardedObject("o", None, (2,), (1,))
    key = next(iter(added), "o")
    with lines_of(logging.getLogger("megackpt")) as lines:
        if mode in outcomes["raised"]:
            with pytest.raises((CheckpointException, CheckpointingException), match=repr(key)):
                dist_checkpointing.load(request, path, strict=mode, validate_access_integrity=False)
            return
        loaded = dist_checkpointing.load(request, path, strict=mode, validate_access_integrity=False)
    assert any(repr(key) in line for line in lines) == (mode in outcomes["logged"])
    if mode in ON_UNEXPECTED["returned"]:
        loaded, missing, unexpected = loaded
        expected = {key} if mode in outcomes["returned"] else set()
        assert (missing, unexpected) == ((set(), expected) if added else (expected, set()))
    assert loaded.keys() == {"a", "o"} - ({"o"} if not added else set())
    assert torch.equal(loaded["a"], torch.ones(4))
    assert loaded.get("o", "object 1") == "object 1"


def test_what_a_save_does_about_copies_that_differ_is_an_option_of_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def policy(**arguments: Any) -> Policy:
        return our_strategies._all_of(None, arguments)["options"].sample_replicas

    assert policy() is Policy.WARN
    monkeypatch.setattr(settings.OPTIONS, "replicas", "error")
    assert policy() is Policy.ERROR
    monkeypatch.setattr(settings.OPTIONS, "replicas", "off")
    assert policy() is Policy.IGNORE
    assert policy(options=SaveOptions(sample_replicas=Policy.WARN)) is Policy.WARN


def test_what_an_error_proposes_can_be_given_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = str(tmp_path / "iter_1")
    dist_checkpointing.save({"model.w": S.from_rank_offsets("model.w", torch.ones(2))}, path)

    def wanted() -> dict[str, Any]:
        return {"w": S.from_rank_offsets("w", torch.zeros(2))}

    with pytest.raises(MissingKeyError) as raised:
        dist_checkpointing.load(wanted(), path)
    proposed = re.findall(r"LoadOptions\(rename=.*?\)", str(raised.value))
    assert "install(load_options=LoadOptions(...))" in str(raised.value)
    assert len(proposed) == 1, str(raised.value)
    monkeypatch.setattr(settings.OPTIONS, "load_options", eval(proposed[0], {"LoadOptions": LoadOptions}))
    reader = torch_dist.TorchDistLoadShardedStrategy()
    wrapped = fully_parallel.FullyParallelLoadStrategyWrapper(reader)
    for strategy in (None, reader, wrapped, tensorstore.TensorStoreLoadShardedStrategy()):
        assert dist_checkpointing.load(wanted(), path, strategy)["w"].tolist() == [1.0, 1.0], strategy
    monkeypatch.setattr(settings.OPTIONS, "save_options", SaveOptions(rank0_values=("*",)))
    for strategy in (None, ("torch_dist", 1), torch_dist.TorchDistSaveShardedStrategy("torch_dist", 1)):
        assert our_strategies._all_of(strategy, getattr(strategy, "save_arguments", {}))[
            "options"
        ].rank0_values


def test_a_silent_cast_is_an_option_of_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = str(tmp_path / "iter_1")
    dist_checkpointing.save({"w": S.from_rank_offsets("w", torch.tensor([1.5, 2.5]))}, path)

    def wanted() -> dict[str, Any]:
        return {"w": S.from_rank_offsets("w", torch.zeros(2, dtype=torch.bfloat16))}

    with pytest.raises(MismatchError, match="float32"):
        dist_checkpointing.load(wanted(), path)
    monkeypatch.setattr(settings.OPTIONS, "silent_cast", True)
    assert dist_checkpointing.load(wanted(), path)["w"].tolist() == [1.5, 2.5]
    with pytest.raises(MismatchError, match="float32"):
        megackpt.load(wanted(), path)
    reader = fully_parallel.FullyParallelLoadStrategyWrapper(
        torch_dist.TorchDistLoadShardedStrategy(cache_metadata=True)
    )
    assert dist_checkpointing.load(wanted(), path, reader)["w"].dtype == torch.bfloat16
    assert reader.stream_ckpt_dequant
