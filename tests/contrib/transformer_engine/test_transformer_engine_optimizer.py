"""Optimizer state of Transformer Engine's parameters is the same at every layout, also if interleaved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megackpt import load, load_plain_tensors, save
from megackpt.contrib.transformer_engine import mark_parameters, sharded_state_dict
from megackpt.errors import OptimizerError
from megackpt.testing.world import SimulatedRank, SimulatedWorld
from megackpt.training.optim import DistributedOptimizer
from megackpt.training.parallel import ParallelGroups, ParallelLayout
from megackpt.training.parallel.attributes import is_marked
from tests.contrib.transformer_engine import te_models
from tests.contrib.transformer_engine.te_models import MODULES, ONE, build, needs_new, ranks_of, same
from tests.contrib.transformer_engine.test_transformer_engine_quantised import build_quantised, linear

LAYOUTS = [ParallelLayout(), ParallelLayout(tp=2, dp=2), ParallelLayout(dp=3), ParallelLayout(tp=4)]
EXPERT_LAYOUTS = [
    ParallelLayout(),
    ParallelLayout(dp=4, ep=2),
    ParallelLayout(dp=4, ep=4),
    ParallelLayout(tp=2, dp=2, ep=2, etp=2),
    ParallelLayout(dp=2, ep=1),
]
OTHERS = {
    "stack": te_models.layers,
    "experts": te_models.experts("column"),
    "grouped experts": te_models.grouped_experts,
}


NAMES = [
    "layer",
    "gated mlp",
    "linear split",
    "stack",
    "experts",
    pytest.param("grouped experts", marks=needs_new),
]


@pytest.mark.parametrize("name", NAMES)
def test_moments_are_the_same_at_every_layout(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NVTE_GROUPED_LINEAR_SINGLE_PARAM", "1")
    make = OTHERS.get(name) or MODULES[name]
    expected: dict[str, Any] = {}
    for step, layout in enumerate(EXPERT_LAYOUTS if "experts" in name else LAYOUTS):
        groups = ranks_of(layout)
        modules = [build(make, g, seed=step) for g in groups]
        for module, own in zip(modules, groups, strict=True):
            mark_parameters(module, own)
        optimizers = [
            DistributedOptimizer(m.parameters(), lambda p: torch.optim.AdamW(p, lr=1e-3), g)
            for m, g in zip(modules, groups, strict=True)
        ]
        if step == 0:
            torch.manual_seed(0)
            for state in optimizers[0].inner.state.values():
                state["exp_avg"].normal_()
                state["exp_avg_sq"].uniform_()

        def one_rank(group: SimulatedRank) -> None:
            optimizer = optimizers[group.rank]  # noqa: B023 - run at once
            model = sharded_state_dict(modules[group.rank], groups[group.rank])  # noqa: B023
            whole = {"model": model, "optimizer": optimizer.sharded_state_dict(model)}
            if step:  # noqa: B023
                loaded = load(whole, tmp_path / f"{step - 1}", group=group)  # noqa: B023
                optimizer.load_sharded_state_dict(loaded["optimizer"])
                whole["optimizer"] = optimizer.sharded_state_dict(model)
            save(whole, tmp_path / f"{step}", group=group)  # noqa: B023

        SimulatedWorld(layout.world_size).run(one_rank)
        actual = load_plain_tensors(tmp_path / f"{step}")
        expected = expected or actual
        assert same(actual, expected)
    moments = [key for key in expected if key.startswith("optimizer.state.exp_avg.")]
    assert len(moments) == sum(not key.startswith("optimizer.") for key in expected)
    assert all(expected[key].std() > 0.5 for key in moments)


@needs_new
def test_a_grouped_parameter_is_trained_in_its_own_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NVTE_GROUPED_LINEAR_SINGLE_PARAM", "1")
    module: Any = build(te_models.grouped_experts, ONE)
    mark_parameters(module, ONE)
    before = module.weight.rowwise_data.clone()
    optimizer = DistributedOptimizer(module.parameters(), lambda p: torch.optim.SGD(p, lr=0.5), ONE)
    module.weight.main_grad.fill_(1)
    module.weight.grad_added_to_main_grad = True
    optimizer.step()
    assert torch.equal(module.weight.rowwise_data, before - 0.5)
    # What the module computes with: views, which TE makes once.
    experts = module.weight.quantized_tensors or module.weight.split_into_quantized_tensors()
    assert torch.equal(torch.stack(experts).flatten(), before - 0.5)


def test_quantised_parameters_are_an_error() -> None:
    module = build_quantised(linear, ONE, "MXFP8BlockScaling", seed=1)
    with pytest.raises(OptimizerError, match="is a MXFP8Tensor, which has codes"):
        DistributedOptimizer(module.parameters(), lambda p: torch.optim.SGD(p, lr=0.5), ONE)


def test_marks_are_what_the_modules_are() -> None:
    groups = ParallelGroups.offline(ParallelLayout(tp=2, dp=2, ep=2, etp=2), 1)
    cut = {
        "linear": [],
        "linear column": ["weight", "bias"],
        "linear row": ["weight"],
        "norm and linear": ["weight", "bias"],
        "gated mlp": ["fc1_weight", "fc1_bias", "fc2_weight"],
        "gated mlp, whole": [],
    }
    for name, expected in cut.items():
        module = build(MODULES[name], groups)
        mark_parameters(module, groups)
        marked = [n for n, p in module.named_parameters() if is_marked(p, "tensor_model_parallel")]
        assert sorted(marked) == sorted(expected), name
        assert not any(is_marked(p, "expert_parallel") for p in module.parameters())
    experts = build(te_models.experts("row"), groups)
    mark_parameters(experts, groups)
    assert all(is_marked(p, "expert_parallel") for p in experts.parameters())
    assert is_marked(experts.get_parameter("weight0"), "tensor_model_parallel")
    assert not is_marked(experts.get_parameter("bias0"), "tensor_model_parallel")
