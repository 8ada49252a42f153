"""`megackpt rollback`: let a run go back to an older step."""

from __future__ import annotations

import sys
from contextlib import closing
from typing import TYPE_CHECKING

import click

from megackpt.cli.entry import EPILOG, FAILED_CHECK, print_result, wants_json
from megackpt.cli.locations import check_run_root
from megackpt.cli.output import ProgressBars, counted, listed
from megackpt.errors import IntegrityError

if TYPE_CHECKING:
    from megackpt.run.checkpointer.root import RunRoot


@click.command(name="rollback", epilog=EPILOG)
@click.argument("root", metavar="RUN")
@click.argument("step", metavar="STEP", type=click.IntRange(0))
@click.option("--remove", is_flag=True, help="Remove the newer steps instead of moving them aside.")
@click.option("-y", "--yes", is_flag=True, help="Do not ask.")
def command(root: str, step: int, *, remove: bool, yes: bool) -> int:
    """Let the run in RUN go back: a restart then takes the committed STEP.

    Steps with greater numbers, and those of newer branches, are moved to a new directory in RUN,
    `rolled-back-1`, with their metrics and pins. It is the root of a run itself. At a URL, where steps cannot
    be moved, give --remove. No job may be saving to RUN meanwhile. Steps in tiers of nodes are not moved.
    """
    with ProgressBars("reading the steps"):
        from megackpt.run.checkpointer.rollback import move_aside, remove_steps, steps_after, update_tracker
        from megackpt.run.checkpointer.root import RunRoot

        check_run_root(root)
        run = RunRoot(root)
        tree = run.tree()
        steps = steps_after(step, [*tree.line, *tree.abandoned], where=root)
        _check_sizes(run, step)
    do = "remove" if remove else "move aside"
    if steps and not yes:
        if wants_json() or not sys.stdin.isatty():
            raise click.UsageError(
                f"This would {do} {counted(len(steps), 'step')} of {root}: {listed(steps)}. Nobody can be "
                f"asked here, so give --yes."
            )
        click.echo(f"{root}: this will {do} {counted(len(steps), 'step')}: {listed(steps)}.", err=True)
        click.confirm("No job may be saving there. Go on?", abort=True, err=True)
    aside = None
    if steps and remove:
        remove_steps(run, steps)
    elif steps:
        aside = move_aside(run, steps)
    newest = update_tracker(run)
    result = {"root": root, "latest": newest, "steps": list(steps), "moved_to": aside, "removed": remove}
    print_result(result, _text(root, steps, newest, aside))
    return 0 if newest == step else FAILED_CHECK


def _check_sizes(run: RunRoot, step: int) -> None:
    """Check that the step that a restart is to take has all its files.

    Raises:
        IntegrityError: a file is missing or has a wrong size, or the commit is damaged.
    """
    from megackpt.cli.run_steps import wrong_size
    from megackpt.engine.checkpoint.steps import step_name

    files = run.directories.files(step_name(step)) or ()
    with closing(run.directories.open(step_name(step))) as store:
        damage = wrong_size(store, {file.name: file.nbytes for file in files})
    if damage:
        where = run.location(step)
        raise IntegrityError(
            f"{where} is damaged, so a restart could not load it: {damage}. Nothing was changed. Repair it "
            f"with `megackpt repair {where}`, or name another step: `megackpt ls` lists them.",
            path=where,
        )


def _text(root: str, steps: tuple[int, ...], newest: int | None, aside: str | None) -> str:
    done = "No step is newer, and nothing was changed."
    if steps and aside is None:
        done = f"{counted(len(steps), 'step')} removed: {listed(steps)}."
    elif steps:
        done = f"{counted(len(steps), 'step')} moved to {aside}: {listed(steps)}."
    return f"{root}: {done} A restart takes step {newest}."
