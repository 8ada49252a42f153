"""The law of the library: for any two layouts and any state, load(save(x)) is x, bit for bit."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megackpt import load, save
from megackpt.comm import Group
from megackpt.engine.data.tensor_bytes import as_bits, byte_view
from megackpt.mapping import ReplicaId, ShardedLayout, ShardedTensor, ShardedTensorFactory, StateDict
from megackpt.metadata import DTYPES
from megackpt.storage import MemoryStore
from megackpt.testing.layouts import OwnedChunk, arrays, owned_chunks
from megackpt.testing.state_dicts import (
    GlobalState,
    blank,
    global_states,
    placements,
    state_difference,
    values_of,
)
from megackpt.testing.world import SimulatedWorld
from tests.support.effort import few


def declare(layout: list[OwnedChunk], key: str, array: torch.Tensor, rank: int) -> list[ShardedTensor]:
    return [owned.declare(key, array) for owned in layout if owned.rank == rank]


def bits_of(tensor: ShardedTensor) -> bytes:
    assert tensor.data is not None
    return bytes(byte_view(as_bits(tensor.data).contiguous()))


# Bounds on time are off: the machine that runs this may be busy. Nothing here is meant to be fast.
@settings(max_examples=few(100, of=2000), deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data(), array=arrays(), source_ranks=st.integers(1, 4), target_ranks=st.integers(1, 4))
def test_any_layout_loads_what_any_other_saved(
    data: st.DataObject, array: torch.Tensor, source_ranks: int, target_ranks: int
) -> None:
    check_the_law("megackpt", data, array, source_ranks, target_ranks)


@settings(max_examples=few(37, of=300), deadline=None, suppress_health_check=list(HealthCheck))
@given(
    data=st.data(),
    array=arrays(),
    source_ranks=st.integers(1, 4),
    target_ranks=st.integers(1, 4),
    has_index=st.booleans(),
)
def test_any_layout_loads_what_any_other_saved_as_torch_dist(
    data: st.DataObject, array: torch.Tensor, source_ranks: int, target_ranks: int, has_index: bool
) -> None:
    check_the_law("torch_dist", data, array, source_ranks, target_ranks, has_index=has_index)


def check_the_law(
    backend: str,
    data: st.DataObject,
    array: torch.Tensor,
    source_ranks: int,
    target_ranks: int,
    *,
    has_index: bool = True,
) -> None:
    """Save and load; without our own index a checkpoint is read as one that another library wrote."""
    shape = tuple(array.shape)
    source = data.draw(owned_chunks(shape, ranks=source_ranks), label="source")
    target = data.draw(owned_chunks(shape, ranks=target_ranks), label="target")
    store = MemoryStore()

    def save_rank(group: Group) -> None:
        save({"shards": declare(source, "array", array, group.rank)}, store, backend, group=group)

    def load_rank(group: Group) -> list[ShardedTensor]:
        wanted = declare(target, "array", array, group.rank)
        for tensor in wanted:
            as_bits(tensor.data).fill_(1)  # something that is not the answer
        load({"shards": wanted}, store, group=group)
        return wanted

    SimulatedWorld(source_ranks).run(save_rank)
    if not has_index:
        store.delete([name for name in store.names() if name.startswith("megackpt-")])
    for rank, loaded in enumerate(SimulatedWorld(target_ranks).run(load_rank)):
        for got, expected in zip(loaded, declare(target, "array", array, rank), strict=True):
            assert bits_of(got) == bits_of(expected)


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


def stored_bits(tensor: torch.Tensor) -> bytes:
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
    assert {
        kind: stored_bits(tensor) == stored_bits(whole) for kind, tensor in results.items()
    } == dict.fromkeys(results, True)


@settings(max_examples=few(25, of=500), deadline=None, suppress_health_check=list(HealthCheck))
@given(state=global_states(), source_ranks=st.integers(1, 3), target_ranks=st.integers(1, 3), data=st.data())
def test_any_world_loads_what_any_other_saved_of_all_entities(
    state: GlobalState, source_ranks: int, target_ranks: int, data: st.DataObject
) -> None:
    source = data.draw(placements(state, ranks=source_ranks), label="source")
    target = data.draw(placements(state, ranks=target_ranks), label="target")
    store = MemoryStore()

    def save_rank(group: Group) -> None:
        save(source.declare(group.rank), store, group=group)

    def load_rank(group: Group) -> StateDict:
        return load(blank(target.declare(group.rank)), store, group=group)

    SimulatedWorld(source_ranks).run(save_rank)
    for rank, loaded in enumerate(SimulatedWorld(target_ranks).run(load_rank)):
        assert state_difference(loaded, values_of(target.declare(rank))) is None
