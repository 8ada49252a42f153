"""How much a run of the tests tries: a sample of the cases, or with `pytest --all` every one.

Which cases are in the sample depends on the test's name alone, so that a run can be repeated. Examples that
hypothesis generates differ from run to run.
"""

from __future__ import annotations

import math
import os
import random
from collections import defaultdict

import pytest

ALL = "MEGACKPT_TESTS_ALL"
"""Set in the environment, for decorators and for processes that tests start."""


def tries_all() -> bool:
    """Return whether `--all` was given."""
    return ALL in os.environ


def few(number: int, *, of: int) -> int:
    """Return how many examples to try: `number`, or with `--all` all `of` them."""
    return of if tries_all() else number


def sampled(one_in: int) -> pytest.MarkDecorator:
    """Return the mark of a test of which one in so many cases is tried without `--all`."""
    return pytest.mark.sampled(one_in)


def with_all(why: str) -> pytest.MarkDecorator:
    """Return the mark of a test that only `--all` runs; why says what holds its claim without it."""
    return pytest.mark.with_all(why)


def leave_out(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect what only `--all` tries."""
    out = {item for item in items if item.get_closest_marker("with_all")}
    cases: dict[tuple[str, int], list[pytest.Item]] = defaultdict(list)
    for item in items:
        mark = item.get_closest_marker("sampled")
        if mark is not None:
            cases[item.nodeid.partition("[")[0], mark.args[0]].append(item)
    for (name, one_in), members in cases.items():
        kept = random.Random(name).sample(members, math.ceil(len(members) / one_in))
        out |= set(members) - set(kept)
    config.hook.pytest_deselected(items=[item for item in items if item in out])
    items[:] = [item for item in items if item not in out]
