"""Adapters on one rank: what they compute, what a checkpoint of them needs, and errors."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megackpt import CheckpointError, DeclarationError, load, save
from megackpt.training.parallel import (
    ColumnParallelLinear,
    ExpertStack,
    GatedExperts,
    LoRAConfig,
    ParallelGroups,
    ParallelLayout,
    ParallelRng,
    PlainExperts,
    RowParallelLinear,
    add_adapters,
    sharded_state_dict,
)
from megackpt.training.parallel.adapters import (
    adapter_parameters,
    adapter_state,
    base_state,
    merge_adapter,
    reset_magnitudes,
    set_active_adapters,
)
from megackpt.training.parallel.attributes import is_marked

ONE = ParallelGroups.create(ParallelLayout())


class Block(nn.Module):
    """A fused column layer, a row layer and a plain one, which do not depend on each other."""

    def __init__(self, groups: ParallelGroups = ONE) -> None:
        super().__init__()
        self.fc1 = ColumnParallelLinear(6, {"gate": 4, "up": 8}, groups)
        self.fc2 = RowParallelLinear(6, 4, groups)
        self.plain = nn.Linear(6, 4)
        with torch.no_grad():
            for param in self.parameters():
                param.copy_(torch.randn(param.shape, generator=torch.Generator().manual_seed(param.numel())))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {name: layer(x) for name, layer in self.named_children()}


def _with(*targets: str, name: str = "default", rank: int = 2, **choices: Any) -> Block:
    block = Block()
    add_adapters(block, LoRAConfig(rank=rank, targets=targets, **choices), ONE, name=name, seed=1)
    return block


def _random(model: nn.Module) -> None:
    with torch.no_grad():
        for number, param in enumerate(adapter_parameters(model)):
            generator = torch.Generator().manual_seed(number)
            param.copy_(torch.rand(param.shape, generator=generator) + 0.1)


def _product(model: nn.Module, path: str, rows: str = "whole") -> Tensor:
    pair = model.get_submodule(f"{path}.adapter.default.{rows}")
    return pair.linear_out.weight @ pair.linear_in.weight


X = torch.randn(3, 6, generator=torch.Generator().manual_seed(4))


@pytest.mark.parametrize(
    ("choices", "scale"),
    [({}, 1.0), ({"alpha": 8}, 4.0), ({"alpha": 8, "rank_stabilised": True}, 8 / 2**0.5)],
)
def test_an_adapter_adds_its_scaled_product(choices: dict[str, Any], scale: float) -> None:
    block = _with("fc1", "fc2", "plain", **choices)
    before = Block()(X)
    for name, output in block(X).items():
        assert torch.equal(output, before[name])  # B is 0
    _random(block)
    for name, output in block(X).items():
        torch.testing.assert_close(output, before[name] + scale * X @ _product(block, name).T)


def test_components_have_matrices_of_their_own_and_others_none() -> None:
    block = _with("fc1.up")
    _random(block)
    gate, up = block.fc1.split(block.fc1(X))
    first, second = block.fc1.split(Block().fc1(X))
    assert torch.equal(gate, first)
    torch.testing.assert_close(up, second + X @ _product(block, "fc1", "up").T)
    assert list(adapter_state(sharded_state_dict(block, ONE))) == [
        "fc1.adapter.default.up.linear_in.weight",
        "fc1.adapter.default.up.linear_out.weight",
    ]


def test_dora_scales_rows_to_its_magnitudes_and_starts_as_the_base() -> None:
    block = _with("fc1.gate", "fc2", dora=True)
    reset_magnitudes(block)
    before = Block()(X)
    for name, output in block(X).items():
        torch.testing.assert_close(output, before[name])
    _random(block)
    weight = block.fc2.weight + _product(block, "fc2")
    magnitude = block.fc2.adapter.default.whole.magnitude
    adapted = magnitude[:, None] * weight / weight.norm(dim=1, keepdim=True)
    torch.testing.assert_close(block.fc2(X), F.linear(X, adapted, block.fc2.bias))
    merge_adapter(block)
    torch.testing.assert_close(block.fc2.weight, adapted)
    assert adapter_parameters(block) == []


def test_several_adapters_are_added_and_can_be_switched_off() -> None:
    block = _with("fc2")
    add_adapters(block, LoRAConfig(rank=1, targets=("fc2",)), ONE, name="second")
    _random(block)
    base = Block().fc2(X)
    both = block.fc2(X) - base
    parts = []
    for name in ("default", "second"):
        set_active_adapters(block, [name])
        parts.append(block.fc2(X) - base)
    torch.testing.assert_close(both, parts[0] + parts[1])
    set_active_adapters(block, [])
    assert torch.equal(block.fc2(X), base)
    assert [p.requires_grad for p in block.parameters()].count(True) == 4


def test_dropout_drops_inputs_of_the_adapter_in_training_only() -> None:
    block = Block()
    config = LoRAConfig(rank=2, targets=("fc2",), dropout=0.5)
    with pytest.raises(DeclarationError, match=r"dropout of 0\.5 has no random stream"):
        add_adapters(block, config, ONE)
    assert all(p.requires_grad for p in block.parameters())  # nothing was changed
    add_adapters(block, config, ONE, rng=ParallelRng(1, ONE))
    _random(block)
    whole = Block().fc2(X) + X @ _product(block, "fc2").T
    assert not torch.allclose(block.fc2(X), whole)
    torch.testing.assert_close(block.eval().fc2(X), whole)


def test_a_config_is_the_same_after_json() -> None:
    config = LoRAConfig(rank=3, targets=("a", "b.c"), alpha=1.5, dora=True)
    assert LoRAConfig.from_json(config.to_json()) == config
    for wrong in (None, {"rank": 3}, {**config.to_json(), "depth": 1}):
        with pytest.raises(DeclarationError, match="is no stored LoRAConfig"):
            LoRAConfig.from_json(wrong)


def _add(module: nn.Module, target: str, rank: int = 2, groups: ParallelGroups = ONE, **choices: Any) -> None:
    name = choices.pop("name", "default")
    add_adapters(module, LoRAConfig(rank=rank, targets=(target,), **choices), groups, name=name)


TP2 = ParallelGroups.offline(ParallelLayout(tp=2), 0)
NEITHER = "neither dropout nor dora"


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (lambda: LoRAConfig(rank=0, targets=("fc1",)), "rank of an adapter is 0"),
        (lambda: LoRAConfig(rank=2, targets="linear_qkv"), "Give a tuple of names"),
        (lambda: LoRAConfig(rank=2, targets=()), "has no targets"),
        (lambda: LoRAConfig(rank=2, targets=("fc1",), dropout=1.0), r"Give a number in \[0, 1\)"),
        (lambda: _with("fc1", "fc9"), "ends with 'fc9'. Here are fc1, fc2, plain and their components"),
        (lambda: _with("fc1", "fc1.up"), "targets 'fc1.up', 'fc1' name the same rows of 'fc1'"),
        (lambda: _with("c1"), "ends with 'c1'"),
        (lambda: _with("fc1.down"), "ends with 'fc1.down'"),
        (lambda: _add(_with("fc1"), "fc2"), "has an adapter 'default' already"),
        (lambda: _add(_with("fc1"), "fc2", name="a.b"), r"'a\.b' cannot name an adapter"),
        (lambda: merge_adapter(_with("fc1"), "other"), "no adapter 'other'; it has default"),
        (lambda: _add(Block(TP2), "fc1", 3, TP2), r"rank of an adapter, 3 cannot be cut into tp=2"),
        (lambda: _add(GatedExperts(2, 6, 4, ONE), "linear_fc1", dropout=0.5), NEITHER),
        (lambda: _add(GatedExperts(2, 6, 4, ONE), "linear_fc1", dora=True), NEITHER),
    ],
)
def test_adapters_that_do_not_fit_are_an_error(act: Callable[[], object], message: str) -> None:
    with pytest.raises(DeclarationError, match=message):
        act()


def test_plain_experts_have_adapters_of_their_whole_rows() -> None:
    experts = PlainExperts(2, 6, 4, ONE, activation=torch.tanh)
    before = experts(X, [1, 2])
    add_adapters(experts, LoRAConfig(rank=2, targets=("linear_fc1",)), ONE)
    assert torch.equal(experts(X, [1, 2]), before)  # B is 0
    for name, param in experts.named_parameters():
        if ".linear_out." in name or "adapter" in name:
            nn.init.ones_(param)
    adapted = experts(X, [1, 2])
    assert not torch.equal(adapted, before)
    merge_adapter(experts)
    torch.testing.assert_close(experts(X, [1, 2]), adapted)


def test_experts_that_are_modules_have_adapters_with_an_axis_over_the_experts() -> None:
    experts = ExpertStack(lambda index: RowParallelLinear(6, 4, ONE.experts), 2, ONE)
    before = experts(X, [1, 2])
    add_adapters(nn.ModuleDict({"experts": experts}), LoRAConfig(rank=2, targets=("0", "1")), ONE)
    a, b = (experts.get_submodule(f"{n}.adapter.default.whole.linear_in").weight for n in (0, 1))
    assert not torch.equal(a, b)
    _random(experts)
    added = torch.cat([X[:1] @ _product(experts, "0").T, X[1:] @ _product(experts, "1").T])
    torch.testing.assert_close(experts(X, [1, 2]), before + added)
    entities = [e for name, e in sharded_state_dict(experts, ONE).items() if "linear_in" in name]
    assert [(e.key, e.global_shape, e.global_offset) for e in entities] == [
        ("adapter.default.whole.linear_in.weight", (2, 2, 6), (n, 0, 0)) for n in (0, 1)
    ]
    assert all(is_marked(p, "expert_parallel") for p in adapter_parameters(experts))


def test_a_base_without_adapters_is_loaded_whole_or_not_at_all(tmp_path: Path) -> None:
    save(sharded_state_dict(Block(), ONE), tmp_path / "base")
    block = _with("fc1")
    declared = sharded_state_dict(block, ONE)
    load(base_state(declared), tmp_path / "base", strict="raise_all")
    with pytest.raises(CheckpointError, match=r"fc1\.adapter\.default\.whole\.linear_in\.weight"):
        load(declared, tmp_path / "base")
    part = {key: entity for key, entity in base_state(declared).items() if key != "fc2.weight"}
    save(part, tmp_path / "part")
    with pytest.raises(CheckpointError, match=r"fc2\.weight"):
        load(base_state(declared), tmp_path / "part")


def test_an_adapter_of_another_rank_is_an_error_that_names_both_shapes(tmp_path: Path) -> None:
    save(adapter_state(sharded_state_dict(_with("fc2"), ONE)), tmp_path)
    with pytest.raises(
        CheckpointError,
        match=r"linear_in\.weight': stored as float32 \(2, 6\), asked for as float32 \(3, 6\)",
    ):
        load(adapter_state(sharded_state_dict(_with("fc2", rank=3), ONE)), tmp_path)
