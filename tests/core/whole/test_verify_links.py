"""A file that is replaced by a symbolic link is damage of a checkpoint, next to all other damage."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megackpt import SaveOptions, ShardedTensor, save, verify


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
