"""Several processes verify one checkpoint together: every byte is read by exactly one of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from megackpt.engine.verify import verify_checkpoint
from megackpt.options import VerifyOptions
from megackpt.storage import LocalStore
from tests.cli.small_checkpoints import FORMATS, NATIVE, files_below, flip, saved

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
    found = [
        verify_checkpoint(LocalStore(directory), DEEP, counted[i], share=(i, count)).damages
        for i in range(count)
    ]
    return found, counted


@pytest.mark.parametrize(("format", "count"), [*((format, 3) for format in FORMATS), (NATIVE, 64)], ids=str)
def test_shares_add_up_to_the_whole(tmp_path: Path, format: tuple[str, int], count: int) -> None:
    saved(tmp_path / "c", format)
    whole = Counted()
    verified = verify_checkpoint(LocalStore(tmp_path / "c"), DEEP, whole)
    found, counted = shares_of(tmp_path / "c", count)
    assert not any(found)
    assert sum(one.planned for one in counted) == whole.planned == verified.nbytes
    assert [one.done for one in counted] == [one.planned for one in counted]
    largest = 4 * 200_000 if format[0] != "zarr" else whole.planned
    assert max(one.planned for one in counted) <= whole.planned / count + largest


def test_damage_is_found_by_the_share_in_which_it_lies(tmp_path: Path) -> None:
    saved(tmp_path / "c", NATIVE)
    for file in files_below(tmp_path / "c", "data/*.safetensors"):
        flip(file, -1)
    whole = verify_checkpoint(LocalStore(tmp_path / "c"), DEEP, Counted()).damages
    assert len(whole) == 2
    found, _ = shares_of(tmp_path / "c", 3)
    assert sorted(map(str, (damage for share in found for damage in share))) == sorted(map(str, whole))
