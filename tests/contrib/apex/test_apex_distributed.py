"""Apex's DistributedFusedAdam: its fragments load at any number of ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.nn import Parameter

from megackpt import DeclarationError, ShardedTensor, load, save
from megackpt.integrations.apex import load_sharded_state_dict, sharded_state_dict
from megackpt.optim import join_master
from megackpt.testing.world import SimulatedRank, SimulatedWorld
from tests.support import fake_apex
from tests.support.apex_training import (
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
