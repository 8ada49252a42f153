"""Experts against plain torch, and which part of the stored arrays each rank declares."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis.strategies import DrawFn, composite, sampled_from
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megackpt import DeclarationError, ShardedLayout, ShardedTensor
from megackpt.training.parallel import (
    ColumnParallelLinear,
    ExpertStack,
    GatedExperts,
    MixtureOfExperts,
    ParallelGroups,
    ParallelLayout,
    PlainExperts,
    Router,
    RoutingOptions,
    RowParallelLinear,
    ShardedModule,
    TpSharding,
    update_expert_bias,
)
from megackpt.training.parallel.attributes import is_marked
from megackpt.training.parallel.router import mean_auxiliary_losses

ONE = ParallelGroups.create(ParallelLayout())
EXPERTS, HIDDEN, FFN = 4, 6, 5
COUNTS = (3, 0, 4, 1)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def _rows() -> Tensor:
    return torch.randn(sum(COUNTS), HIDDEN, generator=torch.Generator().manual_seed(1))


def test_stacked_experts_are_gated_mlps_one_by_one() -> None:
    experts = GatedExperts(EXPERTS, HIDDEN, FFN, ONE, bias=True)
    for param in experts.parameters():
        nn.init.normal_(param)
    fc1, fc2 = experts.linear_fc1, experts.linear_fc2
    out = experts(_rows(), COUNTS)
    parts = []
    for expert, rows in enumerate(_rows().split(COUNTS)):
        gate, up = (rows @ fc1.weight[expert].T + fc1.bias[expert]).chunk(2, dim=1)
        parts.append((F.silu(gate) * up) @ fc2.weight[expert].T + fc2.bias[expert])
    torch.testing.assert_close(out, torch.cat(parts))  # the same products; sums of 6 terms
    out.sum().backward()
    for param in experts.parameters():
        assert param.grad is not None
        used = param.grad.flatten(1).abs().amax(1) > 0
        assert used.tolist() == [True, False, True, True]


def test_plain_experts_are_mlps_one_by_one() -> None:
    experts = PlainExperts(EXPERTS, HIDDEN, FFN, ONE, activation=torch.tanh, bias=True)
    for param in experts.parameters():
        nn.init.normal_(param)
    fc1, fc2 = experts.linear_fc1, experts.linear_fc2
    parts = [
        torch.tanh(rows @ fc1.weight[e].T + fc1.bias[e]) @ fc2.weight[e].T + fc2.bias[e]
        for e, rows in enumerate(_rows().split(COUNTS))
    ]
    torch.testing.assert_close(experts(_rows(), COUNTS), torch.cat(parts))
    with pytest.raises(DeclarationError, match="no named components"):
        fc1.split(_rows())


def test_biases_have_equal_gradients_on_all_ranks_of_etp() -> None:
    for rank in range(2):
        groups = ParallelGroups.offline(ParallelLayout(dp=2, etp=2), rank)
        experts = GatedExperts(EXPERTS, HIDDEN, 4, groups, bias=True)
        nn.init.ones_(experts.linear_fc2.bias)
        nn.init.zeros_(experts.linear_fc2.weight)
        out = experts(_rows(), COUNTS)
        assert torch.equal(out, torch.full_like(out, 1.0 - rank))  # added once
        out.sum().backward()
        assert experts.linear_fc2.bias.grad is not None
        assert experts.linear_fc2.bias.grad[:, 0].tolist() == list(COUNTS)


def test_experts_of_their_own_get_their_rows() -> None:
    stack = ExpertStack(lambda index: nn.Linear(HIDDEN, HIDDEN), EXPERTS, ONE)
    out = stack(_rows(), COUNTS)
    parts = zip(stack.children(), _rows().split(COUNTS), strict=True)
    torch.testing.assert_close(out, torch.cat([expert(rows) for expert, rows in parts]))
    out.sum().backward()
    assert all(param.grad is not None for param in stack.parameters())
    assert all(is_marked(param, "expert_parallel") for param in stack.parameters())


def test_experts_of_their_own_are_one_array_with_an_axis_over_experts() -> None:
    built = []

    def build(index: int) -> nn.Linear:
        built.append(index)
        return nn.Linear(HIDDEN, HIDDEN)

    stack = ExpertStack(build, 8, ParallelGroups.offline(ParallelLayout(dp=4, ep=2), 3))
    assert built == [4, 5, 6, 7]
    state = stack.sharded_state_dict("mlp.experts.", ((0, 1, 3),))
    assert list(state) == [f"mlp.experts.{name}" for name in stack.state_dict()]
    last = state["mlp.experts.3.weight"]
    assert (last.key, last.global_shape) == ("mlp.experts.weight", (3, 8, HIDDEN, HIDDEN))
    assert (last.global_offset, last.replica_id) == ((1, 7, 0, 0), (0, 0, 1))


def test_an_expert_made_with_the_groups_of_dense_layers_is_rejected() -> None:
    groups = ParallelGroups.offline(ParallelLayout(tp=4, etp=2), 3)

    def build(index: int) -> nn.Module:
        return nn.Sequential(ColumnParallelLinear(HIDDEN, 8, groups.experts), RowParallelLinear(8, 6, groups))

    with pytest.raises(DeclarationError, match=r"expert 0: 1 \(RowParallelLinear\).*with groups\.experts"):
        ExpertStack(build, 2, groups)
    with pytest.raises(DeclarationError, match=r"expert 0: it \(RowParallelLinear\)"):
        ExpertStack(lambda index: RowParallelLinear(8, 6, groups), 2, groups)


class Doubled(ShardedModule):
    """Stacked experts of a user: one weight with a declared expert axis."""

    expert_axis = {"weight": 0}  # noqa: RUF012 - read-only by its type in ShardedModule
    output_is_partial = False

    def __init__(self, num_experts: int, groups: ParallelGroups) -> None:
        super().__init__(groups)
        self.num_experts = num_experts
        self.weight = nn.Parameter(torch.full((num_experts // groups.ep.size, HIDDEN), 2.0))

    def forward(self, rows: Tensor, counts: list[int]) -> Tensor:
        return rows * self.weight.repeat_interleave(torch.tensor(counts), dim=0)


def test_a_mixture_takes_any_experts_and_any_shared_experts() -> None:
    router = Router(HIDDEN, EXPERTS, ONE, RoutingOptions(scaling_factor=3.0))
    layer = MixtureOfExperts(router, Doubled(EXPERTS, ONE), ONE, shared_experts=nn.Identity())
    x = torch.randn(7, 2, HIDDEN)
    torch.testing.assert_close(layer(x), x * 7)  # 2 times the sum of the weights, and x itself
    assert list(layer.sharded_state_dict("mlp.")) == ["mlp.router.weight", "mlp.experts.weight"]


@pytest.mark.parametrize("reentrant", [False, True])
def test_activations_may_be_computed_again(reentrant: bool) -> None:
    options = RoutingOptions(balance_loss=1.0, z_loss=0.1, bias_rate=0.1)
    grads, biases, losses = [], [], []
    for recompute in (False, True):
        torch.manual_seed(1)
        layer = MixtureOfExperts(
            Router(HIDDEN, EXPERTS, ONE, options), GatedExperts(EXPERTS, HIDDEN, FFN, ONE), ONE
        )
        x = torch.randn(7, 2, HIDDEN, requires_grad=True)
        out = checkpoint(layer, x, use_reentrant=reentrant) if recompute else layer(x)
        out.square().sum().backward()
        grads.append([param.grad for param in layer.parameters()] + [x.grad])
        losses.append(mean_auxiliary_losses(layer, ONE))
        update_expert_bias(layer, ONE)
        biases.append(layer.router.expert_bias)
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))
    assert torch.equal(*losses)
    assert torch.equal(*biases)


STACKED, STACKED_HIDDEN, STACKED_FFN = 8, 3, 4
LAYER = (0, 1, 2)  # the second of two layers


class Experts(ShardedModule):
    """Gate and up projections of all experts in one weight, and a bias that only the expert axis cuts."""

    expert_axis = {"weight": 0, "bias": 0}  # noqa: RUF012 - read-only by its type

    def __init__(self, groups: ParallelGroups) -> None:
        ffn = STACKED_FFN // groups.etp.size
        parts = TpSharding(dim=1, components={"gate": ffn, "up": ffn})
        super().__init__(groups, tp_sharding={"weight": parts})
        local = STACKED // groups.ep.size
        self.weight = nn.Parameter(torch.zeros(local, 2 * ffn, STACKED_HIDDEN))
        self.bias = nn.Parameter(torch.zeros(local, STACKED_HIDDEN))


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
    shapes = {
        "moe.weight.gate": (STACKED_FFN, STACKED_HIDDEN),
        "moe.weight.up": (STACKED_FFN, STACKED_HIDDEN),
        "moe.bias": (STACKED_HIDDEN,),
    }
    counts = {key: torch.zeros(2, STACKED, *shape) for key, shape in shapes.items()}
    replicas = {key: torch.zeros(2, STACKED, *shape) for key, shape in shapes.items()}
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
    single = ColumnParallelLinear(STACKED_HIDDEN, STACKED_FFN, groups.experts)
    assert is_marked(single.weight, "expert_parallel")
    assert not is_marked(ColumnParallelLinear(STACKED_HIDDEN, STACKED_FFN, groups).weight, "expert_parallel")


def test_a_layer_made_with_the_groups_of_experts_is_cut_over_etp() -> None:
    layout = ParallelLayout(tp=1, dp=4, ep=2, etp=2)
    groups = ParallelGroups.offline(layout, 3)
    weight = ColumnParallelLinear(
        STACKED_HIDDEN, STACKED_FFN, groups.experts, bias=False
    ).sharded_state_dict()["weight"]
    assert isinstance(weight, ShardedTensor)
    assert (weight.global_shape, weight.global_offset) == ((STACKED_FFN, STACKED_HIDDEN), (2, 0))
    assert weight.replica_id == (0, 0, 0)  # edp is 1: what tells ranks 1 and 3 apart is the axis over experts


def _with_axes(expert_axis: dict[str, int], **tp_sharding: int) -> dict[str, Any]:
    module = Experts(ONE)
    module.expert_axis, module.tp_sharding = expert_axis, tp_sharding
    return module.sharded_state_dict()


EP3 = ParallelGroups.offline(ParallelLayout(dp=3, ep=3), 0)
ETP2 = ParallelGroups.offline(ParallelLayout(dp=2, etp=2), 0)
UNEVEN = r"4 experts cannot be spread evenly over ep=3 ranks"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: GatedExperts(EXPERTS, HIDDEN, FFN, EP3), UNEVEN),
        (lambda: ExpertStack(lambda index: nn.Linear(HIDDEN, HIDDEN), EXPERTS, EP3), UNEVEN),
        (lambda: GatedExperts(EXPERTS, HIDDEN, FFN, ETP2), r"component 'gate' 5 cannot be cut into etp=2"),
        (
            lambda: MixtureOfExperts(Router(HIDDEN, EXPERTS, ONE, RoutingOptions()), Doubled(8, ONE), ONE),
            r"router chooses among 4 experts, but there are 8",
        ),
        (
            lambda: _with_axes({"weight": 0, "bias": 0}, weight=0),
            r"'weight'.*dim 0 both in tp_sharding and in expert_axis",
        ),
        (lambda: _with_axes({"wieght": 0}), r"'wieght'.*expert_axis declares.*'bias', 'weight'"),
        (lambda: _with_axes({"bias": 2}), r"'bias'.*expert_axis cuts dim 2 of a tensor of shape \(8, 3\)"),
    ],
)
def test_experts_that_do_not_fit_are_an_error(make: Callable[[], object], message: str) -> None:
    with pytest.raises(DeclarationError, match=message):
        make()
