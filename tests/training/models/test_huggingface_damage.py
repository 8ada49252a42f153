"""Hugging Face folders whose files do not fit together: one error each, with the name and the file."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save, save_file

import megackpt
from megackpt.errors import CheckpointError, FormatError, StorageError
from megackpt.storage import MemoryStore

INDEX = "model.safetensors.index.json"
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


def test_a_config_that_is_too_large_is_not_read(folder: Path) -> None:
    with (folder / "config.json").open("r+b") as file:
        file.truncate(1 << 34)  # sparse
    with pytest.raises(FormatError, match=r"config\.json"):
        megackpt.load_content_metadata(folder)


def test_an_index_that_is_too_large_is_not_read(folder: Path) -> None:
    with (folder / INDEX).open("r+b") as file:
        file.truncate(1 << 34)  # sparse
    assert INDEX in str(error_of(folder))


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


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
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
