"""The distributed optimizer declares its ranges as parts of the arrays that its gathered form stores.

The optimizer here has the attributes of Megatron-Core's that `optimizer_ranges` reads. Megatron-Core's own is
compared with its gathered form in `megatron_ranges.py`, on two ranks.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from megackpt import DeclarationError, ShardedTensor, ShardedTensorFactory, load, save
from megackpt.contrib.megatron.optimizer_ranges import declare_ranges, save_ranges_in, take_ranges
from megackpt.entities import ShardedStateDict
from megackpt.testing.world import SimulatedWorld
from megackpt.training.optim import split_master
from tests.contrib.megatron.test_installing import needs_megatron
from tests.contrib.megatron.test_megatron_trainer import answers_of
from tests.support.effort import with_all
from tests.support.optimizers import gather, loaded, scatter, tensors_of

PADDING = 3  # elements after each parameter in the buffer, of no parameter
Declare = Callable[[str, Parameter, int, int, int], ShardedTensor | ShardedTensorFactory]


class Buffered:
    """One rank's optimizer: its share of a padded buffer that holds all parameters one after the other."""

    distributed_optimizer_instance_id = 0

    def __init__(self, params: list[Parameter], rank: int, ranks: int, dtype: torch.dtype) -> None:
        self.optimizer = SimpleNamespace()
        self.states: dict[Parameter, dict[str, Tensor]] = {}
        whole = sum(param.numel() + PADDING for param in params)
        share = -(-whole // ranks)
        ranges, position = {}, 0
        for param in params:
            first, last = position, position + param.numel()
            start, stop = max(first, rank * share), min(last, (rank + 1) * share)
            if start < stop:
                ranges[param] = {"param": SimpleNamespace(start=start - first, end=stop - first)}
                states = {name: torch.zeros(stop - start, dtype=dtype) for name in ("exp_avg", "exp_avg_sq")}
                self.states[param] = {"param": torch.zeros(stop - start), **states, "step": torch.tensor(3.0)}
            position = last + PADDING
        self.gbuf_ranges = [{torch.float32: [{"param_map": ranges}]}]

    def _get_main_param_and_optimizer_states(self, param: Parameter) -> dict[str, Tensor]:
        return dict(self.states[param])

    def _set_main_param_and_optimizer_states(self, param: Parameter, tensors: dict[str, Tensor]) -> None:
        for name, tensor in tensors.items():
            self.states[param][name].copy_(tensor)


def _rows(key: str, param: Parameter, tp_rank: int, tp: int, replica: int) -> ShardedTensor:
    return ShardedTensor.from_rank_offsets(key, param, (0, tp_rank, tp), replica_id=(0, 0, replica))


def _copied(key: str, param: Parameter, tp_rank: int, tp: int, replica: int) -> ShardedTensor:
    return ShardedTensor.from_rank_offsets(key, param, replica_id=(0, tp_rank, replica))


def _gate_and_up(key: str, param: Parameter, tp_rank: int, tp: int, replica: int) -> ShardedTensorFactory:
    """A stacked layer: both halves of the rows in one array, the gate of all ranks first."""

    def build(key: str, whole: Tensor, replica_id: Any, flat: slice | None) -> list[ShardedTensor]:
        assert flat is None, "Megatron-Core's function would cut a flat tensor in its middle"
        return [
            ShardedTensor.from_rank_offsets(
                key,
                half,
                (0, 0, 1),
                (1, number * tp + tp_rank, 2 * tp),
                replica_id=replica_id,
                prepend_axis_num=1,
            )
            for number, half in enumerate(whole.chunk(2))
        ]

    return ShardedTensorFactory(key, param, build, torch.cat, (0, 0, replica))


def _turned(key: str, param: Parameter, tp_rank: int, tp: int, replica: int) -> ShardedTensorFactory:
    """Two slabs of columns, each turned, under keys of their own, one of them by a factory in the factory."""

    def turn(key: str, whole: Tensor, replica_id: Any, flat: slice | None) -> ShardedTensor:
        return ShardedTensor.from_rank_offsets(key, whole.t(), (1, tp_rank, tp), replica_id=replica_id)

    def build(key: str, whole: Tensor, replica_id: Any, flat: slice | None) -> dict[str, Any]:
        left, right = whole.split([1, 3], dim=1)
        inner = ShardedTensorFactory(f"{key}.right", right, turn, Tensor.t, replica_id)
        return {"left": turn(f"{key}.left", left, replica_id, None), "right": inner}

    def join(parts: dict[str, Tensor]) -> Tensor:
        return torch.cat([parts["left"].t(), parts["right"]], dim=1)

    return ShardedTensorFactory(key, param, build, join, (0, 0, replica))


SHAPES: dict[str, tuple[tuple[int, ...], Declare]] = {
    "embedding": ((12, 3), _rows),
    "norm": ((5,), _copied),
    "fc1": ((16, 4), _gate_and_up),
    "turned": ((6, 4), _turned),
    "number": ((), _copied),
}


def _local_shape(key: str, tp: int) -> tuple[int, ...]:
    shape, declare = SHAPES[key]
    return shape if declare is _copied else (shape[0] // tp, *shape[1:])


def _rank(tp_rank: int, tp: int, dp_rank: int, dp: int, dtype: torch.dtype) -> tuple[Buffered, Any]:
    """Return one rank's optimizer, and the sharded state dict of its model."""
    params = {key: Parameter(torch.zeros(_local_shape(key, tp))) for key in SHAPES}
    model = {key: SHAPES[key][1](key, param, tp_rank, tp, dp_rank) for key, param in params.items()}
    return Buffered(list(params.values()), dp_rank, dp, dtype), model


def _world(tp: int, dp: int, dtype: torch.dtype) -> list[tuple[Buffered, Any]]:
    return [_rank(t, tp, d, dp, dtype) for t in range(tp) for d in range(dp)]


def _whole(name: str, tp: int) -> list[ShardedStateDict]:
    """Return what all ranks declare of one state in the gathered form: whole parameters."""
    states = []
    for rank in range(tp):
        _, model = _rank(rank, tp, 0, 1, torch.float32)
        key = f"optimizer.state.{name}."
        states.append(
            {k: e.retarget(key=key + e.key, data=torch.zeros(_local_shape(k, tp))) for k, e in model.items()}
        )
    return states


def _filled(states: list[ShardedStateDict], seed: int) -> dict[str, Tensor]:
    """Fill the tensors of all ranks from arrays; return these. Their values are exact in bfloat16."""
    shapes = {tensor.key: tensor.global_shape for tensor in tensors_of(states)}
    generator = torch.Generator().manual_seed(seed)
    arrays = {key: torch.randn(shapes[key], generator=generator).bfloat16().float() for key in sorted(shapes)}
    for state in states:
        scatter(state, arrays)
    return arrays


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("dp", [1, 2, 3, 7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_all_ranges_together_are_the_arrays_of_the_gathered_form(dtype: Any, dp: int, tp: int) -> None:
    world = _world(tp, dp, dtype)
    expected: dict[str, Tensor] = {}
    for name in ("param", "exp_avg", "exp_avg_sq"):
        expected |= _filled(_whole(name, tp), seed=len(name))
    for optimizer, model in world:
        declared = declare_ranges(optimizer, model)
        scatter(declared, expected)
        take_ranges(optimizer, {number: loaded(states) for number, states in declared.items()})
    arrays = gather([declare_ranges(optimizer, model) for optimizer, model in world])
    assert arrays.keys() == expected.keys()
    for key, array in arrays.items():
        assert array.dtype == torch.float32, "the gathered form stores float32"
        assert torch.equal(array, expected[key]), key


def _saved(tmp_path: Path, world: list[tuple[Buffered, Any]]) -> str:
    """Fill the state of all ranks by rank, and save it in a simulated world."""
    states = []
    for number, (optimizer, model) in enumerate(world):
        for param in optimizer.states.values():
            for name, tensor in param.items():
                tensor.fill_(number + len(name) / 16)
        states.append(declare_ranges(optimizer, model))
    path = str(tmp_path / "saved")
    SimulatedWorld(len(world)).run(lambda group: save(states[group.rank], path, group=group))
    return path


@pytest.mark.parametrize("dp", [1, 2, 5])
def test_a_load_at_another_size_reads_each_range_into_the_optimizer_s_own_memory(
    dp: int, tmp_path: Path
) -> None:
    path = _saved(tmp_path, _world(2, 3, torch.float32))
    world = _world(1, dp, torch.float32)
    requests = [declare_ranges(optimizer, model) for optimizer, model in world]
    results = SimulatedWorld(dp).run(lambda group: load(requests[group.rank], path, group=group))
    for (optimizer, _), result in zip(world, results, strict=True):
        memory = [t.data_ptr() for states in optimizer.states.values() for t in states.values()]
        take_ranges(optimizer, result)
        assert memory == [t.data_ptr() for states in optimizer.states.values() for t in states.values()]
    arrays = gather([declare_ranges(optimizer, model) for optimizer, model in world])
    wanted = {
        key: ShardedTensor.from_rank_offsets(key, torch.zeros_like(array)) for key, array in arrays.items()
    }
    stored = load(wanted, path)
    assert len(arrays) == 3 * (len(SHAPES) + 1), "of one parameter both slabs are stored"
    assert all(torch.equal(array, stored[key]) for key, array in arrays.items())


def test_a_load_into_host_memory_is_put_together() -> None:
    ((optimizer, model),) = _world(1, 1, torch.float32)
    declared = declare_ranges(optimizer, model)
    factory = next(e for states in declared.values() for e in states.values() if e.key.endswith("param.fc1"))
    elsewhere = [torch.full_like(part.data, number) for number, part in enumerate(factory.build())]
    assert factory.merge_fn(elsewhere).tolist() == [0.0] * 32 + [1.0] * 32


def _rejected_by_a_save(tmp_path: Path, optimizer: Buffered, model: ShardedStateDict) -> str:
    states = [declare_ranges(optimizer, model), {}]
    outcomes = SimulatedWorld(2).outcomes(
        lambda group: save(states[group.rank], tmp_path / "rejected", group=group)
    )
    assert all(isinstance(outcome, DeclarationError) for outcome in outcomes), outcomes
    assert not (tmp_path / "rejected" / "metadata.json").exists()
    return str(outcomes[0])


def test_what_has_no_ranges_is_rejected_on_every_rank_with_the_way_back(tmp_path: Path) -> None:
    optimizer, model = _rank(0, 1, 0, 1, torch.float32)
    way_back = "install(gather_optimizer=True)"
    copies = model["fc1"]
    build = copies.build_fn
    copies.build_fn = lambda key, whole, *rest: build(key, whole.clone(), *rest)
    text = _rejected_by_a_save(tmp_path, optimizer, model)
    assert "'optimizer.state.param.fc1': the factory of this parameter copies" in text
    assert way_back in text

    optimizer, model = _rank(0, 1, 0, 1, torch.float32)
    model["norm"].replica_id = 0
    text = _rejected_by_a_save(tmp_path, optimizer, model)
    assert "'norm': replica_id 0 does not have the three elements" in text
    assert way_back in text

    optimizer, model = _rank(0, 1, 0, 1, torch.float32)
    del model["norm"]
    text = _rejected_by_a_save(tmp_path, optimizer, model)
    assert "parameter of shape (5,) is in no entity" in text
    assert way_back in text

    optimizer, model = _rank(0, 1, 0, 1, torch.float32)
    del next(iter(optimizer.states.values()))["exp_avg_sq"]
    text = _rejected_by_a_save(tmp_path, optimizer, model)
    assert "the optimizer has no 'exp_avg_sq' for this parameter, but ['exp_avg', 'param', 'step']" in text


def _with_remainders(masters: Tensor, rank: int) -> tuple[Buffered, Parameter, slice]:
    """Return one of two ranks with Transformer Engine's masters: what the weights lack of float32."""
    weights, remainders = split_master(masters)
    param = Parameter(weights)
    optimizer = Buffered([param], rank, 2, torch.float32)
    ranges = optimizer.gbuf_ranges[0][torch.float32][0]["param_map"][param]["param"]
    owned = slice(ranges.start, ranges.end)
    optimizer.states[param]["param"] = remainders.reshape(-1)[owned]
    return optimizer, param, owned


def _declared(ranks: list[tuple[Buffered, Parameter, slice]]) -> list[Any]:
    return [declare_ranges(o, {"w": _copied("w", p, 0, 1, r)}) for r, (o, p, _) in enumerate(ranks)]


@pytest.mark.parametrize(
    ("form", "model_is_loaded_first"), [("masters", True), ("masters", False), ("remainders", True)]
)
def test_masters_are_stored_whole_where_the_optimizer_keeps_their_remainders(
    form: str, model_is_loaded_first: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Megatron-Core's own form stores the remainders as numbers, and needs the weights for them, too."""
    masters = torch.randn(16, 4, generator=torch.Generator().manual_seed(1))
    ranks = [_with_remainders(masters, rank) for rank in range(2)]
    arrays = gather(_declared(ranks))
    assert torch.equal(arrays["optimizer.state.param.w"], masters)
    if form == "remainders":
        arrays["optimizer.state.param.w"] = split_master(masters)[1].float()
    readers = [_with_remainders(masters * 0.7, rank) for rank in range(2)]
    for (reader, param, owned), (optimizer, weights, _) in zip(readers, ranks, strict=True):
        if model_is_loaded_first:
            param.data.copy_(weights)
        (declared,) = _declared([(reader, param, owned)])
        scatter(declared, arrays)
        take_ranges(reader, {number: loaded(states) for number, states in declared.items()})
        assert torch.equal(reader.states[param]["param"], optimizer.states[weights]["param"])
        assert torch.equal(param.view(-1)[owned], weights.view(-1)[owned])
    assert ("taken to be the remainders" in caplog.text) == (form == "remainders")


def test_other_states_are_stored_where_the_optimizer_names_them() -> None:
    optimizer, model = _rank(0, 1, 0, 1, torch.float32)
    optimizer.optimizer_state_keys = ("exp_avg",)  # as Lion's in Megatron-Core 0.19
    declared = declare_ranges(optimizer, model)
    assert all(list(states) == ["param", "exp_avg"] for states in declared.values())


def test_a_version_without_the_form_stays_and_one_without_a_method_stays_with_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    older = type("DistributedOptimizer", (), {})
    module: Any = ModuleType("distrib_optimizer")
    module.DistributedOptimizer = older
    save_ranges_in(module)
    assert not caplog.records
    assert not [name for name in vars(older) if "reshardable" in name]

    newer = type("DistributedOptimizer", (), {"sharded_param_state_fully_reshardable": print})
    module.DistributedOptimizer = newer
    with caplog.at_level(logging.WARNING):
        save_ranges_in(module)
    assert "has no DistributedOptimizer.load_parameter_state_from_fully_reshardable" in caplog.text
    assert newer.sharded_param_state_fully_reshardable is print


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory, megatron_core: None) -> dict[str, Any]:
    """What Megatron-Core's own optimizer has said on two ranks, see `megatron_ranges.py`."""
    answers: dict[str, Any] = answers_of("megatron_ranges.py", tmp_path_factory.mktemp("ranges"))
    return answers


def test_megatron_core_s_optimizer_sends_no_tensor(answers: dict[str, Any]) -> None:
    assert answers["elements sent by ranges at tp 1"] == 0
    assert answers["elements sent by gathered at tp 1"] > 0, "the gathered form is the one that gathers"


@pytest.mark.parametrize("backend", ["torch_dist", "megackpt"])
@pytest.mark.parametrize("tp", [1, 2])
def test_megatron_core_s_optimizer_stores_the_gathered_form(
    tp: int, backend: str, answers: dict[str, Any]
) -> None:
    difference = answers[f"difference at tp {tp} in {backend}"]
    assert difference["equal"], difference["text"]
    assert difference["compared"] == 27, "three states of nine arrays"


def test_either_form_is_read_as_either_at_another_size(answers: dict[str, Any]) -> None:
    elements = {name: count for name, count in answers.items() if " read as " in name}
    assert len(elements) == 12
    assert min(elements.values()) > 3000, "every element is compared with the oracle"


@pytest.mark.parametrize("fraction", [1.0, 0.5])
def test_optimizers_offloaded_to_the_host_save_and_load_ranges(
    fraction: float, answers: dict[str, Any]
) -> None:
    """Their parameter groups hold classes, and their states a step and the main parameter."""
    assert answers[f"elements sent by ranges with offload {fraction}"] == 0
    assert answers[f"equal with offload {fraction}"], answers[f"difference with offload {fraction}"]
    elements = [n for name, n in answers.items() if f" of offload {fraction} by " in name]
    assert len(elements) == 8, "either form, read as either, offloaded as before and otherwise"
    assert min(elements) > 3000


def test_ranges_have_no_padding_of_buckets(answers: dict[str, Any]) -> None:
    assert answers["buckets with padding"] > 1, "where Megatron-Core 0.16.1 itself stores shifted values"
    assert answers["padded buckets read at tp 1"] > 3000
    assert answers["padded buckets read at tp 2"] > 3000


EXACT = {"other weights": 2, "read from ranges": 0, "read from gathered": 0, "third step": 0}


@needs_megatron
@with_all("it starts Megatron-Core once more; what Muon declares is whole parameters, as in every save")
def test_muon_s_whole_parameters_resume_with_either_setting(tmp_path: Path) -> None:
    assert resumed_by(tmp_path) == {
        "muon": EXACT | {"equal after tp 2": True, "equal to gathered": True},
        "muon, layer-wise": EXACT | {"equal to gathered": True},
    }


def resumed_by(folder: Path, *transformer_engine: str) -> dict[str, Any]:
    """Return what two ranks of Megatron-Core answer, see `megatron_resumes.py`."""
    answers: dict[str, Any] = answers_of("megatron_resumes.py", folder, *transformer_engine)
    return answers
