"""Plans of earlier saves, cached for the next save of the same structure.

A plan depends on the declarations of all ranks. With each cached plan, a rank stores a digest of its own
declarations. A plan is used again if this digest is right on every rank. The sizes of objects change from
save to save and are not part of a cached plan.
"""

from __future__ import annotations

import zlib
from collections import Counter, OrderedDict
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from megackpt.plans.metadata import DeclaredChunks
from megackpt.plans.planning import SavePlan


@dataclass(frozen=True, slots=True, eq=False)
class CachedPlan:
    """A plan as one rank caches it.

    Attributes:
        plan: its own rows, or those of all ranks on rank 0 and where the format needs them.
        structure_digest: digest of what the rank has declared; see `LocalState.structure_digest`.
        source: all that the declarations were made from, except the sizes of objects.
        declared: the declarations, with the sizes that objects had at that time.
        replica_factors: for each entity of the rank, the number that its digest is multiplied with when ranks
            compare copies; 0 if no other rank has a copy. See `copies.replica_factors`.
    """

    plan: SavePlan
    structure_digest: str
    source: tuple[Any, ...]  # fields of the user's entities
    declared: DeclaredChunks
    replica_factors: npt.NDArray[np.uint64]


class PlanCache:
    """The plans of the last few structures that were saved; give it to each `save` of a training run.

    If several state dicts are saved in turn, each has its own plan. Every rank has a cache of its own, with
    its own rows of each plan; ranks use a plan only if all of them have it. The methods are local.

    Attributes:
        capacity: how many plans are kept; the plan that was not used for the longest time is dropped first.
            A save looks at the 8 plans that were used last.
        hits: how many saves have found their plan here.
        known_warnings: texts of warnings about values, which later saves do not repeat.
        absent_parts: the parts of common state that some ranks lacked at the last save, with the lowest rank
            that had each; equal on all ranks.
    """

    def __init__(self, *, capacity: int = 8) -> None:
        self.capacity = capacity
        self.hits = 0
        self.known_warnings: set[str] = set()
        self.absent_parts: dict[str, int] = {}
        self._plans: OrderedDict[str, CachedPlan] = OrderedDict()
        self._uses: Counter[str] = Counter()

    @property
    def names(self) -> list[str]:
        """Names of the plans, the one that was used last first; the same on all ranks."""
        return list(reversed(self._plans))

    def use(self, name: str) -> CachedPlan:
        """Return a plan, and count it as used."""
        self._plans.move_to_end(name)
        self._uses[name] += 1
        self.hits += 1
        return self._plans[name]

    def peek(self, name: str) -> CachedPlan:
        """Return a plan without counting it as used."""
        return self._plans[name]

    def save_number(self, name: str) -> int:
        """Return the number of the next save that uses a plan, one more for each; equal on all ranks.

        The numbers of a plan begin anywhere, so that runs that are restarted often do not have the same ones.
        """
        return zlib.crc32(name.encode()) + self._uses[name]

    def made_from(self, source: tuple[Any, ...]) -> CachedPlan | None:
        """Return the plan of an earlier save with the same declarations of this rank, if there is one. Local.

        Other ranks may have declared something else since.
        """
        # Tuples are compared up to the first difference, and an object is equal to itself without a look.
        return next((plan for plan in reversed(self._plans.values()) if plan.source == source), None)

    def add(self, name: str, plan: CachedPlan) -> None:
        """Add a plan; drop the one that was not used for the longest time if there are too many."""
        self._plans[name] = plan
        self._plans.move_to_end(name)
        while len(self._plans) > self.capacity:
            dropped, _ = self._plans.popitem(last=False)
            del self._uses[dropped]

    def clear(self) -> None:
        """Drop all plans."""
        self._plans.clear()
        self._uses.clear()
