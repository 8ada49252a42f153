"""Load(save(x)) equals x where tp has more ranks than there are key and value heads, also for flat shards."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megackpt import CoverageError, ShardedLayout, ShardedTensor, load, load_plain_tensors, save
from megackpt.comm import Group
from megackpt.optim import DistributedOptimizer
from megackpt.parallel import ParallelGroups, ParallelLayout, QKVParallelLinear
from megackpt.storage import MemoryStore
from megackpt.testing.world import SimulatedWorld
from tests.support.effort import few

HEADS, HEAD_DIM, HIDDEN = 8, 2, 3
LAYOUTS = st.builds(ParallelLayout, tp=st.sampled_from([1, 2, 4, 8]), dp=st.integers(1, 3))


def declared(layout: ParallelLayout, kv_heads: int, rank: int) -> dict[str, Any]:
    """Declare the layer and its optimizer's state, whose shards begin and end inside of heads."""
    groups = ParallelGroups.offline(layout, rank)
    layer = QKVParallelLinear(HIDDEN, HEADS, kv_heads, HEAD_DIM, groups)
    optimizer = DistributedOptimizer(
        layer.parameters(), lambda g: torch.optim.AdamW(g, lr=0.1), groups, bucket_size=20
    )
    model = layer.sharded_state_dict()
    return {"model": model, "optimizer": optimizer.sharded_state_dict(model)["state"]}


def tensors_of(state: dict[str, Any]) -> list[ShardedTensor]:
    entities = [*state["model"].values(), *(e for s in state["optimizer"].values() for e in s.values())]
    return [t for e in entities for t in (e.tensors() if isinstance(e, ShardedLayout) else [e])]


def expected(tensor: ShardedTensor) -> torch.Tensor:
    """Return what a rank should hold of an array whose elements follow from its key."""
    generator = torch.Generator().manual_seed(len(tensor.key) + sum(tensor.key.encode()))
    whole = torch.randn(tensor.global_shape, generator=generator)
    return whole[tensor.global_coordinates()].to(tensor.dtype) if tensor.global_shape else whole


def fill(state: dict[str, Any]) -> dict[str, Any]:
    for tensor in tensors_of(state):
        assert tensor.data is not None
        with torch.no_grad():
            tensor.data.copy_(expected(tensor).view(tensor.data.shape))
    return state


@settings(max_examples=few(12, of=400), deadline=None, suppress_health_check=list(HealthCheck))
@given(kv_heads=st.sampled_from([1, 2]), source=LAYOUTS, target=LAYOUTS)
def test_any_layout_loads_what_any_other_saved(
    kv_heads: int, source: ParallelLayout, target: ParallelLayout
) -> None:
    store = MemoryStore()

    def save_rank(group: Group) -> None:
        # Also proves that every element has exactly one main replica.
        save(fill(declared(source, kv_heads, group.rank)), store, group=group)

    def load_rank(group: Group) -> None:
        state = declared(target, kv_heads, group.rank)
        for tensor in tensors_of(state):
            assert tensor.data is not None
            with torch.no_grad():
                tensor.data.fill_(float("nan"))
        load(state, store, group=group)
        for tensor in tensors_of(state):
            assert tensor.data is not None
            assert torch.equal(tensor.data.reshape(-1), expected(tensor).reshape(-1)), tensor.key

    SimulatedWorld(source.world_size).run(save_rank)
    arrays = load_plain_tensors(store)
    assert arrays["weight.k"].shape == (kv_heads * HEAD_DIM, HIDDEN)
    assert arrays["optimizer.state.exp_avg.bias.v"].shape == (kv_heads * HEAD_DIM,)
    SimulatedWorld(target.world_size).run(load_rank)


def test_a_copy_that_is_declared_as_a_main_replica_raises_an_error() -> None:
    layout = ParallelLayout(tp=4)

    def save_rank(group: Group) -> None:
        state = declared(layout, 2, group.rank)
        weight = state["model"]["weight"]
        weight.components = tuple(
            type(p)(p.name, p.view, p.global_shape, p.global_offset, p.axis_fragmentations)
            for p in weight.components
        )
        save(state, MemoryStore(), group=group)

    with pytest.raises(CoverageError, match=r"weight\.k"):
        SimulatedWorld(4).run(save_rank)
