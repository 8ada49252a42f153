"""`megackpt verify`: names everything that is damaged, and nothing else."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import megackpt
from megackpt import ShardedTensor
from megackpt.cli import main
from megackpt.errors import FormatError
from megackpt.metadata import DIGEST_BLOCK_BYTES
from megackpt.storage import open_store
from tests.support.checkpoints import FORMATS, NATIVE, copy_of_saved, files_below, flip

RunCommand = Callable[..., tuple[int, dict[str, Any]]]


@pytest.fixture
def verify(capsys: pytest.CaptureFixture[str]) -> RunCommand:
    """Run the command with --json; return its exit code and what it says."""

    def run(directory: Path, *flags: str) -> tuple[int, dict[str, Any]]:
        code = main(["verify", str(directory), "--json", *flags])
        return code, json.loads(capsys.readouterr().out)

    return run


def data_files(directory: Path) -> list[Path]:
    return files_below(directory / "data", "*.safetensors")


def position_of(file: Path, tensor: str) -> tuple[int, int]:
    """Return the byte range of a tensor of a data file, by its safetensors header."""
    data = file.read_bytes()
    length = int.from_bytes(data[:8], "little")
    entry = json.loads(data[8 : 8 + length])[tensor]
    begin, end = entry["data_offsets"]
    return 8 + length + begin, 8 + length + end


@pytest.mark.parametrize("format", FORMATS, ids=str)
@pytest.mark.parametrize("flags", [[], ["--deep"]], ids=["shallow", "deep"])
def test_an_undamaged_checkpoint_is_called_whole_only_if_every_byte_was_checked(
    tmp_path: Path, format: tuple[str, int], flags: list[str], verify: RunCommand
) -> None:
    code, message = verify(copy_of_saved(tmp_path, format), *flags)
    assert (code, message["damages"], message["is_undamaged"]) == (0, [], True)
    assert (message["arrays"], message["objects"], message["deep"]) == (4, 2, bool(flags))
    assert message["nbytes"] >= 400_000 * 4
    is_checked = format in (NATIVE, ("torch_dist", 1), ("zarr", 3))
    assert (message["unchecked_nbytes"] == 0) == is_checked
    assert message["is_whole"] is (True if flags and is_checked else None)


def test_every_flipped_block_is_named_with_key_box_file_and_bytes(tmp_path: Path, verify: RunCommand) -> None:
    first, second = data_files(copy_of_saved(tmp_path))
    long = position_of(first, "long[0:200000]")
    flip(first, long[0])
    flip(first, long[0] + 2 * DIGEST_BLOCK_BYTES + 5)
    block = position_of(second, "block[0:6, 4:8]")
    flip(second, block[1] - 1)
    code, message = verify(tmp_path)
    assert (code, message["is_undamaged"], message["is_whole"]) == (
        0,
        True,
        None,
    )  # what is not read is not known
    code, message = verify(tmp_path, "--deep")
    damages = [(d["file"], d["key"], d["box"], d["start"], d["stop"]) for d in message["damages"]]
    last = DIGEST_BLOCK_BYTES * 2 + long[0]
    assert code == 1
    assert damages == [
        (f"data/{first.name}", "long", "[0:200000]", long[0], long[0] + DIGEST_BLOCK_BYTES),
        (f"data/{first.name}", "long", "[0:200000]", last, last + DIGEST_BLOCK_BYTES),
        (f"data/{second.name}", "block", "[0:6, 4:8]", *block),
    ]
    assert all("digest differs" in d["what"] for d in message["damages"])


def test_the_verdict_names_what_was_checked_and_nothing_more(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A step with a flipped byte was called whole where nobody had looked at its bytes."""

    def verdict(directory: Path, *flags: str) -> str:
        main(["verify", str(directory), *flags])
        (line,) = [
            line for line in capsys.readouterr().out.splitlines() if line.startswith(f"{directory}: ")
        ][-1:]
        return line.removeprefix(f"{directory}: ").partition(";")[0]

    directory, unchecked = copy_of_saved(tmp_path / "a"), copy_of_saved(tmp_path / "b", ("zarr", 1))
    assert verdict(directory, "--deep") == "whole (every byte read)"
    assert verdict(unchecked, "--deep") == "structure whole (every byte read, not all have digests)"
    flip(data_files(directory)[0], position_of(data_files(directory)[0], "long[0:200000]")[0])
    assert verdict(directory) == "structure whole (bytes not read, --deep reads them)"
    assert verdict(directory, "--deep") == "1 damages (every byte read)"
    data_files(directory)[0].unlink()
    assert verdict(directory) == "1 damages (bytes not read, --deep reads them)"


def test_damaged_blocks_that_follow_each_other_are_one_damage(tmp_path: Path, verify: RunCommand) -> None:
    file = data_files(copy_of_saved(tmp_path))[0]
    begin, end = position_of(file, "long[0:200000]")
    data = file.read_bytes()
    file.write_bytes(data[:begin] + bytes(end - begin) + data[end:])
    _, message = verify(tmp_path, "--deep")
    assert [(d["key"], d["start"], d["stop"]) for d in message["damages"]] == [("long", begin, end)]


