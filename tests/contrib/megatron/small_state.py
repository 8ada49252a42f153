"""A small state dict of entities by Megatron-Core's names, and what is logged of it."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from megackpt.contrib.megatron.dist_checkpointing import mapping

S, F = mapping.ShardedTensor, mapping.ShardedTensorFactory


def halves(key: str, data: Any, replica_id: Any, flattened_range: Any) -> list[Any]:
    """Return two tensors, each with its key."""
    return [
        S.from_rank_offsets(f"{key}.{i}", half, replica_id=replica_id) for i, half in enumerate(data.chunk(2))
    ]


def small_state(fill: float = 1.0) -> dict[str, Any]:
    first, second = torch.full((2, 3), fill), torch.full((4,), fill)
    second[2:] += 1
    return {
        "model": {
            "w": S.from_rank_offsets("w", first),
            "fused": F("fused", second, halves, torch.cat),
            "extra": mapping.ShardedObject("extra", {"seen": fill}, (1,), (0,)),
        },
        "local": mapping.LocalNonpersistentObject("mine"),
        "step": 7,
    }


@contextmanager
def lines_of(logger: logging.Logger) -> Iterator[list[str]]:
    """Give what a logger is told meanwhile."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    yield lines
    logger.removeHandler(handler)
