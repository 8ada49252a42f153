"""`megackpt gc`: removes what torn saves left, and steps that are not to be kept."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

import click

from megackpt.arguments import MOST_SECONDS, check_number
from megackpt.cli.entry import EXIT_CODES, FAILED_CHECK, json_option, print_result
from megackpt.cli.locations import check_run_root
from megackpt.cli.tables import show, table_of
from megackpt.errors import DeclarationError, NotACheckpointError

if TYPE_CHECKING:
    from megackpt.checkpointer import KeepBest
    from megackpt.checkpointer.retention import Removals

_RUNNING = (
    "A job may be saving there right now: leftovers that are newer than the newest commit are left alone, "
    "and so is what was written to within --min-age. Its own retention goes on by its own options."
)


class _Best(click.ParamType["KeepBest"]):
    """METRIC, METRIC:N or METRIC:N:max."""

    name = "metric"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> KeepBest:
        """Return the option's value as a `KeepBest`."""
        from megackpt.checkpointer import KeepBest

        if isinstance(value, KeepBest):
            return value
        metric, *rest = str(value).split(":")
        n, mode = (*rest, *("1", "min")[len(rest) :])[:2] if len(rest) < 3 else ("", "")
        if not metric or not n.isdecimal() or int(n) < 1 or mode not in ("min", "max"):
            self.fail(f"{value!r}: give it as loss, loss:3 or accuracy:3:max.", param, ctx)
        return KeepBest(metric=metric, n=int(n), mode="min" if mode == "min" else "max")


@click.command(name="gc", epilog=EXIT_CODES)
@click.argument("root", metavar="ROOT")
@click.option("--keep-last", type=click.IntRange(1), metavar="N", help="The newest N steps stay.")
@click.option("--keep-every", type=click.IntRange(1), metavar="K", help="Steps that K divides stay.")
@click.option(
    "--keep-best", type=_Best(), metavar="METRIC[:N[:max]]", help="The best N by a metric of the run stay."
)
@click.option("--keep-all", is_flag=True, help="All committed steps stay; only leftovers go.")
@click.option(
    "--min-age",
    default=60.0,
    show_default=True,
    type=float,
    metavar="MINUTES",
    help="What a save has begun and not committed goes only if nothing was written to it for so long.",
)
@click.option(
    "--incomplete-newest",
    is_flag=True,
    help="Incomplete steps newer than the newest commit go, too: no job must be saving them.",
)
@click.option("--dry-run", is_flag=True, help="Say what would go, and remove nothing.")
@json_option
def command(
    root: str,
    *,
    keep_last: int | None,
    keep_every: int | None,
    keep_best: KeepBest | None,
    keep_all: bool,
    min_age: float,
    incomplete_newest: bool,
    dry_run: bool,
    as_json: bool,
) -> int:
    """Remove from the run in ROOT, a directory or an URL, what torn saves left and steps that nothing keeps.

    One of the --keep options must be given: a step stays if any of them asks for it. Whatever they say, the
    newest step stays, pinned ones do, and the newest in which nothing is wrong that can be seen without
    reading its chunks. What incomplete saves left goes only if a newer step is committed, or with
    --incomplete-newest, and if nothing was written to it lately.
    """
    from megackpt.checkpointer.options import Retention
    from megackpt.checkpointer.retention import Cleanup
    from megackpt.checkpointer.root_files import read_metrics, scan
    from megackpt.engine.checkpoint.step_roots import step_directories

    retention = Retention(keep_last=keep_last, keep_every=keep_every, keep_best=keep_best)
    if retention.keeps_all != keep_all:
        raise click.UsageError(
            "Say what is to stay: --keep-last, --keep-every, --keep-best, or --keep-all alone. "
            "What is removed does not come back, so nothing is assumed."
        )
    check_number("--min-age", min_age, most=MOST_SECONDS, may_be_0=True)
    check_run_root(root)
    places = step_directories(root, objects=None)
    found = scan(places)
    if not found.committed:
        raise NotACheckpointError(
            f"{root} has no committed step, so nothing in it is known to be superfluous. Name the directory "
            f"that a Checkpointer saves to.",
            path=root,
        )
    if keep_best is not None:
        _check_metric(keep_best.metric, {s: read_metrics(places.root, s) for s in found.committed}, root)
    keeping = Cleanup(places, retention)
    whole = keeping.newest_undamaged(found.committed)
    newest = (
        max(found.committed[-1], *found.incomplete)
        if incomplete_newest and found.incomplete
        else found.committed[-1]
    )
    planned = keeping.plan(found, upto=newest, good=() if whole is None else (whole,))
    waiting = [step for step in found.incomplete if step > newest]
    busy = keeping.being_saved(planned, within_s=60 * min_age)
    chosen = planned.without(busy)
    todo = (*chosen.incomplete, *chosen.retention.removed)
    # A job that saves an older step again may have stored its metrics, and nothing else yet.
    removed = todo if dry_run else keeping.remove(chosen, found, upto=0)
    left = sorted(set(todo) - set(removed))
    if as_json:
        said = _json(root, planned, removed, left, dry_run=dry_run)
        print_result({**said, "left_alone": sorted(busy), "incomplete_newest": waiting}, "", as_json=True)
    else:
        _show(root, planned, removed, left, busy, waiting, dry_run=dry_run)
        click.echo(_RUNNING, err=True)
    return FAILED_CHECK if left else 0


def _check_metric(name: str, metrics: Mapping[int, Mapping[str, float]], root: str) -> None:
    """Refuse a metric that no step has: it would keep none, and may be misspelt."""
    known = sorted({each for of_step in metrics.values() for each in of_step})
    if name not in known:
        raise DeclarationError(
            f"--keep-best {name}: no committed step of {root} was saved with that metric; "
            f"known are {', '.join(known) or 'none'}.",
            path=root,
        )


def _json(
    root: str, planned: Removals, removed: tuple[int, ...], left: list[int], *, dry_run: bool
) -> dict[str, object]:
    return {
        "root": root,
        "dry_run": dry_run,
        "removed": [{"step": s, "state": _state(planned, s)} for s in sorted(removed)],
        "not_removed": left,
        "kept": [{"step": s, "because": list(why)} for s, why in planned.retention.kept.items()],
    }


def _show(
    root: str,
    planned: Removals,
    removed: tuple[int, ...],
    left: list[int],
    busy: Collection[int],
    waiting: Collection[int],
    *,
    dry_run: bool,
) -> None:
    went = "would be removed" if dry_run else "removed"
    rows = {s: (_state(planned, s), went, "") for s in removed}
    rows |= {s: (_state(planned, s), "could not be removed, or is pinned now", "") for s in left}
    rows |= {s: (_state(planned, s), "left alone", "written to within --min-age") for s in busy}
    rows |= {s: ("torn", "left alone", "newer than the newest commit: --incomplete-newest") for s in waiting}
    rows |= {s: ("committed", "stays", ", ".join(why)) for s, why in planned.retention.kept.items()}
    cells = [(str(step), *rows[step]) for step in sorted(rows)]
    show(table_of(root, cells, left=("step", "state", "what", "because")))
    show(f"{len(removed)} {went}, {len(planned.retention.kept)} stay.")


def _state(planned: Removals, step: int) -> str:
    return "torn" if step in planned.incomplete else "committed"
