"""Masters in every form that optimizers keep them in, at every layout: the stored arrays are the same bits.

Each form at each layout is loaded from one set of arrays and declared again. All forms have the same keys, so
whatever one of them saved at one layout, any other loads at any other. Remainders of bf16 weights are exact
for every bit pattern.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from megackpt import DeclarationError, MismatchError, ShardedTensor, load, save
from megackpt.contrib import apex, offload
from megackpt.entities import ShardedStateDict
from megackpt.training.optim import (
    DistributedOptimizer,
    MixedPrecisionOptimizer,
    WholeMatrixOptimizer,
    declare_remainder_masters,
    join_master,
    restore_remainder_masters,
    split_master,
)
from megackpt.training.parallel import ParallelGroups, ParallelLayout
from megackpt.training.parallel.attributes import mark
from tests.support import fake_apex
from tests.support import optimizers as fake_offload
from tests.support.fake_apex import are_equal, declare, groups_of, make_params, train
from tests.support.optimizers import Arrays, gather, loaded, scatter

ROWS, COLUMNS = 12, 10
MASTER = "optimizer.state.fp32_param.weight"
LAYOUTS = [
    *(ParallelLayout(), ParallelLayout(dp=3), ParallelLayout(tp=2), ParallelLayout(tp=3, dp=2)),
    *(ParallelLayout(dp=2, ep=2), ParallelLayout(dp=6, ep=3)),
]
"""Where ep is larger than 1, the rows are experts."""

Declare = Callable[[ShardedStateDict], ShardedStateDict]
Restore = Callable[[Any], None]
Form = Callable[[Parameter, ParallelGroups], tuple[Declare, Restore]]


def of_wrapper(kind: Any) -> Form:
    def make(param: Parameter, groups: ParallelGroups) -> tuple[Declare, Restore]:
        optimizer = kind([param], lambda g: torch.optim.SGD(g, lr=0.1), groups)

        def declare(model: ShardedStateDict) -> ShardedStateDict:
            return {"state": optimizer.sharded_state_dict(model)["state"]}

        return declare, optimizer.load_sharded_state_dict

    return make


def remainders(param: Parameter, groups: ParallelGroups) -> tuple[Declare, Restore]:
    optimizer = RemainderSGD([param])
    return (
        lambda model: declare_remainder_masters(optimizer, model),
        lambda state: restore_remainder_masters(optimizer, state),
    )


def of_apex(build: Callable[[Parameter, ParallelGroups], Any]) -> Form:
    def make(param: Parameter, groups: ParallelGroups) -> tuple[Declare, Restore]:
        optimizer = build(param, groups)

        def restore(state: Any) -> None:
            settings = apex.sharded_state_dict(optimizer, {"weight": param_entity(param, groups)})
            apex.load_sharded_state_dict(optimizer, {**settings, **state})

        return lambda model: {"state": apex.sharded_state_dict(optimizer, model, True)["state"]}, restore

    return make


def fragments(param: Parameter, groups: ParallelGroups, **options: Any) -> Any:
    dp = groups.edp if groups.ep.size > 1 else groups.dp
    return fake_apex.DistributedFusedAdam(
        [param], rank=dp.rank, size=dp.size, default_shard_size=16, **options
    )


FORMS: dict[str, Form] = {
    "DistributedOptimizer": of_wrapper(DistributedOptimizer),
    "MixedPrecisionOptimizer": of_wrapper(MixedPrecisionOptimizer),
    "WholeMatrixOptimizer": of_wrapper(WholeMatrixOptimizer),
    "int16 remainders": remainders,
    "Apex FusedAdam": of_apex(lambda p, g: fake_apex.FusedAdam([p], capturable=True, master_weights=True)),
    "Apex fragments": of_apex(fragments),
    "Apex fragments of remainders": of_apex(
        lambda p, g: fragments(p, g, store_params=False, store_param_remainders=True)
    ),
}


def param_entity(param: Parameter, groups: ParallelGroups) -> ShardedTensor:
    cut, copies = (groups.ep, groups.edp) if groups.ep.size > 1 else (groups.tp, groups.dp)
    return ShardedTensor.from_rank_offsets(
        "weight", param, (0, cut.rank, cut.size), replica_id=(0, 0, copies.rank)
    )


def make_param(groups: ParallelGroups) -> Parameter:
    slices = groups.ep.size * groups.tp.size
    param = Parameter(torch.zeros(ROWS // slices, COLUMNS, dtype=torch.bfloat16))
    of_experts = ("expert_parallel", "stacked_experts")
    mark(param, *(of_experts if groups.ep.size > 1 else ("tensor_model_parallel",)))
    return param


def stored_arrays() -> Arrays:
    special = special_values()
    masters = torch.cat([special, random_patterns(ROWS * COLUMNS - len(special))]).view(ROWS, COLUMNS)
    return {"weight": masters.bfloat16(), MASTER: masters}


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_masters_are_the_same_bits_in_every_form_at_every_layout(form: str, layout: ParallelLayout) -> None:
    arrays, world = stored_arrays(), []
    for rank in range(layout.world_size):
        groups = ParallelGroups.offline(layout, rank)
        param = make_param(groups)
        model = {"weight": param_entity(param, groups)}
        declare, restore = FORMS[form](param, groups)
        scatter(model, arrays)
        request = only_masters(declare(model))
        scatter(request, arrays)
        restore(loaded(request))
        world.append(only_masters(declare(model)))
    (key, masters), *others = gather(world).items()
    assert not others
    assert key == MASTER
    assert torch.equal(masters.view(torch.int32), arrays[MASTER].view(torch.int32))


def only_masters(state: Any) -> Any:
    """Leave out moments and counts of steps."""
    if not isinstance(state, dict):
        return state
    kept = {key: only_masters(value) for key, value in state.items()}
    return {k: v for k, v in kept.items() if isinstance(v, dict) or v.key == MASTER}


SPECIAL = [
    *(0x00000000, 0x80000000),  # zeros of both signs
    *(0x00000001, 0x80000001, 0x00007FFF, 0x00008000, 0x0000FFFF, 0x007FFFFF, 0x807FFFFF),  # subnormals
    *(0x7F800000, 0xFF800000),  # infinities
    *(0x7F800001, 0xFF800001, 0x7F808000, 0x7FBFFFFF, 0x7FC00000, 0x7FFF8000, 0x7FFFFFFF, 0xFFFFFFFF),  # NaNs
    *(0x7F7FFFFF, 0xFF7FFFFF, 0x7F7F8000),  # the largest finite ones, whose weight is infinite
    *(0x3F808000, 0x3F818000, 0xBF808000, 0xBF818000),  # halfway between two bf16 values
    *(0x3F807FFF, 0x3F808001, 0x3F80FFFF, 0x3F810000),  # their neighbours
]


def special_values() -> Tensor:
    return torch.from_numpy(np.array(SPECIAL, dtype=np.uint32).view(np.float32))


def random_patterns(count: int) -> Tensor:
    bits = np.random.default_rng(7).integers(0, 2**32, count, dtype=np.uint32)
    return torch.from_numpy(bits.view(np.float32))


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view({2: torch.int16, 4: torch.int32}[tensor.itemsize])


def split_by_kernel_rule(pattern: int) -> tuple[int, int]:
    """The rule in Python's integers: the 16 bits of the weight, and those of the remainder."""
    low, high = pattern & 0xFFFF, pattern >> 16
    return (high + (low >= 0x8000)) % 0x10000, low


