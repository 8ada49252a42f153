"""Paths that are one text when joined with dots: each leaf keeps its value, or the name is an error."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from megackpt import DeclarationError, KeyRule, LoadOptions, ShardedTensor, load, save
from megackpt.integrations.dcp import MegackptSavePlanner, MegackptStorageWriter
from megackpt.options import Policy
from megackpt.testing.spmd import SpmdLayout

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
    def state() -> dict[str, Any]:
        return {name: HALVES.tensor(torch.zeros(4, 5), 0) for name in ("a.b",)} | {
            "a": {"b": HALVES.tensor(torch.ones(4, 5), 0)}
        }

    with pytest.raises(DeclarationError, match=r"'a\.b': two tensors"):
        save(state(), tmp_path / "c")
    save({"a.b": HALVES.tensor(torch.zeros(4, 5), 0)}, tmp_path / "c")
    with pytest.raises(DeclarationError, match=r"'a\.b': two tensors"):
        load(state(), tmp_path / "c")


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
