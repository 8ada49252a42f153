"""`megackpt verify` names all that is damaged, and nothing else; `repair` repairs it, or changes nothing."""

from __future__ import annotations

import contextlib
import json
import random
import re
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint

import megackpt
from megackpt import Checkpointer, SaveOptions, ShardedTensor
from megackpt.cli import main
from megackpt.errors import FormatError
from megackpt.plans.metadata import DIGEST_BLOCK_BYTES
from megackpt.run import remove_sharded_tensors
from megackpt.storage import open_store
from tests.support.checkpoints import (
    DAMAGES,
    FORMATS,
    NATIVE,
    SAVED_FORMATS,
    ZARR_1,
    contents,
    copy_of_saved,
    data_files,
    files_below,
    flip,
    saved,
)
from tests.support.command_line import CommandLine
from tests.support.dcp_alone import two_that_look_like_one_save
from tests.support.effort import few


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
    tmp_path: Path, format: tuple[str, int], flags: list[str], cli: CommandLine
) -> None:
    message = cli.json("verify", copy_of_saved(tmp_path, format), *flags)
    assert (message["damages"], message["is_undamaged"]) == ([], True)
    assert (message["arrays"], message["objects"], message["deep"]) == (4, 2, bool(flags))
    assert message["nbytes"] >= 400_000 * 4
    is_checked = format in (NATIVE, ("torch_dist", 1), ("zarr", 3))
    assert (message["unchecked_nbytes"] == 0) == is_checked
    assert message["is_whole"] is (True if flags and is_checked else None)


def test_every_flipped_block_is_named_with_key_box_file_and_bytes(tmp_path: Path, cli: CommandLine) -> None:
    first, second = data_files(copy_of_saved(tmp_path))
    long = position_of(first, "long[0:200000]")
    flip(first, long[0])
    flip(first, long[0] + 2 * DIGEST_BLOCK_BYTES + 5)
    block, thing = position_of(second, "block[0:6, 4:8]"), position_of(second, "object[1:2]")
    flip(second, block[1] - 1)
    flip(second, thing[1] - 1)
    message = cli.json("verify", tmp_path)  # what is not read is not known
    assert (message["is_undamaged"], message["is_whole"]) == (True, None)
    message = cli.json("verify", tmp_path, "--deep", code=1)
    damages = [(d["file"], d["key"], d["box"], d["start"], d["stop"]) for d in message["damages"]]
    last = DIGEST_BLOCK_BYTES * 2 + long[0]
    assert damages == [
        (f"data/{first.name}", "long", "[0:200000]", long[0], long[0] + DIGEST_BLOCK_BYTES),
        (f"data/{first.name}", "long", "[0:200000]", last, last + DIGEST_BLOCK_BYTES),
        (f"data/{second.name}", "block", "[0:6, 4:8]", *block),
        (f"data/{second.name}", "object", "[1:2]", *thing),
    ]
    assert all("digest differs" in d["what"] for d in message["damages"])
    out = cli.out("verify", tmp_path, "--deep", code=1)
    for text in ("block", "[0:6, 4:8]", f"{block[0]}:{block[1]}", "4 damages ("):
        assert text in out


def test_the_verdict_names_what_was_checked_and_nothing_more(tmp_path: Path, cli: CommandLine) -> None:
    """A step with a flipped byte was called whole where nobody had looked at its bytes."""

    def verdict(directory: Path, *flags: str, code: int = 0) -> str:
        lines = cli.out("verify", directory, *flags, code=code).splitlines()
        (*_, last) = [line for line in lines if line.startswith(f"{directory}: ")]
        return last.removeprefix(f"{directory}: ").partition(";")[0]

    directory, unchecked = copy_of_saved(tmp_path / "a"), copy_of_saved(tmp_path / "b", ZARR_1)
    assert verdict(directory, "--deep") == "whole (every byte read)"
    assert verdict(unchecked, "--deep") == "structure whole (every byte read, none has a digest)"
    flip(data_files(directory)[0], position_of(data_files(directory)[0], "long[0:200000]")[0])
    assert verdict(directory) == "structure whole (bytes not read, --deep reads them)"
    assert verdict(directory, "--deep", code=1) == "1 damage (every byte read)"
    data_files(directory)[0].unlink()
    assert verdict(directory, code=1) == "1 damage (bytes not read, --deep reads them)"


