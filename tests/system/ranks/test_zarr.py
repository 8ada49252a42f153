"""Zarr with real ranks: files that several of them write, and loads at another layout."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megackpt import ShardedObject, ShardedTensor, load, save
from megackpt.formats.zarr.rounds import GridRules
from megackpt.formats.zarr.version_3 import ZarrV3SaveStrategy
from megackpt.testing.ranks import RankPool

SHAPE = (61, 37)  # prime: shards end in the middle of rows, whatever the number of ranks


def weight() -> torch.Tensor:
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(3))


def flat_shard(key: str, whole: torch.Tensor, rank: int, ranks: int) -> ShardedTensor:
    low, high = (whole.numel() * r // ranks for r in (rank, rank + 1))
    return ShardedTensor(
        key=key,
        data=whole.reshape(-1)[low:high].clone(),
        dtype=whole.dtype,
        local_shape=tuple(whole.shape),
        global_shape=tuple(whole.shape),
        global_offset=(0,) * whole.ndim,
        flattened_range=slice(low, high),
    )


def state_of(rank: int, ranks: int, *, blank: bool) -> dict[str, Any]:
    whole = torch.zeros(SHAPE) if blank else weight()
    norm = torch.zeros(13) if blank else torch.arange(13.0)
    rows = torch.tensor_split(whole, ranks)
    offset = sum(len(r) for r in rows[:rank])
    uneven = ShardedTensor(
        "uneven", rows[rank].clone(), whole.dtype, tuple(rows[rank].shape), SHAPE, (offset, 0)
    )
    return {
        "flat": flat_shard("flat", whole, rank, ranks),
        "norm": flat_shard("norm", norm, rank, ranks),
        "uneven": uneven,
        "rng": ShardedObject("rng", None if blank else f"rank {rank}", (ranks,), (rank,)),
    }


def strategies() -> list[Any]:
    return [
        ZarrV3SaveStrategy(),
        ZarrV3SaveStrategy(GridRules(file_bytes=512, inner_bytes=64)),
        ZarrV3SaveStrategy(GridRules(file_bytes=1 << 20, inner_bytes=64, files_per_row=1)),
    ]


def save_all(directory: str) -> list[int]:
    counts = []
    rank, ranks = dist.get_rank(), dist.get_world_size()
    for i, strategy in enumerate(strategies()):
        for _ in range(2):  # the second one replaces the first
            save(state_of(rank, ranks, blank=False), f"{directory}/{i}", sharded_strategy=strategy)
        assert strategy._last is not None
        counts.append(strategy._last[2].rounds.count)
    return counts


def load_all(directory: str, saved_ranks: int) -> list[str]:
    """Load at this world's layout, and return digests of what differs from the truth."""
    wrong = []
    rank, ranks = dist.get_rank(), dist.get_world_size()
    for i in range(len(strategies())):
        wanted = state_of(rank, ranks, blank=True)
        if ranks != saved_ranks:
            del wanted["rng"]
        got = load(wanted, f"{directory}/{i}")
        truth = state_of(rank, ranks, blank=False)
        for key, value in got.items():
            expected = truth[key].data
            same = torch.equal(value, expected) if isinstance(value, torch.Tensor) else value == expected
            if not same:
                wrong.append(f"{i} {key} {hashlib.sha256(str(value).encode()).hexdigest()}")
    return wrong


def test_ranks_that_share_files_write_the_right_bits(tmp_path: Path, rank_pool: RankPool) -> None:
    counts = rank_pool.run(save_all, 4, str(tmp_path))
    assert counts == [counts[0]] * 4
    assert max(counts[0]) > 1  # files really are shared here
    for ranks in (1, 3, 4):
        assert rank_pool.run(load_all, ranks, str(tmp_path), 4) == [[]] * ranks
