"""Apex's DistributedFusedAdam: its fragments load at any number of ranks, and its own state dicts are read.

The pickles in these do not run.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import Parameter

from megackpt import FormatError, MismatchError, load, save
from megackpt.contrib.apex import declare_gathered, load_sharded_state_dict, sharded_state_dict
from megackpt.errors import UnknownClassError
from megackpt.testing.world import SimulatedRank, SimulatedWorld
from megackpt.training.optim import join_master
from tests.support import fake_apex
from tests.support.fake_apex import (
    DISTRIBUTED,
    are_equal,
    declare,
    make_params,
    make_ranks,
    train,
    train_ranks,
)
from tests.support.optimizers import gather, loaded, scatter


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
