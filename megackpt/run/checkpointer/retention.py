"""Which steps of a run stay, and the removal of others after a commit or a failed save.

The order of these actions ensures that after a crash at any moment every step that should stay exists. All
functions are local, and for one process at a time: rank 0, or a command.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NoReturn

from megackpt.engine.checkpoint.origins import StepOrigin, StepTree
from megackpt.engine.checkpoint.removal import has_other_attempts
from megackpt.engine.checkpoint.steps import StepDirectories, step_name
from megackpt.engine.data.progress import NoProgress
from megackpt.engine.verification.verify import verify_share
from megackpt.errors import IntegrityError, truncated_list
from megackpt.formats.damage import Damage
from megackpt.options import VerifyOptions
from megackpt.run.checkpointer.options import Retention
from megackpt.run.checkpointer.root import (
    TRACKER,
    StepList,
    is_pinned,
    read_metrics,
    read_pins,
    read_tree,
    remove_metrics,
    scan,
    steps_with_metrics,
    write_tracker,
)

log = logging.getLogger(__name__)

ABANDONED = "abandoned branch"
"""The reason why a step stays that a restart does not come from."""

_TEMPORARY_FILE_PREFIXES = (".megackpt/", f".{TRACKER}.")


@dataclass(frozen=True, slots=True, kw_only=True)
class RetentionDecision:
    """Which committed steps stay and which are removed.

    Attributes:
        kept: by step, ascending, the reasons why it stays.
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
    abandoned: Iterable[int] = (),
) -> RetentionDecision:
    """Decide which committed steps stay. Pure.

    The steps that `retention` keeps stay, the newest step, pinned steps, and the steps in `good`: the step
    that was just committed, or the newest step that is known to be undamaged. Steps of abandoned branches
    stay, and are not counted.

    Args:
        retention: the rules.
        committed: the steps of the line that a restart continues.
        pinned: pinned steps.
        good: see above.
        metrics: the metrics of steps.
        abandoned: the committed steps of other branches.

    >>> decide(Retention(keep_last=1, keep_every=100), [50, 100, 150, 200, 250], pinned={50}).removed
    (150,)
    """
    steps = sorted(set(committed))
    last, period = retention.keep_last, retention.keep_every
    groups: dict[str, Iterable[int]] = {
        "newest": steps[-1:],
        "pinned": pinned,
        "good": set(good) - set(steps[-1:]),
        "all are kept": steps if retention.keeps_all else (),
        f"last {last}": () if last is None else steps[-last:],
        f"every {period}": () if period is None else (step for step in steps if step % period == 0),
    }
    if retention.keep_best is not None:
        known = {step: of_step for step, of_step in (metrics or {}).items() if step in set(steps)}
        groups[f"best {retention.keep_best.metric}"] = retention.keep_best.best_of(known)
    members = {why: frozenset(group) for why, group in groups.items()}
    reasons = {step: tuple(why for why, group in members.items() if step in group) for step in steps}
    reasons |= {step: (ABANDONED,) + ("pinned",) * (step in pinned) for step in sorted(abandoned)}
    kept = {step: reasons[step] for step in sorted(reasons) if reasons[step]}
    return RetentionDecision(kept=kept, removed=tuple(step for step in steps if step not in kept))


def stale_leftovers(incomplete: Iterable[int], *, upto: int, pinned: Collection[int] = ()) -> tuple[int, ...]:
    """Return the incomplete steps that can be removed once step upto is committed, ascending. Pure.

    Newer ones stay: another job may be saving them.
    """
    return tuple(sorted(step for step in incomplete if step <= upto and step not in pinned))


