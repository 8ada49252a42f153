"""Verification of whole checkpoints: by all ranks, in shares, and through links."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
import torch

from megackpt import SaveOptions, ShardedTensor, save, verify
from megackpt.comm import Group
from megackpt.engine.data.progress import Progress
from megackpt.engine.verification.collective import verify_on_all_ranks
from megackpt.engine.verification.verify import ShareReport, verify_checkpoint, verify_share
from megackpt.errors import StorageError
from megackpt.formats.damage import Damage
from megackpt.options import VerifyOptions
from megackpt.storage import LocalStore
from megackpt.testing.world import SimulatedWorld
from tests.support.checkpoints import FORMATS, NATIVE, files_below, flip, saved

RANKS = 3
TIMEOUT_S = 2.0


def test_a_rank_whose_share_takes_longer_than_the_time_out_is_waited_for() -> None:
    def look(progress: Progress, share: tuple[int, int]) -> ShareReport:
        if share[0] == 1:
            for _ in range(30):
                time.sleep(TIMEOUT_S / 20)
                progress.advance(1)
        return ShareReport(damages=(Damage(what=f"of {share}"), Damage(what="of all")))

    results = SimulatedWorld(RANKS, timeout_s=TIMEOUT_S).run(
        lambda group: verify_on_all_ranks(group, look, timeout_s=TIMEOUT_S)
    )
    assert results[0] == [Damage(what=f"of {(0, 3)}"), Damage(what="of all"), *map(_of, (1, 2))]
    assert results[1] == results[2] == results[0]


def _of(rank: int) -> Damage:
    return Damage(what=f"of {(rank, RANKS)}")


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

    outcomes = SimulatedWorld(RANKS).outcomes(verify)
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


class Counted:
    """A progress that adds up what is to be read, and what was."""

    def __init__(self) -> None:
        self.planned = self.done = 0

    def begin(self, doing: str, nbytes: int) -> None:
        self.planned += nbytes

    def advance(self, nbytes: int) -> None:
        self.done += nbytes


def shares_of(directory: Path, count: int) -> tuple[list[tuple[object, ...]], list[Counted]]:
    counted = [Counted() for _ in range(count)]
    damages = [
        verify_share(LocalStore(directory), DEEP, counted[i], (i, count)).damages for i in range(count)
    ]
    return damages, counted


@pytest.mark.parametrize(("format", "count"), [*((format, 3) for format in FORMATS), (NATIVE, 64)], ids=str)
def test_shares_add_up_to_the_whole(tmp_path: Path, format: tuple[str, int], count: int) -> None:
    saved(tmp_path / "c", format)
    whole = Counted()
    verified = verify_checkpoint(LocalStore(tmp_path / "c"), DEEP, whole)
    damages, counted = shares_of(tmp_path / "c", count)
    assert not any(damages)
    assert sum(progress.planned for progress in counted) == whole.planned == verified.nbytes
    assert [progress.done for progress in counted] == [progress.planned for progress in counted]
    largest = 4 * 200_000 if format[0] != "zarr" else whole.planned
    assert max(progress.planned for progress in counted) <= whole.planned / count + largest


def test_damage_is_found_by_the_share_in_which_it_lies(tmp_path: Path) -> None:
    saved(tmp_path / "c", NATIVE)
    for file in files_below(tmp_path / "c", "data/*.safetensors"):
        flip(file, -1)
    whole = verify_checkpoint(LocalStore(tmp_path / "c"), DEEP, Counted()).damages
    assert len(whole) == 2
    damages, _ = shares_of(tmp_path / "c", 3)
    assert sorted(map(str, (damage for share in damages for damage in share))) == sorted(map(str, whole))


def protected(directory: Path, ranks: int) -> Path:
    """Save 100,000 bytes a rank, with a parity file for every two ranks."""

    def save_rank(group: Group) -> None:
        rows = torch.arange(100_000, dtype=torch.uint8) + group.rank
        state = {"w": ShardedTensor.from_rank_offsets("w", rows, (0, group.rank, group.size))}
        save(state, directory, options=SaveOptions(parity=2), group=group)

    SimulatedWorld(ranks).run(save_rank)
    return directory


def test_parity_files_are_shared_too_and_each_byte_of_them_is_reported(tmp_path: Path) -> None:
    directory = protected(tmp_path / "c", 4)
    parity = sum((directory / file).stat().st_size for file in files_below(directory, "parity/*.safetensors"))
    whole = Counted()
    verified = verify_checkpoint(LocalStore(directory), DEEP, whole)
    assert whole.planned == whole.done == verified.nbytes + parity
    damages, counted = shares_of(directory, 6)
    assert not any(damages)
    assert sum(progress.done for progress in counted) == whole.done
    assert max(progress.done for progress in counted) < whole.done / 3  # one file each


@pytest.mark.parametrize("harm", ["flip", "cut", "remove"])
def test_damage_to_a_parity_file_is_found_by_one_share(tmp_path: Path, harm: str) -> None:
    directory = protected(tmp_path / "c", 4)
    file = directory / files_below(directory, "parity/*.safetensors")[1]
    if harm == "flip":
        flip(file, -1)
    elif harm == "cut":
        file.write_bytes(file.read_bytes()[:-1])
    else:
        file.unlink()
    whole = verify_checkpoint(LocalStore(directory), DEEP, Counted()).damages
    assert [damage.file for damage in whole] == [str(file.relative_to(directory))]
    damages, counted = shares_of(directory, 3)
    assert [damage for share in damages for damage in share] == list(whole)
    assert [progress.done for progress in counted] == [progress.planned for progress in counted]


def replace_by_link(file: Path, elsewhere: Path) -> None:
    file.rename(elsewhere / file.name)
    file.symlink_to(elsewhere / file.name)


@pytest.mark.parametrize("deep", [False, True])
@pytest.mark.parametrize("backend", ["megackpt", "torch_dist"])
def test_a_linked_data_file_is_damage_and_hides_no_other_damage(
    tmp_path: Path, backend: str, deep: bool
) -> None:
    directory, elsewhere = tmp_path / "ckpt", tmp_path / "elsewhere"
    elsewhere.mkdir()
    state = {key: ShardedTensor.from_rank_offsets(key, torch.arange(1000.0)) for key in ("a", "b")}
    is_native = backend == "megackpt"
    save(state, directory, backend, options=SaveOptions(parity=4 if is_native else None))
    (data_file,) = directory.glob("data/*" if is_native else "__0_0_*.distcp")
    replace_by_link(data_file, elsewhere)
    (common,) = directory.glob("common-*.json" if is_native else "common-*.pt")
    common.unlink()

    damages = verify(directory, deep=deep).damages
    linked = [damage for damage in damages if damage.file == data_file.relative_to(directory).as_posix()]
    assert linked, damages
    assert all(damage.what.startswith("it is a symbolic link") for damage in linked)
    assert any(damage.file == common.name for damage in damages), damages
