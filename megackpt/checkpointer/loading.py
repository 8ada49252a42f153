"""One step out of a run: which one, on all ranks alike, and what to do where it is damaged.

Owns how ranks agree on one of the root. Which one of tiers and root is whole is found in `recovery`.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from megackpt.api import ReturnsState, load_with_report
from megackpt.checkpointer.going_back import load_or_go_back, with_copies_of_step
from megackpt.checkpointer.recovery import Recovery, Root
from megackpt.checkpointer.survey import LastLoad
from megackpt.checkpointer.tier_set import TierSet
from megackpt.comm import AnyGroup, Group, run_on_all_ranks
from megackpt.engine.checkpoint.steps import StepDirectories, step_name
from megackpt.errors import NotACheckpointError
from megackpt.mapping import ShardedStateDict, StateDict
from megackpt.options import LoadOptions
from megackpt.validation import LoadReport, StrictHandling


class StepLoading(Protocol):
    """How steps come out of a run."""

    def load(
        self, state: ShardedStateDict, step: int | None, strict: ReturnsState, group: Group
    ) -> tuple[StateDict, LastLoad]:
        """Load a step, or the newest that can be, and say what was used. Collective.

        Raises:
            NotACheckpointError: there is no committed step, or not the one asked for.
            CheckpointError: as `megackpt.load`.
        """

    def find_latest(self, group: Group) -> int | None:
        """Return the step that a load of the newest takes, None if there is none. Collective."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RootLoading:
    """How steps come out of a root. See `StepLoading`.

    Attributes:
        places: where they lie.
        steps: returns the committed ones.
        latest: returns the newest committed one, and warns of a newer one that is torn.
        options: of the loads.
        exchange_group: of the loads.
    """

    places: StepDirectories
    steps: Callable[[], Sequence[int]]
    latest: Callable[[], int | None]
    options: LoadOptions
    exchange_group: AnyGroup | None

    def load(
        self, state: ShardedStateDict, step: int | None, strict: ReturnsState, group: Group
    ) -> tuple[StateDict, LastLoad]:
        """Load a step; go back to older ones where options say so, and none was asked for."""
        found = self.find_latest(group) if step is None else step
        if found is None:
            where = self.places.location
            raise NotACheckpointError(
                f"{where} has no committed step. Save one, or name the directory of a run.", path=where
            )
        goes_back = step is None and self.options.on_corrupt == "fallback"
        (loaded, report), used = load_or_go_back(
            found,
            lambda step: self.load_step(state, step, strict, group),
            (lambda step: self._find_older(step, group)) if goes_back else None,
            where=self.places.location,
            rank=group.rank,
        )
        return loaded, replace(used, report=report)

    def load_step(
        self, state: ShardedStateDict, step: int, strict: ReturnsState, group: Group
    ) -> tuple[StateDict, LoadReport]:
        """Load one step, with what copies there may be of it. Collective."""
        name = step_name(step)
        with contextlib.closing(self.places.open(name)) as store:
            return load_with_report(
                state,
                store,
                strict=strict,
                options=with_copies_of_step(self.options, name),
                group=group,
                exchange_group=self.exchange_group,
            )

    def find_latest(self, group: Group) -> int | None:
        """Return the newest committed step as rank 0 sees it."""
        return _as_rank_0(group, self.latest, doing="looking for the newest checkpoint")

    def _find_older(self, step: int, group: Group) -> int | None:
        """Return the newest committed step before another, as rank 0 sees it. Collective."""

        def look() -> int | None:
            return max((s for s in self.steps() if s < step), default=None)

        return _as_rank_0(group, look, doing="looking for an older checkpoint")


@dataclass(frozen=True, slots=True, kw_only=True)
class TierLoading:
    """How steps come out of tiers, and of the root behind them. See `StepLoading`.

    Attributes:
        tiers: storage of the nodes.
        root: how they come out of the root; its options hold for tiers, too.
    """

    tiers: TierSet
    root: RootLoading

    def load(
        self, state: ShardedStateDict, step: int | None, strict: ReturnsState, group: Group
    ) -> tuple[StateDict, LastLoad]:
        """Load a step from the first place where it is whole."""
        return self._look(strict, group).load(state, step, strict, self.root.options)

    def find_latest(self, group: Group) -> int | None:
        """Return the newest step of which every byte is somewhere."""
        return self._look(StrictHandling.ASSUME_OK_UNEXPECTED, group).find()

    def _look(self, strict: ReturnsState, group: Group) -> Recovery:
        """Look at all tiers and the root. Collective; strict is for loads from the root."""
        root = Root(
            location=self.root.places.location,
            steps=self.root.steps,
            load=lambda state, step: self.root.load_step(state, step, strict, group)[0],
        )
        return self.tiers.recovery(group, root)


def _as_rank_0(group: Group, look: Callable[[], int | None], *, doing: str) -> int | None:
    def say() -> bytes:
        return json.dumps(look() if group.rank == 0 else None).encode()

    found: int | None = json.loads(run_on_all_ranks(group, say, doing=doing)[0])
    return found
