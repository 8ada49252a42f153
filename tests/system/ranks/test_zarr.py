"""Zarr with real ranks: files that several of them write, and loads at another layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megackpt import ShardedObject, ShardedTensor, load, save
from megackpt.formats.zarr.rounds import GridRules
from megackpt.formats.zarr.version_3 import ZarrV3SaveStrategy
from megackpt.testing.identical import difference
from megackpt.testing.ranks import RankPool

SHAPE = (61, 37)  # prime: shards end in the middle of rows, whatever the number of ranks


def weight() -> torch.Tensor:
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(3))


def state_of(rank: int, ranks: int, *, blank: bool) -> dict[str, Any]:
    whole = torch.zeros(SHAPE) if blank else weight()
    norm = torch.zeros(13) if blank else torch.arange(13.0)
    rows = torch.tensor_split(whole, ranks)
    offset = sum(len(r) for r in rows[:rank])

    def flat(key: str, data: torch.Tensor) -> ShardedTensor:
        share = slice(*(data.numel() * r // ranks for r in (rank, rank + 1)))
        own, shape = data.reshape(-1)[share].clone(), tuple(data.shape)
        return ShardedTensor.from_rank_offsets_flat(key, own, shape, flattened_range=share)

    return {
        "flat": flat("flat", whole),
        "norm": flat("norm", norm),
        "uneven": ShardedTensor(
            "uneven", rows[rank].clone(), whole.dtype, tuple(rows[rank].shape), SHAPE, (offset, 0)
        ),
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


def load_all(directory: str, saved_ranks: int) -> list[str | None]:
    """Load at this world's layout, and return how what is loaded differs from the truth."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    keys = ["flat", "norm", "uneven", *(["rng"] if ranks == saved_ranks else [])]
    truth = state_of(rank, ranks, blank=False)
    differences = []
    for i in range(len(strategies())):
        wanted = state_of(rank, ranks, blank=True)
        loaded = load({key: wanted[key] for key in keys}, f"{directory}/{i}")
        differences.append(difference(loaded, {key: truth[key].data for key in keys}))
    return differences


def test_ranks_that_share_files_write_the_right_bits(tmp_path: Path, rank_pool: RankPool) -> None:
    counts = rank_pool.run(save_all, 4, str(tmp_path))
    assert counts == [counts[0]] * 4
    assert max(counts[0]) > 1  # files really are shared here
    for ranks in (1, 3, 4):
        assert rank_pool.run(load_all, ranks, str(tmp_path), 4) == [[None] * len(strategies())] * ranks
