"""What loads of steps have in common, and loading from the root.

`StepRequest`, `StepLoading` and `LastLoad` are for every place of a step. From the root, all ranks load the
same step, and an older one if the newest is damaged.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from megackpt.comm import AnyGroup, Group, errors_on_all_ranks, gather_step
from megackpt.engine.checkpoint.origins import PlacedStep, StepTree
from megackpt.engine.checkpoint.steps import StepDirectories, step_name
from megackpt.engine.loading.fallback import DAMAGE_ERRORS
from megackpt.entities import ShardedStateDict, StateDict
from megackpt.errors import CheckpointError, DeclarationError, NotACheckpointError
from megackpt.maps import MapChoice
from megackpt.options import LoadOptions
from megackpt.plans.validation import LoadReport, ReturnsState
from megackpt.run.checkpointer.root import newest_step, read_tree, scan
from megackpt.run.collective import load_with_report
from megackpt.storage import Location

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class SkippedStep:
    """A step that was not loaded although it is newer than the loaded step.

    Attributes:
        step: its number.
        where: the tier or root that has it.
        why: the reason, as text.
    """

    step: int
    where: str
    why: str

    def __str__(self) -> str:
        return f"step {self.step} in {self.where}: {self.why}"


@dataclass(frozen=True, slots=True, kw_only=True)
class LastLoad:
    """The step that the last load of a `Checkpointer` used.

    Attributes:
        step: the step.
        where: the tier or root that it was loaded from.
        skipped: newer steps, or the same step in other places, that were not used; newest first.
        damaged: damaged copies of files, which were not used, with their nodes.
        report: the load report of this rank; None for a `Checkpointer` with tiers.
    """

    step: int
    where: str
    skipped: tuple[SkippedStep, ...] = ()
    damaged: tuple[str, ...] = ()
    report: LoadReport | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRequest:
    """What is loaded of a step; arguments of `megackpt.load`.

    Attributes:
        state: the sharded state dict to fill.
        strict: the mode for missing and unexpected keys.
        maps: the map to the names of the step, or what it is made by; None if it has those of the request.
        config: the config of the other model.
    """

    state: ShardedStateDict
    strict: ReturnsState
    maps: MapChoice | None = None
    config: Mapping[str, Any] | None = None


class StepLoading(Protocol):
    """Loads steps of a run, from the root or from tiers and the root."""

    def load(self, request: StepRequest, step: int | None, group: Group) -> tuple[StateDict, LastLoad]:
        """Load a step, or for None the newest that can be loaded; also return which was used. Collective.

        Raises:
            NotACheckpointError: there is no committed step, or not the one asked for.
            CheckpointError: as `megackpt.load`.
        """

    def find_latest(self, group: Group) -> int | None:
        """Return the step that a load of the newest step uses; None if there is none. Collective."""

    def survey(self, group: Group) -> Sequence[PlacedStep[Any]]:
        """Return all committed steps on rank 0, and nothing on other ranks. Collective.

        Raises:
            StorageError: the store rejected a read; the same on every rank.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class RootLoading:
    """Loads steps from a root. See `StepLoading`.

    Attributes:
        directories: the step directories under the root.
        options: options of the loads.
        exchange_group: exchange group of the loads.
    """

    directories: StepDirectories
    options: LoadOptions
    exchange_group: AnyGroup | None

    def load(self, request: StepRequest, step: int | None, group: Group) -> tuple[StateDict, LastLoad]:
        """Load a step; for None with on_corrupt="fallback", the newest that is not damaged."""
        where = self.directories.location
        current = self.find_latest(group) if step is None else step
        if current is None:
            raise NotACheckpointError(
                f"{where} has no committed step. Save one, or name the directory of a run.", path=where
            )
        goes_back = step is None and self.options.on_corrupt == "fallback"
        failures: list[tuple[int, CheckpointError]] = []
        while current is not None:
            # An error of a load is the same on all ranks, so all of them go back to the same step.
            try:
                loaded, report = self.load_step(request, current, group)
            except DAMAGE_ERRORS as error:
                failures.append((current, error))
            else:
                skipped = tuple(SkippedStep(step=s, where=where, why=str(cause)) for s, cause in failures)
                return loaded, LastLoad(step=current, where=where, skipped=skipped, report=report)
            current = self._find_older(current, group) if goes_back else None
            if current is not None and group.rank == 0:
                damaged, cause = failures[-1]
                log.warning("Step %d cannot be loaded; going back to step %d. %s", damaged, current, cause)
        newest_error = failures[0][1]
        if len(failures) == 1:
            raise newest_error
        raise _error_of_all(failures) from newest_error

    def load_step(self, request: StepRequest, step: int, group: Group) -> tuple[StateDict, LoadReport]:
        """Load one step, or its undamaged copies. Collective."""
        name = step_name(step)
        with contextlib.closing(self.directories.open(name)) as store:
            options = with_copies_of_step(self.options, name)
            return load_checkpoint(request, store, options, group, self.exchange_group)

    def find_latest(self, group: Group) -> int | None:
        """Return the newest committed step of the run's line that rank 0 finds. Collective."""
        return _answer_of_rank_0(
            group, lambda: newest_step(self.directories), doing="looking for the newest checkpoint"
        )

    def survey(self, group: Group) -> Sequence[PlacedStep[Any]]:
        """Return the committed steps of the root on rank 0. Collective."""
        steps: list[PlacedStep[Any]] = []
        with errors_on_all_ranks(group, "looking at the steps of the run"):
            if group.rank == 0:
                tree = self._tree()
                steps += [*tree.line, *tree.abandoned]
        return steps

    def _find_older(self, step: int, group: Group) -> int | None:
        """Return the step of the run's line before another that rank 0 finds. Collective."""
        return _answer_of_rank_0(
            group,
            lambda: max((placed.step for placed in self._tree().line if placed.step < step), default=None),
            doing="looking for an older checkpoint",
        )

    def _tree(self) -> StepTree[str]:
        return read_tree(self.directories, scan(self.directories).committed)


