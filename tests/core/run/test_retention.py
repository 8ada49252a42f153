"""The decision which steps stay, compared with the rules of the documentation."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megackpt.checkpointer import KeepBest, Retention
from megackpt.checkpointer.retention import decide, stale_leftovers
from megackpt.errors import DeclarationError

counts = st.none() | st.integers(1, 5)
steps = st.sets(st.integers(0, 30), max_size=12)


@given(
    committed=steps,
    pinned=steps,
    good=steps,
    last=counts,
    every=counts,
    best=st.none() | st.builds(KeepBest, metric=st.just("loss"), n=st.integers(1, 3)),
    losses=st.dictionaries(st.integers(0, 30), st.floats(width=16)),
)
def test_a_step_stays_exactly_if_something_asks_for_it(
    committed: set[int],
    pinned: set[int],
    good: set[int],
    last: int | None,
    every: int | None,
    best: KeepBest | None,
    losses: dict[int, float],
) -> None:
    retention = Retention(keep_last=last, keep_every=every, keep_best=best)
    metrics = {step: {"loss": loss} for step, loss in losses.items()}
    decision = decide(retention, committed, pinned=pinned, good=good, metrics=metrics)

    def better(step: int) -> int:
        """How many committed steps are better than one."""
        known = {s: v for s, v in losses.items() if s in committed and math.isfinite(v)}
        own_rank = (known[step], -step)
        return sum((value, -other) < own_rank for other, value in known.items())

    for step in committed:
        newer = sum(other > step for other in committed)
        stays = newer == 0 or step in pinned | good
        stays |= last is not None and newer < last
        stays |= every is not None and step % every == 0
        stays |= last is None and every is None and best is None
        is_known = math.isfinite(losses.get(step, math.nan))
        stays |= best is not None and is_known and better(step) < best.n
        assert (step in decision.kept) == stays
        assert (step in decision.removed) != stays
    assert set(decision.kept) | set(decision.removed) == committed


def test_with_mode_max_the_largest_is_best_and_reasons_are_returned() -> None:
    retention = Retention(keep_last=1, keep_every=4, keep_best=KeepBest(metric="acc", mode="max"))
    metrics = {1: {"acc": 0.9}, 2: {"acc": 0.7}, 3: {"acc": math.inf}, 4: {"loss": 9.0}, 5: {}}
    decision = decide(retention, range(1, 6), metrics=metrics, pinned={3})
    assert decision.kept == {1: ("best acc",), 3: ("pinned",), 4: ("every 4",), 5: ("newest", "last 1")}
    assert decision.removed == (2,)


def test_leftovers_are_removed_up_to_a_commit_unless_pinned() -> None:
    assert stale_leftovers([5, 1, 3, 9], upto=5, pinned={3}) == (1, 5)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda: Retention(keep_last=0), "keep_last is 0"),
        (lambda: Retention(keep_every=-1), "keep_every is -1"),
        (lambda: Retention(keep_last=True), "keep_last is True"),
        (lambda: Retention(keep_best="loss"), r"keep_best is 'loss'; give a KeepBest"),
        (lambda: KeepBest(metric=""), "give the name"),
        (lambda: KeepBest(metric="loss", n=0), r"KeepBest\.n is 0"),
        (lambda: KeepBest(metric="loss", mode="lowest"), "'min' or 'max'"),
    ],
)
def test_a_retention_out_of_range_is_an_error(wrong: object, message: str) -> None:
    with pytest.raises(DeclarationError, match=message):
        wrong()  # type: ignore[operator]
