"""Small states and comparisons that many tests need."""

from __future__ import annotations

import torch

from megackpt import ShardedTensor


def filled(
    value: float,
    *shape: int,
    key: str = "w",
    rank: int = 0,
    ranks: int = 1,
    dtype: torch.dtype = torch.float32,
) -> ShardedTensor:
    """Return an equal share, along dim 0, of an array that is filled with one value."""
    return ShardedTensor.from_rank_offsets(key, torch.full(shape, value, dtype=dtype), (0, rank, ranks))


def replica(value: float, *shape: int, key: str = "r", rank: int = 0) -> ShardedTensor:
    """Return a tensor of which every rank has an equal copy."""
    return ShardedTensor.from_rank_offsets(key, torch.full(shape, value), replica_id=rank)


def bits(tensor: torch.Tensor) -> bytes:
    """Return the elements of a tensor as bytes, in row-major order."""
    plain = tensor.detach().contiguous().reshape(-1)
    return plain.view(torch.uint8).numpy().tobytes() if plain.numel() else b""
