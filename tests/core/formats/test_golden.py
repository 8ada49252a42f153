"""Checkpoints that earlier releases have written still load, bit for bit, at another layout."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megackpt import ShardedObject, ShardedTensor, load, load_content_metadata
from megackpt.testing.identical import difference
from tests.core.formats.golden_state import COMMON, CONTENT, MOMENT, RANKS, SCALE, WEIGHT

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
