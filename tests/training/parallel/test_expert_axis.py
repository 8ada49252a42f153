"""Declarations of stacked experts: which part of the stored array each rank has, and what is rejected."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis.strategies import DrawFn, composite, sampled_from
from torch import nn

from megackpt.errors import DeclarationError
from megackpt.mapping import ShardedLayout, ShardedTensor
from megackpt.parallel import (
    ColumnParallelLinear,
    ParallelGroups,
    ParallelLayout,
    ShardedModule,
    TpSharding,
    is_marked,
)

EXPERTS, HIDDEN, FFN = 8, 3, 4
LAYER = (0, 1, 2)  # the second of two layers


class Experts(ShardedModule):
    """Gate and up projections of all experts in one weight, and a bias that only the expert axis cuts."""

    expert_axis = {"weight": 0, "bias": 0}  # noqa: RUF012 - read-only by its type

    def __init__(self, groups: ParallelGroups) -> None:
        ffn = FFN // groups.etp.size
        parts = TpSharding(dim=1, components={"gate": ffn, "up": ffn})
        super().__init__(groups, tp_sharding={"weight": parts})
        local = EXPERTS // groups.ep.size
        self.weight = nn.Parameter(torch.zeros(local, 2 * ffn, HIDDEN))
        self.bias = nn.Parameter(torch.zeros(local, HIDDEN))


@composite
def expert_layouts(draw: DrawFn) -> ParallelLayout:
    tp, cp, dp = (draw(sampled_from([1, 2, 4])) for _ in range(3))
    etp = draw(sampled_from([n for n in (1, 2, 4) if tp * cp * dp % n == 0]))
    ep = draw(sampled_from([n for n in (1, 2, 4, 8) if tp * cp * dp // etp % n == 0]))
    return ParallelLayout(tp=tp, cp=cp, dp=dp, ep=ep, etp=etp)


def _declared(layout: ParallelLayout, rank: int) -> list[ShardedTensor]:
    tensors: list[ShardedTensor] = []
    state = Experts(ParallelGroups.offline(layout, rank)).sharded_state_dict("moe.", (LAYER,))
    for entity in state.values():
        assert isinstance(entity, ShardedTensor | ShardedLayout)
        tensors += entity.tensors() if isinstance(entity, ShardedLayout) else [entity]
    return tensors


@settings(deadline=None)
@given(layout=expert_layouts())
def test_main_replicas_tile_the_arrays_of_a_layer_once(layout: ParallelLayout) -> None:
    shapes = {"moe.weight.gate": (FFN, HIDDEN), "moe.weight.up": (FFN, HIDDEN), "moe.bias": (HIDDEN,)}
    counts = {key: torch.zeros(2, EXPERTS, *shape) for key, shape in shapes.items()}
    replicas = {key: torch.zeros(2, EXPERTS, *shape) for key, shape in shapes.items()}
    for rank in range(layout.world_size):
        for tensor in _declared(layout, rank):
            assert tensor.global_shape == tuple(counts[tensor.key].shape)
            is_main = tensor.replica_id == (0, 0, 0)
            (counts if is_main else replicas)[tensor.key][tensor.global_slice()] += 1
    for key, count in counts.items():
        assert torch.equal(count[1], torch.ones_like(count[1]))
        assert not count[0].any()  # the other layer
        # All other ranks have a replica: edp of them, and those of etp for what etp does not cut.
        copies = layout.edp * (layout.etp if key == "moe.bias" else 1)
        assert torch.equal(replicas[key][1], torch.full_like(count[1], copies - 1))


def test_parameters_of_experts_are_marked_for_the_optimizer() -> None:
    groups = ParallelGroups.offline(ParallelLayout(tp=2, dp=2, ep=2, etp=2), 0)
    stacked = Experts(groups)
    assert is_marked(stacked.weight, "expert_parallel")
    assert is_marked(stacked.weight, "tensor_model_parallel")
    assert not is_marked(stacked.bias, "tensor_model_parallel")
    single = ColumnParallelLinear(HIDDEN, FFN, groups.experts)
    assert is_marked(single.weight, "expert_parallel")
    assert not is_marked(ColumnParallelLinear(HIDDEN, FFN, groups).weight, "expert_parallel")


def test_a_layer_made_with_the_groups_of_experts_is_cut_over_etp() -> None:
    layout = ParallelLayout(tp=1, dp=4, ep=2, etp=2)
    groups = ParallelGroups.offline(layout, 3)
    weight = ColumnParallelLinear(HIDDEN, FFN, groups.experts, bias=False).sharded_state_dict()["weight"]
    assert isinstance(weight, ShardedTensor)
    assert (weight.global_shape, weight.global_offset) == ((FFN, HIDDEN), (2, 0))
    assert weight.replica_id == (0, 0, 0)  # edp is 1: what tells ranks 1 and 3 apart is the axis over experts


def test_an_expert_axis_that_tp_also_cuts_is_rejected() -> None:
    module = Experts(ParallelGroups.offline(ParallelLayout(), 0))
    module.tp_sharding = {"weight": 0}
    with pytest.raises(DeclarationError, match=r"'weight'.*dim 0 both in tp_sharding and in expert_axis"):
        module.sharded_state_dict()


def test_an_expert_axis_of_no_tensor_is_rejected() -> None:
    module = Experts(ParallelGroups.offline(ParallelLayout(), 0))
    module.expert_axis = {"wieght": 0}
    with pytest.raises(DeclarationError, match=r"'wieght'.*expert_axis declares.*'bias', 'weight'"):
        module.sharded_state_dict()


def test_an_expert_axis_outside_of_the_tensor_is_rejected() -> None:
    module = Experts(ParallelGroups.offline(ParallelLayout(), 0))
    module.expert_axis = {"bias": 2}
    with pytest.raises(
        DeclarationError, match=r"'bias'.*expert_axis cuts dim 2 of a tensor of shape \(8, 3\)"
    ):
        module.sharded_state_dict()
