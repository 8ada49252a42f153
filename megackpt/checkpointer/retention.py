"""The decision which steps of a run stay and which are removed. Pure; `housekeeping` removes them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from megackpt.checkpointer.options import Retention


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
