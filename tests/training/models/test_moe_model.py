"""GPT with experts as every rank declares it: initial weights, coverage, keys, checkpoints."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

import models.init
from megackpt import DeclarationError, load, load_plain_tensors, save
from megackpt.testing.world import SimulatedRank, SimulatedWorld
from megackpt.training.optim import DistributedOptimizer
from megackpt.training.parallel import (
    Capacity,
    ColumnParallelLinear,
    ExpertStack,
    MixtureOfExperts,
    ParallelGroups,
    ParallelLayout,
    Router,
    RoutingOptions,
    RowParallelLinear,
)
from megackpt.training.parallel.attributes import is_marked
from models import GPT, init_weights
from tests.support.gpt import SMALL_GPT_MIXED as MIXED
from tests.support.gpt import SMALL_GPT_MOE as CONFIG
from tests.support.gpt import joined, state_of

ONE = ParallelGroups.create(ParallelLayout())


def test_experts_start_different_and_shared_experts_are_not_stacked() -> None:
    arrays, _ = joined(CONFIG, ParallelLayout())
    prefix = "decoder.layers.mlp."
    assert arrays[prefix + "experts.linear_fc1.weight.gate"].shape == (4, 8, 12, 16)
    assert arrays[prefix + "experts.linear_fc1.bias.up"].shape == (4, 8, 12)
    assert arrays[prefix + "experts.linear_fc2.weight"].shape == (4, 8, 16, 12)
    assert arrays[prefix + "shared_experts.linear_fc1.weight.gate"].shape == (4, 8, 16)
    assert arrays[prefix + "shared_experts.gate_weight"].shape == (4, 1, 16)
    assert arrays[prefix + "router.weight"].shape == (4, 8, 16)
    assert torch.equal(arrays[prefix + "router.expert_bias"], torch.zeros(4, 8))
    weights = arrays[prefix + "experts.linear_fc2.weight"].flatten(0, 1)
    assert len({weight.sum().item() for weight in weights}) == 32
    # 16 * 12 * 32 numbers: the sample deviation lies within 5 * std / sqrt(2n) = 4.5 % of std.
    assert weights.std().item() == pytest.approx(0.02 / 8**0.5, rel=0.045)


def test_no_rank_draws_more_than_one_expert_at_a_time() -> None:
    shapes = {}

    def record(key: str, shape: tuple[int, ...], *args: object, **kwargs: object) -> Tensor:
        shapes[key] = shape
        return torch.zeros(shape)

    with patch.object(models.init, "initial_values", record):
        joined(CONFIG, ParallelLayout())
    assert shapes["decoder.layers.mlp.experts.linear_fc1.weight.gate"] == (12, 16)


def test_layers_of_both_kinds_have_keys_with_their_global_index() -> None:
    groups = ParallelGroups.offline(ParallelLayout(dp=2, pp=2, ep=2), 3)
    model = GPT(MIXED, groups)
    state = model.sharded_state_dict("model.")
    assert list(state) == [f"model.{name}" for name in model.state_dict()]
    keys = {key for entity in state.values() for key in [entity.key] if "fc2.weight" in key}
    assert keys == {
        "model.decoder.layers.2.mlp.experts.linear_fc2.weight",
        "model.decoder.layers.2.mlp.shared_experts.linear_fc2.weight",
        "model.decoder.layers.3.mlp.linear_fc2.weight",
    }
    experts = state["model.decoder.layers.0.mlp.experts.linear_fc2.weight"]
    assert (experts.global_shape, experts.global_offset) == ((8, 16, 12), (4, 0, 0))


@pytest.mark.parametrize(
    ("freq", "expected"),
    [(1, (1, 1, 1, 1, 1)), (2, (1, 0, 1, 0, 1)), (3, (1, 0, 0, 1, 0)), ((0, 1, 1, 1, 0), (0, 1, 1, 1, 0))],
)
def test_layer_freq_chooses_which_layers_have_experts(freq: int | tuple[int, ...], expected: object) -> None:
    config = replace(CONFIG, num_layers=5, moe=replace(CONFIG.moe, layer_freq=freq))
    assert config.moe_layers == expected


def test_parameters_are_marked_for_the_optimizer() -> None:
    model = GPT(CONFIG, ParallelGroups.offline(ParallelLayout(tp=2), 0), sequence_parallel=True)
    mlp = model.decoder.layers[0].get_submodule("mlp")
    marked = {
        flag: {name for name, p in mlp.named_parameters() if is_marked(p, flag)}
        for flag in ("expert_parallel", "sequence_parallel")
    }
    assert marked["expert_parallel"] == {n for n, _ in mlp.named_parameters() if n.startswith("experts.")}
    assert marked["sequence_parallel"] == {
        "router.weight",
        "shared_experts.gate_weight",
        "shared_experts.linear_fc2.bias",
    }


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"num_experts": 0}, r"num_experts is 0"),
        ({"ffn_hidden_size": 0}, r"ffn_hidden_size is 0"),
        ({"routing": RoutingOptions(top_k=9)}, r"routing does not fit: top_k 9 is larger than the 8 experts"),
        ({"shared_ffn_hidden_size": 0}, r"shared_ffn_hidden_size is 0 and shared_gate is True"),
        ({"layer_freq": 0}, r"layer_freq is 0"),
        ({"layer_freq": (0, 2)}, r"layer_freq is \(0, 2\). Give a 0 \(dense\) or 1 \(experts\)"),
    ],
)
def test_experts_that_cannot_be_are_rejected(changes: dict[str, object], text: str) -> None:
    with pytest.raises(DeclarationError, match=text):
        replace(CONFIG.moe, **changes)


def test_a_pattern_of_another_number_of_layers_is_rejected() -> None:
    with pytest.raises(DeclarationError, match=r"layer_freq of 4 layers, but num_layers is 5"):
        replace(MIXED, num_layers=5)


def test_a_layout_that_does_not_fit_the_experts_is_rejected_with_all_reasons() -> None:
    layout = ParallelLayout(tp=3, dp=40, ep=3, etp=5)
    with pytest.raises(DeclarationError) as caught:
        GPT(CONFIG, ParallelGroups.offline(layout, 0))
    for reason in (
        "num_experts 8 is not a multiple of ep=3",
        "ffn_hidden_size of experts 12 is not a multiple of etp=5",
        "shared_ffn_hidden_size 8 is not a multiple of tp=3",
    ):
        assert reason in str(caught.value)
    assert "; ffn_hidden_size 8" not in str(caught.value)  # no layer is dense


def test_a_capacity_reaches_the_dispatch() -> None:
    config = replace(CONFIG, moe=replace(CONFIG.moe, capacity=Capacity(factor=1e-9)))
    model = GPT(config, ONE)
    init_weights(model, seed=1)
    dispatcher = model.decoder.layers[0].get_submodule("mlp").dispatcher
    assert dispatcher.capacity == Capacity(factor=1e-9)


EXPERTS, HIDDEN, FFN = 4, 6, 8
CHECKPOINT_LAYOUTS = [
    ParallelLayout(),
    ParallelLayout(dp=4, ep=4),
    ParallelLayout(tp=2, dp=2, ep=2, etp=1),
    ParallelLayout(tp=1, dp=4, ep=2, etp=2),
    ParallelLayout(tp=2, cp=2, ep=1, etp=2),
]


def expert(groups: ParallelGroups) -> nn.Module:
    return nn.Sequential(ColumnParallelLinear(HIDDEN, FFN, groups), RowParallelLinear(FFN, HIDDEN, groups))


def _build(layout: ParallelLayout, rank: int) -> tuple[MixtureOfExperts, DistributedOptimizer]:
    groups = ParallelGroups.offline(layout, rank)
    layer = MixtureOfExperts(
        Router(HIDDEN, EXPERTS, groups, RoutingOptions(bias_rate=0.1)),
        ExpertStack(lambda index: expert(groups.experts), EXPERTS, groups),
        groups,
    )
    optimizer = DistributedOptimizer(layer.parameters(), lambda p: torch.optim.AdamW(p, lr=1e-3), groups)
    return layer, optimizer


def _pass_on(source: Path, target: Path, layout: ParallelLayout) -> None:
    def one_rank(group: SimulatedRank) -> None:
        layer, optimizer = _build(layout, group.rank)
        loaded = load(state_of(layer, optimizer), source, group=group)
        optimizer.load_sharded_state_dict(loaded["optimizer"])
        save(state_of(layer, optimizer), target, group=group)

    SimulatedWorld(layout.world_size).run(one_rank)


@pytest.mark.parametrize("index", range(len(CHECKPOINT_LAYOUTS)))
def test_weights_biases_and_moments_are_the_same_at_every_layout(tmp_path: Path, index: int) -> None:
    torch.manual_seed(0)
    layer, optimizer = _build(ParallelLayout(), 0)
    for state in optimizer.inner.state.values():
        state["exp_avg"].normal_()
        state["exp_avg_sq"].uniform_()
    save(state_of(layer, optimizer), tmp_path / "first")
    _pass_on(tmp_path / "first", tmp_path / "source", CHECKPOINT_LAYOUTS[index])
    expected = load_plain_tensors(tmp_path / "first")
    assert expected["experts.0.weight"].shape == (EXPERTS, FFN, HIDDEN)
    assert expected["optimizer.state.exp_avg.experts.0.weight"].std() > 0.5
    for step in (1, 2):  # to two other layouts, by turns
        target = CHECKPOINT_LAYOUTS[(index + step) % len(CHECKPOINT_LAYOUTS)]
        _pass_on(tmp_path / "source", tmp_path / f"{step}", target)
        actual = load_plain_tensors(tmp_path / f"{step}")
        assert actual.keys() == expected.keys()
        assert all(torch.equal(actual[key], expected[key]) for key in expected)