def test_ten_million_random_and_all_special_patterns_are_rebuilt_bit_for_bit() -> None:
    for masters in (random_patterns(10_000_000), special_values()):
        weight, remainder = split_master(masters)
        assert (weight.dtype, remainder.dtype) == (torch.bfloat16, torch.int16)
        assert torch.equal(bits(join_master(weight, remainder)), bits(masters))


def test_the_split_is_that_of_the_kernels() -> None:
    masters = torch.cat([special_values(), random_patterns(20_000)])
    weight, remainder = split_master(masters)
    expected = [split_by_kernel_rule(pattern) for pattern in bits(masters).numpy().view(np.uint32).tolist()]
    got = zip(bits(weight).numpy().view(np.uint16), remainder.numpy().view(np.uint16), strict=True)
    assert [(int(w), int(r)) for w, r in got] == expected


def shift_or(weight: Tensor, remainder: Tensor) -> Tensor:
    return ((bits(weight).int() << 16) | (remainder.int() & 0xFFFF)).view(torch.float32)


def torch_rounding(masters: Tensor) -> tuple[Tensor, Tensor]:
    return masters.bfloat16(), bits(masters).to(torch.int16)


@pytest.mark.parametrize(
    ("split", "join", "least_wrong"),
    [
        (split_master, shift_or, 0.49),  # wrong wherever the remainder is negative
        # Wrong for positive halfway cases with an even weight, which are 1 of 131072, and for some NaNs.
        (torch_rounding, join_master, 1e-6),
    ],
)
def test_the_obvious_rules_do_not_rebuild_the_masters(
    split: Callable[[Tensor], tuple[Tensor, Tensor]],
    join: Callable[[Tensor, Tensor], Tensor],
    least_wrong: float,
) -> None:
    for masters, share in ((random_patterns(1_000_000), least_wrong), (special_values(), 1e-9)):
        finite = masters[masters.isfinite()]
        wrong = bits(join(*split(finite))) != bits(finite)
        assert wrong.float().mean() > share


@pytest.mark.parametrize("shape", [(), (0,), (5,), (3, 4)])
def test_tensors_of_any_shape_are_split_in_place(shape: tuple[int, ...]) -> None:
    masters = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    weight, remainder = torch.zeros(shape, dtype=torch.bfloat16), torch.zeros(shape, dtype=torch.int16)
    assert split_master(masters, weight=weight, remainder=remainder) == (weight, remainder)
    rebuilt = torch.zeros(shape)
    assert join_master(weight, remainder, master=rebuilt) is rebuilt
    assert torch.equal(rebuilt, masters)


