"""Hugging Face folders: read as checkpoints, only what is asked for; damaged ones are errors."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save, save_file

import megackpt
from megackpt import (
    CheckpointError,
    DeclarationError,
    FormatError,
    NotACheckpointError,
    ShardedTensor,
    StorageError,
)
from megackpt.cli import main
from megackpt.comm import Group
from megackpt.contrib.megatron.config import CheckpointConfig
from megackpt.errors import MapError
from megackpt.formats.file_names import HUGGINGFACE
from megackpt.formats.registry import detect, not_imported, save_strategy
from megackpt.formats.safetensors_header import read_header
from megackpt.storage import LocalStore, MemoryStore
from megackpt.testing.identical import difference
from megackpt.testing.world import SimulatedWorld
from megackpt.whole import huggingface_model_files
from tests.support.counting import CountingStore
from tests.support.effort import few, sampled
from tests.support.huggingface_configs import FAMILIES
from tests.support.huggingface_folders import (
    assert_same_tensors,
    folder_tensors,
    loaded_arrays,
    random_config,
    stacked_map,
    write_folder,
)
from tests.support.states import assembled, random_arrays

INDEX = "model.safetensors.index.json"


def tensors() -> dict[str, torch.Tensor]:
    """Return tensors of several dtypes and shapes, sorted by name."""
    generator = torch.Generator().manual_seed(1)
    return {
        "bytes": torch.arange(7, dtype=torch.uint8),
        "embed.weight": torch.randn(16, 6, generator=generator),
        "empty": torch.zeros(0, 4),
        "flags": torch.rand(3, 5, generator=generator) < 0.5,
        "norm.weight": torch.randn(6, generator=generator).to(torch.bfloat16),
        "scale": torch.tensor(0.5),
    }


def two_files(directory: Path) -> Path:
    """Write `tensors` as a folder of two files with an index."""
    directory.mkdir(parents=True, exist_ok=True)
    values = tensors()
    first = {key: values.pop(key) for key in ("embed.weight", "flags")}
    weight_map: dict[str, str] = {}
    for number, content in ((1, first), (2, values)):
        name = f"model-0000{number}-of-00002.safetensors"
        save_file(content, directory / name)
        weight_map |= dict.fromkeys(content, name)
    document = {"metadata": {"total_size": 1}, "weight_map": weight_map}  # total_size is ignored
    (directory / INDEX).write_text(json.dumps(document))
    return directory


@pytest.mark.parametrize("shard_size", ["50KB", "10GB"])
def test_a_folder_of_transformers_is_read_bit_for_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shard_size: str
) -> None:
    monkeypatch.setenv("TRANSFORMERS_VERBOSITY", "error")
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=101, hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4
    )
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path, max_shard_size=shard_size)
    assert (tmp_path / INDEX).exists() == (shard_size == "50KB")
    expected: dict[str, torch.Tensor] = {}
    for file in tmp_path.glob("*.safetensors"):
        expected |= load_file(file)
    assert difference(megackpt.load_plain_tensors(tmp_path), dict(sorted(expected.items()))) is None
    content = megackpt.load_content_metadata(tmp_path)
    assert content is not None
    assert content["huggingface_config"] == json.loads((tmp_path / "config.json").read_text())
    assert content["huggingface_config"]["model_type"] == "llama"
    assert "huggingface_generation_config" in content
    summary = megackpt.inspect(tmp_path)
    assert (summary.backend, summary.version) == ("huggingface", 1)
    report = megackpt.verify(tmp_path, deep=True)
    assert not report.damages
    assert report.arrays == len(expected)
    assert report.unchecked_nbytes == report.nbytes  # the format has no digests


@pytest.mark.parametrize("name", ["model.safetensors", "adapter_model.safetensors"])
def test_a_single_file_is_read_with_and_without_a_config(tmp_path: Path, name: str) -> None:
    save_file(tensors(), tmp_path / name, metadata={"format": "pt"})
    assert difference(megackpt.load_plain_tensors(tmp_path), tensors()) is None
    chunks = {array.key: array.chunks for array in megackpt.inspect(tmp_path).arrays}
    assert chunks == {key: int(key != "empty") for key in tensors()}
    assert megackpt.load_content_metadata(tmp_path) == {}
    (tmp_path / "config.json").write_text('{"a": [1, Infinity]}')  # as transformers writes it for Mamba
    assert megackpt.load_content_metadata(tmp_path) == {"huggingface_config": {"a": [1, float("inf")]}}


def test_model_safetensors_counts_before_an_index_as_in_transformers(tmp_path: Path) -> None:
    two_files(tmp_path)
    save_file({"only": torch.ones(2)}, tmp_path / "model.safetensors")
    assert set(megackpt.load_plain_tensors(tmp_path)) == {"only"}


def test_a_folder_converts_to_a_checkpoint_that_is_equal(tmp_path: Path) -> None:
    folder = two_files(tmp_path / "hf")
    (folder / "config.json").write_text('{"model_type": "gpt2"}')
    assert main(["convert", str(folder), str(tmp_path / "new"), "--to", "megackpt"]) == 0
    assert difference(megackpt.load_plain_tensors(tmp_path / "new"), tensors()) is None
    content = {"huggingface_config": {"model_type": "gpt2"}}
    assert megackpt.load_content_metadata(tmp_path / "new") == content
    assert main(["diff", str(folder), str(tmp_path / "new")]) == 0
    assert main(["verify", "--deep", str(tmp_path / "new")]) == 0


def test_commands_show_and_check_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = str(two_files(tmp_path))
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    assert main(["inspect", folder]) == 0
    shown = capsys.readouterr().out
    assert "embed.weight" in shown
    assert "huggingface_config.model_type" in shown
    assert main(["verify", folder]) == 0
    capsys.readouterr()
    assert main(["ls", folder]) == 3
    assert "has no steps of a Checkpointer: it is a folder of Hugging Face" in capsys.readouterr().err
    (tmp_path / "config.json").write_text("{")
    capsys.readouterr()
    assert main(["verify", folder]) == 1
    assert "config.json" in capsys.readouterr().out


def test_nothing_but_headers_is_read_when_a_folder_is_opened(tmp_path: Path) -> None:
    store = CountingStore(two_files(tmp_path))
    megackpt.inspect(store)
    sizes = {name: (tmp_path / name).read_bytes()[:8] for name in store.names() if "-of-" in name}
    expected = [(name, 0, 8) for name in sizes]
    expected += [(name, 8, int.from_bytes(length, "little")) for name, length in sizes.items()]
    assert sorted(store.reads) == sorted(expected)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_of_two_reads_the_header_and_its_rows_only(tmp_path: Path, rank: int) -> None:
    values = {"w": torch.randn(512, 64), "bias": torch.randn(1024)}
    save_file(values, tmp_path / "model.safetensors")
    store = CountingStore(tmp_path)
    data = torch.zeros(256, 64)
    megackpt.load({"w": ShardedTensor.from_rank_offsets("w", data, (0, rank, 2))}, store)
    assert torch.equal(data, values["w"][256 * rank : 256 * (rank + 1)])
    header = read_header(LocalStore(tmp_path), "model.safetensors").data_start
    assert sum(nbytes for _, _, nbytes in store.reads) == header + data.nbytes


def test_ranks_load_their_rows_and_columns_together(tmp_path: Path) -> None:
    folder, whole = two_files(tmp_path), tensors()["embed.weight"]

    def load(group: Group) -> None:
        rows = ShardedTensor.from_rank_offsets("embed.weight", torch.zeros(4, 6), (0, group.rank, 4))
        half = group.rank % 2
        columns = ShardedTensor.from_rank_offsets("embed.weight", torch.zeros(16, 3), (1, half, 2))
        scale = ShardedTensor.from_rank_offsets("scale", torch.zeros(()))
        loaded = megackpt.load({"rows": rows, "columns": columns, "scale": scale}, folder, group=group)
        assert torch.equal(loaded["rows"], whole[4 * group.rank :][:4])
        assert torch.equal(loaded["columns"], whole[:, 3 * half :][:, :3])
        assert loaded["scale"] == 0.5

    SimulatedWorld(4).run(load)


def test_a_folder_of_links_as_in_the_cache_of_hugging_face_is_an_error_with_advice(tmp_path: Path) -> None:
    folder = two_files(tmp_path / "blobs")
    (tmp_path / "snapshot").mkdir()
    for path in folder.iterdir():
        (tmp_path / "snapshot" / path.name).symlink_to(f"../blobs/{path.name}")
    with pytest.raises(NotACheckpointError, match=r"symbolic links.*hf download REPO --local-dir"):
        megackpt.load_plain_tensors(tmp_path / "snapshot")


@pytest.mark.parametrize(
    "names",
    [
        ["config.json", "tokenizer.json"],
        ["model-00001-of-00002.safetensors"],  # shards whose index is not there yet
        ["model-00001-of-00001.safetensors"],
        ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"],
        ["a.safetensors", "b.safetensors"],
        ["below/model.safetensors"],
        # What saves of ours leave that did not finish.
        ["index-8c6f0e1d2b3a4958.safetensors"],
        ["common-8c6f0e1d2b3a4958.safetensors"],
        ["megackpt-8c6f0e1d2b3a4958.safetensors"],
        ["a.safetensors", "data/8c6f0e1d2b3a4958-00000.safetensors"],
        ["a.safetensors", "__0_0_8c6f0e1d2b3a4958.distcp"],
        ["a.safetensors", "zarr-8c6f0e1d2b3a4958/w/zarr.json"],
    ],
)
def test_other_directories_are_no_folders(names: list[str]) -> None:
    store = MemoryStore()
    for name in names:
        store.write(name, b"")
    assert detect(store) is None
    with pytest.raises(NotACheckpointError):
        megackpt.load_plain_tensors(store)


@pytest.mark.parametrize("prefix", ["index", "common", "megackpt"])
def test_the_format_is_not_imported_for_what_our_saves_leave(prefix: str) -> None:
    assert not HUGGINGFACE.is_foreign(f"{prefix}-8c6f0e1d2b3a4958.safetensors")
    assert not HUGGINGFACE.is_foreign(f"{prefix}-8c6f0e1d2b3a4958-00001.safetensors")
    assert not HUGGINGFACE.is_foreign("data/8c6f0e1d2b3a4958-00000.safetensors")
    assert HUGGINGFACE.is_foreign(f"{prefix}-of-a-model.safetensors")


def test_a_checkpoint_of_ours_in_a_folder_comes_first(tmp_path: Path) -> None:
    two_files(tmp_path)
    megackpt.save({"w": ShardedTensor.from_rank_offsets("w", torch.ones(3))}, tmp_path)
    assert set(megackpt.load_plain_tensors(tmp_path)) == {"w"}


def test_the_format_is_only_read() -> None:
    with pytest.raises(DeclarationError, match=r"No strategy saves format 'huggingface' \(it is only read\)"):
        save_strategy("huggingface")
    assert not_imported("huggingface") is None
    with pytest.raises(DeclarationError, match="it is only read"):
        CheckpointConfig(dist_ckpt_format="huggingface")


FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with the tensors a and b in the first file, c in the second."""
    path = tmp_path / "folder"
    path.mkdir()
    save_file({"a": torch.ones(3), "b": torch.ones(2, 2)}, path / FIRST)
    save_file({"c": torch.ones(5)}, path / SECOND)
    write_index(path, {"a": FIRST, "b": FIRST, "c": SECOND})
    (path / "config.json").write_text('{"model_type": "gpt2"}')
    return path