def test_damaged_blocks_that_follow_each_other_are_one_damage(tmp_path: Path, cli: CommandLine) -> None:
    file = data_files(copy_of_saved(tmp_path))[0]
    begin, end = position_of(file, "long[0:200000]")
    data = file.read_bytes()
    file.write_bytes(data[:begin] + bytes(end - begin) + data[end:])
    message = cli.json("verify", tmp_path, "--deep", code=1)
    assert [(d["key"], d["start"], d["stop"]) for d in message["damages"]] == [("long", begin, end)]


@pytest.mark.parametrize("at", [0, 3, 20, 100, 300, 1000])
def test_a_flipped_byte_in_the_header_of_a_data_file_is_damage_although_loads_do_not_read_it(
    tmp_path: Path, at: int, cli: CommandLine
) -> None:
    file = data_files(copy_of_saved(tmp_path))[0]
    flip(file, at)
    message = cli.json("verify", tmp_path, code=1)
    assert {d["file"] for d in message["damages"]} == {f"data/{file.name}"}
    assert "header" in message["damages"][0]["what"]


@pytest.mark.parametrize(
    ("old", "new", "what"),
    [
        (b'"long[', b'"lung[', "the header calls it 'lung["),
        (
            b'"shape":[200000]',
            b'"shape":[100002]',
            "the header has it as F32 [100002], and not as F32 [200000]",
        ),
        (b'"format"', b'"farmot"', "its header says that it is"),
    ],
    ids=["name", "shape", "metadata"],
)
def test_a_header_that_contradicts_the_index_is_damage(
    tmp_path: Path, old: bytes, new: bytes, what: str, cli: CommandLine
) -> None:
    file = data_files(copy_of_saved(tmp_path))[0]
    file.write_bytes(file.read_bytes().replace(old, new, 1))
    (damage,) = cli.json("verify", tmp_path, code=1)["damages"]
    assert damage["what"].startswith(what)


@pytest.mark.parametrize("pattern", ["index-*", "common-*.json", "common-*.safetensors"])
@pytest.mark.parametrize("at", [0, 40, -1])
def test_a_flipped_byte_in_index_or_common_state_is_named(
    tmp_path: Path, pattern: str, at: int, cli: CommandLine
) -> None:
    (file,) = copy_of_saved(tmp_path).glob(pattern)
    flip(file, at)
    message = cli.json("verify", tmp_path, code=1)
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
def test_every_lost_file_is_damage(tmp_path: Path, format: tuple[str, int]) -> None:
    """Files whose loss changes nothing but for other programs are told apart by name."""
    directory = copy_of_saved(tmp_path, format)
    for file in files_below(directory, "*"):
        name, data = str(file.relative_to(directory)), file.read_bytes()
        file.unlink()
        code = main(["verify", str(directory), "--deep"])
        file.write_bytes(data)
        tolerated = {
            ("torch_dist", 1): ("metadata.json", "megackpt-"),  # .metadata alone is a checkpoint of DCP
            ZARR_1: (".megackpt-",),  # without its marker it is one of Megatron-Core
        }.get(format, ())
        is_commit = name == "metadata.json"
        if name.startswith(tolerated) or (name.endswith("/zarr.json") and name.count("/") == 1):
            continue
        assert code == (3 if is_commit else 1), name


def test_a_lost_data_file_is_one_damage_that_names_its_chunks(tmp_path: Path, cli: CommandLine) -> None:
    file = data_files(copy_of_saved(tmp_path))[1]
    file.unlink()
    message = cli.json("verify", tmp_path, "--deep", code=1)
    (damage,) = message["damages"]
    assert damage["file"] == f"data/{file.name}"
    assert re.match(r"it is missing; \d chunks of 'block', 'flat', ", damage["what"])


