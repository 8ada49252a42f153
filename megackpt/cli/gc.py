"""`megackpt gc`: remove leftovers of incomplete saves, and steps that no rule keeps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import click
from rich.filesize import decimal

from megackpt.cli.entry import EPILOG, FAILED_CHECK, note, print_json, wants_json
from megackpt.cli.locations import check_run_root
from megackpt.cli.output import ProgressBars, counted, show, table_of
from megackpt.errors import DeclarationError, NotACheckpointError
from megackpt.ground.arguments import MOST_SECONDS, check_number

if TYPE_CHECKING:
    from megackpt.engine.checkpoint.steps import StepDirectories
    from megackpt.run.checkpointer import KeepBest, Retention
    from megackpt.run.checkpointer.retention import Removals
    from megackpt.run.checkpointer.root import StepList

_RUNNING = (
    "A job may be saving there right now: leftovers that are newer than the newest commit, and steps that "
    "were written to within --min-age, were not touched. The job goes on removing steps by its own options."
)


class _KeepBestType(click.ParamType):  # type: ignore[type-arg]  # click 8.1 has no type argument
    """METRIC, METRIC:N or METRIC:N:max."""

    name = "metric"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> KeepBest:
        """Return the option's value as a `KeepBest`."""
        from megackpt.run.checkpointer import KeepBest

        if isinstance(value, KeepBest):
            return value
        metric, *rest = str(value).split(":")
        n, mode = (*rest, *("1", "min")[len(rest) :])[:2] if len(rest) < 3 else ("", "")
        if not metric or not n.isdecimal() or int(n) < 1 or mode not in ("min", "max"):
            self.fail(f"{value!r}: give it as loss, loss:3 or accuracy:3:max.", param, ctx)
        return KeepBest(metric=metric, n=int(n), mode="min" if mode == "min" else "max")


@click.command(name="gc", epilog=EPILOG)
@click.argument("root", metavar="ROOT")
@click.option("--keep-last", type=click.IntRange(1), metavar="N", help="Keep the newest N steps.")
@click.option("--keep-every", type=click.IntRange(1), metavar="K", help="Keep steps that K divides.")
@click.option(
    "--keep-best",
    type=_KeepBestType(),
    metavar="METRIC[:N[:max]]",
    help="Keep the best N steps by a metric of the run.",
)
@click.option("--keep-all", is_flag=True, help="Keep all committed steps; remove leftovers only.")
@click.option(
    "--min-age",
    default=60.0,
    show_default=True,
    type=float,
    metavar="MINUTES",
    help="Remove an incomplete step only if nothing was written to it for so long.",
)
@click.option("--abandoned", is_flag=True, help="Also remove steps of abandoned branches, unless pinned.")
@click.option(
    "--incomplete-newest",
    is_flag=True,
    help="Also remove incomplete steps newer than the newest commit: no job must be saving them.",
)
@click.option("--dry-run", is_flag=True, help="Show what would be removed, and remove nothing.")
def command(
    root: str,
    *,
    keep_last: int | None,
    keep_every: int | None,
    keep_best: KeepBest | None,
    keep_all: bool,
    min_age: float,
    abandoned: bool,
    incomplete_newest: bool,
    dry_run: bool,
) -> int:
    """Remove leftovers of incomplete saves, and steps that no rule keeps, from the run in ROOT.

    ROOT is a directory or a URL. Give one of the --keep options: a step is kept if any of them keeps it. The
    newest step, pinned steps, and the newest step without damage (without reading its chunks) are always
    kept, and so are steps of abandoned branches without --abandoned. An incomplete step is removed only if a
    newer step is committed, or with --incomplete-newest, and only if nothing was written to it within
    --min-age.
    """
    from megackpt.run.checkpointer.options import Retention

    retention = Retention(keep_last=keep_last, keep_every=keep_every, keep_best=keep_best)
    if retention.keeps_all != keep_all:
        raise click.UsageError(
            "Give the steps to keep: --keep-last, --keep-every, --keep-best, or --keep-all alone. Removed "
            "steps cannot be restored, so there is no default."
        )
    check_number("--min-age", min_age, most=MOST_SECONDS, may_be_0=True)
    check_run_root(root)
    with ProgressBars("reading the steps") as bars:
        result = _clean_up(
            root,
            retention,
            bars,
            idle_s=60 * min_age,
            abandoned=abandoned,
            incomplete_newest=incomplete_newest,
            dry_run=dry_run,
        )
    if wants_json():
        print_json(result.to_json())
    else:
        result.show()
        note(_RUNNING)
    return FAILED_CHECK if result.not_removed else 0


def _clean_up(
    root: str,
    retention: Retention,
    bars: ProgressBars,
    *,
    idle_s: float,
    abandoned: bool,
    incomplete_newest: bool,
    dry_run: bool,
) -> _Result:
    """Remove what no rule keeps; with dry_run only find it. idle_s is --min-age."""
    from megackpt.engine.checkpoint.step_roots import step_directories
    from megackpt.run.checkpointer.retention import Cleanup

    directories = step_directories(root, objects=None)
    steps = _scan_checked(directories, retention, root)
    cleanup = Cleanup(directories, retention)
    tree = cleanup.tree(steps)
    line = [placed.step for placed in tree.line]
    undamaged = cleanup.newest_undamaged(line)
    damaged = tuple(step for step in line if undamaged is None or step > undamaged)
    newest = steps.committed[-1]
    if incomplete_newest:
        newest = max((newest, *steps.incomplete))
    good = () if undamaged is None else (undamaged,)
    plan = cleanup.plan(steps, upto=newest, good=good, tree=tree)
    if abandoned:
        plan = plan.without_abandoned()
    busy = cleanup.being_saved(plan, within_s=idle_s)
    removals = plan.without(busy)
    to_remove = (*removals.incomplete, *removals.retention.removed)
    sizes = {step: _nbytes(directories, step) for step in to_remove}
    removed = to_remove
    if not dry_run:
        bars.begin_count("removing steps", len(to_remove))
        # Metrics of steps without a directory stay (upto=0): a job that saves a step again stores them first.
        removed = cleanup.remove(removals, steps, upto=0, advance=bars.advance)
    return _Result(
        root=root,
        dry_run=dry_run,
        plan=plan,
        removed=tuple(removed),
        not_removed=tuple(sorted(set(to_remove) - set(removed))),
        left_alone=tuple(sorted(busy)),
        incomplete_newest=tuple(step for step in steps.incomplete if step > newest),
        damaged=damaged,
        undamaged=undamaged,
        freed_nbytes=sum(sizes[step] for step in removed),
    )