def write_index(folder: Path, weight_map: Any, **others: Any) -> None:
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map, **others}))


def error_of(folder: Path) -> CheckpointError:
    with pytest.raises(CheckpointError) as caught:
        megackpt.load_plain_tensors(folder)
    return caught.value


@pytest.mark.parametrize(
    "name", ["/etc/passwd", "../outside.safetensors", "a/../../x", "", ".", "a//b", "a\\b", "a\0b", "\ud800"]
)
def test_a_file_name_outside_the_folder_is_an_error(folder: Path, name: str) -> None:
    save_file({"c": torch.full((5,), 7.0)}, folder.parent / "outside.safetensors")
    write_index(folder, {"a": FIRST, "b": FIRST, "c": name})
    error = error_of(folder)
    assert isinstance(error, FormatError)
    assert error.key == "c"
    assert f"{folder}/{INDEX}: 'c' is in {name!r}, which is not the name of a file in this folder" in str(
        error
    )


@pytest.mark.parametrize("is_directory", [False, True])
def test_links_are_not_followed(folder: Path, is_directory: bool) -> None:
    save_file({"c": torch.full((5,), 7.0)}, folder.parent / SECOND)
    if is_directory:
        (folder / "below").symlink_to(folder.parent)
        write_index(folder, {"a": FIRST, "b": FIRST, "c": f"below/{SECOND}"})
    else:
        (folder / SECOND).unlink()
        (folder / SECOND).symlink_to(f"../{SECOND}")
    error = error_of(folder)
    assert isinstance(error, StorageError)
    assert "symbolic link" in str(error)


