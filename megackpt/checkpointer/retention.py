"""Which steps of a run stay, and which go.

Owns the decision alone, from plain data. Removing, and when that is safe, is up to `housekeeping`.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from megackpt.errors import DeclarationError

Mode = Literal["min", "max"]
Metrics = Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class KeepBest:
    """The best steps by a metric that was given to `Checkpointer.save`.

    A step that was saved without it, or whose value is not finite, is never among the best. Of equal ones
    the newer is better.

    Attributes:
        metric: its name.
        n: how many steps.
        mode: whether small values are good or large ones.
    """

    metric: str
    n: int = 1
    mode: Mode = "min"

    def __post_init__(self) -> None:
        if not isinstance(self.metric, str) or not self.metric:
            raise DeclarationError(f"KeepBest(metric={self.metric!r}): give the name of a metric.")
        _check_count("KeepBest.n", self.n)
        if self.mode not in get_args(Mode):
            raise DeclarationError(f"KeepBest(mode={self.mode!r}): give 'min' or 'max'.")

    def best_of(self, metrics: Mapping[int, Metrics]) -> tuple[int, ...]:
        """Return the best steps, the best first."""
        sign = 1 if self.mode == "min" else -1
        known = {s: m[self.metric] for s, m in metrics.items() if math.isfinite(m.get(self.metric, math.nan))}
        return tuple(sorted(known, key=lambda step: (sign * known[step], -step))[: self.n])


@dataclass(frozen=True, slots=True, kw_only=True)
class RetentionPolicy:
    """What is to stay: a step that any of these asks for. All steps stay where none of them is given.

    Attributes:
        keep_last: the newest steps, so many.
        keep_every: steps that this number divides.
        keep_best: the best by a metric.
    """

    keep_last: int | None = None
    keep_every: int | None = None
    keep_best: KeepBest | None = None

    def __post_init__(self) -> None:
        if self.keep_last is not None:
            _check_count("keep_last", self.keep_last)
        if self.keep_every is not None:
            _check_count("keep_every", self.keep_every)
        if self.keep_best is not None and not isinstance(self.keep_best, KeepBest):
            raise DeclarationError(
                f"keep_best is {self.keep_best!r}; give a KeepBest, as KeepBest(metric='loss', n=2)."
            )

    @property
    def keeps_all(self) -> bool:
        """Whether nothing is ever to go."""
        return self.keep_last is None and self.keep_every is None and self.keep_best is None


@dataclass(frozen=True, slots=True, kw_only=True)
class Retention:
    """A decision.

    Attributes:
        kept: why each step that stays does, ascending.
        removed: steps that go, ascending.
    """

    kept: Mapping[int, tuple[str, ...]]
    removed: tuple[int, ...]


def decide(
    policy: RetentionPolicy,
    committed: Iterable[int],
    *,
    pinned: Collection[int] = (),
    good: Collection[int] = (),
    metrics: Mapping[int, Metrics] | None = None,
) -> Retention:
    """Decide which committed steps stay.

    The newest stays whatever the policy says, and so do pinned steps and those that are given as good: the
    one that was committed just now, or the newest that is known to be whole.

    >>> decide(RetentionPolicy(keep_last=1, keep_every=100), [50, 100, 150, 200, 250], pinned={50}).removed
    (150,)
    """
    steps = sorted(set(committed))
    last = set(steps[-policy.keep_last :]) if policy.keep_last is not None else set()
    best: Collection[int] = ()
    if policy.keep_best is not None:
        best = policy.keep_best.best_of({s: m for s, m in (metrics or {}).items() if s in set(steps)})
    kept: dict[int, tuple[str, ...]] = {}
    for step in steps:
        reasons = {
            "newest": step == steps[-1],
            "pinned": step in pinned,
            "good": step in good and step != steps[-1],
            "all are kept": policy.keeps_all,
            f"last {policy.keep_last}": step in last,
            f"every {policy.keep_every}": policy.keep_every is not None and step % policy.keep_every == 0,
            f"best {policy.keep_best.metric if policy.keep_best else ''}": step in best,
        }
        if any(reasons.values()):
            kept[step] = tuple(reason for reason, holds in reasons.items() if holds)
    return Retention(kept=kept, removed=tuple(step for step in steps if step not in kept))


def stale_leftovers(torn: Iterable[int], *, upto: int, pinned: Collection[int] = ()) -> tuple[int, ...]:
    """Return the torn steps that can go once step upto is committed, ascending.

    A newer one may be a save of another job that is under way.
    """
    return tuple(sorted(step for step in torn if step <= upto and step not in pinned))


def _check_count(name: str, value: object) -> None:
    if type(value) is not int or value < 1:
        raise DeclarationError(
            f"{name} is {value!r}; give a number of at least 1, or leave it out to keep all."
        )
