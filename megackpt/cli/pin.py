"""`megackpt pin`: protect steps from removal."""

from __future__ import annotations

import click

from megackpt.cli.entry import EXIT_CODES, output_options, print_result
from megackpt.cli.locations import check_run_root
from megackpt.cli.output import ProgressBars


@click.command(name="pin", epilog=EXIT_CODES)
@click.argument("root", metavar="ROOT")
@click.argument("step", metavar="[STEP]", type=click.IntRange(0), required=False)
@click.option("--remove", is_flag=True, help="Unpin STEP, so that it can be removed.")
@click.option("--list", "only_list", is_flag=True, help="Change nothing; list the pinned steps.")
@output_options
def command(root: str, step: int | None, *, remove: bool, only_list: bool, as_json: bool) -> None:
    """Pin the committed STEP of the run in ROOT, a directory or a URL.

    No job and no `megackpt gc` removes a pinned step until it is unpinned. This holds for running jobs, too.
    """
    if only_list == (step is not None):
        raise click.UsageError("Give a STEP to pin or unpin, or --list; not both.")
    if only_list and remove:
        raise click.UsageError("--remove needs a STEP and cannot be combined with --list.")
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
    print_result(
        {"root": root, "pins": list(pins)}, _text(root, step, pins, was_pinned=was_pinned), as_json=as_json
    )


def _text(root: str, step: int | None, pins: tuple[int, ...], *, was_pinned: bool) -> str:
    listed = f"pinned: {', '.join(map(str, pins))}" if pins else "no step is pinned"
    if step is None:
        return f"{root}: {listed}."
    done = "is pinned" if step in pins else "is no longer pinned" if was_pinned else "was not pinned"
    return f"{root}: step {step} {done}; {listed}."
