"""Megatron-LM's local checkpoints: state dicts without their tensors, and steps in tiers."""

from __future__ import annotations

import argparse
import importlib.util
import io
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megackpt import Checkpointer, MemoryTier, SaveOptions, Tiers
from megackpt.contrib.megatron.dist_checkpointing import mapping, tensor_aware_state_dict, validation
from megackpt.contrib.megatron.dist_checkpointing.strategies.async_utils import AsyncCallsQueue
from megackpt.contrib.megatron.dist_checkpointing.tensor_aware_state_dict import MCoreTensorAwareStateDict
from megackpt.contrib.megatron_lm import TieredCheckpointManager
from megackpt.errors import CheckpointingException, DeclarationError, MissingKeyError, NotACheckpointError
from megackpt.testing.ranks import RankPool
from tests.contrib.megatron.small_state import small_state
from tests.contrib.nvrx import test_nvrx_folders as nvrx_folders
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
    """Rows of a weight, a replica, objects, and common state: arguments that name the rank, a scale."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    weight = (torch.arange(24.0).reshape(8, 3) + 100 * iteration).chunk(ranks)[rank].clone()
    return {
        "w": S.from_rank_offsets("w", weight, (0, rank, ranks)),
        "same": S.from_rank_offsets("same", torch.full((3,), float(iteration)), replica_id=rank),
        "rng": mapping.ShardedObject("rng", [iteration + rank], (ranks,), (rank,)),
        "args": argparse.Namespace(rank=rank, local_rank=rank, lr=0.1),
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
    assert vars(loaded["args"]) == {"rank": 0, "local_rank": 0, "lr": 0.1}
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
    _check_small(manager.load()[0].to_state_dict(small_state(0.0)))


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


def _check_small(loaded: dict[str, Any]) -> None:
    assert loaded["step"] == 7
    assert loaded["local"] == "mine"
    assert loaded["model"]["extra"] == {"seen": 1.0}
    assert loaded["model"]["w"].tolist() == [[1.0] * 3] * 2
    assert loaded["model"]["fused"].tolist() == [1.0, 1.0, 2.0, 2.0]


@pytest.mark.parametrize("algo", ["atomic", "fully_parallel"])
def test_a_state_dict_survives_without_its_tensors(algo: str) -> None:
    original = small_state()
    kept, cached = MCoreTensorAwareStateDict.from_state_dict(original, algo)
    assert kept.common_state_dict == {"step": 7}
    kept.copy_tensors_to_cpu(non_blocking=True)
    original["model"]["w"].data.zero_()
    assert [t.sum().item() for t in kept.tensors] == [6.0, 2.0, 4.0], "a copy must not change with the model"
    copies = list(kept.tensors)
    kept.copy_tensors_to_cpu()
    assert all(a is b for a, b in zip(kept.tensors, copies, strict=True)), "copied twice"
    tensors = kept.pop_tensors()
    assert kept.is_hollow
    assert original["model"]["w"].data is not None, "the caller's entities must stay as they are"
    with pytest.raises(DeclarationError, match="were taken out"):
        kept.pop_tensors()
    file = io.BytesIO()
    torch.save(kept, file)
    file.seek(0)
    loaded: MCoreTensorAwareStateDict = torch.load(file, weights_only=False)
    loaded.init_tensors()
    assert [t.shape for t in loaded.tensors] == [t.shape for t in tensors]
    loaded.pop_tensors()
    loaded.insert_tensors(tensors)
    loaded.restore_tensor_device()
    _check_small(loaded.to_state_dict(small_state(0.0), algo=algo))
    assert loaded.to_state_dict({}) == {"step": 7}
    again, same = MCoreTensorAwareStateDict.from_state_dict(small_state(), algo, cached_metadata=cached)
    assert same is cached
    _check_small(again.to_state_dict(small_state(0.0)))


@pytest.fixture
def megatron_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let pickles that name Megatron-Core's modules get ours, as under `install()`."""
    names = "megatron.core.dist_checkpointing"
    for module in (mapping, tensor_aware_state_dict):
        monkeypatch.setitem(sys.modules, f"{names}.{module.__name__.rpartition('.')[2]}", module)


@pytest.mark.parametrize("algo", nvrx_folders.ALGORITHMS)
@pytest.mark.usefixtures("megatron_modules")
def test_a_file_of_megatrons_own_class_is_read_or_the_error_names_the_files_of_other_ranks(algo: str) -> None:
    expected = nvrx_folders.arrays(nvrx_folders.NEWEST)
    ranks_without = []
    for rank in range(2):
        file = nvrx_folders.STORED / algo / str(rank) / f"iter_{nvrx_folders.NEWEST:07d}_{rank}_local.pt"
        kept = torch.load(file, weights_only=False)
        assert isinstance(kept, MCoreTensorAwareStateDict)
        kept.insert_tensors(kept.pop_tensors())
        kept.restore_tensor_device()
        request = nvrx_folders.state_of(rank, 2, 0, mapping)
        model, same = request["model"], request["model"].pop("same")
        loaded = kept.to_state_dict({"model": model, "rng": request["rng"]}, algo=algo)
        assert torch.equal(loaded["model"]["w"], expected["w"].chunk(2)[rank])
        assert torch.equal(loaded["model"]["layer"], expected["layers.weight"][rank])
        assert (loaded["rng"], loaded["iteration"]) == ({"seed": rank}, nvrx_folders.NEWEST)
        if kept.to_state_dict({"same": same}, strict="log_all", return_mismatch_keys=True)[2]:
            ranks_without.append(rank)
            with pytest.raises(MissingKeyError, match="in the files of other ranks"):
                kept.to_state_dict({"same": same}, algo=algo)
        else:
            assert torch.equal(kept.to_state_dict({"same": same}, algo=algo)["same"][0], expected["same"])
    assert len(ranks_without) == (algo == "fully_parallel"), "one rank keeps the replica for both"