def test_a_pipe_is_an_error_and_is_not_waited_for(folder: Path) -> None:
    (folder / SECOND).unlink()
    os.mkfifo(folder / SECOND)
    assert "a named pipe" in str(error_of(folder))


def test_a_file_in_a_directory_of_the_folder_is_read(folder: Path) -> None:
    (folder / "below").mkdir()
    (folder / SECOND).rename(folder / "below" / "odd \u20ac name")
    write_index(folder, {"a": FIRST, "b": FIRST, "c": "below/odd \u20ac name"})
    assert set(megackpt.load_plain_tensors(folder)) == {"a", "b", "c"}


def test_a_missing_file_is_named(folder: Path) -> None:
    (folder / SECOND).unlink()
    error = error_of(folder)
    assert isinstance(error, FormatError)
    assert f"{folder}/{SECOND}: the file is missing, and {INDEX} has tensors in it" in str(error)


@pytest.mark.parametrize("nbytes", [0, 5, 40, -1])
def test_a_file_that_was_cut_is_named(folder: Path, nbytes: int) -> None:
    path = folder / SECOND
    path.write_bytes(path.read_bytes()[:nbytes])
    error = error_of(folder)
    assert isinstance(error, FormatError)
    assert error.path == str(path)
    report = megackpt.verify(folder)
    assert [damage.file for damage in report.damages] == [SECOND]


