"""Objects and plain values in a state dict, and the names of their paths."""

from __future__ import annotations

import logging
import re
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from megackpt import (
    KeyRule,
    LoadOptions,
    MismatchError,
    PerRankValue,
    ReplicatedValue,
    load,
    load_common_state_dict,
    load_sharded_metadata,
    load_with_report,
    save,
)
from megackpt.contrib.dcp import MegackptSavePlanner, MegackptStorageWriter
from megackpt.entities import (
    LocalNonpersistentObject,
    ReplicaId,
    ShardedLayout,
    ShardedObject,
    ShardedTensor,
    ShardedTensorFactory,
)
from megackpt.entities.sharded_object import UNKNOWN
from megackpt.errors import CheckpointError, DeclarationError
from megackpt.options import Policy, SaveOptions
from megackpt.testing.spmd import SpmdLayout
from megackpt.testing.world import SimulatedWorld
from tests.support.states import filled, replica
from tests.support.worlds import error_of_all, loading, saving

# --- unique keys


@pytest.mark.parametrize(
    "key", ["rng", "a_b.c", "a/b", "a/shard_0_1", "shard_", "x/shard_1.2_3.4/shard_0_1", "é\n/"]
)
@pytest.mark.parametrize(("shape", "offset"), [((1,), (0,)), ((2, 30), (1, 12)), ((), ())])
def test_an_object_is_found_again_from_its_unique_key(
    key: str, shape: tuple[int, ...], offset: tuple[int, ...]
) -> None:
    declared = ShardedObject(key, "value", shape, offset)
    actual = ShardedObject.empty_from_unique_key(declared.unique_key, replica_id=3)
    assert (actual.key, actual.global_shape, actual.global_offset) == (key, shape, offset)
    assert (actual.data, actual.replica_id) == (None, 3)


def test_an_old_unique_key_that_lacks_the_last_extent_leaves_it_unknown(tmp_path: Path) -> None:
    actual = ShardedObject.empty_from_unique_key("model/state/shard_0.3.1_2.4")
    assert (actual.key, actual.global_offset, actual.global_shape) == (
        "model/state",
        (0, 3, 1),
        (2, 4, UNKNOWN),
    )
    actual.data = "value"
    with pytest.raises(CheckpointError):
        save({"o": actual}, tmp_path / "c")


@pytest.mark.parametrize(
    "text", ["rng", "rng/shard_0", "/shard_0_1", "rng/shard_a_1", "rng/shard_0._1", "rng/shard_0_1 "]
)
def test_what_is_no_unique_key_raises_an_error_with_the_right_form(text: str) -> None:
    expected = f"{text!r}: this is not the unique key of an object: key/shard_OFFSET_SHAPE"
    with pytest.raises(DeclarationError, match=re.escape(expected)):
        ShardedObject.empty_from_unique_key(text)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"key": ""}, "the key of a ShardedObject must be a non-empty string"),
        ({"replica_id": 1.5}, "replica_id 1.5 must be an int or a tuple of ints"),
        (
            {"global_offset": (4,)},
            "global_offset (4,) does not lie in global_shape (4,). Give one offset per axis",
        ),
        ({"global_offset": (0, 0)}, "global_offset (0, 0) does not lie in global_shape (4,)"),
        ({"global_offset": (-1,)}, "global_offset (-1,) must not be negative"),
        (
            {"global_shape": (UNKNOWN, 4), "global_offset": (0, 0)},
            "global_shape (-1, 4) must not be negative",
        ),
    ],
)
def test_an_object_outside_of_its_array_raises_an_error(change: dict[str, Any], text: str) -> None:
    fields: dict[str, Any] = {"key": "o", "data": 1, "global_shape": (4,), "global_offset": (3,), **change}
    with pytest.raises(DeclarationError, match=re.escape(f"{fields['key']!r}: {text}")):
        ShardedObject(**fields)


def test_an_optimizer_state_cannot_be_sharded_like_an_object() -> None:
    message = r"'o': this is a ShardedObject; .* \('exp_avg.o'\) cannot be sharded"
    with pytest.raises(DeclarationError, match=message):
        ShardedObject("o", 1, (1,), (0,)).retarget(key="exp_avg.o", data=torch.zeros(2))


# --- factories


def halves(key: str, data: torch.Tensor, replica_id: ReplicaId, flat: slice | None) -> dict[str, Any]:
    """Store a `[4, 2]` tensor as the list of its halves, whole or flat, and its key as an object."""
    whole = ShardedLayout.split(key, torch.empty(4, 2), 0, {"upper": 2, "lower": 2})
    laid_out = whole.retarget(key=key, data=data, replica_id=replica_id, flattened_range=flat)
    return {"tensors": laid_out.tensors(), "key": ShardedObject(f"{key}.key", key, (1,), (0,), replica_id)}


