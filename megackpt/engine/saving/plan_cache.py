"""Plans of earlier saves, kept for the next save of the same structure.

Owns what is kept and which of it ranks may take. A plan follows from what all ranks declare; each rank knows
from which declarations of its own it was made, and a plan that all of them may take fits them all. The sizes
of objects, which change from save to save, are not part of it.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

from megackpt.metadata import DeclaredChunks
from megackpt.planning import SavePlan


@dataclass(frozen=True, slots=True, eq=False)
class CachedPlan:
    """What a rank keeps of a plan.

    Attributes:
        plan: its own rows, or those of all ranks where the format needs them.
        declared: digest of what it had declared, as which rank of how many.
        said: what it had declared, and all that it was described from, but for sizes of objects.
        chunks: that as rows, with the sizes of objects at that time.
        whole: the rows of all ranks; on rank 0, None elsewhere.
    """

    plan: SavePlan
    declared: str
    said: tuple[Any, ...]  # fields of the user's entities
    chunks: DeclaredChunks
    whole: SavePlan | None = None


class PlanCache:
    """The plans of the last few structures that were saved; hand it to each `save` of a run.

    Several state dicts that are saved in turn each keep their plan. Every rank has a cache of its own, with
    its own rows of each plan; ranks use a plan only if all of them have it.

    Attributes:
        capacity: how many plans are kept; the one that was not used for longest goes first. No more than the
            8 that were used last are looked at.
        hits: how many saves have found their plan here.
    """

    def __init__(self, *, capacity: int = 8) -> None:
        self.capacity = capacity
        self.hits = 0
        self._plans: OrderedDict[str, CachedPlan] = OrderedDict()

    @property
    def names(self) -> list[str]:
        """Names of the plans that are kept, the one that was used last first; the same on all ranks."""
        return list(reversed(self._plans))

    def find(self, name: str) -> CachedPlan:
        """Return a plan that is kept, and keep it longer."""
        self._plans.move_to_end(name)
        self.hits += 1
        return self._plans[name]

    def peek(self, name: str) -> CachedPlan:
        """Return a plan that is kept, without counting it as used."""
        return self._plans[name]

    def recall(self, said: tuple[Any, ...]) -> CachedPlan | None:
        """Return a plan for which this rank has declared the same; other ranks may have none like it."""
        # Python stops at the first difference, and does not look into what is the same object.
        return next((kept for kept in reversed(self._plans.values()) if kept.said == said), None)

    def keep(self, name: str, kept: CachedPlan) -> None:
        """Keep a plan."""
        self._plans[name] = kept
        self._plans.move_to_end(name)
        while len(self._plans) > self.capacity:
            self._plans.popitem(last=False)

    def clear(self) -> None:
        """Keep nothing."""
        self._plans.clear()
