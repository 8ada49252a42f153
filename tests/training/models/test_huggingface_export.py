"""`export_huggingface`: every tensor, whatever layout was saved; wrong input, interruptions, full disks."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import megackpt
from megackpt import CheckpointError, DeclarationError, IntegrityError, StorageError
from megackpt.errors import MapError
from megackpt.storage import LocalStore, ObjectStore, Store
from megackpt.testing.cached_disk import Loss
from megackpt.testing.crash_store import CrashMachine, Moment, Stopped
from megackpt.testing.faulty_store import FaultyStore, Operation
from megackpt.testing.world import SimulatedWorld
from tests.support.effort import few
from tests.support.huggingface_folders import (
    assert_same_tensors,
    declared,
    folder_tensors,
    random_config,
    saved_model,
    stacked_map,
)
from tests.support.s3_server import BUCKET, S3Server, options_for
from tests.support.states import assembled, random_arrays

LLAMA = random_config("llama", 0)
NORM = "decoder.final_layernorm.weight"


def test_files_and_index_are_those_that_transformers_expects(tmp_path: Path) -> None:
    expected = saved_model(tmp_path / "saved", LLAMA, 1)
    total = sum(tensor.nbytes for tensor in expected.values())
    report = megackpt.export_huggingface(tmp_path / "saved", tmp_path / "folder", max_file_bytes=total // 3)
    files = sorted(path.name for path in (tmp_path / "folder").iterdir())
    count = report.files
    assert count > 2
    shards = [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]
    assert files == ["config.json", *shards, "model.safetensors.index.json"]
    index = json.loads((tmp_path / "folder/model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == total
    assert index["weight_map"].keys() == expected.keys()
    assert index["weight_map"]["model.embed_tokens.weight"] == shards[0]
    layers = [
        (file, int(name.split(".")[2])) for name, file in index["weight_map"].items() if "layers" in name
    ]
    numbers = [number for _, number in sorted(layers)]
    assert numbers == sorted(numbers), "layers are not in the order of files"
    for name, file in index["weight_map"].items():
        assert name in load_file(tmp_path / "folder" / file)


def test_values_are_rounded_to_nearest_even_and_the_dtype_is_in_config_json(tmp_path: Path) -> None:
    expected = saved_model(tmp_path / "saved", {**LLAMA, "torch_dtype": "float32"}, 2)
    report = megackpt.export_huggingface(tmp_path / "saved", tmp_path / "folder", dtype=torch.bfloat16)
    assert_same_tensors(
        folder_tensors(tmp_path / "folder"), {key: tensor.bfloat16() for key, tensor in expected.items()}
    )
    assert report.dtype == "bfloat16"
    assert json.loads((tmp_path / "folder/config.json").read_text())["torch_dtype"] == "bfloat16"


SIZES = {"vocab_size": 8, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 2, "n_groups": 1}
NEMOTRON_H = {
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 4,
    "mamba_num_heads": 4,
    "mamba_head_dim": 4,
    "ssm_state_size": 4,
    "layers_block_type": ["mamba", "moe"],
    "n_routed_experts": 2,
    "moe_intermediate_size": 4,
    "moe_shared_expert_intermediate_size": 4,
}
KEPT: dict[str, tuple[dict[str, Any], str]] = {
    "deepseek_v3": (
        {**random_config("deepseek_v3", 0), "first_k_dense_replace": 0, "moe_intermediate_size": 6},
        r"mlp\.gate\.e_score_correction_bias",
    ),
    "mamba2": (
        {"model_type": "mamba2", **SIZES, "num_heads": 4, "head_dim": 4, "state_size": 4},
        r"mixer\.(A_log|D|dt_bias)",
    ),
    "nemotron_h": (
        {"model_type": "nemotron_h", **SIZES, **NEMOTRON_H},
        r"mixer\.(A_log|D|dt_bias|gate\.e_score_correction_bias)",
    ),
    "qwen3_next": (random_config("qwen3_next", 0), r"linear_attn\.(A_log|dt_bias)"),
}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("model_type", KEPT)
def test_some_tensors_are_never_rounded(model_type: str, dtype: str, tmp_path: Path) -> None:
    """By transformers (`_keep_in_fp32_modules_strict`), or because our models have them in float32 only."""
    config, names = KEPT[model_type]
    kept = {key for key in stacked_map(config).right if re.fullmatch(rf".*\.layers\.\d+\.({names})", key)}
    assert kept
    expected = saved_model(tmp_path / "saved", config, 0)
    report = megackpt.export_huggingface(tmp_path / "saved", tmp_path / "folder", dtype=dtype)
    written = folder_tensors(tmp_path / "folder")
    assert {key for key, tensor in written.items() if tensor.dtype == torch.float32} == kept
    assert_same_tensors({key: written[key] for key in kept}, {key: expected[key] for key in kept})
    assert report.dtype == dtype
    # And back: an import with this dtype leaves them as they are, too.
    megackpt.import_huggingface(tmp_path / "folder", tmp_path / "imported", dtype=dtype, stacked=False)
    arrays = megackpt.load_tensors_metadata(tmp_path / "imported").values()
    assert sum(spec.dtype == torch.float32 for spec in arrays) == len(kept)


def test_parts_of_a_tensor_in_several_dtypes_need_a_choice(tmp_path: Path) -> None:
    config = random_config("gpt2", 0)
    made = stacked_map(config)
    theirs = random_arrays(made, 13)
    arrays = assembled(made, theirs)
    (queries,) = (key for key in arrays if key.endswith("linear_qkv.weight.q"))
    arrays[queries] = arrays[queries].bfloat16()
    megackpt.save(declared(arrays, 0, 1), tmp_path / "saved")
    with pytest.raises(MapError, match=r"c_attn.weight' is made of arrays of the dtypes bfloat16, float32"):
        megackpt.export_huggingface(tmp_path / "saved", tmp_path / "folder", config=config)
    assert not (tmp_path / "folder").exists()
    megackpt.export_huggingface(tmp_path / "saved", tmp_path / "folder", config=config, dtype="bfloat16")
    narrow = {key: tensor.bfloat16() for key, tensor in theirs.items()}
    assert_same_tensors(folder_tensors(tmp_path / "folder"), narrow)


def test_masters_are_read_from_the_flat_ranges_of_a_distributed_optimizer(tmp_path: Path) -> None:
    expected = saved_model(tmp_path / "saved", LLAMA, 3, ranks=3, masters=True)
    megackpt.export_huggingface(tmp_path / "saved", tmp_path / "masters", weights="masters", buffer_bytes=999)
    megackpt.export_huggingface(tmp_path / "saved", tmp_path / "model")
    assert_same_tensors(folder_tensors(tmp_path / "masters"), expected)
    assert_same_tensors(
        folder_tensors(tmp_path / "model"), {key: tensor.bfloat16() for key, tensor in expected.items()}
    )


@pytest.mark.parametrize("format", ["torch_dist", "zarr"])
def test_other_formats_and_prefixes_are_read(format: str, tmp_path: Path) -> None:
    if format == "zarr":
        pytest.importorskip("zarr")
    expected = saved_model(tmp_path / "saved", LLAMA, 4, prefix="model.", format=format)
    megackpt.export_huggingface(
        tmp_path / "saved", tmp_path / "folder", map="llama", config=LLAMA, prefix="model."
    )
    assert_same_tensors(folder_tensors(tmp_path / "folder"), expected)


def test_ranks_divide_the_files(tmp_path: Path) -> None:
    expected = saved_model(tmp_path / "saved", LLAMA, 5)
    reports = SimulatedWorld(3).run(
        lambda group: megackpt.export_huggingface(
            tmp_path / "saved", tmp_path / "folder", max_file_bytes=3000, group=group
        )
    )
    assert reports[0] == reports[1] == reports[2]
    assert_same_tensors(folder_tensors(tmp_path / "folder"), expected)


def test_source_and_target_may_be_object_stores(s3_server: S3Server, tmp_path: Path) -> None:
    expected = saved_model(tmp_path / "saved", LLAMA, 12)
    options = options_for(s3_server.port)
    url = f"s3://{BUCKET}/huggingface-export"
    source, target = (ObjectStore(f"{url}/{name}", options=options) for name in ("saved", "folder"))
    megackpt.convert(tmp_path / "saved", source, "megackpt")
    fault = FaultyStore(target, fail_at=lambda o: o.kind == "open_writer" and "model-00002" in o.name)
    with pytest.raises(StorageError, match="No space left"):
        megackpt.export_huggingface(source, fault, max_file_bytes=5000)
    assert "model.safetensors.index.json" not in target.names()
    report = megackpt.export_huggingface(source, target, max_file_bytes=5000)
    assert report.kept_files == 1
    assert all(not name.startswith(".") for name in target.names())
    megackpt.import_huggingface(target, tmp_path / "imported")
    megackpt.export_huggingface(tmp_path / "imported", tmp_path / "folder")
    assert_same_tensors(folder_tensors(tmp_path / "folder"), expected)


def test_files_of_the_tokenizer_are_copied_from_the_folder_of_the_config(tmp_path: Path) -> None:
    saved_model(tmp_path / "saved", LLAMA, 6)
    original = tmp_path / "original"
    original.mkdir()
    (original / "config.json").write_text(json.dumps({**LLAMA, "dtype": "float16"}))
    copied = {"tokenizer.json": "{}", "merges.txt": "a b", "generation_config.json": '{"top_k": 3}'}
    others = {"model.safetensors.index.json": "{}", "model.safetensors": "x", ".hidden.json": "{}"}
    for name, text in {**copied, **others}.items():
        (original / name).write_text(text)
    megackpt.export_huggingface(tmp_path / "saved", tmp_path / "folder", config=original)
    written = {path.name for path in (tmp_path / "folder").iterdir()}
    assert written == {"config.json", "model.safetensors", *copied}
    assert all((tmp_path / "folder" / name).read_text() == text for name, text in copied.items())
    assert json.loads((tmp_path / "folder/config.json").read_text())["dtype"] == "float32"


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({NORM: None}, r"'decoder.final_layernorm.weight' \(\d+,\) is missing"),
        ({"decoder.layers.unknown": torch.zeros(3)}, r"'decoder.layers.unknown' \(3,\) is additional"),
        (
            {NORM: torch.zeros(1)},
            r"'decoder.final_layernorm.weight' has the shape \(1,\), and by the map \(\d+,\)",
        ),
    ],
    ids=["missing", "additional", "wrong shape"],
)
def test_tensors_that_do_not_fit_are_one_error_and_nothing_is_written(
    changed: dict[str, Any], text: str, tmp_path: Path
) -> None:
    made = stacked_map(LLAMA)
    arrays = {**assembled(made, random_arrays(made, 7)), **changed}
    arrays = {key: array for key, array in arrays.items() if array is not None}
    megackpt.save(declared(arrays, 0, 1), tmp_path / "saved")
    with pytest.raises(MapError, match=text):
        megackpt.export_huggingface(tmp_path / "saved", tmp_path / "folder", config=LLAMA)
    assert not (tmp_path / "folder").exists()


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"config": {**LLAMA, "num_hidden_layers": 9}}, MapError, "is missing|has the shape"),
        ({"config": {**LLAMA, "hidden_size": -1}}, MapError, "hidden_size"),
        ({"config": {"model_type": "unknown"}}, MapError, "No map is for model_type 'unknown'"),
        ({"map": "unknown"}, MapError, "No map is called 'unknown'"),
        ({"map": 3}, DeclarationError, "The map is a int"),
        ({"config": 3}, DeclarationError, "config is a int"),
        ({"config": "nowhere"}, StorageError, "config.json"),
        ({"dtype": "int8"}, MapError, "floating-point dtype"),
        ({"weights": "moments"}, DeclarationError, "weights='moments' is not known. Give one of model"),
        ({"weights": "masters"}, MapError, "has no master weights"),
        ({"prefix": "other."}, MapError, "is missing"),
        ({"buffer_bytes": 0}, DeclarationError, "buffer_bytes"),
        ({"norm_added": 2}, DeclarationError, "norm_added is 2"),
    ],
)
def test_wrong_arguments_are_one_error_and_nothing_is_written(
    arguments: dict[str, Any], error: type[CheckpointError], text: str, tmp_path: Path
) -> None:
    saved_model(tmp_path / "saved", LLAMA, 8)
    with pytest.raises(error, match=text):
        megackpt.export_huggingface(tmp_path / "saved", tmp_path / "folder", **arguments)
    assert not (tmp_path / "folder").exists()


def test_a_checkpoint_without_a_config_needs_one(tmp_path: Path) -> None:
    megackpt.save({"a": torch.zeros(3)}, tmp_path / "saved")
    with pytest.raises(DeclarationError, match=r"no huggingface_config.*Give config="):
        megackpt.export_huggingface(tmp_path / "saved", tmp_path / "folder")


def test_a_model_at_the_target_is_replaced_only_on_request(tmp_path: Path) -> None:
    expected = saved_model(tmp_path / "saved", LLAMA, 10)
    other = {**LLAMA, "num_hidden_layers": LLAMA["num_hidden_layers"] + 1}
    expected_then = saved_model(tmp_path / "other", other, 11)
    megackpt.export_huggingface(tmp_path / "saved", tmp_path / "folder", max_file_bytes=4000)
    with pytest.raises(DeclarationError, match="has a model already"):
        megackpt.export_huggingface(tmp_path / "other", tmp_path / "folder")
    assert_same_tensors(folder_tensors(tmp_path / "folder"), expected)
    with pytest.raises(DeclarationError, match="is the source"):
        megackpt.export_huggingface(tmp_path / "saved", tmp_path / "saved")
    with pytest.raises(DeclarationError, match="has a checkpoint of another format"):
        megackpt.export_huggingface(tmp_path / "saved", tmp_path / "other", overwrite=True)
    megackpt.export_huggingface(tmp_path / "other", tmp_path / "folder", overwrite=True)
    assert_same_tensors(folder_tensors(tmp_path / "folder"), expected_then)


FILE_BYTES, BUFFER_BYTES = 10_500, 1500
INDEX = "model.safetensors.index.json"


def export(source: Path, target: Path | Store, *, file_bytes: int = FILE_BYTES, workers: int = 1) -> int:
    """Export, and return how many files were kept."""
    return megackpt.export_huggingface(
        source, target, max_file_bytes=file_bytes, buffer_bytes=BUFFER_BYTES, workers=workers, overwrite=True
    ).kept_files


def fill_disk(source: Path, folder: Path, *, file: str) -> None:
    """Export until the disk is full, in the middle of a file."""

    def is_in_file(operation: Operation) -> bool:
        return operation.kind == "writer.write" and file in operation.name

    with pytest.raises(StorageError, match="No space left on device"):
        export(source, FaultyStore(LocalStore(str(folder)), fail_at=is_in_file))


def assert_listed_files_are_whole(files: Mapping[str, bytes], whole: Mapping[str, bytes]) -> None:
    """Check that what transformers would read, if it finds a model, is the model."""
    if INDEX in files:
        assert files[INDEX] == whole[INDEX]
        for name in set(json.loads(files[INDEX])["weight_map"].values()):
            assert files[name] == whole[name], name
    if "model.safetensors" in files:
        assert files["model.safetensors"] == whole["model.safetensors"]


@pytest.mark.parametrize("file_bytes", [FILE_BYTES, 10**9])
def test_a_machine_that_stops_at_any_moment_leaves_no_half_model(file_bytes: int, tmp_path: Path) -> None:
    saved_model(tmp_path / "saved", LLAMA, 1)
    machine = CrashMachine()
    export(tmp_path / "saved", machine.store(rank=0), file_bytes=file_bytes)
    moments, whole = machine.passed[0], machine.restarted(Loss.NOTHING).disk.files_after(Loss.NOTHING)
    assert not [name for name in whole if name.endswith(".tmp") or "export" in name]
    chance = random.Random(0)
    kept = 0
    for index in sorted(chance.sample(range(moments), min(moments, few(4, of=160)))):
        machine = CrashMachine(stop_at=Moment(rank=0, index=index))
        with pytest.raises(Stopped):
            export(tmp_path / "saved", machine.store(rank=0), file_bytes=file_bytes)
        for loss in chance.sample(list(Loss), 2):
            again = machine.restarted(loss)
            assert_listed_files_are_whole(again.disk.files_after(Loss.NOTHING), whole)
            kept += export(tmp_path / "saved", again.store(rank=0), file_bytes=file_bytes)
            assert again.disk.files_after(Loss.EVERYTHING) == whole, (index, loss)
    assert kept > 0


def test_a_model_that_is_replaced_is_never_mixed_with_the_new_one(tmp_path: Path) -> None:
    saved_model(tmp_path / "old", LLAMA, 10)
    saved_model(tmp_path / "saved", LLAMA, 11)  # the same names of files, other weights
    machine = CrashMachine()
    export(tmp_path / "old", machine.store(rank=0))
    old = machine.disk.files_after(Loss.NOTHING)
    machine = CrashMachine(old)
    export(tmp_path / "saved", machine.store(rank=0))
    moments, whole = machine.passed[0], machine.disk.files_after(Loss.EVERYTHING)
    assert old.keys() == whole.keys()
    chance = random.Random(0)
    seen = 0
    removal = range(min(40, moments))  # the old model is removed first
    for index in [*chance.sample(removal, few(4, of=40)), *chance.sample(range(40, moments), few(3, of=80))]:
        machine = CrashMachine(old, stop_at=Moment(rank=0, index=index))
        with pytest.raises(Stopped):
            export(tmp_path / "saved", machine.store(rank=0))
        files = machine.restarted(chance.choice(list(Loss))).disk.files_after(Loss.NOTHING)
        if INDEX in files:  # both models have the same index
            listed = set(json.loads(files[INDEX])["weight_map"].values())
            is_new = files[min(listed)] == whole[min(listed)]
            expected = whole if is_new else old
            assert all(files[name] == expected[name] for name in listed), index
            seen += 1
        again = CrashMachine(files)
        export(tmp_path / "saved", again.store(rank=0))
        assert again.disk.files_after(Loss.EVERYTHING) == whole, index
    assert seen > 0


def test_a_full_disk_keeps_finished_files_and_writes_no_index(tmp_path: Path) -> None:
    expected = saved_model(tmp_path / "saved", LLAMA, 3)
    fill_disk(tmp_path / "saved", tmp_path / "folder", file="model-00003")
    left = {path.name for path in (tmp_path / "folder").iterdir() if path.is_file()}
    assert left == {"config.json", "model-00001-of-00005.safetensors", "model-00002-of-00005.safetensors"}
    assert export(tmp_path / "saved", tmp_path / "folder") == 2
    assert_same_tensors(folder_tensors(tmp_path / "folder"), expected)


def test_files_of_another_plan_are_not_kept(tmp_path: Path) -> None:
    saved_model(tmp_path / "saved", LLAMA, 4)
    expected = saved_model(tmp_path / "other", LLAMA, 5)
    fill_disk(tmp_path / "saved", tmp_path / "folder", file="model-00004")
    assert export(tmp_path / "other", tmp_path / "folder") == 0  # the same files with other weights
    assert_same_tensors(folder_tensors(tmp_path / "folder"), expected)


def test_a_file_that_changes_on_the_way_is_found(tmp_path: Path) -> None:
    saved_model(tmp_path / "saved", LLAMA, 6)

    def flip(operation: Operation) -> None:
        (file,) = (tmp_path / "folder").glob(".model-00002*.tmp")
        data = bytearray(file.read_bytes())
        data[-3] ^= 1
        file.write_bytes(data)

    store = FaultyStore(
        LocalStore(str(tmp_path / "folder")),
        fail_at=lambda o: o.kind == "writer.close" and "model-00002" in o.name,
        hook=flip,
        after=True,
    )
    with pytest.raises(IntegrityError, match=r"model-00002-of-00005.safetensors: '.*' differs from what was"):
        export(tmp_path / "saved", store)
    assert not list((tmp_path / "folder").glob("*model-00002*"))


def test_a_kept_file_that_changed_is_an_error(tmp_path: Path) -> None:
    saved_model(tmp_path / "saved", LLAMA, 7)
    fill_disk(tmp_path / "saved", tmp_path / "folder", file="model-00003")
    (kept, *_) = sorted((tmp_path / "folder").glob("model-00001*"))
    data = bytearray(kept.read_bytes())
    data[-1] ^= 1
    kept.write_bytes(data)
    with pytest.raises(IntegrityError, match="model-00001"):
        export(tmp_path / "saved", tmp_path / "folder")
    assert not kept.exists()
    export(tmp_path / "saved", tmp_path / "folder")
