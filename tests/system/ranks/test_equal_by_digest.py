"""What real ranks save at one layout, load and save at another is equal, and nothing is read to know it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megackpt import Checkpointer, SaveOptions, ShardedTensor, diff, load
from megackpt.testing.ranks import RankPool

pytest.importorskip("awscrt.checksums", reason="the extra digests is not installed")
OPTIONS = SaveOptions(array_digests=True)
WEIGHT = torch.arange(96 * 84).reshape(96, 84).bfloat16()
MASTER = torch.arange(96 * 84, dtype=torch.float32).reshape(96, 84) / 7


def state(*, filled: bool) -> dict[str, ShardedTensor]:
    """Columns of a weight, a flat range of its master copy, and a copy of a bias, of this rank."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    columns = WEIGHT.chunk(ranks, dim=1)[rank].clone()
    begin, end = (MASTER.numel() * i // ranks + (i % ranks) for i in (rank, rank + 1))
    flat = MASTER.flatten()[begin:end].clone()
    bias = torch.linspace(0, 1, 50)
    for data in () if filled else (columns, flat, bias):
        data.zero_()
    return {
        "weight": ShardedTensor.from_rank_offsets("weight", columns, (1, rank, ranks)),
        "master": ShardedTensor.from_rank_offsets_flat(
            "master", flat, tuple(MASTER.shape), flattened_range=slice(begin, end)
        ),
        "bias": ShardedTensor.from_rank_offsets("bias", bias, replica_id=rank),
    }


def save_step(root: Path) -> None:
    with Checkpointer(root, async_save=True, verify_after_save=True, save_options=OPTIONS) as checkpointer:
        checkpointer.save(1, state(filled=True))


def move(root: Path) -> None:
    empty = state(filled=False)
    load(empty, root / "iter_0000001")
    with Checkpointer(root, save_options=OPTIONS) as checkpointer:
        checkpointer.save(2, empty)


def test_a_checkpoint_that_moved_to_another_layout_is_proved_equal_without_being_read(
    rank_pool: RankPool, tmp_path: Path
) -> None:
    rank_pool.run(save_step, 4, tmp_path)
    rank_pool.run(move, 3, tmp_path)
    steps = [tmp_path / f"iter_000000{step}" for step in (1, 2)]
    for step in steps:
        shutil.rmtree(step / "data")
    difference = diff(*steps)
    assert difference.is_equal
    assert (difference.compared, difference.by_digest, difference.nbytes) == (3, 3, 0)
    assert difference.by_digest_nbytes == WEIGHT.nbytes + MASTER.nbytes + 200
