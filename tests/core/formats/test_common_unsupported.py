"""Common state that one format alone cannot store: saves in it raise an error before anything is written."""

from __future__ import annotations

import pytest
import torch

from megackpt import ShardedTensor, UnserializableError, save
from megackpt.storage import MemoryStore


@pytest.mark.parametrize("strategy", [("torch_dist", 1), ("zarr", 1)], ids=str)
def test_a_key_that_is_the_formats_own_raises_an_error_before_anything_is_written(
    strategy: tuple[str, int],
) -> None:
    store = MemoryStore()
    state = {"w": ShardedTensor.from_rank_offsets("w", torch.ones(3)), "content_metadata": "mine"}
    with pytest.raises(UnserializableError, match=r"content_metadata.*Rename"):
        save(state, store, strategy, content_metadata={"v": 1})
    assert store.names() == []
    if strategy[0] == "torch_dist":  # whose note tells the two apart; zarr 1 has no place for that
        save(state, store, strategy)


def test_a_format_that_stores_any_text_accepts_that_key() -> None:
    state = {"content_metadata": "mine"}
    for strategy in ("megackpt", ("zarr", 3)):
        save(state, MemoryStore(), strategy, content_metadata={"v": 1})
