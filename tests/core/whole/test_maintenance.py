"""`megackpt.inspect`, `verify`, `diff`, `convert` and `repair` as functions: real files, real damage."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import megackpt
from megackpt import DeclarationError, IntegrityError, NotACheckpointError, SaveOptions
from megackpt.comm import Group
from megackpt.errors import CheckpointError
from megackpt.storage import LocalStore, MemoryStore, Store, open_store
from megackpt.testing.world import SimulatedWorld
from tests.support.checkpoints import FORMATS, LONG, RANKS, files_below, flip, saved, state_of


def saved_with_parity(directory: Path) -> Path:
    def save_rank(group: Group) -> None:
        options = SaveOptions(parity=RANKS, plain_tensors="common")
        megackpt.save(state_of(group.rank), directory, options=options, group=group)

    SimulatedWorld(RANKS).run(save_rank)
    return directory


def contents(directory: Path) -> dict[str, bytes]:
    return {str(file.relative_to(directory)): file.read_bytes() for file in files_below(directory, "*")}


class CountingProgress:
    """Adds up what is announced and what is done."""

    def __init__(self) -> None:
        self.phases: list[str] = []
        self.announced = self.done = 0

    def begin(self, doing: str, nbytes: int) -> None:
        self.phases.append(doing)
        self.announced += nbytes

    def advance(self, nbytes: int) -> None:
        self.done += nbytes


class ClosingStore(LocalStore):
    """Notes that it was closed."""

    is_closed = False

    def close(self) -> None:
        self.is_closed = True
        super().close()


@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_inspect_returns_arrays_files_and_common_state(tmp_path: Path, format: tuple[str, int]) -> None:
    summary = megackpt.inspect(saved(tmp_path, format))
    assert (summary.location, (summary.backend, summary.version)) == (str(tmp_path), format)
    long = next(array for array in summary.arrays if array.key == "long")
    assert (long.dtype, long.shape, long.nbytes, long.crc64nvme) == ("float32", (400_000,), LONG.nbytes, None)
    assert [array.key for array in summary.arrays] == ["block", "flat", "half", "long", "object"]
    assert summary.common["step"] == "7"
    assert summary.content == {"sharding": "'flat'"}
    assert summary.nbytes == sum(array.nbytes for array in summary.arrays)
    assert all((tmp_path / file.name).is_file() for file in summary.files)
    assert (summary.unreadable, summary.common_error) == ({}, "")


def test_inspect_lists_matching_keys_only(tmp_path: Path) -> None:
    summary = megackpt.inspect(saved(tmp_path), keys=["b*", "lon?"])
    assert [array.key for array in summary.arrays] == ["block", "long"]
    assert sum(file.nbytes for file in summary.files) == sum(summary.rank_nbytes.values()) == summary.nbytes


@pytest.mark.parametrize("deep", [False, True])
def test_verify_of_a_whole_checkpoint_has_no_damage(tmp_path: Path, deep: bool) -> None:
    progress = CountingProgress()
    report = megackpt.verify(saved(tmp_path), deep=deep, progress=progress)
    assert (report.damages, report.is_undamaged, report.deep) == ((), True, deep)
    assert report.is_whole is (True if deep else None)
    assert (report.arrays, report.objects, report.unchecked_nbytes) == (4, 2, 0)
    assert progress.done == progress.announced == (report.nbytes if deep else 0)


@pytest.mark.parametrize("format", FORMATS, ids=str)
@pytest.mark.parametrize("deep", [False, True])
def test_verify_names_a_lost_file(tmp_path: Path, format: tuple[str, int], deep: bool) -> None:
    name = megackpt.inspect(saved(tmp_path, format), keys=["long"]).files[0].name
    (tmp_path / name).unlink()
    report = megackpt.verify(tmp_path, deep=deep)
    assert not report.is_undamaged
    assert report.is_whole is False
    assert name in {damage.file for damage in report.damages}


def test_verify_deep_names_file_bytes_key_and_chunk_of_a_flipped_bit(tmp_path: Path) -> None:
    file = files_below(saved(tmp_path), "data/*-00001*")[0]
    at = file.read_bytes().index(LONG[200_000:].numpy().tobytes())
    flip(file, at + 5)
    assert megackpt.verify(tmp_path).is_undamaged
    (damage,) = megackpt.verify(tmp_path, deep=True).damages
    assert (damage.file, damage.key) == (str(file.relative_to(tmp_path)), "long")
    assert damage.box == "[200000:400000]"
    assert damage.start is not None
    assert damage.stop is not None
    assert damage.start <= at + 5 < damage.stop
    assert "digest" in damage.what


def test_diff_of_equal_checkpoints_in_different_formats_is_equal(tmp_path: Path) -> None:
    locations = [saved(tmp_path / f"{backend}{version}", (backend, version)) for backend, version in FORMATS]
    for position in locations[1:]:
        difference = megackpt.diff(locations[0], position)
        assert difference.is_equal
        assert difference.compared == 5


def test_diff_counts_and_locates_what_differs(tmp_path: Path) -> None:
    first = {"w": torch.zeros(4, 3), "only_here": torch.ones(2), "n": torch.arange(3)}
    second = {"w": torch.zeros(4, 3), "n": torch.arange(3.0)}
    second["w"][2, 1], second["w"][3, 0] = 0.25, float("nan")
    for name, tensors in (("a", first), ("b", second)):
        state = {key: megackpt.ShardedTensor.from_rank_offsets(key, value) for key, value in tensors.items()}
        megackpt.save({**state, "step": name}, tmp_path / name)
    difference = megackpt.diff(tmp_path / "a", tmp_path / "b")
    assert not difference.is_equal
    assert (difference.only_first, difference.only_second) == (("only_here",), ())
    assert difference.declared == {"n": ("int64 [3]", "float32 [3]")}
    (array,) = difference.arrays
    assert (array.key, array.elements, array.first) == ("w", 2, (2, 1))
    assert (array.largest, array.nan_elements) == (0.25, 1)
    (value,) = difference.values
    assert (value.path, value.first, value.second) == ("common state: step", "'a'", "'b'")
    assert megackpt.diff(tmp_path / "a", tmp_path / "b", keys=["x*"], common=False).is_equal


def test_diff_of_a_damaged_checkpoint_is_an_error(tmp_path: Path) -> None:
    saved(tmp_path / "a")
    file = files_below(saved(tmp_path / "b"), "data/*-00000*")[0]
    flip(file, -1)
    for pair in (("a", "b"), ("b", "a")):
        with pytest.raises(IntegrityError):
            megackpt.diff(*(tmp_path / name for name in pair))


@pytest.mark.parametrize("to", FORMATS, ids=str)
def test_convert_writes_an_equal_checkpoint(tmp_path: Path, to: tuple[str, int]) -> None:
    progress = CountingProgress()
    report = megackpt.convert(saved(tmp_path / "a"), tmp_path / "b", to, progress=progress)
    assert (report.location, (report.backend, report.version)) == (str(tmp_path / "b"), to)
    assert (report.arrays, report.objects, report.is_verified) == (4, 2, True)
    assert progress.phases == ["writing", "verifying"]
    assert progress.done == progress.announced
    assert megackpt.diff(tmp_path / "a", tmp_path / "b").is_equal


def test_convert_on_several_ranks_returns_the_same_report_on_all(tmp_path: Path) -> None:
    saved(tmp_path / "a")
    reports = SimulatedWorld(3).run(
        lambda group: megackpt.convert(tmp_path / "a", tmp_path / "b", "torch_dist", group=group)
    )
    assert reports == [reports[0]] * 3
    assert megackpt.diff(tmp_path / "a", tmp_path / "b").is_equal


def test_convert_of_a_damaged_checkpoint_is_an_error_on_all_ranks_and_leaves_nothing(tmp_path: Path) -> None:
    flip(files_below(saved(tmp_path / "a"), "data/*-00001*")[0], -1)
    outcomes = SimulatedWorld(2).outcomes(
        lambda group: megackpt.convert(tmp_path / "a", tmp_path / "b", "megackpt", group=group)
    )
    assert [type(outcome) for outcome in outcomes] == [IntegrityError] * 2
    assert not files_below(tmp_path / "b", "*")


def test_convert_keeps_a_checkpoint_that_is_there_already(tmp_path: Path) -> None:
    saved(tmp_path / "a")
    megackpt.save({"old": 1}, tmp_path / "b")
    with pytest.raises(DeclarationError, match=r"has a checkpoint already.*set overwrite"):
        megackpt.convert(tmp_path / "a", tmp_path / "b", "megackpt")
    assert megackpt.load_common_state_dict(tmp_path / "b") == {"old": 1}
    megackpt.convert(tmp_path / "a", tmp_path / "b", "megackpt", overwrite=True)
    assert megackpt.diff(tmp_path / "a", tmp_path / "b").is_equal
    with pytest.raises(DeclarationError, match="No strategy saves format 'tar'"):
        megackpt.convert(tmp_path / "a", tmp_path / "c", "tar")


@pytest.mark.parametrize("damage", ["flip", "cut", "lose"])
def test_repair_computes_a_damaged_file_from_parity(tmp_path: Path, damage: str) -> None:
    before = contents(saved_with_parity(tmp_path))
    file = files_below(tmp_path, "data/*-00001*")[0]
    if damage == "flip":
        flip(file, -1)
    elif damage == "cut":
        file.write_bytes(file.read_bytes()[:-10])
    else:
        file.unlink()
    damaged = contents(tmp_path)
    plan = megackpt.repair(tmp_path, dry_run=True)
    assert (plan.is_whole, plan.is_applied, contents(tmp_path)) == (True, False, damaged)
    report = megackpt.repair(tmp_path)
    assert (report.is_whole, report.is_applied, report.remaining) == (True, True, ())
    assert [(f.file, f.source) for f in report.files] == [(str(file.relative_to(tmp_path)), "parity")]
    assert contents(tmp_path) == before


@pytest.mark.parametrize("kind", [str, Path, open_store])
def test_repair_takes_copies_as_paths_and_stores(tmp_path: Path, kind: Callable[[str], Any]) -> None:
    before = contents(saved(tmp_path / "a"))
    shutil.copytree(tmp_path / "a", tmp_path / "copy")
    (tmp_path / "a/metadata.json").unlink()
    report = megackpt.repair(tmp_path / "a", [kind(str(tmp_path / "copy"))])
    assert (report.is_whole, report.is_applied) == (True, True)
    assert report.files[0].source == str(tmp_path / "copy")
    assert contents(tmp_path / "a") == before


def test_repair_changes_nothing_if_damage_would_be_left_unless_partial_is_set(tmp_path: Path) -> None:
    saved_with_parity(tmp_path)
    whole = contents(tmp_path)
    lost, common = files_below(tmp_path, "data/*-00000*")[0], files_below(tmp_path, "common-*.json")[0]
    lost.unlink()
    flip(common, 5)
    damaged = contents(tmp_path)
    other = saved(tmp_path.with_name(f"{tmp_path.name}-other"))
    report = megackpt.repair(tmp_path, [other])
    assert (report.is_whole, report.is_applied, contents(tmp_path)) == (False, False, damaged)
    assert str(other) in report.unusable_sources[0]
    assert "another save" in report.unusable_sources[0]
    report = megackpt.repair(tmp_path, partial=True)
    assert (report.is_whole, report.is_applied) == (False, True)
    assert {damage.file for damage in report.remaining} == {common.name}
    assert contents(tmp_path) == whole | {common.name: damaged[common.name]}


def test_a_single_path_as_copies_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DeclarationError, match=r"copies is 'copy'; give a sequence"):
        megackpt.repair(saved(tmp_path), "copy")


FUNCTIONS: list[Callable[[Any], Any]] = [
    megackpt.inspect,
    megackpt.verify,
    lambda location: megackpt.diff(location, location),
    lambda location: megackpt.convert(location, MemoryStore(), "megackpt"),
    megackpt.repair,
]
NAMES = ["inspect", "verify", "diff", "convert", "repair"]


@pytest.mark.parametrize("function", FUNCTIONS, ids=NAMES)
def test_a_path_a_string_and_an_open_store_are_accepted(
    tmp_path: Path, function: Callable[[Any], Any]
) -> None:
    store = ClosingStore(str(saved(tmp_path)))
    reports = [function(tmp_path), function(str(tmp_path)), function(store)]
    assert reports == [reports[0]] * 3
    assert not store.is_closed
    assert is_dataclass(reports[0])
    assert reports[0].__dataclass_params__.frozen


@pytest.mark.parametrize("function", FUNCTIONS, ids=NAMES)
def test_where_nothing_was_committed_is_an_error(tmp_path: Path, function: Callable[[Any], Any]) -> None:
    with pytest.raises(NotACheckpointError, match="is not a checkpoint"):
        function(tmp_path / "nowhere")
    assert not (tmp_path / "nowhere").exists()


@pytest.mark.parametrize("function", FUNCTIONS, ids=NAMES)
def test_a_path_is_closed_again_also_after_an_error(
    tmp_path: Path, function: Callable[[Any], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    stores: list[ClosingStore] = []

    def open_closing(path: Any) -> Store:
        stores.append(ClosingStore(str(path)))
        return stores[-1]

    monkeypatch.setattr("megackpt.storage.opening.open_store", open_closing)
    function(saved(tmp_path / "a"))
    with pytest.raises(CheckpointError):
        function(tmp_path / "nowhere")
    assert stores
    assert all(store.is_closed for store in stores)