def test_a_damaged_object_is_named(tmp_path: Path, verify: RunCommand) -> None:
    file = data_files(copy_of_saved(tmp_path))[1]
    start, stop = position_of(file, "object[1:2]")
    flip(file, stop - 1)
    code, message = verify(tmp_path, "--deep")
    (damage,) = message["damages"]
    assert code == 1
    assert (damage["key"], damage["box"], damage["start"], damage["stop"]) == ("object", "[1:2]", start, stop)


@pytest.mark.parametrize("at", [0, 3, 20, 100, 300, 1000])
def test_a_flipped_byte_in_the_header_of_a_data_file_is_damage_although_loads_do_not_read_it(
    tmp_path: Path, at: int, verify: RunCommand
) -> None:
    file = data_files(copy_of_saved(tmp_path))[0]
    flip(file, at)
    code, message = verify(tmp_path)
    assert code == 1
    assert {d["file"] for d in message["damages"]} == {f"data/{file.name}"}
    assert "header" in message["damages"][0]["what"]


@pytest.mark.parametrize("pattern", ["index-*", "common-*.json", "common-*.safetensors"])
@pytest.mark.parametrize("at", [0, 40, -1])
def test_a_flipped_byte_in_index_or_common_state_is_named(
    tmp_path: Path, pattern: str, at: int, verify: RunCommand
) -> None:
    (file,) = copy_of_saved(tmp_path).glob(pattern)
    flip(file, at)
    code, message = verify(tmp_path)
    assert code == 1
    assert {d["file"] for d in message["damages"]} == {file.name}


def test_every_flipped_bit_of_the_commit_is_damage_or_changes_nothing(tmp_path: Path) -> None:
    manifest = copy_of_saved(tmp_path) / "metadata.json"
    whole = manifest.read_bytes()
    message = json.loads(whole)
    overlooked: dict[str, set[int]] = {}
    store = open_store(tmp_path)
    for at in range(len(whole)):
        flip(manifest, at)
        with contextlib.suppress(FormatError):  # of a format that is not known
            if megackpt.verify(store).is_undamaged:
                changed = json.loads(manifest.read_bytes())
                for name in {*message, *changed}:
                    if message.get(name) != changed.get(name):
                        overlooked.setdefault(name, set()).add(at)
    # How many ranks saved is result nowhere else: those that wrote nothing have no file.
    assert set(overlooked) <= {"world_size"}


@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_every_lost_file_is_damage(tmp_path: Path, format: tuple[str, int], verify: RunCommand) -> None:
    """Files whose loss changes nothing but for other programs are told apart by name."""
    directory = copy_of_saved(tmp_path, format)
    for file in files_below(directory, "*"):
        name, data = str(file.relative_to(directory)), file.read_bytes()
        file.unlink()
        code = main(["verify", str(directory), "--deep", "--json"])
        file.write_bytes(data)
        tolerated = {
            ("torch_dist", 1): ("metadata.json", "megackpt-"),  # .metadata alone is a checkpoint of DCP
            ("zarr", 1): (".megackpt-",),  # without its marker it is one of Megatron-Core
        }.get(format, ())
        is_commit = name == "metadata.json"
        if name.startswith(tolerated) or (name.endswith("/zarr.json") and name.count("/") == 1):
            continue
        assert code == (3 if is_commit else 1), name


def test_a_lost_data_file_is_one_damage_that_names_its_chunks(tmp_path: Path, verify: RunCommand) -> None:
    file = data_files(copy_of_saved(tmp_path))[1]
    file.unlink()
    code, message = verify(tmp_path, "--deep")
    (damage,) = message["damages"]
    assert code == 1
    assert damage["file"] == f"data/{file.name}"
    assert re.match(r"it is missing; \d chunks of 'block', 'flat', ", damage["what"])


