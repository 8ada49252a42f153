"""Files of torch.save with torch's own ShardedTensors of several ranks, made by one process.

torch's fake process group stands for the ranks, so that tests can make each rank's file in turn, and change
the metadata before they are pickled. Files of real ranks are in tests/contrib/torch/test_fsdp1_rank_files.py.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


@contextmanager
def fake_rank(rank: int, ranks: int) -> Iterator[None]:
    """Make this process one of some ranks that do not exist, for a block."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Please use DTensor instead")
            yield
    finally:
        dist.destroy_process_group()


def sharded_rows(whole: Tensor, rank: int, ranks: int) -> Any:
    """Return a tensor cut by rows as FSDP version 1 does, with the shard of this rank. In `fake_rank`."""
    from torch.distributed._shard.metadata import ShardMetadata
    from torch.distributed._shard.sharded_tensor import Shard, ShardedTensor
    from torch.distributed._shard.sharded_tensor.metadata import ShardedTensorMetadata, TensorProperties

    shards, metadata, at = [], [], 0
    for owner, rows in enumerate(whole.chunk(ranks)):
        offsets = [at] + [0] * (whole.dim() - 1)
        metadata.append(ShardMetadata(offsets, list(rows.shape), f"rank:{owner}/cpu"))
        at += len(rows)
        if owner == rank:
            shards.append(Shard(rows.clone(), ShardMetadata(offsets, list(rows.shape), f"rank:{owner}/cpu")))
    properties = TensorProperties(dtype=whole.dtype)
    return ShardedTensor._init_from_local_shards_and_global_metadata(
        shards, ShardedTensorMetadata(metadata, whole.shape, properties)
    )


def save_rank_files(
    folder: Path,
    arrays: dict[str, Tensor],
    *,
    ranks: int,
    change: Callable[[dict[str, Any], int], None] = lambda state, rank: None,
    only: Sequence[int] | None = None,
) -> None:
    """Save a file `rank_<n>.pt` for each rank, with the arrays under "model", after a change of its state."""
    folder.mkdir(exist_ok=True)
    for rank in range(ranks) if only is None else only:
        with fake_rank(rank, ranks):
            state = {name: sharded_rows(whole, rank, ranks) for name, whole in arrays.items()}
            change(state, rank)
            torch.save({"model": state, "step": 3}, folder / f"rank_{rank}.pt")
