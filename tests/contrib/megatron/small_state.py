"""A small state dict of entities by Megatron-Core's names."""

from __future__ import annotations

from typing import Any

import torch

from megackpt.compat.megatron.dist_checkpointing import mapping

S, F = mapping.ShardedTensor, mapping.ShardedTensorFactory


def halves(key: str, data: Any, replica_id: Any, flattened_range: Any) -> list[Any]:
    whole = S.from_rank_offsets(key, data, replica_id=replica_id)
    return [part for i in range(2) for part in whole.narrow(0, 2 * i, 2)]


def small_state(fill: float = 1.0) -> dict[str, Any]:
    first, second = torch.full((2, 3), fill), torch.full((4,), fill)
    second[2:] += 1
    return {
        "model": {
            "w": S.from_rank_offsets("w", first),
            "fused": F(
                "fused", second, lambda *a: [named(p, i) for i, p in enumerate(halves(*a))], torch.cat
            ),
            "extra": mapping.ShardedObject("extra", {"seen": fill}, (1,), (0,)),
        },
        "local": mapping.LocalNonpersistentObject("mine"),
        "step": 7,
    }


def named(part: Any, number: int) -> Any:
    part.key = f"{part.key}.{number}"
    return part