@pytest.mark.parametrize(
    ("weight_map", "key", "message"),
    [
        ({"a": FIRST, "b": FIRST, "c": FIRST}, "c", f"'c' is not in {FIRST}"),
        ({"a": FIRST, "b": FIRST, "c": SECOND, "d": SECOND}, "d", f"'d' is not in {SECOND}"),
        ({"a": FIRST, "c": SECOND}, "b", f"'b' is in {FIRST}, and not in the index"),
        ({"a": FIRST, "b": SECOND, "c": SECOND}, "b", f"'b' is in {FIRST}, and in {SECOND} by the index"),
        ({"a": FIRST, "b": "config.json", "c": SECOND}, None, "config.json: it says that its header has"),
        ({"a": FIRST, "b": 5, "c": SECOND}, None, "weight_map is not an object of file names"),
        ([FIRST], None, "weight_map is not an object of file names"),
        (None, None, "weight_map is not an object of file names"),
    ],
)
def test_an_index_that_does_not_fit_to_its_files_is_an_error(
    folder: Path, weight_map: Any, key: str | None, message: str
) -> None:
    write_index(folder, weight_map)
    error = error_of(folder)
    assert isinstance(error, FormatError)
    assert error.key == key
    assert message in str(error)
    assert megackpt.verify(folder).damages


def test_a_tensor_in_two_files_is_an_error(folder: Path) -> None:
    save_file({"a": torch.ones(3), "c": torch.ones(5)}, folder / SECOND)
    assert f"'a' is in {SECOND}, and in {FIRST} by the index" in str(error_of(folder))


@pytest.mark.parametrize("total_size", [0, -1, 10**30, "many", None])
def test_total_size_is_ignored(folder: Path, total_size: Any) -> None:
    write_index(folder, {"a": FIRST, "b": FIRST, "c": SECOND}, metadata={"total_size": total_size})
    assert set(megackpt.load_plain_tensors(folder)) == {"a", "b", "c"}