def load_checkpoint(
    request: StepRequest,
    location: Location,
    options: LoadOptions,
    group: Group,
    exchange_group: AnyGroup | None,
) -> tuple[StateDict, LoadReport]:
    """Load one checkpoint, of this run or another; see `megackpt.load_with_report`. Collective."""
    return load_with_report(
        request.state,
        location,
        strict=request.strict,
        options=options,
        group=group,
        exchange_group=exchange_group,
        maps=request.maps,
        config=request.config,
    )


def with_copies_of_step(options: LoadOptions, name: str) -> LoadOptions:
    """Return the options for loading one step: its copies lie below the given roots, under its name.

    Raises:
        DeclarationError: a copy is an open store instead of a root.
    """
    if any(not isinstance(root, (str, os.PathLike)) for root in options.copies):
        raise DeclarationError(
            f"copies={options.copies!r}: a Checkpointer looks for a copy of each step, so give paths or URLs "
            f"of roots."
        )
    copies: tuple[Any, ...] = tuple(f"{os.fspath(root)}/{name}" for root in options.copies)
    return replace(options, copies=copies) if copies else options


def _error_of_all(failures: Sequence[tuple[int, CheckpointError]]) -> CheckpointError:
    """Return an error that names all steps. Its class and fields are those of the newest step's error."""
    newest = failures[0][1]
    steps = ", ".join(str(step) for step, _ in failures)
    text = f"None of the steps {steps} can be loaded. Of the newest: {newest}"
    return type(newest)(text, key=newest.key, rank=newest.rank, path=newest.path)


def _answer_of_rank_0(group: Group, look: Callable[[], int | None], *, doing: str) -> int | None:
    """Return on all ranks the step that rank 0 finds. Collective."""
    with gather_step(group, doing, on_all_ranks=True) as looking:
        looking.data = json.dumps(look() if group.rank == 0 else None).encode()
    step: int | None = json.loads(looking.results[0])
    return step