def _nbytes(directories: StepDirectories, step: int) -> int:
    from megackpt.engine.checkpoint.steps import step_name

    return sum(file.nbytes for file in directories.files(step_name(step)) or ())


def _scan_checked(directories: StepDirectories, retention: Retention, root: str) -> StepList:
    """Return the steps below root.

    Raises:
        NotACheckpointError: none is committed, or the folder is one of another tool.
        DeclarationError: no committed step has the metric of the rules.
    """
    from megackpt.cli.run_steps import check_not_foreign
    from megackpt.run.checkpointer.root import read_metrics, scan

    steps = scan(directories)
    if not steps.committed:
        check_not_foreign(root, directories.root)
        raise NotACheckpointError(
            f"{root} has no committed step, so nothing in it can be removed safely. Name the directory that "
            f"a Checkpointer saves to.",
            path=root,
        )
    if retention.keep_best is not None:
        metrics = [read_metrics(directories.root, step) for step in steps.committed]
        _check_metric(retention.keep_best.metric, metrics, root)
    return steps


def _check_metric(name: str, metrics: Sequence[Mapping[str, float]], root: str) -> None:
    """Check that a step has the metric: otherwise it may be misspelt, and no step would be kept.

    Raises:
        DeclarationError: no committed step has the metric.
    """
    known = sorted({metric for of_step in metrics for metric in of_step})
    if name not in known:
        raise DeclarationError(
            f"--keep-best {name}: no committed step of {root} was saved with that metric; "
            f"known are {', '.join(known) or 'none'}.",
            path=root,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Result:
    """The steps that were removed, or with --dry-run would be.

    Attributes:
        plan: what the rules remove and keep.
        removed: steps that were removed.
        not_removed: steps that could not be removed.
        left_alone: steps that were written to within --min-age.
        incomplete_newest: incomplete steps newer than the newest commit.
        damaged: committed steps in which damage was found; only those newer than `undamaged` were looked at.
        undamaged: the newest step in which no damage was found, without reading chunks; None without one.
        freed_nbytes: bytes of the removed steps.
    """

    root: str
    dry_run: bool
    plan: Removals
    removed: tuple[int, ...]
    not_removed: tuple[int, ...]
    left_alone: tuple[int, ...]
    incomplete_newest: tuple[int, ...]
    damaged: tuple[int, ...]
    undamaged: int | None
    freed_nbytes: int

    def to_json(self) -> dict[str, object]:
        kept = self.plan.retention.kept
        return {
            "root": self.root,
            "dry_run": self.dry_run,
            "removed": [{"step": step, "state": self._state(step)} for step in sorted(self.removed)],
            "not_removed": list(self.not_removed),
            "kept": [{"step": step, "because": list(reasons)} for step, reasons in kept.items()],
            "left_alone": list(self.left_alone),
            "incomplete_newest": list(self.incomplete_newest),
            "damaged": list(self.damaged),
            "newest_undamaged": self.undamaged,
            "freed_nbytes": self.freed_nbytes,
        }

    def show(self) -> None:
        done = "would be removed" if self.dry_run else "removed"
        kept = self.plan.retention.kept
        rows = {step: (self._state(step), done, "") for step in self.removed}
        rows |= {s: (self._state(s), "could not be removed, or is pinned now", "") for s in self.not_removed}
        rows |= {s: (self._state(s), "left alone", "written to within --min-age") for s in self.left_alone}
        reason = "newer than the newest commit: --incomplete-newest"
        rows |= {step: ("incomplete", "left alone", reason) for step in self.incomplete_newest}
        rows |= {step: (self._state(step), "kept", self._reasons(step)) for step in kept}
        cells = [(str(step), *rows[step]) for step in sorted(rows)]
        show(table_of(self.root, cells, left=("step", "state", "what", "because")))
        freed = decimal(self.freed_nbytes)
        verb = "would be freed" if self.dry_run else "freed"
        removed = counted(len(self.removed), "step")
        show(f"{removed} {done}, {freed} of files {verb}; {counted(len(kept), 'step')} kept.")
        if self.damaged:
            kept_damaged = [step for step in self.damaged if step in kept]
            good = "no step" if self.undamaged is None else f"step {self.undamaged}"
            show(
                f"Damaged steps are kept: {', '.join(map(str, kept_damaged)) or 'none'}. The newest without "
                f"damage is {good}. `megackpt verify {self.root} --all` says what is wrong."
            )

    def _reasons(self, step: int) -> str:
        words = {"good": "newest without damage"}
        return ", ".join(words.get(why, why) for why in self.plan.retention.kept[step])

    def _state(self, step: int) -> str:
        if step in self.damaged:
            return "damaged"
        return "incomplete" if step in self.plan.incomplete else "committed"
