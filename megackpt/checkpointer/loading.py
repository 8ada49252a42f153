"""One step out of the root: which one, the same on all ranks, and an older one where it is damaged."""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeVar

from megackpt.api import ReturnsState, load_with_report
from megackpt.comm import AnyGroup, Group, run_on_all_ranks
from megackpt.engine.checkpoint.steps import StepDirectories, step_name
from megackpt.engine.loading.fallback import DAMAGE_ERRORS
from megackpt.errors import CheckpointError, DeclarationError, NotACheckpointError
from megackpt.mapping import ShardedStateDict, StateDict
from megackpt.options import LoadOptions
from megackpt.validation import LoadReport

log = logging.getLogger(__name__)


T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class SkippedStep:
    """A step that was not loaded although it is newer than the one that was.

    Attributes:
        step: its number.
        where: the tier or root it lies in.
        why: what is wrong with it, in words.
    """

    step: int
    where: str
    why: str

    def __str__(self) -> str:
        return f"step {self.step} in {self.where}: {self.why}"


@dataclass(frozen=True, slots=True, kw_only=True)
class LastLoad:
    """What a load of a Checkpointer has used.

    Attributes:
        step: the step.
        where: the tier or root it came from.
        skipped: newer steps, or the same ones elsewhere, that were not used; newest first.
        damaged: copies of files that were left out as they are damaged, with the node they are on.
        report: the load report of this rank; None of a `Checkpointer` with tiers.
    """

    step: int
    where: str
    skipped: tuple[SkippedStep, ...] = ()
    damaged: tuple[str, ...] = ()
    report: LoadReport | None = field(default=None, repr=False)


def load_or_go_back(
    step: int,
    load: Callable[[int], T],
    older: Callable[[int], int | None] | None,
    *,
    where: str,
    rank: int,
) -> tuple[T, LastLoad]:
    """Load a step; where it is damaged, the one that older gives, and so on. Collective, as both functions.

    older returns None where there is no more; it is None itself if nothing but the step may be loaded. where
    is the root, rank this rank. Return what load returned, and which step that was.

    Raises:
        CheckpointError: that of the first step, if none could be loaded, or its error is none of damage.
    """
    passed: list[tuple[int, CheckpointError]] = []
    while True:
        try:
            loaded = load(step)
        except DAMAGE_ERRORS as error:
            passed.append((step, error))
        else:
            over = (SkippedStep(step=number, where=where, why=str(error)) for number, error in passed)
            return loaded, LastLoad(step=step, where=where, skipped=tuple(over))
        before = older(step) if older is not None else None
        if before is None and len(passed) == 1:
            raise passed[0][1]
        if before is None:
            raise _all_failed(passed) from passed[0][1]
        if rank == 0:
            log.warning("Step %d cannot be loaded; going back to step %d. %s", step, before, passed[-1][1])
        step = before


def with_copies_of_step(options: LoadOptions, name: str) -> LoadOptions:
    """Return the options for one step, whose copies lie under its name below the roots that are given.

    Raises:
        DeclarationError: a copy is no root but an open store.
    """
    if any(not isinstance(root, (str, os.PathLike)) for root in options.copies):
        raise DeclarationError(
            f"copies={options.copies!r}: a Checkpointer looks for a copy of each step, so give paths or URLs "
            f"of roots."
        )
    copies: tuple[Any, ...] = tuple(f"{os.fspath(root)}/{name}" for root in options.copies)
    return replace(options, copies=copies) if copies else options


def _all_failed(passed: list[tuple[int, CheckpointError]]) -> CheckpointError:
    first = passed[0][1]
    steps = ", ".join(str(step) for step, _ in passed)
    text = f"None of the steps {steps} can be loaded. Of the newest: {first}"
    return type(first)(text, key=first.key, rank=first.rank, path=first.path)


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


def _as_rank_0(group: Group, look: Callable[[], int | None], *, doing: str) -> int | None:
    def say() -> bytes:
        return json.dumps(look() if group.rank == 0 else None).encode()

    found: int | None = json.loads(run_on_all_ranks(group, say, doing=doing)[0])
    return found
