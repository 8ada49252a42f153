"""`megackpt pin`: protect steps from removal."""

from __future__ import annotations

import click

from megackpt.cli.entry import EPILOG, print_result
from megackpt.cli.locations import check_run_root
from megackpt.cli.output import ProgressBars


@click.command(name="pin", epilog=EPILOG)
@click.argument("root", metavar="ROOT")
@click.argument("step", metavar="[STEP]", type=click.IntRange(0), required=False)
@click.option("--remove", is_flag=True, help="Unpin STEP, so that it can be removed.")
def command(root: str, step: int | None, *, remove: bool) -> None:
    """Pin the committed STEP of the run in ROOT, a directory or a URL.

    No job and no `megackpt gc` removes a pinned step until it is unpinned. This holds for running jobs, too.
    Without STEP nothing changes, and the pinned steps are listed.
    """
    if remove and step is None:
        raise click.UsageError("--remove needs the STEP to unpin.")
    with ProgressBars():
        from megackpt.run.checkpointer.root import RunRoot

        check_run_root(root)
        run = RunRoot(root)
        was_pinned = step in run.pins()
        if step is not None and remove:
            run.unpin(step)
        elif step is not None:
            run.pin(step)
        pins = run.pins()
    print_result({"root": root, "pins": list(pins)}, _text(root, step, pins, was_pinned=was_pinned))


def _text(root: str, step: int | None, pins: tuple[int, ...], *, was_pinned: bool) -> str:
    listed = f"pinned: {', '.join(map(str, pins))}" if pins else "no step is pinned"
    if step is None:
        return f"{root}: {listed}."
    done = "is pinned" if step in pins else "is no longer pinned" if was_pinned else "was not pinned"
    return f"{root}: step {step} {done}; {listed}."
