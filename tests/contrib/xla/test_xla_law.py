"""The law for tensors that XLA has sharded: what one SPMD world saved, any other loads, bit for bit."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megackpt import load, save
from megackpt.comm import Group
from megackpt.engine.data.tensor_bytes import as_bits, byte_view
from megackpt.integrations.xla import XlaLoadPlanner, XlaSavePlanner
from megackpt.mapping import ShardedTensor
from megackpt.storage import MemoryStore
from megackpt.testing.layouts import OwnedChunk, arrays, owned_chunks
from megackpt.testing.spmd import SpmdLayout, XLAShardedTensor, spmd_layouts
from megackpt.testing.world import SimulatedWorld

SETTINGS = settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))


def save_spmd(array: torch.Tensor, layout: SpmdLayout, store: MemoryStore) -> None:
    SimulatedWorld(layout.hosts).run(lambda g: save({"w": layout.tensor(array, g.rank)}, store, group=g))


def load_spmd(wrong: torch.Tensor, layout: SpmdLayout, store: MemoryStore) -> list[XLAShardedTensor]:
    def load_host(group: Group) -> XLAShardedTensor:
        tensor = layout.tensor(wrong, group.rank)
        assert load({"w": tensor}, store, group=group)["w"] is tensor
        return tensor

    return SimulatedWorld(layout.hosts).run(load_host)


def wrong_values(array: torch.Tensor) -> torch.Tensor:
    return as_bits(torch.ones_like(as_bits(array))).view(array.dtype)


def assert_on_all_devices(layout: SpmdLayout, hosts: list[XLAShardedTensor], array: torch.Tensor) -> None:
    for host, tensor in enumerate(hosts):
        for got, expected in zip(tensor.devices, layout.tensor(array, host).devices, strict=True):
            assert bits_of(got.elements()) == bits_of(expected.elements()), got.shard_device


def bits_of(tensor: torch.Tensor) -> bytes:
    return bytes(byte_view(as_bits(tensor).contiguous()))


@SETTINGS
@given(data=st.data(), array=arrays(max_dims=3))
def test_any_spmd_world_loads_what_any_other_saved(data: st.DataObject, array: torch.Tensor) -> None:
    source = data.draw(spmd_layouts(array.ndim), label="source")
    target = data.draw(spmd_layouts(array.ndim), label="target")
    store = MemoryStore()
    save_spmd(array, source, store)
    assert_on_all_devices(target, load_spmd(wrong_values(array), target, store), array)


def declare(layout: list[OwnedChunk], array: torch.Tensor, rank: int) -> list[ShardedTensor]:
    return [owned.declare("w", array) for owned in layout if owned.rank == rank]


@SETTINGS
@given(data=st.data(), array=arrays(max_dims=3), ranks=st.integers(1, 3))
def test_spmd_worlds_and_ranks_load_what_the_other_saved(
    data: st.DataObject, array: torch.Tensor, ranks: int
) -> None:
    spmd = data.draw(spmd_layouts(array.ndim), label="spmd")
    owned = data.draw(owned_chunks(tuple(array.shape), ranks=ranks), label="ranks")
    store, back = MemoryStore(), MemoryStore()
    save_spmd(array, spmd, store)

    def through_ranks(group: Group) -> None:
        request = {"shards": declare(owned, wrong_values(array), group.rank)}
        load(request, store, group=group)
        save(request, back, group=group)

    SimulatedWorld(ranks).run(through_ranks)
    assert_on_all_devices(spmd, load_spmd(wrong_values(array), spmd, back), array)


def save_through_planners(state: list[XLAShardedTensor]) -> tuple[Any, dict[Any, torch.Tensor]]:
    """Return the metadata and the stored boxes of a save by the hosts' DCP planners, without storage."""
    planners = []
    for host, tensor in enumerate(state):
        planner = XlaSavePlanner()
        planner.set_up_planner({"w": tensor}, is_coordinator=host == 0)
        planners.append(planner)
    plans, metadata = planners[0].create_global_plan([planner.create_local_plan() for planner in planners])
    stored = {}
    for planner, plan in zip(planners, plans, strict=True):
        for item in planner.finish_plan(plan).items:
            assert item.index not in stored
            stored[item.index] = planner.resolve_data(item).clone()
    return metadata, stored


def load_through_planners(tensor: XLAShardedTensor, metadata: Any, stored: dict[Any, torch.Tensor]) -> None:
    planner = XlaLoadPlanner()
    planner.set_up_planner({"w": tensor}, metadata, True)
    plan = planner.finish_plan(planner.create_global_plan([planner.create_local_plan()])[0])
    for i, item in enumerate(plan.items):
        assert tensor.loads == 0, f"on the devices before read {i} of {len(plan.items)}"
        source = stored[item.storage_index]
        for dim, (start, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
            source = source.narrow(dim, start, length)
        target = planner.resolve_tensor(item)
        target.copy_(source)
        planner.commit_tensor(item, target)


@SETTINGS
@given(data=st.data(), array=arrays(max_dims=3))
def test_dcp_planners_keep_the_law_between_spmd_worlds(data: st.DataObject, array: torch.Tensor) -> None:
    source = data.draw(spmd_layouts(array.ndim), label="source")
    target = data.draw(spmd_layouts(array.ndim), label="target")
    metadata, stored = save_through_planners([source.tensor(array, host) for host in range(source.hosts)])
    loaded = [target.tensor(wrong_values(array), host) for host in range(target.hosts)]
    for tensor in loaded:
        load_through_planners(tensor, metadata, stored)
    assert_on_all_devices(target, loaded, array)
