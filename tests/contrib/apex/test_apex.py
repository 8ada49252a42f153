"""Apex's optimizers: saved, loaded into new objects, and one step equals that of the uninterrupted run."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import Optimizer

from megackpt import DeclarationError, MismatchError, ShardedTensor, load, save
from megackpt.integrations.apex import installed_apex, load_sharded_state_dict, sharded_state_dict
from megackpt.optim import MixedPrecisionOptimizer
from megackpt.parallel.attributes import mark
from megackpt.parallel.groups import ParallelGroups
from megackpt.parallel.layout import ParallelLayout
from tests.support import fake_apex
from tests.support.apex_training import (
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


# Optimizer, and dtype of the parameters.
WHOLE: dict[str, tuple[Build, torch.dtype]] = {
    "FusedAdam fp32": (lambda p: fake_apex.FusedAdam(p), torch.float32),
    "FusedAdam bf16": (lambda p: fake_apex.FusedAdam(p), torch.bfloat16),
    "FusedAdam masters": (
        lambda p: fake_apex.FusedAdam(p, capturable=True, master_weights=True),
        torch.float16,
    ),
    "FusedAdam unused masters": (
        lambda p: fake_apex.FusedAdam(p, capturable=True, master_weights=True),
        torch.bfloat16,
    ),
    "FusedAdagrad": (lambda p: fake_apex.FusedAdagrad(p), torch.float32),
    "FusedSGD": (lambda p: fake_apex.FusedSGD(p), torch.float32),
    "FusedLAMB": (lambda p: fake_apex.FusedLAMB(p), torch.float32),
    "FusedNovoGrad": (lambda p: fake_apex.FusedNovoGrad(p), torch.float32),
    "FusedMixedPrecisionLamb": (
        lambda p: fake_apex.FusedMixedPrecisionLamb(p, reduced_precision_dtype=torch.bfloat16),
        torch.bfloat16,
    ),
}


STOCK_DIFFERS = {"FusedAdam bf16", "FusedAdam masters", "FusedAdam unused masters", "FusedMixedPrecisionLamb"}
"""Whose masters are in no state dict, or whose float32 moments a stock load casts."""


@pytest.mark.parametrize("name", WHOLE)
def test_a_step_after_a_load_equals_that_of_the_uninterrupted_run(name: str, tmp_path: Path) -> None:
    build, dtype = WHOLE[name]
    params, fresh = make_params(0, dtype), make_params(1, dtype)
    optimizer, resumed = build(params), build(fresh)
    train(params, optimizer, range(5))
    model = declare(params)
    save({"model": model, "optimizer": sharded_state_dict(optimizer, model)}, tmp_path)

    model = declare(fresh)
    request = {"model": model, "optimizer": sharded_state_dict(resumed, model, is_loading=True)}
    load_sharded_state_dict(resumed, load(request, tmp_path)["optimizer"])
    assert are_equal(params, fresh)
    train(params, optimizer, range(5, 8))
    train(fresh, resumed, range(5, 8))
    assert are_equal(params, fresh)


@pytest.mark.parametrize("name", WHOLE)
def test_the_stock_way_differs_where_masters_or_moments_are_lost(name: str) -> None:
    """Why this integration exists: a state dict of torch, loaded into a new optimizer."""
    build, dtype = WHOLE[name]
    params, fresh = make_params(0, dtype), make_params(1, dtype)
    optimizer, resumed = build(params), build(fresh)
    train(params, optimizer, range(5))
    stored = copy.deepcopy(optimizer.state_dict())
    for p, q in zip(fresh, params, strict=True):
        p.detach().copy_(q)
    resumed.load_state_dict(stored)
    train(params, optimizer, range(5, 8))
    train(fresh, resumed, range(5, 8))
    assert are_equal(params, fresh) == (name not in STOCK_DIFFERS)


def test_a_step_with_masters_of_construction_time_overwrites_loaded_weights() -> None:
    build, dtype = WHOLE["FusedAdam masters"]
    params, fresh = make_params(0, dtype), make_params(1, dtype)
    optimizer, resumed = build(params), build(fresh)
    train(params, optimizer, range(2))
    for p, q in zip(fresh, params, strict=True):
        p.detach().copy_(q)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    train(params, optimizer, range(2, 3))
    train(fresh, resumed, range(2, 3))
    assert float((params[2] - fresh[2]).detach().abs().max()) > 1  # they are near the weights of another seed


def test_capturable_steps_and_rates_load_into_plain_ones_and_back(tmp_path: Path) -> None:
    for source, target in ((True, False), (False, True)):
        params, fresh = make_params(0, torch.float32), make_params(1, torch.float32)
        optimizer = fake_apex.FusedAdam(groups_of(params), capturable=source)
        train(params, optimizer, range(2))
        save({"optimizer": sharded_state_dict(optimizer, declare(params))}, tmp_path / str(source))
        resumed = fake_apex.FusedAdam(groups_of(fresh), capturable=target)
        request = sharded_state_dict(resumed, declare(fresh), is_loading=True)
        load_sharded_state_dict(resumed, load({"optimizer": request}, tmp_path / str(source))["optimizer"])
        assert [int(group["step"]) for group in resumed.param_groups] == [2, 2]
        rates = [float(group["lr"]) for group in resumed.param_groups]
        assert rates == pytest.approx([0.01, 0.003], rel=1e-6)  # a tensor has the float32 of it
        if target:
            assert resumed.param_groups[0]["step"].dtype == torch.int
            assert isinstance(resumed.param_groups[0]["lr"], Tensor)


def test_masters_that_the_kernel_ignores_are_stored_as_the_weights(tmp_path: Path) -> None:
    build, dtype = WHOLE["FusedAdam unused masters"]
    params, fresh = make_params(0, dtype), make_params(1, dtype)
    optimizer, resumed = build(params), build(fresh)
    train(params, optimizer, range(3))
    stale = optimizer.param_groups_master[0]["params"]  # type: ignore[attr-defined]
    assert not any(torch.equal(m, p.float()) for m, p in zip(stale, params, strict=True))
    resume(params, optimizer, tmp_path, fresh, resumed)
    masters = resumed.param_groups_master[0]["params"]  # type: ignore[attr-defined]
    assert all(torch.equal(m, p.float()) for m, p in zip(masters, params, strict=True))


def test_without_stored_masters_those_of_construction_time_become_the_weights() -> None:
    build, dtype = WHOLE["FusedAdam masters"]
    params, fresh = make_params(0, dtype), make_params(1, dtype)
    optimizer, resumed = build(params), build(fresh)
    train(params, optimizer, range(1))
    state = sharded_state_dict(optimizer, declare(params))
    for p, q in zip(fresh, params, strict=True):
        p.detach().copy_(q)
    moments = {position: {"exp_avg": s["exp_avg"].data} for position, s in state["state"].items()}
    sharded_state_dict(resumed, declare(fresh), is_loading=True)
    load_sharded_state_dict(resumed, {**state, "state": moments})
    masters = resumed.param_groups_master[0]["params"]  # type: ignore[attr-defined]
    assert all(torch.equal(m, p.float()) for m, p in zip(masters, fresh, strict=True))


def test_moments_that_a_stock_load_has_cast_get_their_dtype_again(tmp_path: Path) -> None:
    build, dtype = WHOLE["FusedAdam bf16"]
    params, fresh = make_params(0, dtype), make_params(1, dtype)
    optimizer, resumed = build(params), build(fresh)
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
    optimizer = fake_apex.FusedAdam(params, capturable=True, master_weights=True)
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


@pytest.mark.parametrize("build", [fake_apex.FusedSGD, fake_apex.FusedNovoGrad])
def test_state_that_does_not_start_at_zero_is_not_saved_before_the_first_step(build: Any) -> None:
    params = make_params(0, torch.float32)
    with pytest.raises(DeclarationError, match="no state for 3 of 3 parameters"):
        sharded_state_dict(build(params), declare(params))


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
    save({"optimizer": sharded_state_dict(optimizer, declare(params))}, tmp_path)
    resumed = fake_apex.FusedAdam([{"params": fresh[2:]}, {"params": fresh[:2]}])
    model = {str(i): ShardedTensor.from_rank_offsets(f"p{i}", p) for i, p in enumerate(fresh)}
    request = sharded_state_dict(resumed, model, is_loading=True)
    load_sharded_state_dict(resumed, load({"optimizer": request}, tmp_path)["optimizer"])
    assert [group["lr"] for group in resumed.param_groups] == [0.003, 0.01]
    others = fake_apex.FusedAdam([{"params": fresh[1:]}, {"params": fresh[:1]}])
    request = sharded_state_dict(others, model, is_loading=True)
    with pytest.raises(MismatchError, match="parameters of group 0 were saved in group 0 and group 1"):
        load_sharded_state_dict(others, load({"optimizer": request}, tmp_path)["optimizer"])


def test_what_is_not_apex_s_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    params = make_params(0, torch.float32)
    with pytest.raises(DeclarationError, match=r"Adam is none of the optimizers of Apex.*megackpt\.optim\.$"):
        sharded_state_dict(torch.optim.Adam(params), declare(params))
    optimizer = fake_apex.FusedAdam(params)
    optimizer._amp_stash = type("Stash", (), {"fp32_from_fp16_groups": [params]})()  # type: ignore[attr-defined]
    with pytest.raises(DeclarationError, match="_amp_stash"):
        sharded_state_dict(optimizer, declare(params))


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
