"""Apex's optimizers: saved, loaded into new objects, and one step equals that of the uninterrupted run."""

from __future__ import annotations

import copy
import re
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from megackpt import DeclarationError, FormatError, MismatchError, ShardedTensor, load, save
from megackpt.contrib.apex import (
    declare_gathered,
    installed_apex,
    load_sharded_state_dict,
    sharded_state_dict,
)
from megackpt.errors import UnknownClassError
from megackpt.testing.world import SimulatedRank, SimulatedWorld
from megackpt.training.optim import MixedPrecisionOptimizer
from megackpt.training.parallel.attributes import mark
from megackpt.training.parallel.groups import ParallelGroups
from megackpt.training.parallel.layout import ParallelLayout
from tests.support import fake_apex
from tests.support.fake_apex import (
    DISTRIBUTED,
    SINGLE_PROCESS,
    are_equal,
    declare,
    groups_of,
    make_params,
    make_ranks,
    resume,
    train,
    train_ranks,
)
from tests.support.optimizers import gather, loaded, scatter

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


def test_ranks_of_a_redundant_group_have_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    world = []
    for rank in range(2):
        params, (optimizer,) = make_ranks(0, 1, "float32 masters")
        train_ranks(params, [optimizer], range(1))
        optimizer.redundant_size, optimizer.redundant_process_group = 2, "redundant"
        monkeypatch.setattr("torch.distributed.get_rank", lambda group, rank=rank: rank)
        world.append(sharded_state_dict(optimizer, declare(params[0], dp=rank)))
    arrays = gather([state["state"] for state in world])  # an error, if two ranks were to write an element
    assert arrays["optimizer.state.exp_avg.p2"].shape == (9, 10)


def resumed_at(size: int, name: str, path: Path) -> tuple[list[list[Parameter]], list[Any]]:
    """Return ranks of another seed that have loaded a checkpoint."""
    params, optimizers = make_ranks(1, size, name)

    def load_rank(rank: SimulatedRank) -> None:
        model = declare(params[rank.rank], rank.rank)
        optimizer = optimizers[rank.rank]
        request = {"model": model, "optimizer": sharded_state_dict(optimizer, model, is_loading=True)}
        load_sharded_state_dict(optimizer, load(request, path, group=rank)["optimizer"])

    SimulatedWorld(size).run(load_rank)
    return params, optimizers


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("name", DISTRIBUTED)
def test_fragments_load_at_any_number_of_ranks(name: str, size: int, tmp_path: Path) -> None:
    params, optimizers = make_ranks(0, 2, name)
    train_ranks(params, optimizers, range(4))

    def save_rank(rank: SimulatedRank) -> None:
        model = declare(params[rank.rank], rank.rank)
        state = {"model": model, "optimizer": sharded_state_dict(optimizers[rank.rank], model)}
        save(state, tmp_path, group=rank)

    SimulatedWorld(2).run(save_rank)
    assert optimizers[0].syncs == ["gradients", "parameters"]
    fresh, resumed = resumed_at(size, name, tmp_path)
    train_ranks(params, optimizers, range(4, 7))
    train_ranks(fresh, resumed, range(4, 7))
    assert all(are_equal(params[0], p) for p in fresh)


def test_the_scale_of_a_float16_fragment_is_the_same_when_it_is_scaled_again() -> None:
    """For every mantissa of its largest value; so codes and scales are exact at the same fragments."""
    largest_code = torch.tensor(torch.finfo(torch.float16).max / 2)
    largest = torch.arange(0x3F800000, 0x40000000, dtype=torch.int32).view(torch.float32)
    scale = largest / largest_code
    code = (largest * scale.reciprocal()).half()
    assert bool((code.float() == largest_code).all())
    assert torch.equal(code.float() * scale / largest_code, scale)


def test_scaled_states_are_stored_as_float32_and_scaled_again() -> None:
    """Exact only in the codes' precision: Apex scales by the largest value of the part that a rank has."""
    options = {"dtype": torch.float16, "with_scaled_states": True}
    params, fresh = make_params(0, torch.bfloat16), make_params(1, torch.bfloat16)
    optimizer = fake_apex.DistributedFusedAdam(params, **options)
    train(params, optimizer, range(3))
    arrays = gather([sharded_state_dict(optimizer, declare(params))["state"]])
    resumed = fake_apex.DistributedFusedAdam(fresh, **options)
    request = sharded_state_dict(resumed, declare(fresh))
    scatter(request["state"], arrays)
    load_sharded_state_dict(
        resumed, {"state": loaded(request["state"]), "param_groups": request["param_groups"], "step": 3}
    )
    again = gather([sharded_state_dict(resumed, declare(fresh))["state"]])
    for key, array in arrays.items():
        # Half of float16's last bit, relative to the largest value.
        torch.testing.assert_close(again[key], array, rtol=2**-11, atol=float(array.abs().max()) * 2**-24)
    assert resumed.state["step"] == 3  # type: ignore[comparison-overlap, index]