def test_what_a_local_checkpoint_lacks_is_an_error() -> None:
    kept, _ = MCoreTensorAwareStateDict.from_state_dict(small_state(), "atomic")
    other = {"new": S.from_rank_offsets("new", torch.zeros(1))}
    with pytest.raises(MissingKeyError, match=r"'new' among them.*the layout that wrote it"):
        kept.to_state_dict(other)
    cut = {"w": S.from_rank_offsets("w", torch.zeros(1, 3), (0, 0, 2))}
    with pytest.raises(CheckpointingException, match="'w' among them"):
        kept.to_state_dict(cut)
    empty = {"w": S.from_rank_offsets("w", torch.ones(1)).without_data()}
    for call in (
        lambda: kept.insert_tensors([]),
        kept.init_tensors,
        lambda: kept.to_state_dict(other, algo="pigeons"),
        MCoreTensorAwareStateDict.from_state_dict(empty, "atomic")[0].pop_tensors,
    ):
        with pytest.raises(DeclarationError):
            call()


@pytest.mark.parametrize("mode", list(validation.StrictHandling), ids=lambda mode: mode.value)
@pytest.mark.parametrize("asked", ["w", "new", "w and new"])
def test_to_state_dict_raises_logs_and_returns_keys_by_mode(
    asked: str, mode: Any, caplog: pytest.LogCaptureFixture
) -> None:
    kept, _ = MCoreTensorAwareStateDict.from_state_dict(small_state(), "atomic")
    request = {key: S.from_rank_offsets(key, torch.zeros(2, 3)) for key in asked.split(" and ")}
    lacking = {"fused.0", "fused.1", "extra"} | ({"w"} if asked == "new" else set())
    modes = type(mode)
    unexpected = set() if mode is modes.IGNORE_ALL else request.keys() - {"w"}
    missing = lacking if mode in (modes.LOG_ALL, modes.RAISE_ALL, modes.RETURN_ALL) else set()
    raises = {modes.RAISE_ALL} | (
        {modes.RAISE_UNEXPECTED, modes.ASSUME_OK_UNEXPECTED} if unexpected else set()
    )
    state, text = None, ""
    try:
        state = kept.to_state_dict(request, strict=mode, return_mismatch_keys=True)
    except MissingKeyError as error:
        text = str(error)
    assert (state is None) == (mode in raises)
    text = text or caplog.text
    if mode in (modes.RETURN_UNEXPECTED, modes.RETURN_ALL, modes.IGNORE_ALL):
        assert text == ""
    else:
        assert ("Unexpected keys" in text and "'new'" in text) == bool(unexpected)
        assert ("Missing keys" in text) == bool(missing)
        assert all(key in text for key in missing)
    if state is not None:
        assert state[1:] == (missing, unexpected)
        assert state[0].keys() == {"step"} | (request.keys() & {"w"})


def _save_and_load_local(path: str, is_async: bool) -> int:
    from nvidia_resiliency_ext.checkpointing.local.ckpt_managers.local_manager import LocalCheckpointManager

    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment,return-value]
    torch.cuda.synchronize = lambda *_: None  # type: ignore[assignment]
    manager, queue = LocalCheckpointManager(path), AsyncCallsQueue()
    for iteration in (1, 2):
        kept, _ = MCoreTensorAwareStateDict.from_state_dict(_state(iteration))
        request = manager.save(kept, iteration, is_async=is_async)
        if request is not None:
            queue.schedule_async_request(request)
            queue.maybe_finalize_async_calls(blocking=True)
    queue.close()
    reader = LocalCheckpointManager(path)
    latest = reader.find_latest()
    expected, request = _state(latest), _state(0)
    del request["iteration"], request["scaler"], request["args"]
    loaded = reader.load()[0].to_state_dict(request)
    assert torch.equal(loaded["w"], expected["w"].data)
    assert torch.equal(loaded["same"], expected["same"].data)
    assert loaded["rng"] == expected["rng"].data
    assert (loaded["scaler"], loaded["iteration"]) == (expected["scaler"], latest)
    assert loaded["args"] == expected["args"], "each rank keeps its own common state"
    return latest


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.skipif(
    importlib.util.find_spec("nvidia_resiliency_ext") is None,
    reason="nvidia-resiliency-ext is not installed: pip install nvidia-resiliency-ext",
)
def test_the_manager_of_nvidia_resiliency_ext_saves_finds_and_loads(
    rank_pool: RankPool, tmp_path: Path, is_async: bool
) -> None:
    assert rank_pool.run(_save_and_load_local, 2, str(tmp_path), is_async) == [2, 2]
