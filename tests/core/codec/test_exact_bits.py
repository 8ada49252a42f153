"""Bits are stored, not values: NaN payloads, signed zeros, subnormals, all values of the small dtypes."""

from __future__ import annotations

import pytest
import torch

from megackpt import load, save
from megackpt.comm import Group
from megackpt.mapping import ReplicaId, ShardedLayout, ShardedTensor, ShardedTensorFactory, StateDict
from megackpt.metadata import DTYPES
from megackpt.storage import MemoryStore
from megackpt.testing.world import SimulatedWorld

NAMED = [name for name in DTYPES if name != "bool"]
# Quiet and signalling NaN with payloads, infinities, zeros of both signs, subnormals.
SPECIAL = {
    4: [0x7FC00001, 0x7F800001, 0xFFBFFFFF, 0x7F800000, 0xFF800000, 0, 0x80000000, 1, 0x807FFFFF],
    8: [
        0x7FF8000000000001,
        0x7FF0000000000001,
        0xFFF7FFFFFFFFFFFF,
        0x7FF0000000000000,
        0,
        1 << 63,
        1,
        0x800FFFFFFFFFFFFF,
    ],
}


def all_bits(dtype: torch.dtype) -> torch.Tensor:
    """Every bit pattern of a dtype of one or two bytes, special ones of a wider: `[rows, 8]`, rows even."""
    width = dtype.itemsize // (2 if dtype.is_complex else 1)
    raw_bytes = b"".join(p.to_bytes(width, "little") for p in SPECIAL.get(width, range(256**width)))
    raw_bytes *= -(-256 // len(raw_bytes))
    whole_rows = raw_bytes[: len(raw_bytes) // 256 * 256]
    return torch.frombuffer(bytearray(whole_rows), dtype=torch.uint8).view(dtype).reshape(-1, 8)


def bits_of(tensor: torch.Tensor) -> bytes:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def declared(whole: torch.Tensor, rank: int, ranks: int, *, fill: bool) -> StateDict:
    """One rank's part of the tensor as each kind of entity: rows, rows from the other end as flat ranges."""
    rows, columns = len(whole) // ranks, whole.shape[1]
    local = whole.chunk(ranks)[rank]

    def own(part: torch.Tensor) -> torch.Tensor:
        return part.clone() if fill else torch.zeros_like(part)

    def build(key: str, data: torch.Tensor, replica_id: ReplicaId, flat: slice | None) -> ShardedTensor:
        turned = data.t().contiguous()
        return ShardedTensor.from_rank_offsets(key, turned, (1, rank, ranks), replica_id=replica_id)

    cut = local.numel() // 3 + 1
    layout = ShardedLayout.transpose("layout", local, (1, 0), (1, rank, ranks))
    return {
        "box": ShardedTensor.from_rank_offsets("box", own(local), (0, rank, ranks)),
        "flat": [
            ShardedTensor.from_rank_offsets_flat(
                "flat", own(local.reshape(-1)[r]), (rows, columns), (0, rank, ranks), flattened_range=r
            )
            for r in (slice(0, cut), slice(cut, local.numel()))
        ],
        "layout": [
            layout.retarget(key="layout", data=own(local.reshape(-1)[r]), flattened_range=r)
            for r in (slice(0, cut), slice(cut, local.numel()))
        ],
        "factory": ShardedTensorFactory("factory", own(local), build, torch.t),
        "common": own(whole),
    }


@pytest.mark.parametrize("name", NAMED)
def test_every_entity_keeps_the_bits_of(name: str) -> None:
    whole = all_bits(
        DTYPES[name].torch_dtype if hasattr(DTYPES[name], "torch_dtype") else getattr(torch, name)
    )
    store = MemoryStore()

    def save_rank(group: Group) -> None:
        save(declared(whole, group.rank, 2, fill=True), store, group=group)

    SimulatedWorld(2).run(save_rank)
    loaded = load(declared(whole, 0, 1, fill=False), store)
    results = {
        "box": loaded["box"],
        "flat": torch.cat([t.view(torch.uint8) for t in loaded["flat"]]),
        "layout": torch.cat([t.view(torch.uint8) for t in loaded["layout"]]),
        "factory": loaded["factory"],
        "common": loaded["common"],
    }
    assert loaded["common"].dtype == whole.dtype
    assert {kind: bits_of(tensor) == bits_of(whole) for kind, tensor in results.items()} == dict.fromkeys(
        results, True
    )