@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_every_truncated_file_of_chunks_is_damage(
    tmp_path: Path, format: tuple[str, int], cli: CommandLine
) -> None:
    directory = copy_of_saved(tmp_path, format)
    with_chunks = inspected_files(directory)
    assert with_chunks
    for name in with_chunks:
        file = directory / name
        data = file.read_bytes()
        file.write_bytes(data[: len(data) // 2])
        flags = ["--deep"] if format[0] == "zarr" else []  # of shards and objects no length is stored
        message = cli.json("verify", directory, *flags, code=1)
        assert name in {d["file"] for d in message["damages"]}, name
        file.write_bytes(data)


def inspected_files(directory: Path) -> list[str]:
    return [file.name for file in megackpt.inspect(directory).files]


def test_a_truncated_data_file_names_every_chunk_that_is_cut(tmp_path: Path, cli: CommandLine) -> None:
    file = data_files(copy_of_saved(tmp_path))[0]
    begin, _ = position_of(file, "long[0:200000]")
    file.write_bytes(file.read_bytes()[: begin + 10])
    message = cli.json("verify", tmp_path, code=1)
    cut = {d["key"] for d in message["damages"] if "file ends at" in d["what"]}
    assert "long" in cut
    assert all(d["stop"] > begin + 10 for d in message["damages"] if d.get("key") in cut and d["start"])


def test_swapped_data_files_are_damage(tmp_path: Path, cli: CommandLine) -> None:
    first, second = data_files(copy_of_saved(tmp_path))
    first_bytes, second_bytes = first.read_bytes(), second.read_bytes()
    first.write_bytes(second_bytes)
    second.write_bytes(first_bytes)
    message = cli.json("verify", tmp_path, code=1)
    assert {d["file"] for d in message["damages"]} == {f"data/{first.name}", f"data/{second.name}"}


@pytest.mark.parametrize("format", [f for f in FORMATS if f != ZARR_1], ids=str)
def test_a_flipped_byte_in_the_middle_of_any_file_of_chunks_is_found(
    tmp_path: Path, format: tuple[str, int], cli: CommandLine
) -> None:
    directory = copy_of_saved(tmp_path, format)
    for name in inspected_files(directory):
        file = directory / name
        data = file.read_bytes()
        flip(file, len(data) // 2)
        message = cli.json("verify", directory, "--deep", code=1)
        assert any(d["file"] == name and "key" in d for d in message["damages"]), name
        file.write_bytes(data)


def test_the_zip_records_around_tensors_are_checked(tmp_path: Path, cli: CommandLine) -> None:
    directory = copy_of_saved(tmp_path, ("torch_dist", 1))
    for file in files_below(directory, "*.distcp"):
        data = file.read_bytes()
        for at in (0, 100, -1, -60):
            flip(file, at)
            message = cli.json("verify", directory, "--deep", code=1)
            assert {d["file"] for d in message["damages"]} == {file.name}
            file.write_bytes(data)


def test_another_metadata_than_that_of_the_save_is_damage(tmp_path: Path, cli: CommandLine) -> None:
    flip(copy_of_saved(tmp_path, ("torch_dist", 1)) / ".metadata", 200)
    message = cli.json("verify", tmp_path, code=1)
    assert ".metadata" in {d["file"] for d in message["damages"]}


def test_elements_that_no_chunk_has_are_named(tmp_path: Path, cli: CommandLine) -> None:
    half = ShardedTensor.from_rank_offsets("w", torch.zeros(4), (0, 0, 2))
    megackpt.save({"w": half}, tmp_path, validate_access_integrity=False)
    message = cli.json("verify", tmp_path, code=1)
    assert message["damages"] == [{"key": "w", "box": "[4:8]", "what": "no chunk has it"}]


def test_arrays_that_were_taken_out_leave_no_damage(tmp_path: Path, cli: CommandLine) -> None:
    remove_sharded_tensors(copy_of_saved(tmp_path), "block")
    cli.json("verify", tmp_path, "--deep")
    flip(data_files(tmp_path)[0], 60)
    cli.json("verify", tmp_path, code=1)


def test_any_number_of_threads_finds_the_same(tmp_path: Path) -> None:
    for file in data_files(copy_of_saved(tmp_path)):
        flip(file, -1)
        flip(file, len(file.read_bytes()) // 2)
    damages = [megackpt.verify(tmp_path, deep=True, threads=n).damages for n in (1, 2, 7)]
    assert len(damages[0]) >= 4
    assert damages[0] == damages[1] == damages[2]


SMALL_FILES = [
    (ZARR_1, "*.pt"),
    (ZARR_1, ".zarray"),
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


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("pattern", ["data/*-00000*", "data/*-00001*", "parity/*"])
def test_parity_repairs_any_damage_to_one_file(
    tmp_path: Path, pattern: str, damage: str, cli: CommandLine
) -> None:
    before = contents(saved(tmp_path, parity=2))
    (file,) = tmp_path.glob(pattern)
    DAMAGES[damage](file)
    message = cli.json("repair", tmp_path)
    assert (message["is_applied"], message["is_whole"]) == (True, True)
    (repaired,) = message["files"]
    assert (repaired["file"], repaired["source"]) == (str(file.relative_to(tmp_path)), "parity")
    assert contents(tmp_path) == before


def test_files_of_one_group_that_are_damaged_at_different_positions_are_repaired(
    tmp_path: Path, cli: CommandLine
) -> None:
    before = contents(saved(tmp_path, parity=2))
    first, second = files_below(tmp_path, "data/*")
    flip(first, 5000)
    flip(second, -1)
    message = cli.json("repair", tmp_path)
    assert len(message["files"]) == 2
    assert all(stop - start < f["nbytes"] for f in message["files"] for start, stop in f["ranges"])
    assert contents(tmp_path) == before


def test_nothing_is_changed_if_something_cannot_be_repaired(tmp_path: Path, cli: CommandLine) -> None:
    whole = contents(saved(tmp_path, parity=2))
    first, second = files_below(tmp_path, "data/*")
    flip(first, -1)
    (index,) = tmp_path.glob("common-*.json")
    flip(index, 5)
    before = contents(tmp_path)
    message = cli.json("repair", tmp_path, code=1)
    assert (message["is_applied"], message["is_whole"]) == (False, False)
    assert [f["file"] for f in message["files"]] == [f"data/{first.name}"]
    assert contents(tmp_path) == before
    message = cli.json("repair", tmp_path, "--partial", code=1)
    assert (message["is_applied"], message["is_whole"]) == (True, False)
    assert contents(tmp_path) == {**whole, index.name: before[index.name]}
    assert second.read_bytes() == whole[f"data/{second.name}"]


def test_a_dry_run_and_a_whole_checkpoint_change_nothing_and_a_repair_removes_what_a_killed_one_left(
    tmp_path: Path, cli: CommandLine
) -> None:
    whole = contents(saved(tmp_path, parity=2))
    assert "no damage found; nothing was changed" in cli.out("repair", tmp_path)
    assert contents(tmp_path) == whole
    first = files_below(tmp_path, "data/*")[0]
    first.unlink()
    (tmp_path / f"data/.{first.name}.0123456789abcdef.tmp").write_bytes(b"half")
    damaged = contents(tmp_path)
    message = cli.json("repair", tmp_path, "--dry-run")
    assert (message["is_applied"], message["is_whole"]) == (False, True)
    assert len(message["files"]) == 1
    assert contents(tmp_path) == damaged
    cli.json("repair", tmp_path)
    assert contents(tmp_path) == whole


@pytest.mark.parametrize("format", SAVED_FORMATS, ids=str)
def test_a_copy_repairs_all_files_of_chunks_that_are_lost(
    tmp_path: Path, format: tuple[str, int], cli: CommandLine
) -> None:
    directory, copy = copy_of_saved(tmp_path / "it", format), tmp_path / "copy"
    shutil.copytree(directory, copy)
    before = contents(directory)
    for file in megackpt.inspect(directory).files:
        (directory / file.name).unlink()
    cli.json("repair", directory, "--from", copy)
    assert contents(directory) == before


@pytest.mark.parametrize("first", [0, 1])
def test_a_copy_repairs_every_other_file_of_a_checkpoint(
    tmp_path: Path, first: int, cli: CommandLine
) -> None:
    directory, copy = saved(tmp_path / "it", parity=2), tmp_path / "copy"
    shutil.copytree(directory, copy)
    before = contents(directory)
    for name in sorted(before)[first::2]:
        (directory / name).unlink()
    cli.json("repair", directory, "--from", copy)
    assert contents(directory) == before


@pytest.mark.parametrize("at", range(5, 860, 57))
def test_a_damaged_commit_is_repaired_from_a_copy(tmp_path: Path, at: int, cli: CommandLine) -> None:
    """Also where it says that other files are damaged, and they are not."""
    directory = saved(tmp_path / "it", parity=2)
    shutil.copytree(directory, tmp_path / "copy")
    before = contents(directory)
    flip(directory / "metadata.json", at)
    flip(files_below(directory, "data/*")[0], -1)
    cli.json("repair", directory, "--from", tmp_path / "copy")
    assert json.loads(contents(directory)["metadata.json"]) == json.loads(before["metadata.json"])
    cli.run("verify", directory, "--deep")


def test_a_copy_of_another_save_is_not_used(tmp_path: Path, cli: CommandLine) -> None:
    directory, other = saved(tmp_path / "it"), saved(tmp_path / "other")
    flip(files_below(directory, "data/*")[0], -1)
    before = contents(directory)
    message = cli.json("repair", directory, "--from", other, code=1)
    reason = f"{other} has another save, or its format does not record which save it is"
    assert message["unusable_sources"] == [reason]
    assert contents(directory) == before


@pytest.mark.filterwarnings("ignore:torch.distributed is (disabled|unavailable)")
def test_what_another_library_has_saved_is_not_mixed_with_a_copy(tmp_path: Path, cli: CommandLine) -> None:
    """Nothing in it says which save it is of: a copy could be of another step."""
    first, second = two_that_look_like_one_save(tmp_path)
    message = cli.json("repair", first, "--from", second, code=1)
    assert (message["is_applied"], message["files"]) == (False, [])


def test_tables_show_what_was_repaired_and_what_is_left(tmp_path: Path, cli: CommandLine) -> None:
    first, second = files_below(saved(tmp_path, parity=2), "data/*")
    first.unlink()
    out = cli.out("repair", tmp_path)
    assert "parity" in out
    assert "1 file repaired" in out
    first.unlink()
    second.unlink()
    out = cli.out("repair", tmp_path, code=1)
    assert "nothing can be repaired" in out
    assert "missing" in out


def save(root: Path, step: int, *, parity: bool = False, format: str | None = None) -> Path:
    """Save a step; return its directory."""
    options = SaveOptions(parity=1) if parity else SaveOptions()
    tensor = ShardedTensor.from_rank_offsets("w", torch.full((1000,), float(step)))
    checkpointer = Checkpointer(root, save_options=options)
    checkpointer.save(step, {"w": tensor, "step": step}, sharded_strategy=format)
    return checkpointer.directory(step)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A step in each state."""
    save(tmp_path, 1)
    flip(data_files(save(tmp_path, 2))[0], -10)
    flip(data_files(save(tmp_path, 3, parity=True))[0], -10)
    cut = data_files(save(tmp_path, 4))[0]
    cut.write_bytes(cut.read_bytes()[:-100])
    data_files(save(tmp_path, 5))[0].unlink()
    (index,) = save(tmp_path, 6).glob("index-*")
    flip(index, -10)
    (common,) = save(tmp_path, 7).glob("common-*.json")
    flip(common, -10)
    save(tmp_path, 8, format="torch_dist")
    flipped = save(tmp_path, 9, parity=True)
    flip(data_files(flipped)[0], -10)
    for parity in (flipped / "parity").iterdir():
        parity.unlink()
    unknown = save(tmp_path, 10) / "metadata.json"
    unknown.write_text(json.dumps(json.loads(unknown.read_text()) | {"sharded_backend": "later"}))
    later = save(tmp_path, 13)
    checkpointer = Checkpointer(tmp_path)
    checkpointer.load({"step": 0}, 8)
    checkpointer.save(11, {"step": 11})  # 13 is abandoned
    assert later.is_dir()
    (checkpointer.directory(11) / "metadata.json").write_text("{")
    for step in (12, 14):
        checkpointer.save(step, {"step": step})
    (checkpointer.directory(12) / "metadata.json").unlink()
    (common,) = checkpointer.directory(14).glob("common-*.json")
    common.unlink()
    return tmp_path


DEEP = {
    1: ("whole", ""),
    2: ("damaged", ""),
    3: ("damaged", "all"),
    4: ("damaged", ""),
    5: ("damaged", ""),
    6: ("damaged", ""),
    7: ("damaged", ""),
    8: ("whole", ""),
    9: ("damaged", "nothing"),
    10: ("unreadable", ""),
    11: ("unreadable", ""),
    12: ("incomplete", ""),
    13: ("whole", ""),
    14: ("damaged", ""),
}


def test_each_state_of_a_step_gets_its_verdict_and_the_last_line_names_the_newest_good_step(
    root: Path, cli: CommandLine
) -> None:
    result = cli.json("verify", root, "--all", "--deep", code=1)
    assert {row["step"]: (row["state"], row["repair"]) for row in result["steps"]} == DEEP
    assert [row["step"] for row in result["steps"] if row["abandoned"]] == [9, 13]
    assert (result["newest_good"], result["latest"]) == (8, 14)
    lines = cli.out("verify", root, "--all", "--deep", code=1).splitlines()
    assert lines[-1] == "newest good step: 8"
    assert "megackpt repair" in lines[-2]
    shallow = cli.json("verify", root, "--all", code=1)["steps"]
    assert [row["state"] for row in shallow if row["step"] in (1, 2, 4, 8)] == [
        "undamaged",
        "undamaged",
        "damaged",
        "undamaged",
    ]


def test_a_run_without_damage_is_no_fault_and_one_without_steps_is_no_run(
    tmp_path: Path, cli: CommandLine
) -> None:
    save(tmp_path, 1)
    assert cli.out("verify", tmp_path, "--all", "--deep").splitlines()[-1] == "newest good step: 1"
    shutil.rmtree(tmp_path / "iter_0000001")
    assert "has no steps" in cli.err("verify", tmp_path, "--all", code=3)


def test_gc_names_damaged_steps_that_it_keeps_and_the_newest_without_damage(
    tmp_path: Path, cli: CommandLine
) -> None:
    steps = [save(tmp_path, step) for step in (1, 2, 3, 4)]
    for step in steps[2:]:
        data_files(step)[0].unlink()
    nbytes = sum(file.stat().st_size for file in steps[0].rglob("*") if file.is_file())
    out = cli.out("gc", tmp_path, "--keep-last", 2, "--dry-run")
    assert "newest without damage" in out
    assert "Damaged steps are kept: 3, 4. The newest without damage is step 2." in out
    result = cli.json("gc", tmp_path, "--keep-last", 2)
    assert (result["damaged"], result["newest_undamaged"]) == ([3, 4], 2)
    assert result["freed_nbytes"] == nbytes
    assert [row["step"] for row in result["kept"]] == [2, 3, 4]


def test_gc_removes_abandoned_steps_only_if_asked(tmp_path: Path, cli: CommandLine) -> None:
    for step in (1, 2, 3):
        save(tmp_path, step)
    checkpointer = Checkpointer(tmp_path)
    checkpointer.load({"step": 0}, 1)
    checkpointer.save(5, {"step": 5})
    checkpointer.pin(2)
    kept = cli.json("gc", tmp_path, "--keep-last", 1)["kept"]
    assert kept == [
        {"because": ["abandoned branch", "pinned"], "step": 2},
        {"because": ["abandoned branch"], "step": 3},
        {"because": ["newest", "last 1"], "step": 5},
    ]
    result = cli.json("gc", tmp_path, "--keep-last", 1, "--abandoned")
    assert [row["step"] for row in result["removed"]] == [3]
    assert Checkpointer(tmp_path).steps() == (2, 5)


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("template")
    for step in (100, 200, 300, 400):
        save(root, step, parity=step == 200, format="torch_dist" if step == 300 else None)
    return root


@pytest.mark.parametrize("seed", range(few(24, of=200)))
def test_the_newest_good_step_is_right_after_random_damage(
    template: Path, tmp_path: Path, cli: CommandLine, seed: int
) -> None:
    choice, root = random.Random(seed), tmp_path / "run"
    shutil.copytree(template, root)
    damaged = choice.sample((100, 200, 300, 400), choice.randint(1, 4))
    done = []
    for step in damaged:
        directory = root / f"iter_{step:07d}"
        path = choice.choice(sorted(p for p in directory.rglob("*") if p.is_file()))
        kind = choice.choice(["flip", "cut", "remove", "uncommit"])
        # No digest covers all of a commit, and of the note that has its place in torch_dist.
        if kind == "uncommit" or path.name == "metadata.json" or path.match("megackpt-*.json"):
            (directory / "metadata.json").unlink()
        elif kind == "remove":
            path.unlink()
        elif kind == "cut":
            path.write_bytes(path.read_bytes()[: choice.randrange(path.stat().st_size)])
        else:
            flip(path, choice.randrange(path.stat().st_size))
        done.append((step, path.name, kind))
    good = max({100, 200, 300, 400} - set(damaged), default=None)
    result = cli.json("verify", root, "--all", "--deep", code=None)
    assert result["newest_good"] == good, (done, result["steps"])
