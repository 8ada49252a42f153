"""Optimizers that update copies on the host: masters, settings, and what a load of the model alone loses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import Parameter

from megackpt import DeclarationError, load, save
from megackpt.contrib import offload
from tests.support import optimizers as fake_offload
from tests.support.fake_apex import are_equal, declare, groups_of, make_params, train

MAKE: dict[str, Any] = {
    "HybridDeviceOptimizer": lambda params: fake_offload.hybrid(params),
    "CPUOffloadOptimizer": lambda params: fake_offload.CPUOffload(params, minimal_size=20),
}


def make(name: str, seed: int) -> tuple[list[Parameter], Any]:
    params = make_params(seed, torch.bfloat16)
    return params, MAKE[name](params)


@pytest.mark.parametrize("name", MAKE)
def test_weights_of_construction_time_come_back_if_only_the_model_is_loaded(name: str) -> None:
    """Why this integration exists."""
    params, _ = make(name, 0)
    fresh, resumed = make(name, 1)
    with torch.no_grad():
        for p, q in zip(params, fresh, strict=True):
            q.copy_(p)
    train(fresh, resumed, range(1))
    # Each weight moves by the learning rate of 0.01 in the first step.
    assert max(float((p - q).detach().abs().max()) for p, q in zip(params, fresh, strict=True)) > 1


@pytest.mark.parametrize("name", MAKE)
def test_copies_without_a_stored_master_are_made_of_the_parameters(name: str) -> None:
    params, optimizer = make(name, 0)
    train(params, optimizer, range(1))
    fresh, resumed = make(name, 1)
    state = offload.sharded_state_dict(optimizer, declare(params))
    with torch.no_grad():
        for p, q in zip(params, fresh, strict=True):
            q.copy_(p)
    offload.sharded_state_dict(resumed, declare(fresh), is_loading=True)
    offload.load_sharded_state_dict(resumed, {**state, "state": {}})
    assert all(
        torch.equal(member.copy, member.param.to(member.copy.dtype))
        for member in offload._offloaded_params(resumed)
    )


def test_the_hybrid_optimizer_updates_parameters_on_both_sides() -> None:
    params, optimizer = make("HybridDeviceOptimizer", 0)
    train(params, optimizer, range(1))
    assert len(optimizer.cpu_optimizers) == 2
    assert len(offload._params(optimizer.gpu_optimizer)) == 1
    state = offload.sharded_state_dict(optimizer, declare(params))["state"]
    assert all(sorted(states) == ["exp_avg", "exp_avg_sq", "fp32_param", "step"] for states in state.values())


def test_settings_reach_the_inner_optimizers_and_those_of_offloading_are_not_stored() -> None:
    params, fresh = make_params(0, torch.bfloat16), make_params(1, torch.bfloat16)
    optimizer, resumed = fake_offload.hybrid(groups_of(params)), fake_offload.hybrid(groups_of(fresh))
    train(params, optimizer, range(1))
    for group in optimizer.param_groups:
        group["lr"] *= 3
    state = offload.sharded_state_dict(optimizer, declare(params))
    assert not {option for option in state["param_groups"]["0"] if "cpu" in option or "offload" in option}
    offload.sharded_state_dict(resumed, declare(fresh), is_loading=True)
    offload.load_sharded_state_dict(resumed, {**state, "param_group_of": {}, "state": {}})
    assert [group["lr"] for group in resumed.param_groups] == pytest.approx([0.03, 0.009])
    rates = {group["lr"] for inner in resumed.sub_optimizers for group in inner.param_groups}
    assert sorted(rates) == pytest.approx([0.009, 0.03])


def test_groups_of_single_parameters_are_stored_by_their_settings(tmp_path: Path) -> None:
    params, optimizer = make("CPUOffloadOptimizer", 0)
    train(params, optimizer, range(1))
    optimizer.param_groups[0]["lr"] = 0.5
    save({"optimizer": offload.sharded_state_dict(optimizer, declare(params))}, tmp_path)
    fresh, resumed = make("CPUOffloadOptimizer", 1)
    resumed.param_groups[0]["lr"] = 0.7
    request = offload.sharded_state_dict(resumed, declare(fresh), is_loading=True)
    offload.load_sharded_state_dict(resumed, load({"optimizer": request}, tmp_path)["optimizer"])
    assert [group["lr"] for group in resumed.param_groups] == [0.5, 0.01, 0.01]


def test_creating_state_changes_no_weights() -> None:
    for name in MAKE:
        params, optimizer = make(name, 0)
        offload.sharded_state_dict(optimizer, declare(params), is_loading=True)
        assert are_equal(params, make_params(0, torch.bfloat16))
        steps = [member.states()["step"] for member in offload._offloaded_params(optimizer)]
        assert all(step == 0 for step in steps)


def test_what_cannot_be_declared_is_an_error() -> None:
    params, optimizer = make("HybridDeviceOptimizer", 0)
    with pytest.raises(DeclarationError, match=r"no state for 3 of 3 parameters.*is_loading=True"):
        offload.sharded_state_dict(optimizer, declare(params))
    with pytest.raises(DeclarationError, match=r"Adam is neither Megatron-Core's.*megackpt\.training\.optim"):
        offload.sharded_state_dict(torch.optim.Adam(params), declare(params))
