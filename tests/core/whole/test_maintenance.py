"""`megackpt.inspect`, `verify`, `diff`, `convert` and `repair` as functions, on one rank or on several."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, is_dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import megackpt
from megackpt import (
    DeclarationError,
    IntegrityError,
    NotACheckpointError,
    SaveOptions,
    ShardedTensor,
    save,
    verify,
)
from megackpt.comm import Group
from megackpt.engine.data.progress import Progress
from megackpt.engine.verification.collective import verify_on_all_ranks
from megackpt.engine.verification.verify import ShareReport, verify_checkpoint, verify_share
from megackpt.errors import StorageError
from megackpt.formats.damage import Damage
from megackpt.options import VerifyOptions
from megackpt.storage import LocalStore, MemoryStore, Store, open_store
from megackpt.testing.world import SimulatedWorld
from megackpt.whole.windows import ByteArray, filled_windows, window_threads
from tests.support.checkpoints import (
    DAMAGES,
    FORMATS,
    LONG,
    NATIVE,
    SAVED_FORMATS,
    contents,
    files_below,
    flip,
    saved,
)
from tests.support.states import save_on_ranks, sharded


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


def test_diff_of_a_damaged_checkpoint_is_an_error(tmp_path: Path) -> None:
    saved(tmp_path / "a")
    file = files_below(saved(tmp_path / "b"), "data/*-00000*")[0]
    flip(file, -1)
    for pair in (("a", "b"), ("b", "a")):
        with pytest.raises(IntegrityError):
            megackpt.diff(*(tmp_path / name for name in pair))


@pytest.mark.parametrize("to", SAVED_FORMATS, ids=str)
def test_convert_writes_an_equal_checkpoint_on_one_rank_or_several(
    tmp_path: Path, to: tuple[str, int]
) -> None:
    progress, ranks = CountingProgress(), 3
    saved(tmp_path / "a")
    report = megackpt.convert(tmp_path / "a", tmp_path / "b", to, progress=progress)
    assert (report.location, (report.backend, report.version)) == (str(tmp_path / "b"), to)
    assert (report.arrays, report.objects, report.is_verified) == (4, 2, True)
    assert progress.phases == ["writing", "verifying"]
    assert progress.done == progress.announced
    of_ranks = SimulatedWorld(ranks).run(
        lambda group: megackpt.convert(tmp_path / "a", tmp_path / "c", to, group=group)
    )
    assert of_ranks == [of_ranks[0]] * ranks
    for name in ("b", "c"):
        assert megackpt.diff(tmp_path / "a", tmp_path / name).is_equal


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


@pytest.mark.parametrize("kind", [str, Path, open_store])
def test_repair_takes_copies_as_paths_and_stores(tmp_path: Path, kind: Callable[[str], Any]) -> None:
    before = contents(saved(tmp_path / "a"))
    shutil.copytree(tmp_path / "a", tmp_path / "copy")
    (tmp_path / "a/metadata.json").unlink()
    report = megackpt.repair(tmp_path / "a", [kind(str(tmp_path / "copy"))])
    assert (report.is_whole, report.is_applied) == (True, True)
    assert report.files[0].source == str(tmp_path / "copy")
    assert contents(tmp_path / "a") == before


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
def test_paths_and_stores_are_accepted_and_only_what_a_path_opens_is_closed_also_after_an_error(
    tmp_path: Path, function: Callable[[Any], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[ClosingStore] = []

    def open_closing(path: Any) -> Store:
        opened.append(ClosingStore(str(path)))
        return opened[-1]

    monkeypatch.setattr("megackpt.storage.opening.open_store", open_closing)
    store = ClosingStore(str(saved(tmp_path / "a")))
    reports = [function(tmp_path / "a"), function(str(tmp_path / "a")), function(store)]
    assert reports == [reports[0]] * 3
    assert is_dataclass(reports[0])
    assert reports[0].__dataclass_params__.frozen
    with pytest.raises(NotACheckpointError, match="is not a checkpoint"):
        function(tmp_path / "nowhere")
    assert not (tmp_path / "nowhere").exists()
    assert len(opened) >= 3
    assert all(path_store.is_closed for path_store in opened)
    assert not store.is_closed


THREE = 3
TIMEOUT_S = 2.0


def test_a_rank_whose_share_takes_longer_than_the_time_out_is_waited_for() -> None:
    def look(progress: Progress, share: tuple[int, int]) -> ShareReport:
        if share[0] == 1:
            for _ in range(30):
                time.sleep(TIMEOUT_S / 20)
                progress.advance(1)
        return ShareReport(damages=(Damage(what=f"of {share}"), Damage(what="of all")))

    results = SimulatedWorld(THREE, timeout_s=TIMEOUT_S).run(
        lambda group: verify_on_all_ranks(group, look, timeout_s=TIMEOUT_S)
    )
    damages = [Damage(what=what) for what in ("of (0, 3)", "of all", "of (1, 3)", "of (2, 3)")]
    assert results == [damages] * THREE


def test_a_rank_that_reads_nothing_for_so_long_is_named_and_others_stop_reading() -> None:
    disk, stopped = threading.Event(), threading.Event()

    def look(progress: Progress, share: tuple[int, int]) -> ShareReport:
        if share[0] == 1:
            disk.wait()
        if share[0] == 2:
            try:
                while True:
                    time.sleep(0.01)
                    progress.advance(1)
            finally:
                stopped.set()
        return ShareReport(damages=())

    def verify(group: Group) -> list[Damage]:
        return verify_on_all_ranks(group, look, timeout_s=2.0)

    outcomes = SimulatedWorld(THREE).outcomes(verify)
    assert {str(error) for error in outcomes} == {str(outcomes[0])}
    assert isinstance(outcomes[0], StorageError)
    assert outcomes[0].rank == 1
    assert "Rank 1 failed while verifying the step: nothing could be read for 2 s" in str(outcomes[0])
    assert stopped.wait(60)
    disk.set()


def test_a_rank_that_finds_much_damage_reports_the_first() -> None:
    def look(progress: Progress, share: tuple[int, int]) -> ShareReport:
        return ShareReport(damages=tuple(Damage(what=str(number)) for number in range(1000)))

    damages, _ = SimulatedWorld(2).run(lambda group: verify_on_all_ranks(group, look, timeout_s=60))
    assert [damage.what for damage in damages] == [*map(str, range(20)), "980 more that one rank has found"]


DEEP = VerifyOptions(deep=True)


def shares_of(directory: Path, count: int) -> tuple[list[tuple[object, ...]], list[CountingProgress]]:
    counted = [CountingProgress() for _ in range(count)]
    shares = [verify_share(LocalStore(directory), DEEP, counted[i], (i, count)) for i in range(count)]
    return [share.damages for share in shares], counted


@pytest.mark.parametrize(("format", "count"), [*((format, 3) for format in FORMATS), (NATIVE, 64)], ids=str)
def test_shares_add_up_to_the_whole(tmp_path: Path, format: tuple[str, int], count: int) -> None:
    saved(tmp_path / "c", format)
    whole = CountingProgress()
    verified = verify_checkpoint(LocalStore(tmp_path / "c"), DEEP, whole)
    damages, counted = shares_of(tmp_path / "c", count)
    assert not any(damages)
    assert sum(progress.announced for progress in counted) == whole.announced == verified.nbytes
    assert [progress.done for progress in counted] == [progress.announced for progress in counted]
    largest = 4 * 200_000 if format[0] != "zarr" else whole.announced
    assert max(progress.announced for progress in counted) <= whole.announced / count + largest


def test_damage_is_found_by_the_share_in_which_it_lies(tmp_path: Path) -> None:
    saved(tmp_path / "c", NATIVE)
    for file in files_below(tmp_path / "c", "data/*.safetensors"):
        flip(file, -1)
    whole = verify_checkpoint(LocalStore(tmp_path / "c"), DEEP, CountingProgress()).damages
    assert len(whole) == 2
    damages, _ = shares_of(tmp_path / "c", 3)
    assert sorted(map(str, (damage for share in damages for damage in share))) == sorted(map(str, whole))


def protected(directory: Path, ranks: int) -> Path:
    """Save 100,000 bytes a rank, with a parity file for every two ranks."""

    def state(rank: int) -> dict[str, ShardedTensor]:
        rows = torch.arange(100_000, dtype=torch.uint8) + rank
        return {"w": sharded("w", rows, (0, rank, ranks))}

    save_on_ranks(ranks, state, directory, options=SaveOptions(parity=2))
    return directory


def test_parity_files_are_shared_too_and_each_byte_of_them_is_reported(tmp_path: Path) -> None:
    directory = protected(tmp_path / "c", 4)
    parity = sum((directory / file).stat().st_size for file in files_below(directory, "parity/*.safetensors"))
    whole = CountingProgress()
    verified = verify_checkpoint(LocalStore(directory), DEEP, whole)
    assert whole.announced == whole.done == verified.nbytes + parity
    damages, counted = shares_of(directory, 6)
    assert not any(damages)
    assert sum(progress.done for progress in counted) == whole.done
    assert max(progress.done for progress in counted) < whole.done / 3  # one file each


@pytest.mark.parametrize("harm", ["spoil the last byte", "lose the end", "lose"])
def test_damage_to_a_parity_file_is_found_by_one_share(tmp_path: Path, harm: str) -> None:
    directory = protected(tmp_path / "c", 4)
    file = directory / files_below(directory, "parity/*.safetensors")[1]
    DAMAGES[harm](file)
    whole = verify_checkpoint(LocalStore(directory), DEEP, CountingProgress()).damages
    assert [damage.file for damage in whole] == [str(file.relative_to(directory))]
    damages, counted = shares_of(directory, 3)
    assert [damage for share in damages for damage in share] == list(whole)
    assert [progress.done for progress in counted] == [progress.announced for progress in counted]


@pytest.mark.parametrize("deep", [False, True])
@pytest.mark.parametrize("backend", ["megackpt", "torch_dist"])
def test_a_linked_data_file_is_damage_and_hides_no_other_damage(
    tmp_path: Path, backend: str, deep: bool
) -> None:
    directory, elsewhere = tmp_path / "ckpt", tmp_path / "elsewhere"
    elsewhere.mkdir()
    state = {key: sharded(key, torch.arange(1000.0)) for key in ("a", "b")}
    is_native = backend == "megackpt"
    save(state, directory, backend, options=SaveOptions(parity=4 if is_native else None))
    (data_file,) = directory.glob("data/*" if is_native else "__0_0_*.distcp")
    data_file.rename(elsewhere / data_file.name)
    data_file.symlink_to(elsewhere / data_file.name)
    (common,) = directory.glob("common-*.json" if is_native else "common-*.pt")
    common.unlink()

    damages = verify(directory, deep=deep).damages
    linked = [damage for damage in damages if damage.file == data_file.relative_to(directory).as_posix()]
    assert linked, damages
    assert all(damage.what.startswith("it is a symbolic link") for damage in linked)
    assert any(damage.file == common.name for damage in damages), damages


@dataclass(frozen=True)
class Stretch:
    """A window of a few bytes."""

    nbytes: int = 8


def test_a_stream_of_windows_can_be_dropped_while_one_is_filled() -> None:
    """Whoever drops it, perhaps the garbage collector, may hold a lock that the thread needs to go on."""
    may_go_on = threading.Event()
    begun: list[int] = []

    def fill(window: Stretch, data: ByteArray) -> None:
        begun.append(window.nbytes)
        if len(begun) > 1:
            assert may_go_on.wait(60)

    with window_threads() as threads:
        stream = filled_windows([Stretch()] * 3, fill, threads)
        next(stream)
        stream.close()  # type: ignore[attr-defined]
        may_go_on.set()
    assert len(begun) == 2