@dataclass(frozen=True, slots=True, kw_only=True)
class Removals:
    """Steps to remove from a root.

    Attributes:
        retention: the decision about committed steps.
        incomplete: incomplete steps to remove, ascending.
    """

    retention: RetentionDecision
    incomplete: tuple[int, ...]

    def without_abandoned(self) -> Removals:
        """Return the same removals, with all steps of abandoned branches that are not pinned."""
        kept = self.retention.kept
        abandoned = {step for step, reasons in kept.items() if reasons == (ABANDONED,)}
        decision = RetentionDecision(
            kept={step: reasons for step, reasons in kept.items() if step not in abandoned},
            removed=tuple(sorted({*self.retention.removed, *abandoned})),
        )
        return replace(self, retention=decision)

    def without(self, steps: Collection[int]) -> Removals:
        """Return the same removals without these steps."""
        removed = tuple(step for step in self.retention.removed if step not in steps)
        incomplete = tuple(step for step in self.incomplete if step not in steps)
        return Removals(retention=replace(self.retention, removed=removed), incomplete=incomplete)


class Cleanup:
    """Removes steps and leftovers of a root after commits and failed saves. Local; one process at a time."""

    def __init__(
        self,
        directories: StepDirectories,
        retention: Retention,
        *,
        allow_unsafe_pickle: bool = False,
    ) -> None:
        self._directories = directories
        self._retention = retention
        self._allow_unsafe_pickle = allow_unsafe_pickle
        # Of steps that do not change any more:
        self._metrics: dict[int, dict[str, float]] = {}
        self._origins: dict[int, StepOrigin | None] = {}

    def after_commit(
        self, step: int, damages: Sequence[Damage] | None = None, *, discard: Collection[int] = ()
    ) -> None:
        """Write the tracker, and remove steps that are not kept.

        The step is saved: if a write or removal fails, a warning is logged, and it is tried again after the
        next save.

        Args:
            step: the step that was committed.
            damages: the damage that ranks found when they verified the step; None if it was not verified.
            discard: other steps to remove, unless they are pinned.

        Raises:
            IntegrityError: the step is damaged. Only this step is removed, if the store permits.
        """
        self._metrics.pop(step, None)
        self._origins.pop(step, None)
        if damages:
            self._remove_damaged(step, damages)
        with _storage_errors_logged(f"after the commit of step {step}"):
            for discarded in sorted(set(discard) - {step}, reverse=True):
                self._remove(discarded)
            steps, tree = self._update_tracker()
            if tree.newest != step:
                log.warning(
                    "Step %s is saved, but a restart takes step %s: another job has saved it, or its commit "
                    "is damaged.",
                    step,
                    tree.newest,
                )
            removals = self.plan(steps, upto=step, good={step}, tree=tree)
            self.remove(removals, steps, upto=step)

    def after_failure(self, step: int) -> None:
        """Remove the metrics and the directory of a step whose save failed and has removed its files."""
        with contextlib.suppress(OSError):
            if not self._directories.committed([step_name(step)]):
                remove_metrics(self._directories.root, step)
            self._directories.prune(step_name(step))

    def plan(
        self, steps: StepList, *, upto: int, good: Iterable[int], tree: StepTree[str] | None = None
    ) -> Removals:
        """Decide which steps to remove: not those in good, and incomplete steps only up to `upto`.

        tree has the committed steps; None to read their origins.
        """
        tree = tree or self.tree(steps)
        pinned = read_pins(self._directories.root)
        metrics = self._metrics_of(steps.committed) if self._retention.keep_best is not None else {}
        return Removals(
            retention=decide(
                self._retention,
                [placed.step for placed in tree.line],
                pinned=pinned,
                good=frozenset(good),
                metrics=metrics,
                abandoned=[placed.step for placed in tree.abandoned],
            ),
            incomplete=stale_leftovers(steps.incomplete, upto=upto, pinned=pinned),
        )

    def being_saved(self, removals: Removals, *, within_s: float) -> frozenset[int]:
        """Return the steps that a job may be saving now, because a file was written in the last seconds.

        A committed step is among them only if it also has files that its commit does not name. If the store
        has no times of files, the result is empty.
        """
        busy = {step for step in removals.incomplete if self._was_written(step, within_s)}
        for step in removals.retention.removed:
            if self._was_written(step, within_s):
                with contextlib.closing(self._directories.open(step_name(step))) as store:
                    busy |= {step} if has_other_attempts(store) else set()
        return frozenset(busy)

    def _was_written(self, step: int, within_s: float) -> bool:
        idle_s = self._directories.idle_s(step_name(step))
        return idle_s is not None and idle_s < within_s

    def remove(
        self,
        removals: Removals,
        steps: StepList,
        *,
        upto: int,
        advance: Callable[[int], None] = lambda steps: None,
    ) -> tuple[int, ...]:
        """Remove steps, unless they were pinned meanwhile; return those that no longer exist.

        Their metrics are removed with them. Metrics before upto whose steps do not exist are also removed:
        they are left over from saves that were interrupted before they wrote anything else.

        Args:
            removals: the steps to remove.
            steps: the steps that existed before.
            upto: see above.
            advance: called with 1 after each of these steps, to report progress.
        """
        gone = []
        for step in (*removals.retention.removed, *removals.incomplete):
            if self._remove(step):
                gone.append(step)
            advance(1)
        existing = {*steps.committed, *steps.incomplete} - set(gone)
        with _storage_errors_logged(f"removing metrics before step {upto}"):
            for step in steps_with_metrics(self._directories.root):
                if step in gone or (step < upto and step not in existing):
                    remove_metrics(self._directories.root, step)
        return tuple(gone)

    def _remove(self, step: int) -> bool:
        """Remove a step; return whether it no longer exists."""
        is_gone = False
        with _storage_errors_logged(f"removing step {step}"):
            if not is_pinned(self._directories.root, step):
                self._directories.remove(step_name(step))
                is_gone = True
                self._metrics.pop(step, None)
                log.info("removed %s/%s", self._directories.location, step_name(step))
        return is_gone

    def newest_undamaged(self, committed: Iterable[int]) -> int | None:
        """Return the newest step without damage that can be found without reading its chunks."""
        return next((step for step in sorted(committed, reverse=True) if self._is_undamaged(step)), None)

    def _is_undamaged(self, step: int) -> bool:
        options = VerifyOptions(allow_unsafe_pickle=self._allow_unsafe_pickle)
        with contextlib.closing(self._directories.open(step_name(step))) as store:
            return not verify_share(store, options, NoProgress()).damages

    def tree(self, steps: StepList) -> StepTree[str]:
        """Return the committed steps with their origins. Those that were read before are not read again."""
        for step in self._origins.keys() - set(steps.committed):
            del self._origins[step]
        return read_tree(self._directories, steps.committed, known=self._origins)

    def _update_tracker(self) -> tuple[StepList, StepTree[str]]:
        """Write the step that a restart takes into the tracker; return the steps."""
        steps = scan(self._directories)
        # A crash between writing and renaming a file next to the steps leaves its temporary file.
        leftovers = [
            name for name in self._directories.temporary_files() if name.startswith(_TEMPORARY_FILE_PREFIXES)
        ]
        if leftovers:
            self._directories.root.delete(leftovers)
        tree = self.tree(steps)
        write_tracker(self._directories.root, tree.newest)
        return steps, tree

    def _metrics_of(self, steps: Iterable[int]) -> Mapping[int, Mapping[str, float]]:
        for step in steps:
            if step not in self._metrics:
                self._metrics[step] = read_metrics(self._directories.root, step)
        return self._metrics

    def _remove_damaged(self, step: int, damages: Sequence[Damage]) -> NoReturn:
        where = f"{self._directories.location}/{step_name(step)}"
        with _storage_errors_logged(f"removing damaged step {step}"):
            remove_metrics(self._directories.root, step)
            self._directories.remove(step_name(step))
            self._update_tracker()
        raise IntegrityError(
            f"{where} is damaged right after it was saved. The step is removed, and older steps stay:\n"
            f"{truncated_list([str(damage) for damage in damages])}\n"
            f"The bytes read differ from the bytes written. Check the disk or mount, the memory of the "
            f"machines that wrote them, and their logs.",
            key=damages[0].key,
            path=f"{where}/{damages[0].file}" if damages[0].file else where,
        )


@contextlib.contextmanager
def _storage_errors_logged(doing: str) -> Iterator[None]:
    """Log an error of the store as a warning instead of raising it."""
    try:
        yield
    except OSError as error:
        log.warning("%s: %s It is tried again after the next save.", doing, error)