@pytest.mark.parametrize(
    "text", ["", "[]", "{", "nul", '{"weight_map": {}, "weight_map": {}}', '{"weight_map":' * 100_000, "\xff"]
)
def test_an_index_that_is_no_document_is_an_error(folder: Path, text: str) -> None:
    (folder / INDEX).write_text(text, encoding="latin-1")
    error = error_of(folder)
    assert isinstance(error, FormatError)
    assert error.path == f"{folder}/{INDEX}"


def test_a_tensor_that_occurs_twice_in_the_index_is_an_error(folder: Path) -> None:
    (folder / INDEX).write_text(f'{{"weight_map": {{"a": "{FIRST}", "a": "{SECOND}"}}}}')
    assert "the key 'a' is repeated" in str(error_of(folder))


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
@pytest.mark.parametrize("text", [b"", b"[]", b"{", b'{"a": 1, "a": 2}', b'{"a":' * 100_000, b"\xff"])
def test_a_damaged_config_is_an_error_where_it_is_needed(folder: Path, name: str, text: bytes) -> None:
    (folder / name).write_bytes(text)
    with pytest.raises(FormatError, match=name):
        megackpt.load_content_metadata(folder)
    assert name in megackpt.inspect(folder).common_error
    assert [damage.file for damage in megackpt.verify(folder).damages] == [name]


@pytest.mark.parametrize(
    ("name", "read"),
    [("config.json", megackpt.load_content_metadata), (INDEX, megackpt.load_plain_tensors)],
)
def test_a_document_that_is_too_large_is_not_read(folder: Path, name: str, read: Any) -> None:
    os.truncate(folder / name, 1 << 34)  # sparse
    with pytest.raises(FormatError, match=name):
        read(folder)


def test_the_manifest_of_somebody_else_may_name_the_format_but_no_file_outside(folder: Path) -> None:
    manifest = {"sharded_backend": "huggingface", "sharded_backend_version": 1}
    (folder / "metadata.json").write_text(json.dumps(manifest))
    assert set(megackpt.load_plain_tensors(folder)) == {"a", "b", "c"}
    for model in ("../x.safetensors", "/etc/passwd", 5, "", ["x"]):
        (folder / "metadata.json").write_text(json.dumps({**manifest, "model": model}))
        error_of(folder)


HOSTILE = st.none() | st.integers() | st.sampled_from(
    [FIRST, SECOND, "config.json", INDEX, "..", "/", "x", "a\0", "\ud800", "x" * 300]
) | st.text(max_size=3)  # fmt: skip


@settings(max_examples=few(40, of=100), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    names=st.dictionaries(
        st.sampled_from(["a", "b", "c", "d", ""]) | st.text(max_size=2), HOSTILE, max_size=4
    ),
    cut=st.integers(0, 200),
)
def test_any_index_and_any_cut_is_read_or_an_error(names: dict[str, Any], cut: int) -> None:
    files = {FIRST: save({"a": torch.ones(3), "b": torch.ones(2, 2)}), SECOND: save({"c": torch.ones(5)})}
    weight_map = {"a": FIRST, "b": FIRST, "c": SECOND, **names}
    files[INDEX] = json.dumps({"weight_map": weight_map}).encode()
    files[SECOND] = files[SECOND][:cut]  # longer than the file: not cut
    store = MemoryStore()
    for name, data in files.items():
        store.write(name, data)
    try:
        loaded = megackpt.load_plain_tensors(store)
    except CheckpointError:
        return
    assert set(loaded) == {"a", "b", "c"}


SEEDS = range(few(2, of=5))
LLAMA = random_config("llama", 0)


