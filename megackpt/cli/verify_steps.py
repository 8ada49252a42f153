"""`megackpt verify ROOT --all`: all steps of a run, and the newest good one."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from rich.filesize import decimal

from megackpt.cli.locations import check_run_root
from megackpt.cli.output import ProgressBars, counted, show, table_of
from megackpt.cli.run_steps import check_not_foreign
from megackpt.errors import CheckpointError, NotACheckpointError

if TYPE_CHECKING:
    from megackpt.options import VerifyOptions
    from megackpt.run.checkpointer.root import RunRoot
    from megackpt.storage import Store

_REPAIRS = {"all": "repairs it", "part": "repairs part", "nothing": "repairs nothing"}
_STYLES = {"whole": "green", "undamaged": "green", "incomplete": "yellow"}


@dataclass(frozen=True, slots=True, kw_only=True)
class StepVerdict:
    """What was found in a step.

    Attributes:
        step: its number.
        state: `whole`, if every byte was compared with a digest; `undamaged`, if no damage was found in what
            was checked; `damaged`; `incomplete`, if it has no commit; `unreadable`, if its commit is damaged,
            in an unknown format, or the store rejects the read.
        abandoned: whether a restart does not come from it.
        damages: how many were found.
        what: the first damage, or why it is unreadable; empty without one.
        repair: of a damaged step, what parity files restore: `all`, `part`, `nothing`; empty without parity.
        nbytes: bytes of its chunks.
    """

    step: int
    state: str
    abandoned: bool
    damages: int = 0
    what: str = ""
    repair: str = ""
    nbytes: int = 0

    @property
    def is_good(self) -> bool:
        """Whether no damage was found in a committed step."""
        return self.state in ("whole", "undamaged")


def newest_good(verdicts: Sequence[StepVerdict]) -> int | None:
    """Return the newest good step from which the run comes; None if there is none. Pure."""
    return max((v.step for v in verdicts if v.is_good and not v.abandoned), default=None)


def verify_steps(
    root: str, options: VerifyOptions, bars: ProgressBars
) -> tuple[list[StepVerdict], int | None]:
    """Return the verdicts on all steps below a root, ascending, and the step that a restart takes.

    Raises:
        NotACheckpointError: the root is not a directory, is itself a checkpoint, or has no step.
    """
    from megackpt.run.checkpointer.root import RunRoot

    check_run_root(root)
    run = RunRoot(root)
    steps, tree = run.scan(), run.tree()
    abandoned = {placed.step for placed in tree.abandoned}
    numbers = sorted({*steps.committed, *steps.incomplete})
    if not numbers:
        check_not_foreign(root, run.directories.root)
        raise NotACheckpointError(
            f"{root} has no steps. Name the directory that a Checkpointer saves to.", path=root
        )
    bars.begin_count("verifying steps", len(numbers))
    verdicts = []
    for step in numbers:
        if step in steps.incomplete:
            verdicts.append(StepVerdict(step=step, state="incomplete", abandoned=False))
        else:
            verdicts += _verdicts(run, step, options, abandoned=step in abandoned)
        bars.advance(1)
    return verdicts, tree.newest


def _verdicts(run: RunRoot, step: int, options: VerifyOptions, *, abandoned: bool) -> Iterator[StepVerdict]:
    """Yield the verdict on a committed step; nothing if it was removed meanwhile."""
    from megackpt.engine.checkpoint.steps import step_name
    from megackpt.engine.data.progress import NoProgress
    from megackpt.engine.verification.verify import verify_checkpoint

    with contextlib.closing(run.directories.open(step_name(step))) as store:
        try:
            report = verify_checkpoint(store, options, NoProgress())
        except NotACheckpointError:
            return
        except CheckpointError as error:
            what = " ".join(str(error).split())
            yield StepVerdict(step=step, state="unreadable", abandoned=abandoned, damages=1, what=what)
            return
        state = "whole" if report.is_whole else "undamaged"
        if report.damages:
            state = "damaged" if report.backend else "unreadable"
        yield StepVerdict(
            step=step,
            state=state,
            abandoned=abandoned,
            damages=len(report.damages),
            what=str(report.damages[0]) if report.damages else "",
            repair=_repair_by_parity(store) if state == "damaged" else "",
            nbytes=report.nbytes,
        )


def _repair_by_parity(store: Store) -> str:
    """Return how much of the damage parity files restore; empty if there are none. Reads all bytes."""
    from megackpt.engine.checkpoint.manifest import read_manifest
    from megackpt.plans.validation.report import PARITY
    from megackpt.whole.repair import repair

    try:
        if PARITY not in read_manifest(store):
            return ""
        report = repair(store, dry_run=True)
    except CheckpointError:
        return "nothing"
    return "all" if report.is_whole else "part" if report.files else "nothing"


def steps_as_json(root: str, verdicts: Sequence[StepVerdict], latest: int | None) -> dict[str, object]:
    """Return the verdicts as values of JSON."""
    return {
        "root": root,
        "latest": latest,
        "newest_good": newest_good(verdicts),
        "steps": [asdict(verdict) for verdict in verdicts],
    }


def show_steps(root: str, verdicts: Sequence[StepVerdict], latest: int | None, *, deep: bool) -> None:
    """Print the verdicts, and which step is good."""
    rows = [_cells(verdict, latest) for verdict in verdicts]
    styles = [_STYLES.get(verdict.state, "red") for verdict in verdicts]
    left, right = ("step", "state", "parity", "what is wrong"), ("chunks",)
    show(table_of(root, rows, left=left, right=right, styles=styles))
    damaged = [v for v in verdicts if not v.is_good and v.state != "incomplete"]
    if not deep:
        show("No bytes of tensors were read; --deep reads them.")
    good = newest_good(verdicts)
    if damaged:
        numbers = ", ".join(str(v.step) for v in damaged)
        show(f"{counted(len(damaged), 'step')} damaged: {numbers}.{_advice(root, damaged, good)}")
    show(f"newest good step: {'none' if good is None else good}")


def _cells(verdict: StepVerdict, latest: int | None) -> tuple[str, ...]:
    words = [verdict.state] + ["latest"] * (verdict.step == latest) + ["abandoned"] * verdict.abandoned
    repaired = _REPAIRS.get(verdict.repair, "")
    more = f" (and {verdict.damages - 1} more)" if verdict.damages > 1 else ""
    parity = repaired or ("none" if verdict.state == "damaged" else "")
    size = decimal(verdict.nbytes) if verdict.nbytes else ""
    return str(verdict.step), ", ".join(words), parity, f"{verdict.what}{more}", size


def _advice(root: str, damaged: Sequence[StepVerdict], good: int | None) -> str:
    from megackpt.engine.checkpoint.steps import step_name

    repairable = [v.step for v in damaged if v.repair == "all"]
    if repairable:
        return f" Next: `megackpt repair {root}/{step_name(repairable[-1])}` restores step {repairable[-1]}."
    if good is None or good > damaged[-1].step:
        return ""
    return f" Next: load step {good}, or `megackpt rollback {root} {good}`."
