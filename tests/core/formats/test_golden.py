"""Checkpoints that earlier releases have written still load, bit for bit, at another layout.

A golden checkpoint was written by the first release that knew its format and is never written again: what it
proves is that today's library reads yesterday's bytes. To add one for a new format or version, and only then:

    python tests/core/formats/test_golden.py FORMAT VERSION tests/core/formats/golden/FORMAT-VERSION

`megackpt-1-long` has what else the native format can store: arrays of several blocks of digests, parity, and
digests of arrays. Today's library also writes it again, byte for byte.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Literal

import pytest
import torch

import megackpt.engine.saving.preparation
from megackpt import (
    IntegrityError,
    LoadOptions,
    SaveOptions,
    ShardedObject,
    ShardedTensor,
    load,
    load_content_metadata,
    save,
    verify,
)
from megackpt.comm import Group
from megackpt.entities import ShardedStateDict
from megackpt.errors import CheckpointError
from megackpt.testing.identical import difference
from megackpt.testing.world import SimulatedWorld

RANKS = 2
COMMON = {"step": 1234, "lr": 3e-4, "name": "golden", "betas": [0.9, 0.95], "rng": torch.arange(4)}
CONTENT = {"layout": {"tp": 2}}
WEIGHT = torch.arange(48, dtype=torch.float32).reshape(6, 8) / 7
SCALE = torch.tensor([1.5, -2.0, 0.0, 65504.0], dtype=torch.bfloat16)
MOMENT = torch.linspace(-1, 1, 48).reshape(6, 8)
FLAT_CUT = 21  # where a data-parallel rank's share of MOMENT ends


def golden_state(rank: int) -> ShardedStateDict:
    """Declare what one of RANKS ranks holds: a tensor-parallel weight, a replicated one, flat shards."""
    start, stop = ((0, FLAT_CUT), (FLAT_CUT, 48))[rank]
    return {
        "weight": ShardedTensor.from_rank_offsets(
            "weight", WEIGHT[:, 4 * rank : 4 * rank + 4].clone(), (1, rank, 2)
        ),
        "scale": ShardedTensor.from_rank_offsets("scale", SCALE.clone(), replica_id=rank),
        "moment": ShardedTensor.from_rank_offsets_flat(
            "moment", MOMENT.flatten()[start:stop].clone(), (6, 8), flattened_range=slice(start, stop)
        ),
        "loader": ShardedObject("loader", {"rank": rank, "seen": [1, 2, rank]}, (RANKS,), (rank,)),
        **COMMON,
    }


def write(backend: str, version: int, directory: str) -> None:
    """Write the golden checkpoint of a format."""

    def save_rank(group: Group) -> None:
        save(golden_state(group.rank), directory, (backend, version), content_metadata=CONTENT, group=group)

    SimulatedWorld(RANKS).run(save_rank)


FOLDER = Path(__file__).parent / "golden"
LONG = FOLDER / "megackpt-1-long"
GOLDEN = sorted(path.name for path in FOLDER.iterdir() if (path / "metadata.json").is_file() and path != LONG)
THIS_IS_THE_FORMAT = (
    "this is the format: checkpoints of version 1 are written like this, and other readers rely on it. Take "
    "the change back, or give the format a new version (docs/contributing.md, Adding a format)."
)
BLOCK = 262_144  # bytes of a block, docs/format.md; not imported, so that a change of it is noticed
LONG_ARRAY = (torch.arange(2 * BLOCK + 1000) % 251).to(torch.uint8)  # three blocks in one chunk
LONG_CUT = 140_077  # where a rank's share of LONG_FLAT ends, neither at a row nor at a block
LONG_FLAT = (torch.arange(768 * 256) % 127).to(torch.int16).reshape(768, 256)


@pytest.mark.parametrize("name", GOLDEN)
def test_a_golden_checkpoint_loads(name: str) -> None:
    directory = FOLDER / name
    arrays = {"weight": WEIGHT, "scale": SCALE, "moment": MOMENT}
    wanted = {key: ShardedTensor.from_rank_offsets(key, torch.zeros_like(a)) for key, a in arrays.items()}
    objects = [ShardedObject("loader", None, (RANKS,), (rank,)) for rank in range(RANKS)]
    loaded = load({**wanted, "loader": objects}, directory)
    assert difference(loaded.pop("loader"), [{"rank": r, "seen": [1, 2, r]} for r in range(RANKS)]) is None
    assert set(loaded) == {*arrays, *COMMON}
    for key, expected in {**arrays, **COMMON}.items():
        assert difference(loaded[key], expected, path=key) is None
    assert load_content_metadata(directory) == CONTENT


def test_there_is_a_golden_checkpoint_of_the_native_format() -> None:
    assert "megackpt-1" in GOLDEN


def long_state(rank: int) -> ShardedStateDict:
    """Declare what one of RANKS ranks holds of the long checkpoint, in addition to the golden one."""
    start, stop = ((0, LONG_CUT), (LONG_CUT, LONG_FLAT.numel()))[rank]
    return {
        **golden_state(rank),
        "long": ShardedTensor.from_rank_offsets("long", LONG_ARRAY.clone(), replica_id=rank),
        "long_flat": ShardedTensor.from_rank_offsets_flat(
            "long_flat",
            LONG_FLAT.flatten()[start:stop].clone(),
            tuple(LONG_FLAT.shape),
            flattened_range=slice(start, stop),
        ),
    }


def write_long(directory: Path) -> None:
    """Write the long checkpoint."""
    options = SaveOptions(parity=RANKS, array_digests=True)

    def save_rank(group: Group) -> None:
        save(long_state(group.rank), directory, options=options, content_metadata=CONTENT, group=group)

    SimulatedWorld(RANKS).run(save_rank)


def check_long(directory: Path, *, on_corrupt: Literal["error", "fallback"] = "error") -> None:
    """Load the long checkpoint at another layout and compare it, bit for bit."""
    arrays = {"weight": WEIGHT, "scale": SCALE, "moment": MOMENT, "long": LONG_ARRAY, "long_flat": LONG_FLAT}
    wanted = {key: ShardedTensor.from_rank_offsets(key, torch.zeros_like(a)) for key, a in arrays.items()}
    loaded = load(wanted, directory, options=LoadOptions(on_corrupt=on_corrupt))
    for key, expected in {**arrays, **COMMON}.items():
        assert difference(loaded[key], expected, path=key) is None, THIS_IS_THE_FORMAT


def contents_of(directory: Path) -> dict[str, bytes]:
    """Return the bytes of each file of a checkpoint."""
    files = sorted(path for path in directory.rglob("*") if path.is_file())
    return {str(path.relative_to(directory)): path.read_bytes() for path in files}


def copied(directory: Path) -> Path:
    """Return a copy of the long checkpoint, which a test may damage."""
    return Path(shutil.copytree(LONG, directory / "copy"))


def test_the_long_checkpoint_loads_with_every_digest() -> None:
    try:
        check_long(LONG)
    except CheckpointError as error:
        pytest.fail(f"{THIS_IS_THE_FORMAT}\n{error}")
    assert verify(LONG, deep=True).is_whole, THIS_IS_THE_FORMAT


def test_the_long_checkpoint_is_written_again_byte_for_byte(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempt = json.loads((LONG / "metadata.json").read_text())["attempt"]
    monkeypatch.setattr(megackpt.engine.saving.preparation, "new_attempt", lambda: attempt)
    write_long(tmp_path / "again")
    files, again = (contents_of(directory) for directory in (LONG, tmp_path / "again"))
    assert sorted(again) == sorted(files), THIS_IS_THE_FORMAT
    assert [name for name in files if again[name] != files[name]] == [], THIS_IS_THE_FORMAT


@pytest.mark.parametrize("block", range(3))
def test_a_flipped_bit_is_in_a_block_of_the_format(block: int, tmp_path: Path) -> None:
    directory = copied(tmp_path)
    needle = LONG_ARRAY[:4096].numpy().tobytes()
    (file,) = [path for path in (directory / "data").iterdir() if needle in path.read_bytes()]
    data = bytearray(file.read_bytes())
    begin = data.index(needle) + block * BLOCK
    end = min(begin + BLOCK, data.index(needle) + LONG_ARRAY.numel())
    data[begin + 5] ^= 1
    file.write_bytes(data)
    with pytest.raises(IntegrityError) as raised:
        check_long(directory)
    assert f"the bytes {begin}:{end} of" in str(raised.value), THIS_IS_THE_FORMAT


@pytest.mark.parametrize("rank", range(RANKS))
def test_a_lost_data_file_is_computed_from_golden_parity(rank: int, tmp_path: Path) -> None:
    directory = copied(tmp_path)
    sorted((directory / "data").iterdir())[rank].unlink()
    check_long(directory, on_corrupt="fallback")


if __name__ == "__main__":
    write(sys.argv[1], int(sys.argv[2]), sys.argv[3])
