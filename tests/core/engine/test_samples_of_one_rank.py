"""Samples compare ranks: a rank alone may declare a chunk twice, and what it saves is the main replica."""

from __future__ import annotations

import torch

from megackpt import ShardedTensor, load, save
from megackpt.storage import MemoryStore


def test_of_two_declarations_of_one_rank_the_main_replica_is_saved() -> None:
    store = MemoryStore()
    pair = {
        name: ShardedTensor.from_rank_offsets("w", torch.full((3,), value), replica_id=replica)
        for replica, (name, value) in enumerate([("main", 1.0), ("other", 2.0)])
    }
    save(pair, store)
    wanted = ShardedTensor.from_rank_offsets("w", torch.zeros(3))
    load({"w": wanted}, store)
    assert wanted.data is not None
    assert wanted.data.tolist() == [1, 1, 1]
