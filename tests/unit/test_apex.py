"""Apex's optimizers: saved, loaded into new objects, and one step equals that of the uninterrupted run."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from megackpt import (
    DeclarationError,
    FormatError,
    MismatchError,
    ShardedTensor,
    UnknownClassError,
    load,
    save,
)
from megackpt.integrations.apex import (
    declare_gathered,
    installed_apex,
    load_sharded_state_dict,
    sharded_state_dict,
)
from megackpt.mapping import ShardedStateDict
from megackpt.optim import MixedPrecisionOptimizer, join_master
from megackpt.parallel.attributes import mark
from megackpt.parallel.groups import ParallelGroups
from megackpt.parallel.layout import ParallelLayout
from megackpt.testing.world import SimulatedRank, SimulatedWorld
from tests import fake_apex
from tests.optim_world import gather, loaded, scatter

SHAPES = [(4, 6), (13,), (9, 10)]
SINGLE_PROCESS = ParallelGroups.offline(ParallelLayout(), 0)

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


def make_params(seed: int, dtype: torch.dtype) -> list[Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in SHAPES]


def groups_of(params: list[Parameter]) -> list[dict[str, Any]]:
    return [{"params": params[:2]}, {"params": params[2:], "lr": 0.003}]


def train(params: list[Parameter], optimizer: Optimizer, steps: range) -> None:
    for step in steps:
        set_grads(params, step)
        optimizer.step()


def set_grads(params: list[Parameter], step: int) -> None:
    generator = torch.Generator().manual_seed(100 + step)
    for p in params:
        p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)


def declare(params: list[Parameter], dp: int = 0) -> ShardedStateDict:
    return {
        str(i): ShardedTensor.from_rank_offsets(f"p{i}", p, replica_id=(0, 0, dp))
        for i, p in enumerate(params)
    }


def are_equal(a: list[Parameter], b: list[Parameter]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


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


def resume(
    params: list[Parameter], optimizer: Optimizer, path: Path, fresh: list[Parameter], into: Optimizer
) -> None:
    """Save one, and load it into the other."""
    model = declare(params)
    save({"model": model, "optimizer": sharded_state_dict(optimizer, model)}, path)
    model = declare(fresh)
    request = {"model": model, "optimizer": sharded_state_dict(into, model, is_loading=True)}
    load_sharded_state_dict(into, load(request, path)["optimizer"])


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


DISTRIBUTED: dict[str, dict[str, Any]] = {
    "float32 masters": {},
    "remainders": {"store_params": False, "store_param_remainders": True},
    "no masters": {"store_params": False},
    "bfloat16 states": {"dtype": torch.bfloat16},
}


def make_ranks(seed: int, size: int, name: str) -> tuple[list[list[Parameter]], list[Any]]:
    dtype = torch.float32 if name == "no masters" else torch.bfloat16
    params = [make_params(seed, dtype) for _ in range(size)]
    optimizers = [
        fake_apex.DistributedFusedAdam(groups_of(p), rank=rank, size=size, **DISTRIBUTED[name])
        for rank, p in enumerate(params)
    ]
    return params, optimizers


def train_ranks(params: list[list[Parameter]], optimizers: list[Any], steps: range) -> None:
    for step in steps:
        for p, optimizer in zip(params, optimizers, strict=True):
            set_grads(p, step)
            optimizer.step()
        fake_apex.share_params(optimizers)


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
    fresh, resumed = make_ranks(1, size, name)

    def load_rank(rank: SimulatedRank) -> None:
        model = declare(fresh[rank.rank], rank.rank)
        request = {
            "model": model,
            "optimizer": sharded_state_dict(resumed[rank.rank], model, is_loading=True),
        }
        load_sharded_state_dict(resumed[rank.rank], load(request, tmp_path, group=rank)["optimizer"])

    SimulatedWorld(size).run(load_rank)
    train_ranks(params, optimizers, range(4, 7))
    train_ranks(fresh, resumed, range(4, 7))
    assert all(are_equal(params[0], p) for p in fresh)


@pytest.mark.parametrize("name", ["float32 masters", "remainders"])
def test_a_state_dict_of_apex_s_own_is_saved_again_and_loads_at_other_ranks(
    name: str, tmp_path: Path
) -> None:
    params, (optimizer,) = make_ranks(0, 1, name)
    train_ranks(params, [optimizer], range(4))
    torch.save(optimizer.state_dict(), tmp_path / "apex.pt")
    stored = torch.load(tmp_path / "apex.pt", map_location="cpu", weights_only=True)
    model = declare(params[0])
    save({"model": model, "optimizer": declare_gathered(stored, params[0], model)}, tmp_path / "ours")
    fresh, resumed = make_ranks(1, 2, name)

    def load_rank(rank: SimulatedRank) -> None:
        model = declare(fresh[rank.rank], rank.rank)
        request = {"model": model, "optimizer": sharded_state_dict(resumed[rank.rank], model)}
        state = load(request, tmp_path / "ours", group=rank)
        load_sharded_state_dict(resumed[rank.rank], state["optimizer"])

    SimulatedWorld(2).run(load_rank)
    train_ranks(params, [optimizer], range(4, 6))
    train_ranks(fresh, resumed, range(4, 6))
    assert all(are_equal(params[0], p) for p in fresh)


@pytest.mark.parametrize("name", ["float32 masters", "remainders", "no masters"])
def test_pickled_states_of_all_ranks_are_saved_again_and_load_at_another_number(
    name: str, tmp_path: Path
) -> None:
    """Format 1 of Apex, which Apex itself reads at the same number of ranks only."""
    params, optimizers = make_ranks(0, 2, name)
    train_ranks(params, optimizers, range(4))
    with fake_apex.names_of_apex():
        torch.save(fake_apex.state_dict_of_format_1(optimizers), tmp_path / "apex.pt")
    stored = torch.load(tmp_path / "apex.pt", map_location="cpu", weights_only=True)
    model = declare(params[0])
    save({"model": model, "optimizer": declare_gathered(stored, params[0], model)}, tmp_path / "ours")
    fresh, resumed = make_ranks(1, 3, name)

    def load_rank(rank: SimulatedRank) -> None:
        model = declare(fresh[rank.rank], rank.rank)
        request = {"model": model, "optimizer": sharded_state_dict(resumed[rank.rank], model)}
        state = load(request, tmp_path / "ours", group=rank)
        load_sharded_state_dict(resumed[rank.rank], state["optimizer"])

    SimulatedWorld(3).run(load_rank)
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
    with pytest.raises(UnknownClassError, match=r"names pathlib\.Path"):
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


def test_remainders_are_stored_as_the_float32_masters() -> None:
    params, (optimizer,) = make_ranks(0, 1, "remainders")
    train_ranks(params, [optimizer], range(3))
    arrays = gather([sharded_state_dict(optimizer, declare(params[0]))["state"]])
    masters = arrays["optimizer.state.fp32_param.p0"]
    assert masters.dtype == torch.float32
    bucket = optimizer.state["buckets"][0]
    assert torch.equal(
        masters, join_master(params[0][0].detach(), bucket.param_remainders_shard[:24].view(4, 6))
    )
    assert not torch.equal(masters, params[0][0].float())


def test_halfway_cases_of_another_optimizer_get_the_weight_of_their_remainder() -> None:
    params, (optimizer,) = make_ranks(0, 1, "remainders")
    state = sharded_state_dict(optimizer, declare(params[0]))
    halfway = torch.full((24,), 1.00390625)  # torch rounds it down, the kernel up
    params[0][0].detach().view(-1).copy_(halfway)
    masters = {0: {"fp32_param.0": halfway}}
    load_sharded_state_dict(optimizer, {**state, "state": masters, "param_group_of": {}})
    remainders = optimizer.state["buckets"][0].param_remainders_shard[:24]
    assert torch.equal(join_master(params[0][0].detach().view(-1), remainders), halfway)


def test_the_scale_of_a_float16_fragment_is_the_same_when_it_is_scaled_again() -> None:
    """For every mantissa of its largest value; so codes and scales are exact at the same fragments."""
    largest_code = torch.tensor(torch.finfo(torch.float16).max / 2)
    largest = torch.arange(0x3F800000, 0x40000000, dtype=torch.int32).view(torch.float32)
    scale = largest / largest_code
    code = (largest * scale.reciprocal()).half()
    assert bool((code.float() == largest_code).all())
    assert torch.equal(code.float() * scale / largest_code, scale)


def test_distributed_lamb_is_an_error_with_the_reason() -> None:
    class DistributedFusedLAMB(torch.optim.SGD):
        pass

    params = make_params(0, torch.float16)
    with pytest.raises(DeclarationError, match="by the gradients of its first backward pass"):
        sharded_state_dict(DistributedFusedLAMB(params), declare(params))


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


def test_a_parameter_in_another_order_of_dims_is_an_error() -> None:
    param = Parameter(torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last))
    optimizer = fake_apex.DistributedFusedAdam([param])
    optimizer._init_param_state = lambda *args: None  # type: ignore[method-assign]
    with pytest.raises(DeclarationError, match="not contiguous"):
        sharded_state_dict(optimizer, {"p": ShardedTensor.from_rank_offsets("p", param)})
