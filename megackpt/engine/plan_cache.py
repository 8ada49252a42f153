"""Plans of earlier saves, kept for the next save of the same structure.

Owns what is kept and under which name. A plan follows from what all ranks declare, so it is named by the
digests of their declarations; the sizes of objects, which change from save to save, are not part of it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from megackpt.planning import SavePlan
from megackpt.storage import digest_of


class PlanCache:
    """The plans of the last few structures that were saved; hand it to each `save` of a run.

    Several state dicts that are saved in turn each keep their plan. Every rank has a cache of its own; ranks
    use a plan only if all of them have it.

    Attributes:
        capacity: how many plans are kept; the one that was not used for longest goes first.
        last: name of the plan that was used last.
        hits: how many saves have found their plan here.
    """

    def __init__(self, *, capacity: int = 8) -> None:
        self.capacity = capacity
        self.last: str | None = None
        self.hits = 0
        self._plans: OrderedDict[str, SavePlan] = OrderedDict()
        self._declared: dict[str, str] = {}

    @property
    def names(self) -> list[str]:
        """Names of the plans that are kept."""
        return list(self._plans)

    def find(self, name: str) -> SavePlan:
        """Return a plan that is kept, and keep it longer."""
        self._plans.move_to_end(name)
        self.last = name
        self.hits += 1
        return self._plans[name]

    def peek(self, name: str) -> SavePlan:
        """Return a plan that is kept, without counting it as used."""
        return self._plans[name]

    def declared(self, name: str) -> str:
        """Return the digest of what this rank had declared when a plan that is kept was made."""
        return self._declared[name]

    def keep(self, name: str, plan: SavePlan, *, declared: str) -> None:
        """Keep a plan, and the digest of what this rank has declared for it."""
        self._plans[name] = plan
        self._declared[name] = declared
        self._plans.move_to_end(name)
        self.last = name
        while len(self._plans) > self.capacity:
            forgotten, _ = self._plans.popitem(last=False)
            del self._declared[forgotten]


def name_of(declared: Sequence[str]) -> str:
    """Return the name of the plan for the digests of all ranks' declarations, in rank order."""
    return digest_of("\n".join(declared).encode())
