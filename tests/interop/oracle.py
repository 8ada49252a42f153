"""Values that every peer can compute by itself: whole global arrays by key, and common state.

Imported by every peer in its own environment, so it knows torch only.
"""

from __future__ import annotations

import hashlib
from typing import Any

import torch

STEP = 7
ITERATION = 40


def oracle(key: str, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return the whole global array that a key stands for: the same in every process and at every layout."""
    seed = int.from_bytes(hashlib.sha256(key.encode()).digest()[:4], "little")
    values = torch.rand(shape, generator=torch.Generator().manual_seed(seed)) * 0.5 + 0.01  # > 0: exp_avg_sq too
    return values.to(dtype)


def common() -> dict[str, Any]:
    """Return what is neither tensor of the model nor of the optimizer."""
    return {
        "iteration": ITERATION,
        "checkpoint_version": 3.0,
        "note": "näher",
        "schedule": {"lr": 1.25e-4, "steps": [1, 2, 3], "done": False, "none": None},
        "plain_tensor": torch.arange(5, dtype=torch.int64),
    }


def rng_state(rank: int) -> dict[str, Any]:
    """Return an object that each rank has another one of."""
    return {"rank": rank, "state": torch.arange(4, dtype=torch.uint8) + rank, "name": f"rank {rank}"}


def check_equal(found: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    """Raise ValueError unless two tensors are the same bit for bit."""
    if found.shape != expected.shape or found.dtype != expected.dtype:
        raise ValueError(
            f"{what}: {tuple(found.shape)} {found.dtype}, expected {tuple(expected.shape)} {expected.dtype}"
        )
    if not torch.equal(found.view(torch.uint8) if found.dim() else found, expected.view(torch.uint8) if expected.dim() else expected):
        wrong = int((found != expected).sum())
        raise ValueError(f"{what}: {wrong} of {found.numel()} elements differ")
