"""An array or object that a zarr checkpoint has lost is an error that names it, and never just not there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from megackpt import (
    FormatError,
    IntegrityError,
    ShardedObject,
    ShardedTensor,
    load_sharded_metadata,
    remove_sharded_tensors,
    save,
)

STRATEGIES = [("zarr", 1), ("zarr", 3)]
LOST = {
    ("zarr", 1): {
        "model/a%/.zarray": "model/a%",
        "empty/.zarray": "empty",
        "rng/state/shard_1_2.pt": "rng/state",
    },
    ("zarr", 3): {
        "zarr-*/model%2Fa%25/zarr.json": "model/a%",
        "zarr-*/empty/zarr.json": "empty",
        "objects-*/rng%2Fstate/shard_1_2.bin": "rng/state",
    },
}


def saved(directory: Path, strategy: tuple[str, int]) -> Path:
    state = {
        "a": ShardedTensor.from_rank_offsets("model/a%", torch.ones(3)),
        "none": ShardedTensor.from_rank_offsets("empty", torch.zeros(0)),
        "b": ShardedTensor.from_rank_offsets("opt.b", torch.ones(3)),
        "o": [ShardedObject("rng/state", i, (2,), (i,)) for i in range(2)],
    }
    save(state, directory, strategy)
    return directory


@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
def test_a_lost_document_or_object_is_an_error_that_names_key_and_file(
    tmp_path: Path, strategy: tuple[str, int]
) -> None:
    for number, (name, key) in enumerate(LOST[strategy].items()):
        directory = saved(tmp_path / str(number), strategy)
        (lost,) = directory.glob(name)
        lost.unlink()
        with pytest.raises(FormatError, match=re.escape(f"{key!r}: {lost} is missing")) as caught:
            load_sharded_metadata(directory)
        assert caught.value.key == key
        assert caught.value.path == str(lost)


@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
def test_what_was_taken_out_is_not_missed_and_what_is_left_is(
    tmp_path: Path, strategy: tuple[str, int]
) -> None:
    directory = saved(tmp_path, strategy)
    remove_sharded_tensors(directory, "opt.")
    remove_sharded_tensors(directory, "rng/")
    assert set(load_sharded_metadata(directory)) == {"model/a%", "empty"}
    (document,) = [p for p in directory.rglob("*") if p.parent.name == "empty" and p.is_file()]
    document.unlink()
    with pytest.raises(FormatError, match=r"'empty': .* is missing"):
        load_sharded_metadata(directory)


def test_a_list_of_files_that_is_damaged_is_an_error(tmp_path: Path) -> None:
    (listing,) = saved(tmp_path / "3", ("zarr", 3)).glob("files-*.json")
    listing.write_text("{}")
    with pytest.raises(IntegrityError, match="digest does not match"):
        load_sharded_metadata(tmp_path / "3")
    (marker,) = saved(tmp_path / "1", ("zarr", 1)).glob(".megackpt-*.json")
    marker.write_text('{"files": []}')
    with pytest.raises(FormatError, match="'checkpoint' is no list of files"):
        load_sharded_metadata(tmp_path / "1")


def test_without_a_marker_as_megatron_core_leaves_it_nothing_is_missed(tmp_path: Path) -> None:
    (marker,) = saved(tmp_path, ("zarr", 1)).glob(".megackpt-*.json")
    marker.unlink()
    assert {"model/a%", "empty", "opt.b"} < set(load_sharded_metadata(tmp_path))