def test_a_transposed_master_is_split_like_a_contiguous_one() -> None:
    masters = torch.randn(4, 6, generator=torch.Generator().manual_seed(0)).T
    assert torch.equal(join_master(*split_master(masters)), masters)
    weight = torch.zeros(4, 6, dtype=torch.bfloat16).T
    assert torch.equal(split_master(masters, weight=weight)[0].contiguous(), split_master(masters)[0])
    assert torch.equal(join_master(weight, split_master(masters)[1]), masters)


@pytest.mark.parametrize(
    ("weight", "remainder"),
    [
        (torch.zeros(3), torch.zeros(3, dtype=torch.int16)),
        (torch.zeros(3, dtype=torch.bfloat16), torch.zeros(3)),
        (torch.zeros(3, dtype=torch.bfloat16), torch.zeros(2, dtype=torch.int16)),
    ],
)
def test_other_dtypes_and_shapes_are_errors(weight: Tensor, remainder: Tensor) -> None:
    with pytest.raises(MismatchError, match="int16 remainder"):
        join_master(weight, remainder)


class RemainderSGD(torch.optim.Optimizer):
    """Keeps int16 remainders in `master_param`, as Transformer Engine's FusedAdam does."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})
        for group in self.param_groups:
            for param in group["params"]:
                self.state[param]["master_param"] = torch.zeros(param.shape, dtype=torch.int16)

    def set_master(self, param: Tensor, master: Tensor) -> None:
        split_master(master, weight=param.detach(), remainder=self.state[param]["master_param"])

    def master(self, param: Tensor) -> Tensor:
        return join_master(param.detach(), self.state[param]["master_param"])


def make_remainders() -> tuple[Parameter, RemainderSGD]:
    param = Parameter(torch.zeros(ROWS, COLUMNS, dtype=torch.bfloat16))
    return param, RemainderSGD([param])


def test_masters_of_a_distributed_optimizer_become_remainders_and_the_reverse(tmp_path: Path) -> None:
    """Values that are halfway between two weights are among them: the two round these differently."""
    masters = stored_arrays()[MASTER]
    first, remainders = make_remainders()
    remainders.set_master(first, masters)
    declared_first = ShardedTensor.from_rank_offsets("weight", first)
    of_first = declare_remainder_masters(remainders, {"model": declared_first})
    save({"model": declared_first, "masters": of_first}, tmp_path / "remainders")

    param, _ = make_remainders()
    groups = ParallelGroups.create(ParallelLayout())
    whole = DistributedOptimizer([param], lambda g: torch.optim.SGD(g, lr=0.1), groups)
    model = ShardedTensor.from_rank_offsets("weight", param)
    declared = whole.sharded_state_dict({"model": model})["state"][0]["fp32_param"]
    state = load({"model": model, "master": declared}, tmp_path / "remainders")
    whole.load_sharded_state_dict({"state": {0: {"fp32_param": state["master"]}}})
    assert torch.equal(bits(whole.param_groups[0]["params"][0]), bits(masters.view(-1)))

    whole.sync_params()  # now the weights are torch's: halfway cases to even
    assert not torch.equal(bits(param.detach()), bits(split_master(masters)[0]))
    save({"model": model, "master": declared}, tmp_path / "float32")
    other, optimizer = make_remainders()
    entity = ShardedTensor.from_rank_offsets("weight", other)
    masters_of = declare_remainder_masters(optimizer, {"model": entity})
    restore_remainder_masters(
        optimizer, load({"m": entity, "masters": masters_of}, tmp_path / "float32")["masters"]
    )
    assert torch.equal(bits(optimizer.master(other)), bits(masters))


def test_weights_that_neither_rounding_gives_are_still_an_error(tmp_path: Path) -> None:
    param = Parameter(torch.ones(4, dtype=torch.bfloat16))
    whole = DistributedOptimizer(
        [param], lambda g: torch.optim.SGD(g, lr=0.1), ParallelGroups.create(ParallelLayout())
    )
    with pytest.raises(MismatchError, match=r"not the torch\.bfloat16 values"):
        whole.load_sharded_state_dict({"state": {0: {"fp32_param": torch.full((4,), 1.012)}}})


@pytest.mark.parametrize(
    ("stored", "asked"),
    [(torch.int16, torch.float32), (torch.float32, torch.int16), (torch.int16, torch.bfloat16)],
)
def test_a_load_does_not_cast_between_remainders_and_floats(
    stored: torch.dtype, asked: torch.dtype, tmp_path: Path
) -> None:
    key = "optimizer.state.fp32_param.weight"
    save({"master": ShardedTensor.from_rank_offsets(key, torch.zeros(3, dtype=stored))}, tmp_path)
    request = {"master": ShardedTensor.from_rank_offsets(key, torch.ones(3, dtype=asked))}
    with pytest.raises(MismatchError, match=r"fp32_param.weight"):
        load(request, tmp_path)


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
