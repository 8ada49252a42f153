"""What Megatron-Core from 0.17 on has added to dist_checkpointing, and what its training package calls."""

from __future__ import annotations

import gc
import importlib
import inspect
import os
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.api import CheckpointException

import megackpt
from megackpt.compat.megatron import core_version, dist_checkpointing, process_options
from megackpt.compat.megatron.dist_checkpointing import (
    core,
    gpt_checkpoint_interop,
    mapping,
    serialization,
    validation,
)
from megackpt.compat.megatron.dist_checkpointing.strategies import async_utils, fully_parallel, nvrx
from megackpt.compat.megatron.dist_checkpointing.strategies import torch as torch_dist
from megackpt.errors import DeclarationError, IntegrityError, MismatchError, NotACheckpointError
from megackpt.testing.ranks import RankPool
from tests.contrib.megatron.imports_table import IMPORT_VERSIONS, load_imports
from tests.contrib.megatron.small_state import small_state
from tests.support.dcp_alone import ALONE

S, F = mapping.ShardedTensor, mapping.ShardedTensorFactory
ROOT = Path(__file__).parents[3]
MEGATRONS = [path for path in os.environ.get("MEGATRON_PATHS", "").split(os.pathsep) if path]
"""Checkouts of Megatron-LM, or unpacked wheels from 0.17 on, to import `megatron.training` from."""
IMPORTS_TRAINING = """
from megackpt.compat import megatron
megatron.install()
import megatron.training
from megatron.training import arguments, async_utils, checkpointing, training
from megatron.core import dist_checkpointing
assert dist_checkpointing.__name__.startswith("megackpt."), dist_checkpointing
assert checkpointing.dist_checkpointing is dist_checkpointing
"""


def _python(program: str, *paths: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *paths]), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", program]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)


@pytest.mark.parametrize("path", MEGATRONS or ["installed"])
def test_megatron_training_can_be_imported_under_install(path: str) -> None:
    done = _python(IMPORTS_TRAINING, *([path] if MEGATRONS else []))
    if "ModuleNotFoundError" in done.stderr and "dist_checkpointing" not in done.stderr.splitlines()[-1]:
        pytest.skip(f"{done.stderr.splitlines()[-1]} (name checkouts in MEGATRON_PATHS)")
    assert done.returncode == 0, done.stderr[-2000:]


def test_every_name_that_megatron_imports_is_found_under_install() -> None:
    names = sorted({name for version in IMPORT_VERSIONS for name in load_imports(version)})
    lines = [
        f"from megatron.core.dist_checkpointing.{m} import {n}".replace("checkpointing. ", "checkpointing ")
        for m, _, n in (name.rpartition(".") for name in names)
    ]
    program = "from megackpt.compat import megatron; megatron.install()\n" + "\n".join(lines)
    done = _python(program)
    if "No module named 'megatron'" in done.stderr:
        pytest.skip("Megatron-Core is not installed: pip install megatron-core==0.16.1")
    assert done.returncode == 0, done.stderr[-2000:]


_BY_POSITION = {
    "0.18.2": (None, None, True, False, None, {"v": 1}, "nvrx", True),
    "0.19.0": (None, True, False, None, {"v": 1}, "nvrx", True),
}
"""Arguments of save after the directory, as each version orders them."""


@pytest.mark.parametrize("version", _BY_POSITION)
def test_calls_by_position_follow_the_installed_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    monkeypatch.setattr(core_version.metadata, "version", lambda name: version)
    monkeypatch.delitem(sys.modules, "megatron.core", raising=False)
    path, others = str(tmp_path / "here"), [v for v in _BY_POSITION if v != version]
    dist_checkpointing.save(small_state(), path, *_BY_POSITION[version])
    wanted = {**small_state(0.0), "new": S.from_rank_offsets("new", torch.zeros(1))}
    assert (Path(path) / "integrity.json").exists()
    assert serialization.load_content_metadata(path) == {"v": 1}
    first = (None,) if version == "0.18.2" else ()
    _, missing, unexpected = dist_checkpointing.load(
        wanted, path, None, *first, True, "return_all", True, None
    )
    assert (missing, unexpected) == (set(), {"new"})
    for other in others:
        with pytest.raises(
            DeclarationError, match=rf"fourth argument .*Megatron-Core {version} \(which is inst"
        ):
            dist_checkpointing.save(small_state(), str(tmp_path / other), *_BY_POSITION[other])
    assert not (tmp_path / others[0]).exists()
    loaded = dist_checkpointing.load(
        small_state(0.0), path, common_strategy=None, validate_access_integrity=False
    )
    assert loaded["step"] == 7
    assert list(inspect.signature(serialization.load).parameters)[3] == "common_strategy"


def test_without_megatron_core_calls_have_the_order_of_the_newest_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def version(name: str) -> str:
        raise core_version.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(core_version.metadata, "version", version)
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


