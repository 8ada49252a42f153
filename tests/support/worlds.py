"""Simulated worlds whose ranks save and load: what a rank runs, and the error that all of them raise."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, TypeVar
from unittest.mock import patch

from megackpt import load, save
from megackpt.comm import Group
from megackpt.run import PlanCache
from megackpt.storage import MemoryStore
from megackpt.testing.world import SimulatedWorld

State = dict[str, Any]
Raised = TypeVar("Raised", bound=Exception)


def saving(state_of: Callable[[int], Any], *where: Any, **arguments: Any) -> Callable[[Group], None]:
    """Return what each rank runs to save its state; `where` is the location, and the format if any."""

    def save_rank(group: Group) -> None:
        save(state_of(group.rank), *where, group=group, **arguments)

    return save_rank


def loading(request_of: Callable[[int], Any], location: Any, **arguments: Any) -> Callable[[Group], Any]:
    """Return what each rank runs to load its request."""

    def load_rank(group: Group) -> Any:
        return load(request_of(group.rank), location, group=group, **arguments)

    return load_rank


def error_of_all(ranks: int, act: Callable[[Group], object], kind: type[Raised]) -> Raised:
    """Return the error that all ranks raise when each acts: of one class, with one text and its fields."""
    errors: list[Raised] = SimulatedWorld(ranks).outcomes(act)
    assert all(isinstance(error, kind) for error in errors), errors
    names = ("key", "rank", "path")
    fields = {(str(error), *(getattr(error, name, None) for name in names)) for error in errors}
    assert len(fields) == 1, fields
    return errors[0]


class Run:
    """Saves of a world whose ranks keep their cached plans; attempts are numbered, so positions are fixed."""

    def __init__(self, ranks: int, *, first: int = 1, **arguments: Any) -> None:
        self.world = SimulatedWorld(ranks)
        self.plans = [PlanCache() for _ in range(ranks)]
        self.store = MemoryStore()
        self.arguments = arguments
        self._attempts = map("{:016x}".format, itertools.count(first))

    def save(self, make: Callable[[int], State], *, group_of: Callable[[Group], Group] = lambda g: g) -> Any:
        """Save the state of each rank; return what they have raised: the same text on all of them."""

        def save_rank(group: Group) -> None:
            plans = self.plans[group.rank]
            save(make(group.rank), self.store, group=group_of(group), plans=plans, **self.arguments)

        with patch("megackpt.engine.saving.preparation.new_attempt", side_effect=self._attempts):
            outcomes = self.world.outcomes(save_rank)
        assert len({str(outcome) for outcome in outcomes}) == 1
        return outcomes[0]

    @property
    def hits(self) -> set[int]:
        return {plans.hits for plans in self.plans}
