"""Wrong arguments of public constructors are DeclarationErrors with what to give, and no errors of Python."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn.parameter import UninitializedParameter

from megackpt import (
    DeclarationError,
    PerRankValue,
    ReplicatedValue,
    ShardedLayout,
    ShardedObject,
    ShardedTensor,
)
from megackpt.training.parallel import ParallelGroups, ParallelLayout, TpSharding

T: Any = torch.zeros(4, 2)
ALL = slice(0, 8)
WHOLE = ("w", T, T.dtype, (4, 2), (4, 2), (0, 0))
# Without their types, which would find these errors.
cut: Any = ShardedTensor.from_rank_offsets
flat: Any = ShardedTensor.from_rank_offsets_flat
split: Any = ShardedLayout.split
tensor: Any = ShardedTensor
value: Any = ShardedObject
own: Any = PerRankValue
shared: Any = ReplicatedValue
layout: Any = ParallelLayout
offline: Any = ParallelGroups.offline
sharding: Any = TpSharding

WRONG: dict[str, tuple[Callable[[], object], str]] = {
    "two numbers": (lambda: cut("w", T, (0, 0)), r"\(0, 0\) is not \(axis, index, fragments\)"),
    "numbers": (lambda: cut("w", T, 0, 1, 2), "offset 0 is not"),
    "text": (lambda: cut("w", T, ("0", 0, 2)), "Give three ints"),
    "fraction": (lambda: cut("w", T, (0, 0.5, 2)), "Give three ints"),
    "a list of offsets": (lambda: cut("w", T, [(0, 0, 2)]), "Give three ints"),
    "a list as data": (lambda: cut("w", [1, 2]), "data is a list, not a tensor"),
    "a nested tensor": (lambda: cut("w", torch.nested.nested_tensor([T, T[:1]])), "the tensor is nested"),
    "a tensor of a lazy module": (lambda: cut("w", UninitializedParameter()), "lazy module that has not run"),
    "no data": (lambda: cut("w", None), "data is a NoneType, not a tensor"),
    "an array of numpy": (lambda: cut("w", T.numpy()), "data is a ndarray, not a tensor"),
    "a number as key": (lambda: cut(3, T), "must be a non-empty string"),
    "key and data exchanged": (lambda: cut(T, "w"), "Give the key, then the tensor"),
    "prepended text": (lambda: cut("w", T, prepend_axis_num="1"), "must be an int >= 0"),
    "prepended fraction": (lambda: cut("w", T, prepend_axis_num=1.0), "must be an int >= 0"),
    "replica text": (lambda: cut("w", T, replica_id="0"), "replica_id '0' must be an int"),
    "a number as shape": (lambda: flat("w", T[0], 8, flattened_range=ALL), "must be a sequence of ints"),
    "flat": (lambda: flat("w", T.view(-1), (4, 2), (0, 0), flattened_range=ALL), r"\(0, 0\) is not"),
    "two numbers as range": (lambda: flat("w", T.view(-1), (4, 2), flattened_range=(0, 8)), "slice"),
    "if_missing": (lambda: tensor(*WHOLE, if_missing="drop"), "if_missing"),
    "an object with a number as shape": (lambda: value("o", 1, 1, 0), "sequence of ints"),
    "a dim as text": (lambda: split("w", T, "0", {"a": 2, "b": 2}), "not an int and ints by name"),
    "sizes without names": (lambda: split("w", T, 0, [2, 2]), "not an int and ints by name"),
    "sizes as fractions": (lambda: split("w", T, 0, {"a": 2.0, "b": 2.0}), "not an int and ints by name"),
    "a layout of two numbers": (lambda: split("w", T, 0, {"a": 4}, (0, 0)), r"\(0, 0\) is not"),
    "a layout of a list": (lambda: split("w", [1], 0, {"a": 1}), "data is a list, not a tensor"),
    "a value without a name": (lambda: own(3, 1), "non-empty string"),
    "elsewhere": (lambda: own("a", 1, elsewhere="drop"), "elsewhere"),
    "a replicated value": (lambda: shared(3, 1), "non-empty string"),
    "tp as text": (lambda: layout(tp="2"), "tp='2'"),
    "tp as fraction": (lambda: layout(tp=2.0), r"tp=2\.0"),
    "a rank as text": (lambda: offline(ParallelLayout(tp=2), "0"), "rank '0' does not exist"),
    "ranks as layout": (lambda: offline(2, 0), "give ParallelLayout"),
    "a sharding along text": (lambda: sharding(dim="0"), r"TpSharding\.dim is '0'"),
    "a sharding from the end": (lambda: sharding(dim=-1), r"TpSharding\.dim is -1"),
    "components in a list": (lambda: sharding(dim=0, components=[2, 2]), r"TpSharding\.components"),
    "tokens without padding": (lambda: sharding(dim=0, unpadded_extent=5), "without allow_shape_mismatch"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_argument_is_an_error_that_shows_it(name: str) -> None:
    make, text = WRONG[name]
    with pytest.raises(DeclarationError, match=text):
        make()
