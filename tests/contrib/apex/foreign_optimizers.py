"""Optimizers of other libraries: trained on all ranks of a layout in one process, and resumed at another.

Each rank steps by itself, with its cuts of the same random gradients, so that every rank of dp does the same.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import Parameter

from megackpt.entities import ShardedStateDict
from megackpt.training.parallel.groups import ParallelGroups
from megackpt.training.parallel.layout import ParallelLayout
from tests.support import expert_world
from tests.support.optimizers import (
    SHAPES,
    Arrays,
    gather,
    loaded,
    make_model,
    model_state,
    random_arrays,
    scatter,
    tensors_of,
)

SAVED_AFTER, STEPS = 2, 5
CHANGES = {
    "same": (ParallelLayout(dp=2), ParallelLayout(dp=2)),
    "dp": (ParallelLayout(dp=2), ParallelLayout(dp=3)),
    "pp": (ParallelLayout(dp=2), ParallelLayout(pp=2)),
    "tp": (ParallelLayout(tp=2), ParallelLayout(tp=4)),
    "ep": (ParallelLayout(dp=2, ep=2), ParallelLayout(dp=2)),
}


@dataclass(frozen=True, kw_only=True)
class Kind:
    """An optimizer, and how its state is declared and restored."""

    make: Callable[[list[Parameter], ParallelGroups], Any]  # makes the optimizer of the parameters of a rank
    # `sharded_state_dict` of the optimizer, with the model's, whether it loads, and the groups
    declare: Callable[[Any, ShardedStateDict, bool, ParallelGroups], ShardedStateDict]
    restore: Callable[[Any, Any], None]  # `load_sharded_state_dict`
    dtype: torch.dtype = torch.bfloat16  # of the parameters
    # called with all ranks after their steps
    after_step: Callable[[Sequence[Rank]], None] = lambda ranks: None


class Rank:
    """A rank's part of a small model, and its optimizer."""

    def __init__(self, kind: Kind, groups: ParallelGroups, seed: int, *, moe: bool) -> None:
        self.kind, self.groups, self._moe = kind, groups, moe
        if moe:
            self._model = expert_world.build(groups, expert_world.random_weights(seed), kind.dtype)
            self.params = list(self._model.parameters())
        else:
            self._world = make_model(groups, random_arrays(SHAPES, seed), kind.dtype)
            self.params = [p.param for p in self._world]
        self.optimizer = kind.make(self.params, groups)

    def step(self, number: int) -> None:
        if self._moe:
            grads = expert_world.build(
                self.groups, expert_world.random_weights(100 + number), self.kind.dtype
            )
            cuts = [grad.detach() for grad in grads.parameters()]
        else:
            arrays = random_arrays(SHAPES, 100 + number)
            cuts = [p.cut(arrays).to(self.kind.dtype) for p in self._world]
        for param, grad in zip(self.params, cuts, strict=True):
            param.grad = grad
        self.optimizer.step()

    def declare(self, is_loading: bool = False) -> ShardedStateDict:
        model = self._model.sharded_state_dict() if self._moe else model_state(self._world)
        return {
            "model": model,
            "optimizer": self.kind.declare(self.optimizer, model, is_loading, self.groups),
        }


def make_ranks(kind: Kind, layout: ParallelLayout, seed: int, *, moe: bool) -> list[Rank]:
    return [
        Rank(kind, ParallelGroups.offline(layout, rank), seed, moe=moe) for rank in range(layout.world_size)
    ]


def train(ranks: Sequence[Rank], steps: range) -> None:
    for number in steps:
        for rank in ranks:
            rank.step(number)
        ranks[0].kind.after_step(ranks)


def along(ranks: Sequence[Rank], axis: str) -> list[list[Rank]]:
    """Return the ranks of each process group along an axis of `ParallelGroups`, such as "dp"."""
    groups = {getattr(rank.groups, axis).ranks for rank in ranks}
    return [[ranks[number] for number in members] for members in sorted(groups)]


def arrays_of(ranks: Sequence[Rank]) -> Arrays:
    arrays = gather([rank.declare() for rank in ranks])
    return {key: array.clone() for key, array in arrays.items()}


def resume(rank: Rank, arrays: Arrays, common: Any) -> str:
    """Fill a new rank from arrays and common state; return why it cannot be, or an empty text."""
    request = rank.declare(is_loading=True)
    asked = tensors_of(request)
    if any(t.key in arrays and tuple(arrays[t.key].shape) != t.global_shape for t in asked):
        return "MismatchError"
    assert all(t.if_missing == "keep" for t in asked if t.key not in arrays)
    scatter({"all": [t for t in asked if t.key in arrays]}, arrays)
    rank.kind.restore(rank.optimizer, {**loaded(request["optimizer"]), **copy.deepcopy(common)})
    return ""


def outcome(kind: Kind, change: str) -> str:
    """Return `exact` if three steps after the change equal those of the uninterrupted run.

    Otherwise `MismatchError`; `state` if only the state does right after the load; or `rounded` if it is
    equal but for the last bits of codes of 8 bits.
    """
    (source, target), moe = CHANGES[change], change == "ep"
    ranks, others = make_ranks(kind, source, 1, moe=moe), make_ranks(kind, target, 7, moe=moe)
    train(ranks, range(SAVED_AFTER))
    saved = arrays_of(ranks)
    declared = ranks[0].declare()["optimizer"]
    common = {name: declared[name] for name in ("param_groups", "step") if name in declared}
    errors = {resume(rank, saved, common) for rank in others} - {""}
    if errors:
        return errors.pop()
    restored = arrays_of(others)
    train(ranks, range(SAVED_AFTER, STEPS))
    train(others, range(SAVED_AFTER, STEPS))
    if not are_equal(saved, restored):
        return "rounded" if are_close(saved, restored) else "differs"
    return "exact" if are_equal(arrays_of(ranks), arrays_of(others)) else "state"


def are_equal(first: Arrays, second: Arrays) -> bool:
    """Compare arrays, but not the scales of slices that are others."""
    keys = [key for key in first if key in second or not key.startswith("optimizer.scale.")]
    return all(torch.equal(first[key], second[key]) for key in keys)


def are_close(first: Arrays, second: Arrays) -> bool:
    # float8 has three bits of mantissa, and small values are multiples of 2^-9 / 448 of the largest one.
    keys = [key for key in first if not key.startswith("optimizer.scale.")]
    return all(
        torch.allclose(first[key], second[key], rtol=2**-4, atol=2**-17 * float(first[key].abs().max()))
        for key in keys
    )


_IN_DOCS = {"state": "state exact, steps not", "MismatchError": "`MismatchError`"}


def row_of_docs(name: str, outcomes: Sequence[str]) -> str:
    """Return the row of the table in docs/optimizers.md: name and outcome of every change, in order."""
    return f"| {name} | {' | '.join(_IN_DOCS.get(text, text) for text in outcomes)} |"
