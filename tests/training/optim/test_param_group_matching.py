"""Parameter groups of a checkpoint are those with the same name, or with the same parameters."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import Parameter

import megackpt
from megackpt import load_sharded_metadata
from megackpt.errors import MismatchError
from megackpt.mapping import ShardedStateDict, ShardedTensor
from megackpt.optim import DistributedOptimizer
from megackpt.parallel import ParallelGroups, ParallelLayout

ALONE = ParallelGroups.offline(ParallelLayout(), 0)
Sets = Sequence[
    tuple[str, str]
]  # of each group: names of its parameters, one letter each; its own name or ""


class FourParams(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        for name in "abcd":
            self.register_parameter(name, Parameter(torch.ones(3)))


def build(sets: Sets, *, lr: Sequence[float] = ()) -> tuple[DistributedOptimizer, ShardedStateDict]:
    model = FourParams()
    groups: list[dict[str, Any]] = []
    for members, name in sets:
        # All groups have equal options, so that these tell nothing.
        group = {"params": [getattr(model, m) for m in members], "lr": 0.5}
        groups.append(group | ({"name": name} if name else {}))
    optimizer = DistributedOptimizer(groups, lambda g: torch.optim.AdamW(g, lr=1.0), ALONE)
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
