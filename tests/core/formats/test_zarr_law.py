"""The law of the library holds for zarr: what any layout saved, any other loads, bit for bit."""

from __future__ import annotations

import tempfile

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megackpt import load, save
from megackpt.comm import Group
from megackpt.engine.data.tensor_bytes import as_bits, byte_view
from megackpt.formats.zarr.grids import GridRules
from megackpt.formats.zarr.save import ZarrSaveStrategy
from megackpt.formats.zarr.version_1 import ZarrV2SaveStrategy
from megackpt.formats.zarr.version_3 import ZarrV3SaveStrategy
from megackpt.mapping import ShardedTensor
from megackpt.storage import LocalStore, MemoryStore, Store
from megackpt.testing.layouts import OwnedChunk, arrays, owned_chunks
from megackpt.testing.world import SimulatedWorld

# Files and chunks of a few elements, so that small arrays have many of them and ranks share some.
TINY = [GridRules(file_bytes=64, inner_bytes=16), GridRules(file_bytes=24, inner_bytes=8, files_per_row=1)]


def declare(layout: list[OwnedChunk], array: torch.Tensor, rank: int) -> list[ShardedTensor]:
    return [owned.declare("array", array) for owned in layout if owned.rank == rank]


def bits_of(tensor: ShardedTensor) -> bytes:
    assert tensor.data is not None
    return bytes(byte_view(as_bits(tensor.data).contiguous()))


def check(
    data: st.DataObject, array: torch.Tensor, strategy: type[ZarrSaveStrategy], rules: GridRules, store: Store
) -> None:
    source_ranks, target_ranks = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 4))
    source = data.draw(owned_chunks(tuple(array.shape), ranks=source_ranks), label="source")
    target = data.draw(owned_chunks(tuple(array.shape), ranks=target_ranks), label="target")

    def save_rank(group: Group) -> None:
        shards = {"shards": declare(source, array, group.rank)}
        save(shards, store, sharded_strategy=strategy(rules), group=group)

    def load_rank(group: Group) -> list[ShardedTensor]:
        wanted = declare(target, array, group.rank)
        for tensor in wanted:
            as_bits(tensor.data).fill_(1)  # something that is not the answer
        load({"shards": wanted}, store, group=group)
        return wanted

    SimulatedWorld(source_ranks).run(save_rank)
    for rank, loaded in enumerate(SimulatedWorld(target_ranks).run(load_rank)):
        for got, expected in zip(loaded, declare(target, array, rank), strict=True):
            assert bits_of(got) == bits_of(expected)


# Bounds on time are off: the machine that runs this may be busy.
@pytest.mark.parametrize("strategy", [ZarrV2SaveStrategy, ZarrV3SaveStrategy])
@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data(), array=arrays(), rules=st.sampled_from([*TINY, GridRules(inner_bytes=2**20)]))
def test_any_layout_loads_what_any_other_saved_as_zarr(
    strategy: type[ZarrSaveStrategy], data: st.DataObject, array: torch.Tensor, rules: GridRules
) -> None:
    if strategy is ZarrV2SaveStrategy:
        rules = GridRules(file_bytes=rules.file_bytes, files_per_row=rules.files_per_row)
    check(data, array, strategy, rules, MemoryStore())


@pytest.mark.parametrize("strategy", [ZarrV2SaveStrategy, ZarrV3SaveStrategy])
@settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data(), array=arrays())
def test_any_layout_loads_what_any_other_saved_as_zarr_in_a_directory(
    strategy: type[ZarrSaveStrategy], data: st.DataObject, array: torch.Tensor
) -> None:
    rules = TINY[0] if strategy is ZarrV3SaveStrategy else GridRules(file_bytes=64)
    with tempfile.TemporaryDirectory() as directory:
        check(data, array, strategy, rules, LocalStore(directory))
