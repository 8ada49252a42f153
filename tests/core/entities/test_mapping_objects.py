"""ShardedObject, LocalNonpersistentObject and ShardedTensorFactory."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from megackpt import load, load_with_report, save
from megackpt.errors import CheckpointError, DeclarationError
from megackpt.mapping import (
    LocalNonpersistentObject,
    ReplicaId,
    ShardedLayout,
    ShardedObject,
    ShardedTensor,
    ShardedTensorFactory,
)
from megackpt.mapping.sharded_object import UNKNOWN
from tests.support.states import filled

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
    with pytest.raises(
        DeclarationError, match=r"'o': this is a ShardedObject; .* \('exp_avg.o'\) cannot be sharded"
    ):
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


@pytest.mark.parametrize("name", ["build_fn", "merge_fn"])
def test_a_factory_needs_functions(name: str) -> None:
    fields: dict[str, Any] = {"key": "w", "data": None, "build_fn": halves, "merge_fn": join, name: None}
    with pytest.raises(DeclarationError, match=f"'w': {name} must be a function, not None"):
        ShardedTensorFactory(**fields)


def test_a_factory_needs_a_key() -> None:
    with pytest.raises(
        DeclarationError, match="the key of a ShardedTensorFactory must be a non-empty string"
    ):
        ShardedTensorFactory("", torch.zeros(1), halves, join)


# --- values that are not stored, and lists that hold all kinds


def test_a_nonpersistent_value_is_not_saved_and_answers_with_the_local_one(tmp_path: Path) -> None:
    save({"a": 1, "own": LocalNonpersistentObject("of the saver")}, tmp_path / "c")
    stored_value = object()
    loaded = load({"a": None, "own": LocalNonpersistentObject(stored_value)}, tmp_path / "c")
    assert loaded["own"] is stored_value
    assert "own" not in load({}, tmp_path / "c")


def test_a_list_of_common_sharded_and_local_elements_comes_back_as_that_list(tmp_path: Path) -> None:
    def mixed(value: int, local: str) -> list[Any]:
        w = filled(value, 2)
        return [
            value,
            w,
            LocalNonpersistentObject(local),
            {"deep": [None, LocalNonpersistentObject(local)]},
            [],
        ]

    save({"list": mixed(1, "saver")}, tmp_path / "c")
    first, w, local, deep, empty = load({"list": mixed(2, "loader")}, tmp_path / "c")["list"]
    assert (first, w.tolist(), local, deep, empty) == (1, [1, 1], "loader", {"deep": [None, "loader"]}, [])


def test_a_dict_with_integer_keys_stays_a_dict(tmp_path: Path) -> None:
    def state(value: int) -> dict[int, Any]:
        return {0: value, 1: filled(value, 2)}

    save({"params": state(1)}, tmp_path / "c")
    loaded = load({"params": state(2)}, tmp_path / "c")["params"]
    assert isinstance(loaded, dict)
    assert (loaded[0], loaded[1].tolist()) == (1, [1, 1])


def test_an_object_stored_in_an_array_of_another_shape_is_an_error_or_kept(tmp_path: Path) -> None:
    save({"o": ShardedObject("o", "stored", (1,), (0,))}, tmp_path / "c")
    with pytest.raises(CheckpointError, match="Objects are never resharded"):
        load({"o": ShardedObject("o", "mine", (2,), (1,))}, tmp_path / "c")
    for shape, expected in [((2,), "mine"), ((1, 1), "mine"), ((1,), "stored")]:
        asked = ShardedObject("o", "mine", shape, (0,) * len(shape), elsewhere="keep")
        assert load({"o": asked}, tmp_path / "c") == {"o": expected}
