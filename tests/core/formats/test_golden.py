"""Checkpoints that earlier releases have written still load, bit for bit, at another layout.

A golden checkpoint was written by the first release that knew its format and is never written again: what it
proves is that today's library reads yesterday's bytes. To add one for a new format or version, and only then:

    python tests/core/formats/test_golden.py FORMAT VERSION tests/core/formats/golden/FORMAT-VERSION
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from megackpt import ShardedObject, ShardedTensor, load, load_content_metadata, save
from megackpt.comm import Group
from megackpt.entities import ShardedStateDict
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
GOLDEN = sorted(path.name for path in FOLDER.iterdir() if (path / "metadata.json").is_file())


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


if __name__ == "__main__":
    write(sys.argv[1], int(sys.argv[2]), sys.argv[3])