def join(built: dict[str, Any]) -> torch.Tensor:
    return torch.cat(built["tensors"])


def test_a_factory_is_merged_from_what_it_built_in_lists_and_dicts(tmp_path: Path) -> None:
    w = torch.arange(8.0).reshape(4, 2)
    save({"w": ShardedTensorFactory("w", w, halves, join)}, tmp_path / "c")
    seen: list[dict[str, Any]] = []

    def merge(built: dict[str, Any]) -> torch.Tensor:
        seen.append(built)
        return join(built)

    loaded = load({"w": ShardedTensorFactory("w", torch.zeros(4, 2), halves, merge)}, tmp_path / "c")["w"]
    assert torch.equal(loaded, w)
    assert [set(built) for built in seen] == [{"tensors", "key"}]
    assert seen[0]["key"] == "w"
    assert [t.tolist() for t in seen[0]["tensors"]] == [w[:2].tolist(), w[2:].tolist()]


def test_a_load_report_has_what_a_factory_makes_of_stored_arrays(tmp_path: Path) -> None:
    w = torch.arange(8.0).reshape(4, 2)
    save({"w": ShardedTensorFactory("w", w, halves, join, how="joined")}, tmp_path / "c")
    asked = {
        "w": ShardedTensorFactory("w", torch.zeros(4, 2), halves, join, how="joined"),
        "v": ShardedTensorFactory("v", torch.zeros(4, 2), halves, join, how="joined"),
        "silent": ShardedTensorFactory("silent", torch.zeros(0), lambda *_: [], lambda _: None),
    }
    _, report = load_with_report(asked, tmp_path / "c", strict="log_unexpected")
    assert report.transformed == {"w": "joined"}  # not v, of which nothing is stored
    assert "transformed: 1 arrays, joined" in str(report)


def test_the_factory_of_a_parameter_serves_its_optimizer_state_whole_and_flat(tmp_path: Path) -> None:
    factory = ShardedTensorFactory("w", torch.zeros(4, 2), halves, join, replica_id=(0, 0, 0))
    moment = torch.arange(8, dtype=torch.float64).reshape(4, 2)
    save({"m": factory.retarget(key="exp_avg.w", data=moment)}, tmp_path / "c")
    shard = factory.retarget(
        key="exp_avg.w",
        data=torch.zeros(4, dtype=torch.float64),
        flattened_range=slice(3, 7),
        replica_id=(0, 0, 1),
    )
    assert [t.flattened_range for t in shard.build()["tensors"]] == [slice(3, 4), slice(0, 3)]
    assert [t.replica_id for t in shard.build()["tensors"]] == [(0, 0, 1)] * 2
    assert load({"m": shard}, tmp_path / "c")["m"].tolist() == [3, 4, 5, 6]


def test_factories_are_merged_innermost_first_and_once_each(tmp_path: Path) -> None:
    order: list[str] = []

    def leaf(name: str, data: torch.Tensor) -> ShardedTensorFactory:
        def merge(built: list[torch.Tensor]) -> torch.Tensor:
            order.append(name)
            return built[0].neg_()  # in place: twice would undo it

        return ShardedTensorFactory(
            name, data, lambda k, t, r, _: [ShardedTensor.from_rank_offsets(k, -t, replica_id=r)], merge
        )

    def middle(k: str, t: torch.Tensor, r: ReplicaId, _: slice | None) -> dict[str, Any]:
        return {"a": leaf(f"{k}.a", t[:1]), "b": [leaf(f"{k}.b", t[1:])]}

    def merge_middle(built: dict[str, Any]) -> torch.Tensor:
        order.append("middle")
        return torch.cat([built["a"], *built["b"]])

    def merge_outer(built: list[torch.Tensor]) -> torch.Tensor:
        order.append("outer")
        return built[0]

    def outer(data: torch.Tensor) -> ShardedTensorFactory:
        inner = lambda k, t, r, f: [ShardedTensorFactory(f"{k}.in", t, middle, merge_middle, r, f)]  # noqa: E731
        return ShardedTensorFactory("w", data, inner, merge_outer)

    w = torch.arange(3.0)
    save({"w": outer(w)}, tmp_path / "c")
    assert torch.equal(load({"w": outer(torch.zeros(3))}, tmp_path / "c")["w"], w)
    assert order == ["w.in.a", "w.in.b", "middle", "outer"]


