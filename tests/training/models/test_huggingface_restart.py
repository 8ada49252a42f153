"""An export that is interrupted anywhere lists nothing half, and the next one ends with an equal folder."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from pathlib import Path

import pytest

import megackpt
from megackpt import IntegrityError, StorageError
from megackpt.storage import LocalStore, Store
from megackpt.testing.cached_disk import Loss
from megackpt.testing.crash_store import CrashMachine, Moment, Stopped
from megackpt.testing.faulty_store import FaultyStore, Operation
from tests.support.effort import few
from tests.support.huggingface_folders import assert_same_tensors, folder_tensors, random_config, saved_model

LLAMA = random_config("llama", 0)
FILE_BYTES, BUFFER_BYTES = 5000, 1500
INDEX = "model.safetensors.index.json"


def export(source: Path, target: Path | Store, *, file_bytes: int = FILE_BYTES, workers: int = 1) -> int:
    """Export, and return how many files were kept."""
    return megackpt.export_huggingface(
        source, target, max_file_bytes=file_bytes, buffer_bytes=BUFFER_BYTES, workers=workers, overwrite=True
    ).kept_files


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
    for index in [
        *chance.sample(removal, few(4, of=40)),
        *chance.sample(range(40, moments), few(3, of=80)),
    ]:
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

    def is_in_third_file(operation: Operation) -> bool:
        return operation.kind == "writer.write" and "model-00003" in operation.name

    store = FaultyStore(LocalStore(str(tmp_path / "folder")), fail_at=is_in_third_file)
    with pytest.raises(StorageError, match="No space left on device"):
        export(tmp_path / "saved", store)
    left = {path.name for path in (tmp_path / "folder").iterdir() if path.is_file()}
    assert left == {"config.json", "model-00001-of-00005.safetensors", "model-00002-of-00005.safetensors"}
    assert export(tmp_path / "saved", tmp_path / "folder") == 2
    assert_same_tensors(folder_tensors(tmp_path / "folder"), expected)


def test_files_of_another_plan_are_not_kept(tmp_path: Path) -> None:
    saved_model(tmp_path / "saved", LLAMA, 4)
    expected = saved_model(tmp_path / "other", LLAMA, 5)
    store = FaultyStore(LocalStore(str(tmp_path / "folder")), fail_at=lambda o: "model-00004" in o.name)
    with pytest.raises(StorageError):
        export(tmp_path / "saved", store)
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
    store = FaultyStore(LocalStore(str(tmp_path / "folder")), fail_at=lambda o: "model-00003" in o.name)
    with pytest.raises(StorageError):
        export(tmp_path / "saved", store)
    (kept, *_) = sorted((tmp_path / "folder").glob("model-00001*"))
    data = bytearray(kept.read_bytes())
    data[-1] ^= 1
    kept.write_bytes(data)
    with pytest.raises(IntegrityError, match="model-00001"):
        export(tmp_path / "saved", tmp_path / "folder")
    assert not kept.exists()
    export(tmp_path / "saved", tmp_path / "folder")


def test_an_unfinished_export_is_no_model(tmp_path: Path) -> None:
    saved_model(tmp_path / "saved", LLAMA, 8)
    store = FaultyStore(LocalStore(str(tmp_path / "folder")), fail_at=lambda o: "model-00002" in o.name)
    with pytest.raises(StorageError):
        export(tmp_path / "saved", store)
    with pytest.raises(megackpt.NotACheckpointError):
        megackpt.inspect(tmp_path / "folder")
