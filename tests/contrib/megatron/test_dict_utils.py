"""Nested dicts and lists by Megatron-Core's names."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from megackpt.compat.megatron.dist_checkpointing import dict_utils as d


def _is_int(x: object) -> bool:
    return isinstance(x, int)


def test_matching_and_other_values_keep_the_structure() -> None:
    tree = {"a": 1, "b": {"c": "x", "d": [2, "y", []]}, "e": {}, "f": (3,)}
    matching, others = d.extract_matching_values(tree, _is_int)
    assert matching == {"a": 1, "b": {"d": [2]}}
    assert others == {"b": {"c": "x", "d": ["y", []]}, "e": {}, "f": (3,)}
    matching, others = d.extract_matching_values(["x", 5], _is_int, return_lists_as_dicts=True)
    assert (matching, others) == ({1: 5}, {0: "x"})
    with pytest.raises(ValueError, match="dict or a list is expected at the top, not int"):
        d.extract_matching_values(3, _is_int)  # type: ignore[arg-type]


def test_a_difference_is_named_by_its_path() -> None:
    left = {"a": 1, "b": [1, 2, 3], "t": torch.zeros(2), "n": np.zeros(2), "only": 0}
    right = {"a": 1, "b": [1, 5], "t": torch.ones(2), "n": np.zeros(2), "new": 0}
    only_left, only_right, mismatch = d.diff(left, right)
    assert set(only_left) == {("only",), ("b", 2)}
    assert only_right == [("new",)]
    assert {path for path, *_ in mismatch} == {("b", 1), ("t",)}
    assert d.diff(left, left) == ([], [], [])


def test_types_are_printed_as_a_tree(capsys: pytest.CaptureFixture[str]) -> None:
    d.inspect_types({"a": [torch.zeros(2, 3)], "b": "x" * 40})
    printed = capsys.readouterr().out
    assert "> a: \n    - 0: Tensor of shape (2, 3)" in printed
    assert f"> b: [<class 'str'>]: {'x' * 30}... (truncated)" in printed


def test_values_are_visited_and_mapped_in_order() -> None:
    tree = {"a": 1, "b": [2, {"c": 3}]}
    assert list(d.nested_values(tree)) == [1, 2, 3]
    assert [key for _, key, _ in d.nested_items_iter(tree)] == ["a", 0, "c"]
    doubled = d.dict_list_map_outplace(lambda x: 2 * x, tree)
    assert (doubled, tree["a"]) == ({"a": 2, "b": [4, {"c": 6}]}, 1)
    inner = tree["b"]
    assert d.dict_list_map_inplace(lambda x: x + 1, tree) is tree
    d.dict_map(lambda x: 10 * x, tree)
    d.dict_map_with_key(lambda key, x: f"{key}{x}", tree)
    assert tree == {"a": "a20", "b": ["030", {"c": "c40"}]}
    assert tree["b"] is inner
    assert d.dict_list_map_inplace(str, 3) == "3"


def test_merging_is_in_place_and_rejects_two_values_at_one_path() -> None:
    base = {"a": {"b": 1}, "l": [{"x": 1}, {}]}
    assert d.merge(base, {"a": {"c": 2}, "l": [{}, {"y": 2}], "d": 3}) is base
    assert base == {"a": {"b": 1, "c": 2}, "l": [{"x": 1}, {"y": 2}], "d": 3}
    with pytest.raises(ValueError, match=r"At \('a', 'b'\): both have a value"):
        d.merge(base, {"a": {"b": 4}})
    with pytest.raises(ValueError, match="lists of 2 and 1 elements"):
        d.merge(base, {"l": [{}]})


def test_map_reduce_groups_by_key() -> None:
    assert d.map_reduce([1, 2, 3], lambda x: x % 2, lambda x: x * x, sum) == {1: 10, 0: 4}
    assert d.map_reduce([1, 1]) == {1: [1, 1]}
