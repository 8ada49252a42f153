"""Several processes verify one checkpoint together: every byte is read by exactly one of them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megackpt import SaveOptions, ShardedTensor, save
from megackpt.comm import Group
from megackpt.engine.verification.verify import verify_checkpoint, verify_share
from megackpt.options import VerifyOptions
from megackpt.storage import LocalStore
from megackpt.testing.world import SimulatedWorld
from tests.support.checkpoints import FORMATS, NATIVE, files_below, flip, saved

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