@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_every_truncated_file_of_chunks_is_damage(
    tmp_path: Path, format: tuple[str, int], verify: RunCommand
) -> None:
    directory = copy_of_saved(tmp_path, format)
    with_chunks = inspected_files(directory)
    assert with_chunks
    for name in with_chunks:
        file = directory / name
        data = file.read_bytes()
        file.write_bytes(data[: len(data) // 2])
        flags = ["--deep"] if format[0] == "zarr" else []  # of shards and objects no length is stored
        code, message = verify(directory, *flags)
        assert code == 1, name
        assert name in {d["file"] for d in message["damages"]}, name
        file.write_bytes(data)


def inspected_files(directory: Path) -> list[str]:
    return [file.name for file in megackpt.inspect(directory).files]


def test_a_truncated_data_file_names_every_chunk_that_is_cut(tmp_path: Path, verify: RunCommand) -> None:
    file = data_files(copy_of_saved(tmp_path))[0]
    begin, _ = position_of(file, "long[0:200000]")
    file.write_bytes(file.read_bytes()[: begin + 10])
    _, message = verify(tmp_path)
    cut = {d["key"] for d in message["damages"] if "file ends at" in d["what"]}
    assert "long" in cut
    assert all(d["stop"] > begin + 10 for d in message["damages"] if d.get("key") in cut and d["start"])


def test_swapped_data_files_are_damage(tmp_path: Path, verify: RunCommand) -> None:
    first, second = data_files(copy_of_saved(tmp_path))
    first_bytes, second_bytes = first.read_bytes(), second.read_bytes()
    first.write_bytes(second_bytes)
    second.write_bytes(first_bytes)
    code, message = verify(tmp_path)
    assert code == 1
    assert {d["file"] for d in message["damages"]} == {f"data/{first.name}", f"data/{second.name}"}


@pytest.mark.parametrize("format", [f for f in FORMATS if f != ("zarr", 1)], ids=str)
def test_a_flipped_byte_in_the_middle_of_any_file_of_chunks_is_found(
    tmp_path: Path, format: tuple[str, int], verify: RunCommand
) -> None:
    directory = copy_of_saved(tmp_path, format)
    for name in inspected_files(directory):
        file = directory / name
        data = file.read_bytes()
        flip(file, len(data) // 2)
        code, message = verify(directory, "--deep")
        assert code == 1, name
        assert any(d["file"] == name and "key" in d for d in message["damages"]), name
        file.write_bytes(data)


def test_the_zip_records_around_tensors_are_checked(tmp_path: Path, verify: RunCommand) -> None:
    directory = copy_of_saved(tmp_path, ("torch_dist", 1))
    for file in files_below(directory, "*.distcp"):
        data = file.read_bytes()
        for at in (0, 100, -1, -60):
            flip(file, at)
            code, message = verify(directory, "--deep")
            assert code == 1, (file.name, at)
            assert {d["file"] for d in message["damages"]} == {file.name}
            file.write_bytes(data)


def test_another_metadata_than_that_of_the_save_is_damage(tmp_path: Path, verify: RunCommand) -> None:
    flip(copy_of_saved(tmp_path, ("torch_dist", 1)) / ".metadata", 200)
    code, message = verify(tmp_path)
    assert code == 1
    assert ".metadata" in {d["file"] for d in message["damages"]}


def test_elements_that_no_chunk_has_are_named(tmp_path: Path, verify: RunCommand) -> None:
    half = ShardedTensor.from_rank_offsets("w", torch.zeros(4), (0, 0, 2))
    megackpt.save({"w": half}, tmp_path, validate_access_integrity=False)
    code, message = verify(tmp_path)
    assert code == 1
    assert message["damages"] == [{"key": "w", "box": "[4:8]", "what": "no chunk has it"}]


def test_arrays_that_were_taken_out_leave_no_damage(tmp_path: Path, verify: RunCommand) -> None:
    megackpt.remove_sharded_tensors(copy_of_saved(tmp_path), "block")
    assert verify(tmp_path, "--deep")[0] == 0
    flip(data_files(tmp_path)[0], 60)
    assert verify(tmp_path)[0] == 1


def test_damage_is_a_table_and_exit_code_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = data_files(copy_of_saved(tmp_path))[0]
    begin, end = position_of(file, "block[0:6, 0:4]")
    flip(file, begin)
    assert main(["verify", str(tmp_path), "--deep"]) == 1
    out = capsys.readouterr().out
    assert "block" in out
    assert "[0:6, 0:4]" in out
    assert f"{begin}:{end}" in out
    assert "1 damages" in out


def test_any_number_of_threads_finds_the_same(tmp_path: Path) -> None:
    for file in data_files(copy_of_saved(tmp_path)):
        flip(file, -1)
        flip(file, len(file.read_bytes()) // 2)
    damages = [megackpt.verify(tmp_path, deep=True, threads=n).damages for n in (1, 2, 7)]
    assert len(damages[0]) >= 4
    assert damages[0] == damages[1] == damages[2]


SMALL_FILES = [
    (("zarr", 1), "*.pt"),
    (("zarr", 1), ".zarray"),
    (("zarr", 3), "zarr.json"),
    (("torch_dist", 1), "*.pt"),
]


@pytest.mark.parametrize(("format", "pattern"), SMALL_FILES, ids=str)
def test_flipped_bytes_in_the_small_files_of_other_formats_are_damage_or_change_nothing(
    tmp_path: Path, format: tuple[str, int], pattern: str
) -> None:
    whole = open_store(copy_of_saved(tmp_path / "whole", format))
    directory = copy_of_saved(tmp_path / "damaged", format)
    file = files_below(directory, pattern)[0]
    data = file.read_bytes()
    overlooked = []
    for at in range(0, len(data), max(1, len(data) // 60)):
        flip(file, at)
        damaged = open_store(directory)
        is_undamaged = megackpt.verify(damaged, deep=True, threads=1).is_undamaged
        if is_undamaged and not megackpt.diff(whole, damaged, threads=1).is_equal:
            overlooked.append(at)
        file.write_bytes(data)
    # The extents of an array stand nowhere but in its document.
    assert len(overlooked) <= (0 if pattern == "*.pt" else 3)
