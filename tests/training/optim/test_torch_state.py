"""State dicts of torch optimizers, saved and loaded; groups are matched by name or by parameters.

The optimizers are those of the packages that people install, where these are installed and step on the CPU
(see test-optim in pyproject.toml).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import Parameter
from torch.optim import Optimizer

import megackpt
from megackpt import (
    DeclarationError,
    MismatchError,
    ShardedLayout,
    ShardedObject,
    ShardedTensor,
    ShardedTensorFactory,
    load,
    load_sharded_metadata,
    save,
)
from megackpt.entities import ShardedStateDict
from megackpt.training.optim import (
    DistributedOptimizer,
    MixedPrecisionOptimizer,
    get_param_id_to_sharded_param_map,
    initialise_state,
    optim_state_to_sharding_state,
    param_groups,
)
from megackpt.training.optim.param_groups import parse_param_groups, stored_group_names
from megackpt.training.optim.sharded_state import cuts_of_entity
from megackpt.training.parallel import ParallelGroups, ParallelLayout
from megackpt.training.parallel.groups import Axis
from tests.support.optimizers import SHAPES as MODEL_SHAPES
from tests.support.optimizers import SINGLE_PROCESS, gather, make_model, random_arrays
from tests.training.optim.test_optim_sharded_state import (
    Blocks,
    Factors,
    Norms,
    adafactor,
    assert_run_goes_on,
    declare,
    make_matrices,
    train,
)

# Shampoo makes a factor of 8192 x 8192 for the probe of a vector that our wrapper takes.
IN_WRAPPER = ["Adafactor of torch", "SOAP", "NovoGrad", "AdamW8bit", "Lion8bit"]


def of_package(package: str, name: str, **options: Any) -> Callable[[Any], Optimizer]:
    def build(params: Any) -> Optimizer:
        module = pytest.importorskip(package)
        optimizer: Optimizer = getattr(module, name)(params, lr=0.01, **options)
        return optimizer

    return build


OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "stand-in with factors": Factors,
    "stand-in with norms": Norms,
    "stand-in with blocks": Blocks,
    "Adafactor of torch": adafactor,
    "SOAP": of_package("pytorch_optimizer", "SOAP", precondition_frequency=2),
    "Shampoo": of_package("pytorch_optimizer", "Shampoo"),
    "NovoGrad": of_package("pytorch_optimizer", "NovoGrad"),
    "AdamW8bit": of_package("bitsandbytes.optim", "AdamW8bit"),
    "Lion8bit": of_package("bitsandbytes.optim", "Lion8bit"),
}


def sharded_state(params: list[Parameter], optimizer: Optimizer) -> ShardedStateDict:
    state, model = optimizer.state_dict(), declare(params)
    optim_state_to_sharding_state(state, get_param_id_to_sharded_param_map(model, params))
    return {"model": model, "optimizer": state}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_state_of_any_shape_goes_on_after_a_load(name: str, tmp_path: Path) -> None:
    params, fresh = make_matrices(0), make_matrices(1)
    optimizer, resumed = OPTIMIZERS[name](params), OPTIMIZERS[name](fresh)
    train(params, optimizer, range(3))
    save(sharded_state(params, optimizer), tmp_path)
    initialise_state(resumed)
    loaded = load(sharded_state(fresh, resumed), tmp_path)
    resumed.load_state_dict(copy.deepcopy(loaded["optimizer"]))
    train(params, optimizer, range(3, 6))
    train(fresh, resumed, range(3, 6))
    assert all(torch.equal(p, q) for p, q in zip(params, fresh, strict=True))


@pytest.mark.parametrize("name", IN_WRAPPER)
def test_real_packages_go_on_inside_of_our_wrapper(name: str, tmp_path: Path) -> None:
    kind = MixedPrecisionOptimizer
    assert_run_goes_on(kind, kind, OPTIMIZERS[name], tmp_path, saved_after=3)


def slice_of(rank: int, size: int, value: Any) -> ShardedStateDict:
    """Return the declared state of a square slice of one of `size` ranks of tp."""
    param = Parameter(torch.full((6, 6), float(rank)))
    model = {"w": ShardedTensor.from_rank_offsets("w", param, (0, rank, size), replica_id=(0, 0, 0))}
    state = {"state": {0: {"exp_avg": torch.zeros(6, 6), "step": torch.tensor(3.0), **value}}}
    state["param_groups"] = []
    optim_state_to_sharding_state(state, get_param_id_to_sharded_param_map(model, [param]))
    return state


def test_what_is_of_a_slice_has_an_axis_over_slices() -> None:
    factors = [[torch.full((6, 6), float(rank)), torch.ones(3)] for rank in range(2)]
    world = [slice_of(r, 2, {"GG": factors[r], "norm": torch.tensor(r + 0.5)}) for r in range(2)]
    arrays = gather(world)
    assert arrays["optimizer.state.exp_avg.w"].shape == (12, 6)
    assert arrays["optimizer.state.step.w"].shape == ()
    assert arrays["optimizer.state.GG.0.w"].shape == (2, 6, 6)  # of the slice, though it has its shape
    assert arrays["optimizer.state.GG.0.w"][:, 0, 0].tolist() == [0, 1]
    assert arrays["optimizer.state.norm.w"].tolist() == [0.5, 1.5]


def test_a_factor_of_a_square_parameter_is_known_by_those_of_the_others() -> None:
    params = make_matrices(0)[:4]
    state: Any = {
        "state": {i: {"left": torch.zeros(p.shape[0], p.shape[0])} for i, p in enumerate(params)},
        "param_groups": [],
    }
    model = {
        f"p{i}": ShardedTensor.from_rank_offsets(f"p{i}", p, (0, 1, 2), replica_id=(0, 0, 0))
        for i, p in enumerate(params)
    }
    optim_state_to_sharding_state(state, get_param_id_to_sharded_param_map(model, params))
    shapes = [state["state"][i]["left"].global_shape for i in range(4)]
    assert shapes == [(2, 6, 6), (2, 70, 70), (2, 3, 3), (2, 5, 5)]


def test_numbers_are_objects_of_their_slice_and_come_back_as_numbers(tmp_path: Path) -> None:
    state = slice_of(1, 2, {"k": 7, "beta": 0.5, "nothing": None})["state"][0]
    number = state["k"]
    assert isinstance(number, ShardedObject)
    assert (number.key, number.global_shape, number.global_offset) == ("optimizer.state.k.w", (2,), (1,))
    save(slice_of(0, 1, {"k": 7, "beta": 0.5, "nothing": None}), tmp_path)
    loaded = load(slice_of(0, 1, {"k": 0, "beta": 0.0, "nothing": None}), tmp_path)["state"][0]
    assert (loaded["k"], loaded["beta"], loaded["nothing"]) == (7, 0.5, None)
    assert type(loaded["k"]) is int


def test_another_number_of_slices_is_an_error(tmp_path: Path) -> None:
    save(slice_of(0, 1, {"GG": [torch.zeros(3)]}), tmp_path)
    with pytest.raises(MismatchError, match=r"optimizer\.state\.GG\.0\.w"):
        load({"GG": slice_of(0, 2, {"GG": [torch.zeros(3)]})["state"][0]["GG"]}, tmp_path)


def test_slices_of_different_sizes_are_an_error() -> None:
    param = Parameter(torch.zeros(3, 2))
    entity = ShardedTensor("w", param, torch.float32, (3, 2), (5, 2), (2, 0), replica_id=(0, 0, 0))
    state: Any = {"state": {0: {"rows": torch.zeros(9)}}, "param_groups": []}
    with pytest.raises(DeclarationError, match=r"'w': the optimizer state 'rows'.*different sizes"):
        optim_state_to_sharding_state(state, {0: entity})


def test_the_slices_of_a_fused_weight_are_those_of_its_most_cut_component() -> None:
    """With four ranks and two key heads, two ranks have the same keys and other queries."""
    positions = []
    for rank in range(4):
        groups = ParallelGroups.offline(ParallelLayout(tp=4), rank)
        world = make_model(groups, random_arrays(MODEL_SHAPES, 0), torch.float32)
        cuts = {p.entity.key: cuts_of_entity(p.entity) for p in world}
        positions.append(cuts["layers.kq"])
        assert cuts["layers.fc1"] == cuts["layers.fc2"] == [(rank, 4)]
        assert cuts["layers.norm"] == cuts["final"] == []
    assert positions == [[(rank, 4)] for rank in range(4)]


@pytest.mark.parametrize(("tp", "groups"), [(1, 4), (2, 2), (4, 1)])
def test_groups_of_queries_keys_and_values_that_alternate_are_one_slice(tp: int, groups: int) -> None:
    qkv = torch.zeros(4 * groups, 6)
    for rank in range(tp):
        entity = ShardedLayout.interleave("qkv", qkv, 0, {"q": 2, "k": 1, "v": 1}, (0, rank, tp))
        assert cuts_of_entity(entity) == ([(rank, tp)] if tp > 1 else [])


def test_boxes_with_a_gap_have_no_number() -> None:
    def rows(key: str, tensor: torch.Tensor, *_: Any) -> Any:
        return {
            first: ShardedTensor("w", tensor[:1], tensor.dtype, (1, 2), (8, 2), (first, 0))
            for first in (0, 2)
        }

    factory = ShardedTensorFactory("w", torch.zeros(2, 2), rows, lambda parts: parts)
    assert cuts_of_entity(factory) is None


def test_counters_in_groups_and_tensors_of_groups_do_not_change() -> None:
    class Fused(Factors):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            for group in self.param_groups:
                group["step"] = group.get("step", 0) + 1
                group["rate"] += 1
            super().step(closure)

    rate = torch.ones(1)
    optimizer = Fused(make_matrices(0))
    optimizer.param_groups[0]["rate"] = rate
    initialise_state(optimizer)
    assert optimizer.param_groups[0]["step"] == 0
    assert optimizer.param_groups[0]["rate"] is rate
    assert float(rate) == 1


# Of each group: names of its parameters, one letter each; its own name or "".
Sets = Sequence[tuple[str, str]]


def build(sets: Sets, *, lr: Sequence[float] = ()) -> tuple[DistributedOptimizer, ShardedStateDict]:
    model = nn.ParameterDict({name: torch.ones(3) for name in "abcd"})
    groups: list[dict[str, Any]] = []
    for members, name in sets:
        # All groups have equal options, so that these tell nothing.
        group = {"params": [model[m] for m in members], "lr": 0.5}
        groups.append(group | ({"name": name} if name else {}))
    optimizer = DistributedOptimizer(groups, lambda g: torch.optim.AdamW(g, lr=1.0), SINGLE_PROCESS)
    for group, value in zip(optimizer.param_groups, lr, strict=False):
        group["lr"] = value
    declared = {name: ShardedTensor.from_rank_offsets(name, p) for name, p in model.named_parameters()}
    return optimizer, {"model": declared, "optimizer": optimizer.sharded_state_dict(declared)}


def rates_after_load(saved: Sets, loading: Sets, directory: Path) -> list[float]:
    """Save groups with rates 0.1, 0.2, ..., load them into others and return the rates of those."""
    _, state = build(saved, lr=[0.1, 0.2, 0.3, 0.4])
    megackpt.save(state, directory)
    optimizer, request = build(loading)
    optimizer.load_sharded_state_dict(megackpt.load(request, directory)["optimizer"])
    return [group["lr"] for group in optimizer.param_groups]


@pytest.mark.parametrize(
    ("saved", "loading", "rates"),
    [
        ([("ab", ""), ("cd", "")], [("ab", ""), ("cd", "")], [0.1, 0.2]),
        ([("ab", ""), ("cd", "")], [("cd", ""), ("ab", "")], [0.2, 0.1]),
        ([("a", ""), ("b", ""), ("cd", "")], [("dc", ""), ("a", ""), ("b", "")], [0.3, 0.1, 0.2]),
        ([("ab", ""), ("cd", "x")], [("cd", "x"), ("ba", "")], [0.2, 0.1]),
        ([("ab", ""), ("", ""), ("cd", "")], [("cd", ""), ("", ""), ("ab", "")], [0.3, 0.2, 0.1]),
        ([("ab", "x"), ("cd", "y")], [("cd", "y"), ("ab", "x")], [0.2, 0.1]),
        ([("ab", "x"), ("cd", "y")], [("cd", "x"), ("ab", "y")], [0.1, 0.2]),
    ],
    ids=["same", "reordered", "rotated", "some_named", "an_empty_one", "named", "named_with_others"],
)
def test_groups_keep_their_hyperparameters(
    saved: Sets, loading: Sets, rates: list[float], tmp_path: Path
) -> None:
    assert rates_after_load(saved, loading, tmp_path) == rates


@pytest.mark.parametrize(
    ("saved", "loading", "match"),
    [
        (
            [("ab", ""), ("cd", "")],
            [("abc", ""), ("d", "")],
            r"parameters of group 0 were saved in group 0 and",
        ),
        (
            [("abc", ""), ("d", "")],
            [("ab", ""), ("c", ""), ("d", "")],
            r"groups 0 and 1 were saved in one .*0",
        ),
        ([("ab", "x"), ("cd", "")], [("ab", ""), ("cd", "x")], r"group 0 were saved in a named group"),
        ([("ab", ""), ("cd", "")], [("ab", ""), ("cd", "x")], r"only in the checkpoint: \['1'\], only here"),
    ],
    ids=["cut_differently", "one_becomes_two", "moved_from_a_name", "a_new_name"],
)
def test_groups_that_were_made_differently_are_rejected(
    saved: Sets, loading: Sets, match: str, tmp_path: Path
) -> None:
    with pytest.raises(MismatchError, match=match) as error:
        rates_after_load(saved, loading, tmp_path)
    assert "'name'" in str(error.value)


@pytest.mark.parametrize("loading", [[("ab", ""), ("cd", "")], [("ab", "0"), ("cd", "1")]])
def test_a_checkpoint_without_numbers_of_groups_is_loaded_by_position(loading: Sets, tmp_path: Path) -> None:
    # What older versions saved of groups without names is what named ones save today.
    assert rates_after_load([("ab", "0"), ("cd", "1")], loading, tmp_path) == [0.1, 0.2]


@pytest.mark.parametrize("sets", [[("abcd", "")], [("ab", "x"), ("cd", "y")]])
def test_numbers_of_groups_are_stored_only_where_groups_can_be_mistaken(sets: Sets, tmp_path: Path) -> None:
    _, state = build(sets)
    megackpt.save(state, tmp_path)
    assert not [key for key in load_sharded_metadata(tmp_path) if "param_group" in key]


def test_a_group_learns_from_other_stages_which_group_was_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here are parameters of the first group only, and on the other stage those of the second."""
    groups = parse_param_groups([{"params": [Parameter(torch.ones(1))]}, {"params": [], "lr": 0.1}])

    def from_both_stages(was_in: torch.Tensor, axis: Axis, op: Any) -> torch.Tensor:
        assert was_in.tolist() == [[0, 1, 0], [0, 0, 0]]
        return was_in + torch.tensor([[0, 0, 0], [1, 0, 0]])

    monkeypatch.setattr(param_groups, "all_reduce", from_both_stages)
    group: Any = "a group"
    names = stored_group_names(
        groups,
        {0: torch.tensor(1)},
        {"0": {}, "1": {}},
        pp=Axis.of([0, 1], 0, group),
        device=torch.device("cpu"),
    )
    assert names == {"0": "1", "1": "0"}
