"""Which steps of a run stay, and what is done after a commit or a failed save.

The order of these actions is such that a crash at any moment leaves every step that should stay. Everything
here is local, and for one process at a time: rank 0, or a command.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NoReturn

from megackpt.checkpointer.options import Retention
from megackpt.checkpointer.root_files import (
    TRACKER,
    StepList,
    forget_metrics,
    is_pinned,
    read_metrics,
    read_pins,
    scan,
    steps_with_metrics,
    write_tracker,
)
from megackpt.engine.checkpoint.manifest import holds_other_attempts
from megackpt.engine.checkpoint.steps import StepDirectories, step_name
from megackpt.engine.data.progress import NoProgress
from megackpt.engine.verification.verify import verify_share
from megackpt.errors import IntegrityError, truncated_list
from megackpt.formats.damage import Damage
from megackpt.options import VerifyOptions

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class RetentionDecision:
    """Which steps stay and which are removed.

    Attributes:
        kept: the reasons of each step that stays, by step, ascending.
        removed: steps to remove, ascending.
    """

    kept: Mapping[int, tuple[str, ...]]
    removed: tuple[int, ...]


def decide(
    retention: Retention,
    committed: Iterable[int],
    *,
    pinned: Collection[int] = (),
    good: Collection[int] = (),
    metrics: Mapping[int, Mapping[str, float]] | None = None,
) -> RetentionDecision:
    """Decide which committed steps stay.

    Besides those that `retention` asks for, the newest step stays, pinned steps, and the steps in `good`: the
    one that was committed just now, or the newest one that is known to be undamaged.

    >>> decide(Retention(keep_last=1, keep_every=100), [50, 100, 150, 200, 250], pinned={50}).removed
    (150,)
    """
    steps = sorted(set(committed))
    period = retention.keep_every
    last = set(steps[-retention.keep_last :]) if retention.keep_last is not None else set()
    best: Collection[int] = ()
    if retention.keep_best is not None:
        best = retention.keep_best.best_of({s: m for s, m in (metrics or {}).items() if s in set(steps)})
    kept: dict[int, tuple[str, ...]] = {}
    for step in steps:
        reasons = {
            "newest": step == steps[-1],
            "pinned": step in pinned,
            "good": step in good and step != steps[-1],
            "all are kept": retention.keeps_all,
            f"last {retention.keep_last}": step in last,
            f"every {period}": period is not None and step % period == 0,
            f"best {retention.keep_best.metric if retention.keep_best else ''}": step in best,
        }
        if any(reasons.values()):
            kept[step] = tuple(reason for reason, holds in reasons.items() if holds)
    return RetentionDecision(kept=kept, removed=tuple(step for step in steps if step not in kept))


def stale_leftovers(incomplete: Iterable[int], *, upto: int, pinned: Collection[int] = ()) -> tuple[int, ...]:
    """Return the incomplete steps that can be removed once step upto is committed, ascending.

    Newer ones stay: another job may be saving them.
    """
    return tuple(sorted(step for step in incomplete if step <= upto and step not in pinned))


_OUR_HALVES = (".megackpt/", f".{TRACKER}.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Removals:
    """What is to go from below a root.

    Attributes:
        retention: about committed steps.
        incomplete: incomplete steps to remove, ascending.
    """

    retention: RetentionDecision
    incomplete: tuple[int, ...]

    def without(self, steps: Collection[int]) -> Removals:
        """Return what is left to go if these steps are let alone."""
        removed = tuple(step for step in self.retention.removed if step not in steps)
        incomplete = tuple(step for step in self.incomplete if step not in steps)
        return Removals(retention=replace(self.retention, removed=removed), incomplete=incomplete)


class Cleanup:
    """Keeps the root of a run in order. Local; see the module."""

    def __init__(
        self,
        places: StepDirectories,
        retention: Retention,
        *,
        allow_unsafe_pickle: bool = False,
    ) -> None:
        self._places = places
        self._retention = retention
        self._trusted = allow_unsafe_pickle
        self._metrics: dict[int, dict[str, float]] = {}  # of steps that do not change any more

    def committed(self, step: int, damages: Sequence[Damage] | None = None) -> None:
        """Do what follows the commit of a step: note it, remove what is not kept.

        What cannot be noted or removed now stays for the next time, with a warning: the step is saved.
        damages are what ranks have found that have verified it together; None if nobody has.

        Raises:
            IntegrityError: the step is damaged. It is gone then, if the store lets it go, and no other is.
        """
        self._metrics.pop(step, None)
        if damages:
            self._refuse(step, damages)
        with _warned("after the commit of step", step):
            found = self._note_newest()
            removals = self.plan(found, upto=step, good={step})
            self.remove(removals, found, upto=step)

    def failed(self, step: int) -> None:
        """Do what follows a save that failed and has removed its files: let go of what is beside them."""
        with contextlib.suppress(OSError):
            if not self._places.committed([step_name(step)]):
                forget_metrics(self._places.root, step)
            self._places.prune(step_name(step))

    def plan(self, found: StepList, *, upto: int, good: Iterable[int]) -> Removals:
        """Decide what is to go. good are steps that stay; torn ones go up to this step."""
        pinned = read_pins(self._places.root)
        metrics = self._metrics_of(found.committed) if self._retention.keep_best is not None else {}
        return Removals(
            retention=decide(
                self._retention, found.committed, pinned=pinned, good=frozenset(good), metrics=metrics
            ),
            incomplete=stale_leftovers(found.incomplete, upto=upto, pinned=pinned),
        )

    def being_saved(self, removals: Removals, *, within_s: float) -> frozenset[int]:
        """Return those that go into which a job may be saving right now: something was written there lately.

        Of a committed one, that there are files that its commit does not name counts as well. Where a store
        does not tell when it was written to, none.
        """
        busy = {step for step in removals.incomplete if self._is_young(step, within_s)}
        for step in removals.retention.removed:
            if self._is_young(step, within_s):
                with contextlib.closing(self._places.open(step_name(step))) as store:
                    busy |= {step} if holds_other_attempts(store) else set()
        return frozenset(busy)

    def _is_young(self, step: int, within_s: float) -> bool:
        idle_s = self._places.idle_s(step_name(step))
        return idle_s is not None and idle_s < within_s

    def remove(self, removals: Removals, found: StepList, *, upto: int) -> tuple[int, ...]:
        """Remove steps, unless they have been pinned meanwhile; return those that are gone.

        found is what was there before. Metrics go with them, and those of steps before upto that do not
        exist: of saves that wrote nothing else before they were cut short.
        """
        chosen = (*removals.retention.removed, *removals.incomplete)
        gone = tuple(step for step in chosen if self._remove(step))
        there = {*found.committed, *found.incomplete} - set(gone)
        with _warned("removing metrics before step", upto):
            for stray in steps_with_metrics(self._places.root):
                if stray in gone or (stray < upto and stray not in there):
                    forget_metrics(self._places.root, stray)
        return gone

    def _remove(self, step: int) -> bool:
        with _warned("removing step", step):
            if is_pinned(self._places.root, step):
                return False
            self._places.remove(step_name(step))
            self._metrics.pop(step, None)
            log.info("removed %s/%s", self._places.location, step_name(step))
            return True
        return False

    def newest_whole(self, committed: Iterable[int]) -> int | None:
        """Return the newest step in which nothing is wrong that can be seen without reading its chunks."""
        return next((step for step in sorted(committed, reverse=True) if self._is_whole(step)), None)

    def _is_whole(self, step: int) -> bool:
        options = VerifyOptions(allow_unsafe_pickle=self._trusted)
        with contextlib.closing(self._places.open(step_name(step))) as store:
            return not verify_share(store, options, NoProgress()).damages

    def _note_newest(self) -> StepList:
        found = scan(self._places)
        if halves := [name for name in self._places.halves() if name.startswith(_OUR_HALVES)]:
            self._places.root.delete(halves)
        write_tracker(self._places.root, max(found.committed, default=None))
        return found

    def _metrics_of(self, steps: Iterable[int]) -> Mapping[int, Mapping[str, float]]:
        for step in steps:
            if step not in self._metrics:
                self._metrics[step] = read_metrics(self._places.root, step)
        return self._metrics

    def _refuse(self, step: int, damages: Sequence[Damage]) -> NoReturn:
        where = f"{self._places.location}/{step_name(step)}"
        with _warned("removing damaged step", step):
            forget_metrics(self._places.root, step)
            self._places.remove(step_name(step))
            self._note_newest()
        raise IntegrityError(
            f"{where} is damaged right after it was saved, so it is removed again, and older steps stay:\n"
            f"{truncated_list([str(damage) for damage in damages])}\n"
            f"What was written is not what is read: look at the disk or mount and at the memory of the "
            f"machines that wrote, and at their logs.",
            key=damages[0].key,
            path=f"{where}/{damages[0].file}" if damages[0].file else where,
        )


class _warned:  # named as `contextlib.suppress` is
    """Within the block, what the store refuses becomes a warning."""

    def __init__(self, doing: str, step: int) -> None:
        self._said = f"{doing} {step}"

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, trace: object, /) -> bool:
        if isinstance(error, OSError):
            log.warning("%s: %s It is tried again after the next save.", self._said, error)
            return True
        return False