def test_a_factory_may_build_one_entity_or_a_layout_that_loads_in_place(tmp_path: Path) -> None:
    def build(k: str, t: torch.Tensor, r: ReplicaId, _: slice | None) -> ShardedLayout:
        return ShardedLayout.transpose(k, t, (1, 0), replica_id=r)

    w, target = torch.arange(6.0).reshape(2, 3), torch.zeros(2, 3)
    save({"w": ShardedTensorFactory("w", w, build, lambda t: t)}, tmp_path / "c")
    assert load({"w": ShardedTensorFactory("w", target, build, lambda t: t)}, tmp_path / "c")["w"] is target
    assert torch.equal(target, w)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"build_fn": None}, "'w': build_fn must be a function, not None"),
        ({"merge_fn": None}, "'w': merge_fn must be a function, not None"),
        ({"key": ""}, "the key of a ShardedTensorFactory must be a non-empty string"),
    ],
)
def test_a_factory_needs_a_key_and_functions(change: dict[str, Any], message: str) -> None:
    fields: dict[str, Any] = {"key": "w", "data": None, "build_fn": halves, "merge_fn": join}
    with pytest.raises(DeclarationError, match=message):
        ShardedTensorFactory(**fields | change)


# --- values that are not stored, and lists that hold all kinds


def test_a_list_of_common_sharded_and_local_elements_comes_back_as_it_was_and_integer_keys_too(
    tmp_path: Path,
) -> None:
    def state(value: int, local: str) -> dict[str, Any]:
        own = LocalNonpersistentObject(local)
        mixed = [value, filled(value, 2), own, {"deep": [None, own]}, []]
        return {"list": mixed, "params": {0: value, 1: filled(value, 2, key="params")}}

    save(state(1, "saver"), tmp_path / "c")
    loaded = load(state(2, "loader"), tmp_path / "c")
    first, w, local, deep, empty = loaded["list"]
    assert (first, w.tolist(), local, deep, empty) == (1, [1, 1], "loader", {"deep": [None, "loader"]}, [])
    assert isinstance(loaded["params"], dict)
    assert (loaded["params"][0], loaded["params"][1].tolist()) == (1, [1, 1])


def test_an_object_stored_in_an_array_of_another_shape_is_an_error_or_kept(tmp_path: Path) -> None:
    save({"o": ShardedObject("o", "stored", (1,), (0,))}, tmp_path / "c")
    message = r"'o': stored as object \(1,\)(.|\n)*Objects are never resharded"
    with pytest.raises(MismatchError, match=message):
        load({"o": ShardedObject("o", "mine", (2,), (1,))}, tmp_path / "c")
    for shape, expected in [((2,), "mine"), ((1, 1), "mine"), ((1,), "stored")]:
        asked = ShardedObject("o", "mine", shape, (0,) * len(shape), elsewhere="keep")
        assert load({"o": asked}, tmp_path / "c") == {"o": expected}


def test_per_rank_values_are_never_merged_and_come_back_to_their_ranks(tmp_path: Path) -> None:
    def state_of(rank: int) -> dict[str, Any]:
        rng = PerRankValue("rng", torch.tensor([rank]))
        return {"seed": PerRankValue("seed", 7), "rng": rng, "step": 3}

    def blank(rank: int) -> dict[str, Any]:
        return {"seed": PerRankValue("seed", None), "rng": PerRankValue("rng", None)}

    SimulatedWorld(3).run(saving(state_of, tmp_path))
    assert len([key for key in load_sharded_metadata(tmp_path) if key.startswith("seed/")]) == 3
    for rank, loaded in enumerate(SimulatedWorld(3).run(loading(blank, tmp_path))):
        assert loaded == {"seed": 7, "rng": torch.tensor([rank]), "step": 3}