@sampled(4)
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("model_type", FAMILIES)
def test_a_folder_becomes_our_arrays_and_the_same_folder_again(
    model_type: str, seed: int, tmp_path: Path
) -> None:
    config = random_config(model_type, seed)
    made = stacked_map(config)
    tensors = random_arrays(made, seed)
    chance = random.Random(seed)
    write_folder(tmp_path / "folder", config, tensors, files=chance.choice([1, 3]))
    report = megackpt.import_huggingface(
        tmp_path / "folder", tmp_path / "saved", buffer_bytes=chance.choice([1000, 10**6])
    )
    assert_same_tensors(loaded_arrays(tmp_path / "saved"), assembled(made, tensors))
    assert report.nbytes == sum(tensor.nbytes for tensor in tensors.values())
    report = megackpt.export_huggingface(
        tmp_path / "saved",
        tmp_path / "again",
        max_file_bytes=chance.choice([4000, 20_000, 10**9]),
        buffer_bytes=chance.choice([700, 5000, 10**6]),
        workers=chance.choice([1, 3]),
    )
    assert_same_tensors(folder_tensors(tmp_path / "again"), tensors)
    assert (report.tensors, report.dtype) == (len(tensors), "float32")


def test_ranks_write_one_checkpoint_of_any_format(tmp_path: Path) -> None:
    made = stacked_map(LLAMA)
    tensors = random_arrays(made, 1)
    write_folder(tmp_path / "folder", LLAMA, tensors)
    for format in ("megackpt", "torch_dist"):
        target = tmp_path / format
        SimulatedWorld(3).run(
            lambda group, to=format, target=target: megackpt.import_huggingface(  # type: ignore[misc]
                tmp_path / "folder", target, to, prefix="model.", group=group
            )
        )
        ours = {f"model.{key}": array for key, array in assembled(made, tensors).items()}
        assert_same_tensors(loaded_arrays(target), ours)


def test_layers_get_keys_of_their_own_if_wanted(tmp_path: Path) -> None:
    tensors = random_arrays(stacked_map(LLAMA), 2)
    write_folder(tmp_path / "folder", LLAMA, tensors)
    megackpt.import_huggingface(tmp_path / "folder", tmp_path / "saved", stacked=False)
    assert "decoder.layers.0.mlp.linear_fc2.weight" in megackpt.load_tensors_metadata(tmp_path / "saved")
    megackpt.export_huggingface(tmp_path / "saved", tmp_path / "again")
    assert_same_tensors(folder_tensors(tmp_path / "again"), tensors)


def test_dtypes_are_converted_and_the_generation_config_is_kept(tmp_path: Path) -> None:
    made = stacked_map(LLAMA)
    tensors = random_arrays(made, 3)
    write_folder(tmp_path / "folder", LLAMA, tensors)
    (tmp_path / "folder/generation_config.json").write_text('{"top_k": 7}')
    megackpt.import_huggingface(tmp_path / "folder", tmp_path / "saved", dtype="bfloat16")
    ours = {key: array.bfloat16() for key, array in assembled(made, tensors).items()}
    assert_same_tensors(loaded_arrays(tmp_path / "saved"), ours)
    megackpt.export_huggingface(tmp_path / "saved", tmp_path / "again")
    assert json.loads((tmp_path / "again/generation_config.json").read_text()) == {"top_k": 7}


def test_tensors_that_models_compute_again_are_left_out(tmp_path: Path) -> None:
    config = {**LLAMA, "tie_word_embeddings": True}
    tensors = random_arrays(stacked_map(config), 4)
    computed = {
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(2),
        "lm_head.weight": tensors["model.embed_tokens.weight"].clone(),
    }
    write_folder(tmp_path / "folder", config, {**tensors, **computed})
    megackpt.import_huggingface(tmp_path / "folder", tmp_path / "saved")
    megackpt.export_huggingface(tmp_path / "saved", tmp_path / "again")
    assert_same_tensors(folder_tensors(tmp_path / "again"), tensors)


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"model.norm.weight": None}, r"'model.norm.weight' \(\d+,\) is missing"),
        ({"model.unknown": torch.zeros(2)}, r"'model.unknown' \(2,\) is additional"),
        ({"model.norm.weight": torch.zeros(2)}, r"'model.norm.weight' has the shape \(2,\), and by the map"),
    ],
    ids=["missing", "additional", "wrong shape"],
)
def test_a_folder_that_does_not_fit_is_one_error_and_nothing_is_written(
    changed: dict[str, Any], text: str, tmp_path: Path
) -> None:
    tensors = {**random_arrays(stacked_map(LLAMA), 5), **changed}
    write_folder(tmp_path / "folder", LLAMA, {k: t for k, t in tensors.items() if t is not None})
    with pytest.raises(MapError, match=text):
        megackpt.import_huggingface(tmp_path / "folder", tmp_path / "saved")
    assert not (tmp_path / "saved").exists()


