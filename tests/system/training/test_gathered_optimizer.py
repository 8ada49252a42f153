"""Optimizer state that is gathered for a save is the same checkpoint in fewer, larger chunks."""

from __future__ import annotations

from pathlib import Path

import megackpt
from megackpt.storage import LocalStore
from megackpt.testing.ranks import RankPool
from tests.system.ranks.test_layout_pairs import assert_equal, build, load_and_save, train_and_save


def load_and_save_gathered(name: str, source: Path, target: Path) -> None:
    model, optimizer, _ = build(name, tied=True, seed=2)
    sharded = model.sharded_state_dict()
    loaded = megackpt.load({"model": sharded, "optimizer": optimizer.sharded_state_dict(sharded)}, source)
    optimizer.load_sharded_state_dict(loaded["optimizer"])
    gathered = optimizer.sharded_state_dict(sharded, gathered=True)
    # main replicas write: where only one rank holds a chunk, that is who holds it
    megackpt.save({"model": sharded, "optimizer": gathered}, target)


def chunks_of(directory: Path) -> int:
    from megackpt.engine.checkpoint.opening import open_checkpoint

    contents = open_checkpoint(LocalStore(directory))
    return len(contents.chunks([key for key in contents.arrays if "exp_avg" in key]).table)


def test_gathered_and_sharded_state_are_one_checkpoint_and_load_at_any_layout(
    rank_pool: RankPool, tmp_path: Path
) -> None:
    source, gathered, again = tmp_path / "source", tmp_path / "gathered", tmp_path / "again"
    rank_pool.run(train_and_save, 4, "DP4", True, source)
    rank_pool.run(load_and_save_gathered, 4, "TP2xDP2", source, gathered)
    assert_equal(source, gathered)
    assert chunks_of(gathered) < chunks_of(source)
    rank_pool.run(load_and_save, 4, "PP2xDP2", True, gathered, again)
    assert_equal(source, again)