def test_pg_cache_path_and_its_kin_are_accepted(tmp_path: Path) -> None:
    cached = {"pg_cache_path": str(tmp_path / "cache"), "pg_cache_create": True}
    saver = fully_parallel.FullyParallelSaveStrategyWrapper(
        torch_dist.TorchDistSaveShardedStrategy("torch_dist", 1),
        None,
        False,
        "torch_dist",
        1,
        False,
        **cached,
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
    with pytest.raises(megackpt.CheckpointingException, match="cannot be read"):
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
    assert megackpt.check_is_distributed_checkpoint(dcp), "megackpt itself reads it"
    with pytest.raises(NotACheckpointError, match=r"no metadata\.json"):
        validation.verify_checkpoint(str(dcp))
    store = megackpt.storage.open_store(dcp)
    assert not dist_checkpointing.check_is_distributed_checkpoint(store)
    dist_checkpointing.save(small_state(), str(tmp_path / "c"), ("torch_dist", 1))
    assert dist_checkpointing.check_is_distributed_checkpoint(tmp_path / "c")
    validation.verify_checkpoint(str(tmp_path / "c"))
    (tmp_path / "c" / "metadata.json").write_text("{}")
    with pytest.raises(megackpt.FormatError, match="does not name a sharded_backend"):
        dist_checkpointing.check_is_distributed_checkpoint(str(tmp_path / "c"))


def test_what_is_not_stored_or_does_not_fit_raises_torch_s_error_too(tmp_path: Path) -> None:
    path = str(tmp_path / "iter_1")
    dist_checkpointing.save(small_state(), path)
    unknown = {"new": S.from_rank_offsets("new", torch.zeros(1))}
    for caught in (CheckpointException, megackpt.MissingKeyError, KeyError):
        with pytest.raises(caught, match="new"):
            dist_checkpointing.load(unknown, path)
    with pytest.raises(CheckpointException) as raised:
        dist_checkpointing.load({"w": S.from_rank_offsets("w", torch.zeros(5, 3))}, path)
    assert isinstance(raised.value, MismatchError)
    assert [type(error) for error, _ in raised.value.failures.values()] == [MismatchError]
    with pytest.raises(megackpt.MissingKeyError) as plain:
        megackpt.load(unknown, path)
    assert not isinstance(plain.value, CheckpointException), "only the face of Megatron-Core does so"


def test_a_silent_cast_is_an_option_of_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = str(tmp_path / "iter_1")
    dist_checkpointing.save({"w": S.from_rank_offsets("w", torch.tensor([1.5, 2.5]))}, path)

    def wanted() -> dict[str, Any]:
        return {"w": S.from_rank_offsets("w", torch.zeros(2, dtype=torch.bfloat16))}

    with pytest.raises(MismatchError, match="float32"):
        dist_checkpointing.load(wanted(), path)
    monkeypatch.setattr(process_options.OPTIONS, "silent_cast", True)
    assert dist_checkpointing.load(wanted(), path)["w"].tolist() == [1.5, 2.5]
    with pytest.raises(MismatchError, match="float32"):
        megackpt.load(wanted(), path)
    reader = fully_parallel.FullyParallelLoadStrategyWrapper(
        torch_dist.TorchDistLoadShardedStrategy(cache_metadata=True)
    )
    assert dist_checkpointing.load(wanted(), path, reader)["w"].dtype == torch.bfloat16
    assert reader.stream_ckpt_dequant


def test_install_sets_the_option() -> None:
    done = _python(
        "from megackpt.compat import megatron; from megackpt.compat.megatron.process_options import OPTIONS\n"
        "megatron.install(silent_cast=True); assert OPTIONS.silent_cast\n"
        "megatron.install(); assert not OPTIONS.silent_cast\n"
        "megatron.install(silent_cast='yes')"
    )
    assert "silent_cast is 'yes'" in done.stderr, done.stderr


@pytest.mark.filterwarnings("ignore:torch.distributed is (disabled|unavailable)")
@pytest.mark.parametrize("strategy", ["nvrx", "mcore"])
def test_an_asynchronous_save_by_the_classes_of_get_async_strategy(tmp_path: Path, strategy: str) -> None:
    path = str(tmp_path / "iter_1")
    name, modules = torch_dist.get_async_strategy(strategy)
    assert name == "mcore"
    assert torch_dist.get_async_strategy(strategy, "AsyncRequest")[1] is async_utils.AsyncRequest
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
    request = nvrx.make_nvrx_async_request(async_utils.AsyncRequest, print, (1,), [], preload_fn=None)
    assert (request.async_fn_args, request.async_fn_kwargs) == ((1,), {})
    assert not nvrx.is_nvrx_min_version("99.0.0")
    assert gc.isenabled()
    with async_utils._disable_gc():
        assert not gc.isenabled()
    assert gc.isenabled()
    done = _python(
        "import os; from megackpt.compat.megatron.dist_checkpointing.strategies import async_utils\n"
        "before = os.nice(0); async_utils._set_process_qos(before + 3, 3); assert os.nice(0) == before + 3\n"
        "async_utils._set_process_qos(0, None); assert os.nice(0) == before + 3"
    )
    assert done.returncode == 0, done.stderr


def test_a_hybrid_model_reads_the_checkpoint_of_a_gpt(tmp_path: Path) -> None:
    path = str(tmp_path / "gpt")
    weight = torch.arange(12.0).reshape(2, 2, 3)
    stored: dict[str, Any] = {
        "mlp": S.from_rank_offsets("decoder.layers.mlp.w", weight),
        "attention": S.from_rank_offsets("decoder.layers.self_attention.w", -weight),
        "norm": S.from_rank_offsets("decoder.final_layernorm.weight", torch.ones(3)),
        **{
            f"extra{i}": mapping.ShardedObject("decoder.layers.mlp._extra_state", i, (2,), (i,))
            for i in (0, 1)
        },
    }
    dist_checkpointing.save(stored, path, ("torch_dist", 1))
    maps = gpt_checkpoint_interop.gpt_compatible_layer_maps("M*-|M*-")
    assert maps.num_gpt_layers == 2
    assert (dict(maps.attention_to_gpt), dict(maps.mlp_to_gpt)) == ({1: 0, 4: 1}, {2: 0, 5: 1})
    parts = F(
        "decoder.layers.5.mlp.w",
        torch.zeros(2, 3),
        lambda key, data, replica, flat: [
            S.from_rank_offsets(key, data[i : i + 1], (0, i, 2), replica_id=replica) for i in range(2)
        ],
        torch.cat,
    )
    model: dict[str, Any] = {
        "fresh": S.from_rank_offsets("decoder.layers.0.mixer.A", torch.full((2,), 5.0)),
        "attention": S.from_rank_offsets("decoder.layers.4.self_attention.w", torch.zeros(2, 3)),
        "mlp": S.from_rank_offsets("decoder.layers.2.mlp.w", torch.zeros(2, 3)),
        "factory": parts,
        "norm": S.from_rank_offsets("decoder.final_norm.weight", torch.zeros(3)),
        "head": mapping.ShardedObject("output_layer._extra_state", "mine", (1,), (0,)),
        "extra": mapping.ShardedObject("decoder.layers.5.mlp._extra_state", None, (1,), (0,)),
    }
    gpt_checkpoint_interop.retarget_sharded_state_dict_to_gpt_checkpoint(model, maps)
    loaded = dist_checkpointing.load(model, path)
    assert loaded["fresh"].tolist() == [5.0, 5.0]
    assert torch.equal(loaded["attention"], -weight[1])
    assert torch.equal(loaded["mlp"], weight[0])
    assert torch.equal(loaded["factory"], weight[1])
    assert loaded["norm"].tolist() == [1.0] * 3
    assert (loaded["head"], loaded["extra"]) == ("mine", 1)


def test_plain_names_of_a_hybrid_model_become_those_of_a_gpt() -> None:
    maps = gpt_checkpoint_interop.gpt_compatible_layer_maps("M*-")
    rename = gpt_checkpoint_interop.retarget_fsdp_state_dict_to_gpt_checkpoint
    state = {
        "module.decoder.layers.0.mixer.A": 0,
        "module.decoder.layers.1.self_attention.w": 1,
        "module.decoder.final_norm.weight": 2,
        "state": [{"decoder.layers.2.mlp.w": {"exp_avg": 3}}],
    }
    assert rename(state, maps) == {
        "module.decoder.layers.0.self_attention.w": 1,
        "module.decoder.final_layernorm.weight": 2,
        "state": [{"decoder.layers.0.mlp.w": {"exp_avg": 3}}],
    }
    keys = ["model.module.module.decoder.layers.0.self_attention.w"]
    assert rename(state, maps, keys, "model") == {
        "module.module.decoder.layers.0.self_attention.w": 1,
        "state": [{"decoder.layers.0.mlp.w": {}}],
    }
    outside = {"x": S.from_rank_offsets("decoder.layers.9.mlp.w", torch.zeros(1))}
    with pytest.raises(ValueError, match="layer 9, which the hybrid pattern does not have"):
        gpt_checkpoint_interop.retarget_sharded_state_dict_to_gpt_checkpoint(outside, maps)


@pytest.mark.parametrize(
    ("pattern", "why"),
    [
        ("*-/*", "several tokens"),
        ("*-G", "'G'"),
        ("*-*E", "both"),
        ("M", "0 attention"),
        ("**-", "2 attention"),
    ],
)
def test_a_pattern_that_fits_no_gpt_is_an_error(pattern: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        gpt_checkpoint_interop.gpt_compatible_layer_maps(pattern)


def test_modules_of_newer_versions_import_alone() -> None:
    for name in ("strategies.nvrx", "gpt_checkpoint_interop", "strategies.cached_metadata_filesystem_reader"):
        assert importlib.import_module(f"{dist_checkpointing.__name__}.{name}")


def _save_dcp_later(path: str, breaks: bool) -> str:
    rank = torch.distributed.get_rank()
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