def test_files_of_the_tokenizer_come_back_when_the_checkpoint_is_exported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(huggingface_model_files, "MAX_KEPT_BYTES", 50)
    write_folder(tmp_path / "folder", LLAMA, random_arrays(stacked_map(LLAMA), 5), files=2)
    kept = {
        "tokenizer.json": b'{"\xc3\xa9": 1}',
        "tokenizer.model": b"\x00\xff",
        "chat_template.jinja": b"{{ x }}",
    }
    others = {
        "README.md": b"x",
        "vocab.json": b"{}" + 50 * b" ",
        "sub/tokenizer.json": b"{}",
        "pytorch_model.bin": b"x",
    }
    for name, data in {**kept, **others, "generation_config.json": b'{"top_k": 3}'}.items():
        path = tmp_path / "folder" / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(data)
    for to in ("megackpt", "torch_dist", "zarr"):
        report = megackpt.import_huggingface(tmp_path / "folder", tmp_path / to, to)
        assert report.files == tuple(sorted(kept))
        assert "vocab.json" in caplog.text  # too long
        megackpt.export_huggingface(tmp_path / to, tmp_path / f"again-{to}")
        written = {p.name: p.read_bytes() for p in (tmp_path / f"again-{to}").iterdir()}
        assert {name: written.pop(name) for name in kept} == kept
        assert json.loads(written.pop("generation_config.json")) == {"top_k": 3}
        assert set(written) == {"config.json", "model.safetensors"}

    # A folder that is named has the files of another tokenizer.
    (tmp_path / "config").mkdir()
    (tmp_path / "config/config.json").write_text(json.dumps(LLAMA))
    (tmp_path / "config/tokenizer.json").write_bytes(b"[]")
    (tmp_path / "config/generation_config.json").write_bytes(b'{ "top_k": 4 }')
    megackpt.import_huggingface(tmp_path / "folder", tmp_path / "new", config=tmp_path / "config")
    megackpt.export_huggingface(tmp_path / "new", tmp_path / "new-folder")
    assert (tmp_path / "new-folder/tokenizer.json").read_bytes() == b"[]"
    assert (tmp_path / "new-folder/tokenizer.model").read_bytes() == b"\x00\xff"
    assert (tmp_path / "new-folder/generation_config.json").read_bytes() == b'{ "top_k": 4 }'


def test_files_of_a_forged_checkpoint_stay_in_the_folder_and_replace_nothing(tmp_path: Path) -> None:
    tensors = random_arrays(stacked_map(LLAMA), 6)
    names = [
        "../up.json", "/tmp/up.json", "a/b.json", ".hidden.json", "config.json", "Config.JSON", "a\0.json",
        "model.safetensors", "model.safetensors.index.json", "run.py", "..", "", 3,
    ]  # fmt: skip
    forged = {**dict.fromkeys(names, b"{}"), "tokenizer.json": "text", "merges.txt": b"a b"}
    state = {
        key: ShardedTensor.from_rank_offsets(key, array)
        for key, array in assembled(stacked_map(LLAMA), tensors).items()
    }
    metadata = {"huggingface_config": LLAMA, "huggingface_files": forged}
    megackpt.save(state, tmp_path / "saved", content_metadata=metadata)
    megackpt.export_huggingface(tmp_path / "saved", tmp_path / "out/folder")
    written = {str(p.relative_to(tmp_path / "out")) for p in (tmp_path / "out").rglob("*") if p.is_file()}
    assert written == {"folder/config.json", "folder/model.safetensors", "folder/merges.txt"}
    assert_same_tensors(folder_tensors(tmp_path / "out/folder"), tensors)
    megackpt.save(state, tmp_path / "other", content_metadata={**metadata, "huggingface_files": ["x"]})
    megackpt.export_huggingface(tmp_path / "other", tmp_path / "other-folder")