def test_per_rank_values_on_another_number_of_ranks_are_an_error_or_kept(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    SimulatedWorld(4).run(saving(lambda rank: {"rng": PerRankValue("rng", rank)}, tmp_path / "c"))
    message = r"'rng' was stored for each of \(4,\) ranks and this job has 1.*keep"
    with pytest.raises(MismatchError, match=message):
        load({"rng": PerRankValue("rng", "mine")}, tmp_path / "c")
    with caplog.at_level(logging.WARNING):
        assert load({"rng": PerRankValue("rng", "mine", elsewhere="keep")}, tmp_path / "c") == {"rng": "mine"}
    assert "every rank keeps its own value" in caplog.text


def test_a_replicated_value_is_stored_once_from_whichever_ranks_hold_it(tmp_path: Path) -> None:
    def on_the_last_two(rank: int) -> dict[str, Any]:
        return {"stage": {"table": ReplicatedValue("table", {"b": 1, "a": [2]})}} if rank else {}

    SimulatedWorld(3).run(saving(on_the_last_two, tmp_path / "c"))
    assert list(load_sharded_metadata(tmp_path / "c")) == ["table/shard_0_1"]
    assert load({"here": ReplicatedValue("table", None)}, tmp_path / "c") == {"here": {"b": 1, "a": [2]}}
    assert load_common_state_dict(tmp_path / "c") == {}


def test_replicated_values_that_differ_are_named_with_the_ranks(tmp_path: Path) -> None:
    def state_of(rank: int) -> dict[str, Any]:
        value = {"lr": 0.1 if rank < 2 else 0.2}
        return {"v": ReplicatedValue("v", value), "same": ReplicatedValue("same", 1)}

    error = error_of_all(3, saving(state_of, tmp_path), MismatchError)
    assert "'v': ranks 0, 1 and ranks 2 hold different values" in str(error)
    assert "same" not in str(error)
    assert error.key == "v"


def test_without_validation_all_kinds_are_stored_too(tmp_path: Path) -> None:
    def state(rank: int, value: float) -> dict[str, Any]:
        return {
            "w": filled(value * (rank + 1), 3, rank=rank, ranks=3),
            "s": replica(value, 2, key="s", rank=rank),
            "many": [filled(value, 2, key=f"many{i}", rank=rank, ranks=3) for i in range(200)],
            "r": ReplicatedValue("r", 5),
            "p": PerRankValue("p", rank),
            "c": 1,
        }

    for validate in (True, False):
        directory = tmp_path / str(validate)
        save_rank = saving(partial(state, value=1.0), directory, validate_access_integrity=validate)
        SimulatedWorld(3).run(save_rank)
        load_rank = loading(partial(state, value=0.0), directory)
        for rank, loaded in enumerate(SimulatedWorld(3).run(load_rank)):
            assert loaded["w"].tolist() == [rank + 1.0] * 3
            assert loaded["s"].tolist() == [1.0, 1.0]
            assert (loaded["r"], loaded["p"], loaded["c"]) == (5, rank, 1)
            assert all(t.tolist() == [1.0, 1.0] for t in loaded["many"])


@pytest.mark.parametrize("format", ["megackpt", "torch_dist", "zarr"])
def test_a_tied_weight_under_two_names_is_stored_and_loaded_under_both(tmp_path: Path, format: str) -> None:
    weight = torch.arange(6.0).reshape(2, 3)
    state = {"embedding": {"weight": weight}, "output": {"weight": weight, "rows": weight[1:]}}
    save(state, tmp_path / "c", format)
    tied = torch.zeros(2, 3)
    apart = torch.zeros(2, 3)
    load({"embedding": {"weight": tied}, "output": {"weight": tied}}, tmp_path / "c")
    assert torch.equal(tied, weight)
    load({"output": {"weight": apart, "rows": torch.zeros(1, 3)}}, tmp_path / "c")
    assert torch.equal(apart, weight)


ONE, TWO = torch.full((3,), 1.0), torch.full((3,), 2.0)
HALVES = SpmdLayout((2, 1), 2, (0, 1, 2, 3), 1)


def zeros(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {key: zeros(child) for key, child in tree.items()}
    return [zeros(child) for child in tree] if isinstance(tree, list) else torch.zeros_like(tree)


def tensors(tree: Any) -> list[torch.Tensor]:
    if isinstance(tree, (dict, list)):
        return [t for child in (tree.values() if isinstance(tree, dict) else tree) for t in tensors(child)]
    return [tree]


@pytest.mark.parametrize(
    "state",
    [
        {"a.b": ONE, "a": {"b": TWO}},
        {0: ONE, "0": TWO},
        {"x": [ONE], "x.0": TWO},
        {"": {"a": ONE}, "a": TWO},
        {"deep": [{"a.b": ONE, "a": {"b": TWO}}]},
    ],
)
@pytest.mark.parametrize("form", ["megackpt", "torch_dist", "zarr"])
def test_plain_tensors_keep_their_own_values(tmp_path: Path, state: dict[Any, Any], form: str) -> None:
    save(state, tmp_path / "c", form)
    asked = zeros(state)
    loaded = load(asked, tmp_path / "c")
    assert [t.tolist() for t in tensors(loaded)] == [t.tolist() for t in tensors(state)]
    assert [t.tolist() for t in tensors(asked)] == [t.tolist() for t in tensors(state)]  # in place
    assert all(a is b for a, b in zip(tensors(loaded), tensors(asked), strict=True))


def test_a_flat_request_is_answered_by_nested_values_and_the_other_way_round(tmp_path: Path) -> None:
    save({"state": {"w": {"step": ONE}}}, tmp_path / "nested")
    save({"state.w.step": ONE}, tmp_path / "flat")
    flat, nested = torch.zeros(3), torch.zeros(3)
    load({"state.w.step": flat}, tmp_path / "nested")
    load({"state": {"w": {"step": nested}}}, tmp_path / "flat")
    assert flat.tolist() == nested.tolist() == ONE.tolist()


def test_an_ambiguous_name_of_a_value_raises_an_error(tmp_path: Path) -> None:
    save({"a": {"b.c": ONE}, "a.b": {"c": TWO}}, tmp_path / "two")
    with pytest.raises(DeclarationError, match=r"two values of the checkpoint") as caught:
        load({"a.b.c": torch.zeros(3)}, tmp_path / "two")
    assert "['a']['b.c'] and ['a.b']['c']" in str(caught.value)
    save({"a": {"b": {"c": ONE}}}, tmp_path / "one")
    with pytest.raises(DeclarationError, match=r"two tensors of the state dict"):
        load({"a.b.c": torch.zeros(3), "a.b": {"c": torch.zeros(3)}}, tmp_path / "one")
    with pytest.raises(DeclarationError, match=r"two tensors of the state dict"):
        load({"a.b.c": torch.zeros(3), "a": {"b": {"c": torch.zeros(3)}}}, tmp_path / "one")


def test_two_tensors_that_would_be_filled_from_one_array_raise_an_error(tmp_path: Path) -> None:
    save({"x": ShardedTensor.from_rank_offsets("a.b", ONE)}, tmp_path / "c")
    with pytest.raises(DeclarationError, match=r"'a\.b': two tensors.*\['a'\]\['b'\] and \['a\.b'\]"):
        load({"a.b": torch.zeros(3), "a": {"b": torch.zeros(3)}}, tmp_path / "c")
    with pytest.raises(DeclarationError, match=r"'a\.b': two tensors"):
        load({"a.b": torch.zeros(3), "a": {"b": HALVES.tensor(torch.zeros(4, 5), 0)}}, tmp_path / "c")


def test_two_tensors_of_xla_with_one_name_raise_an_error(tmp_path: Path) -> None:
    flat, nested = (HALVES.tensor(torch.full((4, 5), value), 0) for value in (0.0, 1.0))
    both = {"a.b": flat, "a": {"b": nested}}
    with pytest.raises(DeclarationError, match=r"'a\.b': two tensors"):
        save(both, tmp_path / "c")
    save({"a.b": flat}, tmp_path / "c")
    with pytest.raises(DeclarationError, match=r"'a\.b': two tensors"):
        load(both, tmp_path / "c")


def test_a_value_next_to_an_array_of_its_name_is_the_one_at_its_path(tmp_path: Path) -> None:
    save({"x": ShardedTensor.from_rank_offsets("a.b", ONE), "a": {"b": TWO}}, tmp_path / "c")
    asked = {"a": {"b": torch.zeros(3)}}
    load(asked, tmp_path / "c")
    assert asked["a"]["b"].tolist() == TWO.tolist()
    flat = torch.zeros(3)
    load(
        {"a.b": flat},
        tmp_path / "c",
        options=LoadOptions(rules=(KeyRule(keys="*", unexpected=Policy.ERROR),)),
    )
    assert flat.tolist() == ONE.tolist()


@pytest.mark.parametrize("value", [TWO, 7])
def test_dcp_rejects_a_name_that_an_entity_has_too(tmp_path: Path, value: object) -> None:
    state = {"x": ShardedTensor.from_rank_offsets("a.b", ONE), "a": {"b": value}}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(dcp.api.CheckpointException, match=r"'a\.b'.*path joined with dots"):
            dcp.save(
                state, storage_writer=MegackptStorageWriter(tmp_path / "c"), planner=MegackptSavePlanner()
            )


def test_tensors_of_common_state_that_share_memory_are_stored_each(tmp_path: Path) -> None:
    rates = torch.arange(6.0)
    state = {"first": rates[:3], "second": rates[3:], "again": rates[:3]}
    save(state, tmp_path, options=SaveOptions(plain_tensors="common"))
    loaded, report = load_with_report({}, tmp_path)
    assert {key: loaded[key].tolist() for key in state} == {key: state[key].tolist() for key in state}
    assert report.recovered == ()
