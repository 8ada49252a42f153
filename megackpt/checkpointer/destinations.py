"""Where a step goes: into which tiers, and whether to the root.

Owns that choice, and who is owed a step because one was skipped while an earlier save was under way.
"""

from __future__ import annotations

from dataclasses import dataclass

from megackpt.checkpointer.options import Tiers


@dataclass(frozen=True, slots=True)
class Destinations:
    """Where a step goes.

    Attributes:
        tiers: numbers of tiers, ascending.
        root: whether to the root.
    """

    tiers: tuple[int, ...]
    root: bool

    def __bool__(self) -> bool:
        return self.root or bool(self.tiers)


class Intervals:
    """Says where steps go; the same on all ranks, which skip the same steps. Local.

    >>> intervals = Intervals(Tiers([Tier("a", every=2)], root_every=4))
    >>> intervals.of(2), intervals.of(3, to_root=True)
    (Destinations(tiers=(0,), root=False), Destinations(tiers=(), root=True))
    >>> intervals.skipped(intervals.of(4))
    >>> intervals.of(5)
    Destinations(tiers=(0,), root=True)
    """

    def __init__(self, tiers: Tiers) -> None:
        self._root_every = tiers.root_every
        self._tiers = tiers.tiers
        self._owed = Destinations((), root=False)

    def of(self, step: int, *, to_root: bool | None = None, is_signalled: bool = False) -> Destinations:
        """Return where a step goes. to_root says so for the root, a signal where that is None."""
        if to_root is None:
            to_root = step % self._root_every == 0 or is_signalled or self._owed.root
        due = (n for n, tier in enumerate(self._tiers) if step % tier.every == 0 or n in self._owed.tiers)
        return Destinations(tuple(due), root=to_root)

    def skipped(self, what: Destinations) -> None:
        """Note that a step did not go where it was to: then the next one does."""
        tiers = {*self._owed.tiers, *what.tiers}
        self._owed = Destinations(tuple(sorted(tiers)), root=self._owed.root or what.root)

    def served(self, what: Destinations) -> None:
        """Note that a step goes there."""
        tiers = tuple(n for n in self._owed.tiers if n not in what.tiers)
        self._owed = Destinations(tiers, root=self._owed.root and not what.root)
