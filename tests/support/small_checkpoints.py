"""Small real checkpoints of two ranks in every format, and damage done to their files."""

from __future__ import annotations

from pathlib import Path

import torch

import megackpt
from megackpt import SaveOptions, ShardedObject, ShardedTensor
from megackpt.comm import Group
from megackpt.formats.registry import save_strategies
from megackpt.mapping import ShardedStateDict
from megackpt.testing.world import SimulatedWorld

FORMATS = sorted((strategy.backend, strategy.version) for strategy in save_strategies())
NATIVE = ("megackpt", 1)
RANKS = 2
COMMON = {"step": 7, "args": {"lr": 3e-4, "betas": [0.9, 0.95]}, "rng": torch.arange(4)}
CONTENT = {"sharding": "flat"}
LONG = torch.arange(400_000, dtype=torch.float32)  # several digest blocks on each rank


def state_of(rank: int) -> ShardedStateDict:
    """A matrix cut by columns, a flat range, a long vector, a replica in bfloat16; an object a rank."""
    numbers = torch.arange(48.0).reshape(6, 8)
    cut = (0, 21, 48)[rank : rank + 2]
    return {
        "block": ShardedTensor.from_rank_offsets("block", numbers[:, 4 * rank : 4 * rank + 4], (1, rank, 2)),
        "flat": ShardedTensor.from_rank_offsets_flat(
            "flat", numbers.flatten()[cut[0] : cut[1]], (6, 8), flattened_range=slice(*cut)
        ),
        "long": ShardedTensor.from_rank_offsets(
            "long", LONG[rank * 200_000 : (rank + 1) * 200_000].clone(), (0, rank, 2)
        ),
        "half": ShardedTensor.from_rank_offsets("half", torch.ones(3).bfloat16(), replica_id=rank),
        "object": ShardedObject("object", {"rank": rank, "seen": [1, 2.0]}, (RANKS,), (rank,)),
        **COMMON,
    }


def saved(directory: Path, format: tuple[str, int] = NATIVE) -> Path:
    """Save the state of both ranks, with a file of tensors of common state where the format has one."""
    options = SaveOptions(plain_tensors="common")

    def save_rank(group: Group) -> None:
        state = state_of(group.rank)
        megackpt.save(state, directory, format, content_metadata=CONTENT, options=options, group=group)

    SimulatedWorld(RANKS).run(save_rank)
    return directory


def flip(file: Path, at: int) -> None:
    """Flip a bit of a byte; at counts from the end where it is negative."""
    data = bytearray(file.read_bytes())
    data[at] ^= 1
    file.write_bytes(data)


def files_below(directory: Path, pattern: str) -> list[Path]:
    """Return files, sorted by name."""
    return sorted(path for path in directory.rglob(pattern) if path.is_file())
