"""The law of the library: for any source and target layout, load(save(x)) equals x, bit for bit."""

from __future__ import annotations

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megackpt import load, save
from megackpt.comm import Group
from megackpt.engine.data.tensor_bytes import as_bits, byte_view
from megackpt.mapping import ShardedTensor
from megackpt.storage import MemoryStore
from megackpt.testing.layouts import OwnedChunk, arrays, owned_chunks
from megackpt.testing.world import SimulatedWorld
from tests.support.effort import few


def declare(layout: list[OwnedChunk], key: str, array: torch.Tensor, rank: int) -> list[ShardedTensor]:
    return [owned.declare(key, array) for owned in layout if owned.rank == rank]


def bits_of(tensor: ShardedTensor) -> bytes:
    assert tensor.data is not None
    return bytes(byte_view(as_bits(tensor.data).contiguous()))


# Bounds on time are off: the machine that runs this may be busy. Nothing here is meant to be fast.
@settings(max_examples=few(250, of=2000), deadline=None, suppress_health_check=list(HealthCheck))
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