@pytest.mark.parametrize(
    ("name", "sizes", "is_pickled"),
    [
        ("float32 masters", (1, 2), False),
        ("remainders", (1, 2), False),
        ("float32 masters", (2, 3), True),
        ("remainders", (2, 3), True),
        ("no masters", (2, 3), True),
    ],
)
def test_a_state_dict_that_apex_has_saved_is_saved_again_and_loads_at_another_number_of_ranks(
    name: str, sizes: tuple[int, int], is_pickled: bool, tmp_path: Path
) -> None:
    """Format 1 has a pickle of each rank, and Apex itself reads it at the same number of ranks only."""
    params, optimizers = make_ranks(0, sizes[0], name)
    train_ranks(params, optimizers, range(4))
    with fake_apex.names_of_apex():
        gathered = fake_apex.state_dict_of_format_1(optimizers) if is_pickled else optimizers[0].state_dict()
        torch.save(gathered, tmp_path / "apex.pt")
    stored = torch.load(tmp_path / "apex.pt", map_location="cpu", weights_only=True)
    model = declare(params[0])
    save({"model": model, "optimizer": declare_gathered(stored, params[0], model)}, tmp_path / "ours")
    fresh, resumed = resumed_at(sizes[1], name, tmp_path / "ours")
    train_ranks(params, optimizers, range(4, 6))
    train_ranks(fresh, resumed, range(4, 6))
    assert all(are_equal(params[0], p) for p in fresh)


class Trap:
    """What a malicious file has in the place of a bucket."""

    def __reduce__(self) -> Any:
        return (Path.touch, (Path("was-run"),))


def test_bytes_that_name_another_class_are_rejected_and_nothing_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    params, (optimizer,) = make_ranks(0, 1, "float32 masters")
    train_ranks(params, [optimizer], range(1))
    model = declare(params[0])
    optimizer.state["buckets"].append(Trap())
    with fake_apex.names_of_apex():
        stored = fake_apex.state_dict_of_format_1([optimizer])
    with pytest.raises(UnknownClassError, match=rf"names {re.escape(Path.__module__)}\.Path"):
        declare_gathered(stored, params[0], model)
    assert not Path("was-run").exists()
    # Bytes that get something else of the outer class.
    optimizer.state["buckets"][-1] = OtherOfApex()
    with fake_apex.names_of_apex():
        stored = fake_apex.state_dict_of_format_1([optimizer])
    with pytest.raises(FormatError, match="a call of getattr"):
        declare_gathered(stored, params[0], model)


class OtherOfApex:
    def __reduce__(self) -> Any:
        outer = sys.modules["apex.contrib.optimizers.distributed_fused_adam"]
        return (getattr, (outer.DistributedFusedAdam, "__init__"))


def test_pickled_states_of_some_ranks_or_twice_are_an_error() -> None:
    params, optimizers = make_ranks(0, 2, "float32 masters")
    train_ranks(params, optimizers, range(1))
    with fake_apex.names_of_apex():
        stored = fake_apex.state_dict_of_format_1(optimizers)
    first, second = stored["gathered_states"]
    model = declare(params[0])
    for gathered in ([first], [first, second, second]):
        with pytest.raises(FormatError, match="elements are not in the state of exactly one rank"):
            declare_gathered({"format": 1, "gathered_states": gathered}, params[0], model)
    with pytest.raises(FormatError, match="of other parameters"):
        declare_gathered(stored, params[0][:2], model)


def test_other_state_dicts_of_apex_are_errors() -> None:
    params, (optimizer,) = make_ranks(0, 1, "remainders")
    train_ranks(params, [optimizer], range(1))
    stored, model = optimizer.state_dict(), declare(params[0])
    with pytest.raises(FormatError, match="has the format 1 and no 'gathered_states'"):
        declare_gathered({**stored, "format": 1}, params[0], model)
    with pytest.raises(MismatchError, match=r"\[24, 13, 90\] elements, and these are of \[24, 13\]"):
        declare_gathered(stored, params[0][:2], model)
