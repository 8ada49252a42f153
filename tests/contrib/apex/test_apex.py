"""Apex's optimizers: saved, loaded into new objects, and one step equals that of the uninterrupted run."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from megackpt import DeclarationError, MismatchError, ShardedTensor, load, save
from megackpt.contrib.apex import installed_apex, load_sharded_state_dict, sharded_state_dict
from megackpt.testing.ranks import RankPool
from megackpt.training.optim import MixedPrecisionOptimizer
from megackpt.training.parallel.attributes import mark
from megackpt.training.parallel.groups import ParallelGroups
from megackpt.training.parallel.layout import ParallelLayout
from tests.support import fake_apex
from tests.support.fake_apex import (
    SINGLE_PROCESS,
    are_equal,
    declare,
    groups_of,
    make_params,
    resume,
    train,
)
from tests.support.optimizers import gather

Build = Callable[[Any], Optimizer]


MASTERS = {"capturable": True, "master_weights": True}
# Optimizer, and dtype of the parameters.
WHOLE: dict[str, tuple[Build, torch.dtype]] = {
    "FusedAdam fp32": (fake_apex.FusedAdam, torch.float32),
    "FusedAdam bf16": (fake_apex.FusedAdam, torch.bfloat16),
    "FusedAdam masters": (partial(fake_apex.FusedAdam, **MASTERS), torch.float16),
    "FusedAdam unused masters": (partial(fake_apex.FusedAdam, **MASTERS), torch.bfloat16),
    "FusedAdagrad": (fake_apex.FusedAdagrad, torch.float32),
    "FusedSGD": (fake_apex.FusedSGD, torch.float32),
    "FusedLAMB": (fake_apex.FusedLAMB, torch.float32),
    "FusedNovoGrad": (fake_apex.FusedNovoGrad, torch.float32),
    "FusedMixedPrecisionLamb": (
        partial(fake_apex.FusedMixedPrecisionLamb, reduced_precision_dtype=torch.bfloat16),
        torch.bfloat16,
    ),
}


STOCK_DIFFERS = {"FusedAdam bf16", "FusedAdam masters", "FusedAdam unused masters", "FusedMixedPrecisionLamb"}
"""Whose masters are in no state dict, or whose float32 moments a stock load casts."""


def pair(name: str) -> tuple[list[Parameter], Any, list[Parameter], Any]:
    """Return parameters and their optimizer, and the same with other values."""
    build, dtype = WHOLE[name]
    params, fresh = make_params(0, dtype), make_params(1, dtype)
    return params, build(params), fresh, build(fresh)


def copy_weights(params: list[Parameter], into: list[Parameter]) -> None:
    for p, q in zip(into, params, strict=True):
        p.detach().copy_(q)


def masters_are_the_weights(optimizer: Any, params: list[Parameter]) -> bool:
    masters = optimizer.param_groups_master[0]["params"]
    return all(torch.equal(m, p.float()) for m, p in zip(masters, params, strict=True))


@pytest.mark.parametrize("name", WHOLE)
def test_a_step_after_a_load_equals_that_of_the_uninterrupted_run(name: str, tmp_path: Path) -> None:
    params, optimizer, fresh, resumed = pair(name)
    train(params, optimizer, range(5))
    resume(params, optimizer, tmp_path, fresh, resumed)
    assert are_equal(params, fresh)
    train(params, optimizer, range(5, 8))
    train(fresh, resumed, range(5, 8))
    assert are_equal(params, fresh)


def a_step_of_a_new_process(name: str, path: Path) -> list[Tensor]:
    _, _, params, optimizer = pair(name)
    model = declare(params)
    request = {"model": model, "optimizer": sharded_state_dict(optimizer, model, is_loading=True)}
    load_sharded_state_dict(optimizer, load(request, path)["optimizer"])
    train(params, optimizer, range(5, 6))
    return [p.detach() for p in params]


def test_one_step_in_a_new_process_equals_that_of_the_uninterrupted_run(
    rank_pool: RankPool, tmp_path: Path
) -> None:
    for name in WHOLE:
        params, optimizer, _, _ = pair(name)
        train(params, optimizer, range(5))
        model = declare(params)
        save({"model": model, "optimizer": sharded_state_dict(optimizer, model)}, tmp_path / name)
        train(params, optimizer, range(5, 6))
        ((*weights,),) = rank_pool.run(a_step_of_a_new_process, 1, name, tmp_path / name)
        assert all(weight.equal(p) for weight, p in zip(weights, params, strict=True)), name


@pytest.mark.parametrize("name", WHOLE)
def test_the_stock_way_differs_where_masters_or_moments_are_lost(name: str) -> None:
    """Why this integration exists: a state dict of torch, loaded into a new optimizer."""
    params, optimizer, fresh, resumed = pair(name)
    train(params, optimizer, range(5))
    copy_weights(params, fresh)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    train(params, optimizer, range(5, 8))
    train(fresh, resumed, range(5, 8))
    assert are_equal(params, fresh) == (name not in STOCK_DIFFERS)


def test_a_step_with_masters_of_construction_time_overwrites_loaded_weights() -> None:
    params, optimizer, fresh, resumed = pair("FusedAdam masters")
    train(params, optimizer, range(2))
    copy_weights(params, fresh)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    train(params, optimizer, range(2, 3))
    train(fresh, resumed, range(2, 3))
    assert float((params[2] - fresh[2]).detach().abs().max()) > 1  # they are near the weights of another seed


@pytest.mark.parametrize("capturable", [True, False])
def test_capturable_steps_and_rates_load_into_plain_ones_and_back(capturable: bool, tmp_path: Path) -> None:
    params, fresh = make_params(0, torch.float32), make_params(1, torch.float32)
    optimizer = fake_apex.FusedAdam(groups_of(params), capturable=not capturable)
    train(params, optimizer, range(2))
    resumed = fake_apex.FusedAdam(groups_of(fresh), capturable=capturable)
    resume(params, optimizer, tmp_path, fresh, resumed)
    assert [int(group["step"]) for group in resumed.param_groups] == [2, 2]
    rates = [float(group["lr"]) for group in resumed.param_groups]
    assert rates == pytest.approx([0.01, 0.003], rel=1e-6)  # a tensor has the float32 of it
    if capturable:
        assert resumed.param_groups[0]["step"].dtype == torch.int
        assert isinstance(resumed.param_groups[0]["lr"], Tensor)


def test_masters_that_the_kernel_ignores_are_stored_as_the_weights(tmp_path: Path) -> None:
    params, optimizer, fresh, resumed = pair("FusedAdam unused masters")
    train(params, optimizer, range(3))
    stale = optimizer.param_groups_master[0]["params"]
    assert not any(torch.equal(m, p.float()) for m, p in zip(stale, params, strict=True))
    resume(params, optimizer, tmp_path, fresh, resumed)
    assert masters_are_the_weights(resumed, params)


def test_without_stored_masters_those_of_construction_time_become_the_weights() -> None:
    params, optimizer, fresh, resumed = pair("FusedAdam masters")
    train(params, optimizer, range(1))
    state = sharded_state_dict(optimizer, declare(params))
    copy_weights(params, fresh)
    moments = {position: {"exp_avg": s["exp_avg"].data} for position, s in state["state"].items()}
    sharded_state_dict(resumed, declare(fresh), is_loading=True)
    load_sharded_state_dict(resumed, {**state, "state": moments})
    assert masters_are_the_weights(resumed, fresh)


def test_moments_that_a_stock_load_has_cast_get_their_dtype_again(tmp_path: Path) -> None:
    params, optimizer, fresh, resumed = pair("FusedAdam bf16")
    train(params, optimizer, range(2))
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert resumed.state[fresh[0]]["exp_avg"].dtype == torch.bfloat16
    resume(params, optimizer, tmp_path, fresh, resumed)
    for p, q in zip(params, fresh, strict=True):
        assert torch.equal(optimizer.state[p]["exp_avg"], resumed.state[q]["exp_avg"])


def test_groups_that_share_the_tensor_of_the_default_rate_get_their_own(tmp_path: Path) -> None:
    params, fresh = make_params(0, torch.float32), make_params(1, torch.float32)
    optimizer = fake_apex.FusedAdam(groups_of(params))
    resumed = fake_apex.FusedAdam([{"params": fresh[:2]}, {"params": fresh[2:]}], capturable=True)
    assert resumed.param_groups[0]["lr"] is resumed.param_groups[1]["lr"]
    train(fresh, resumed, range(1))
    resume(params, optimizer, tmp_path, fresh, resumed)
    rates = [float(group["lr"]) for group in resumed.param_groups]
    assert rates == pytest.approx([0.01, 0.003], rel=1e-6)
    assert not any("step" in group for group in resumed.param_groups)  # the saved one took none


def test_moments_and_masters_load_into_an_optimizer_of_megackpt(tmp_path: Path) -> None:
    params, other = make_params(0, torch.float16), make_params(1, torch.float16)
    optimizer = fake_apex.FusedAdam(params, **MASTERS)
    train(params, optimizer, range(3))
    model = declare(params)
    save({"model": model, "optimizer": sharded_state_dict(optimizer, model)["state"]}, tmp_path)
    whole = MixedPrecisionOptimizer(other, lambda g: torch.optim.Adam(g), SINGLE_PROCESS)
    model = declare(other)
    declared = whole.sharded_state_dict(model)["state"]
    request = {
        position: {name: entity for name, entity in states.items() if name != "step"}
        for position, states in declared.items()
    }
    state = load({"model": model, "optimizer": request}, tmp_path)
    whole.load_sharded_state_dict({"state": state["optimizer"]})
    for master, ours in zip(
        optimizer.param_groups_master[0]["params"], whole.param_groups[0]["params"], strict=True
    ):
        assert torch.equal(master, ours)


def test_the_norms_of_slices_are_stored_by_slice() -> None:
    world = []
    for rank in range(2):
        params = make_params(rank, torch.float32)
        mark(params[0], "tensor_model_parallel")
        optimizer = fake_apex.FusedNovoGrad(params)
        train(params, optimizer, range(1))
        model = declare(params)
        model["0"] = ShardedTensor.from_rank_offsets("p0", params[0], (0, rank, 2), replica_id=(0, 0, 0))
        for key in ("1", "2"):
            model[key] = ShardedTensor.from_rank_offsets(f"p{key}", params[int(key)], replica_id=(0, rank, 0))
        if not rank:
            with pytest.raises(DeclarationError, match=r"'p0'.*Pass the ParallelGroups"):
                sharded_state_dict(optimizer, model)
        groups = ParallelGroups.offline(ParallelLayout(tp=2), rank)
        world.append(sharded_state_dict(optimizer, model, groups=groups)["state"])
    arrays = gather(world)
    assert arrays["optimizer.state.exp_avg_sq.p0"].shape == (2,)
    assert arrays["optimizer.state.exp_avg_sq.p1"].shape == ()


def _with_amp(params: list[Parameter]) -> Any:
    optimizer: Any = fake_apex.FusedAdam(params)
    optimizer._amp_stash = type("Stash", (), {"fp32_from_fp16_groups": [params]})()
    return optimizer


def _strided(params: list[Parameter]) -> Any:
    strided = Parameter(torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last))
    optimizer: Any = fake_apex.DistributedFusedAdam([strided])
    optimizer._init_param_state = lambda *args: None
    return optimizer


class DistributedFusedLAMB(torch.optim.SGD):
    pass


@pytest.mark.parametrize(
    ("build", "reason"),
    [
        (fake_apex.FusedSGD, "no state for 3 of 3 parameters"),
        (fake_apex.FusedNovoGrad, "no state for 3 of 3 parameters"),
        (torch.optim.Adam, r"Adam is none of the optimizers of Apex.*megackpt\.training\.optim\.$"),
        (_with_amp, "_amp_stash"),
        (_strided, "not contiguous"),
        (DistributedFusedLAMB, "by the gradients of its first backward pass"),
    ],
)
def test_what_cannot_be_declared_is_an_error_with_the_reason(build: Any, reason: str) -> None:
    optimizer = build(make_params(0, torch.float32))
    with pytest.raises(DeclarationError, match=reason):
        sharded_state_dict(optimizer, declare(optimizer.param_groups[0]["params"]))


def test_groups_of_one_name_and_other_groups_are_errors() -> None:
    params = make_params(0, torch.float32)
    twice = [{**group, "name": "all"} for group in groups_of(params)]
    with pytest.raises(DeclarationError, match="Some are equal"):
        sharded_state_dict(fake_apex.FusedAdam(twice), declare(params))
    state = sharded_state_dict(fake_apex.FusedAdam(groups_of(params)), declare(params))
    with pytest.raises(MismatchError, match=r"groups \['0', '1'\] and this optimizer \['0'\]"):
        load_sharded_state_dict(fake_apex.FusedAdam(params), {**state, "param_group_of": {}})


def test_groups_without_names_are_matched_by_their_parameters(tmp_path: Path) -> None:
    """By position they would silently swap their learning rates."""
    params, fresh = make_params(0, torch.float32), make_params(1, torch.float32)
    optimizer = fake_apex.FusedAdam(groups_of(params))
    resumed = fake_apex.FusedAdam([{"params": fresh[2:]}, {"params": fresh[:2]}])
    resume(params, optimizer, tmp_path, fresh, resumed)
    assert [group["lr"] for group in resumed.param_groups] == [0.003, 0.01]
    others = fake_apex.FusedAdam([{"params": fresh[1:]}, {"params": fresh[:1]}])
    with pytest.raises(MismatchError, match="parameters of group 0 were saved in group 0 and group 1"):
        resume(params, optimizer, tmp_path, fresh, others)


@pytest.mark.parametrize(("folder", "whose"), [("multi_tensor_apply", "nvidia"), ("lib", "other")])
def test_the_installed_package_is_known_without_an_import(
    folder: str, whose: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("sys.path", [str(tmp_path)])
    assert installed_apex() is None
    (tmp_path / "apex" / folder).mkdir(parents=True)
    (tmp_path / "apex" / "__init__.py").write_text("raise RuntimeError('imported')")
    assert installed_apex() == whose
    params = make_params(0, torch.float32)
    with pytest.raises(DeclarationError) as caught:
        sharded_state_dict(torch.optim.Adam(params), declare(params))
    assert ("another project" in str(caught.value)) == (whose == "other")
