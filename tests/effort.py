"""How much a run of the tests tries: a sample by default, all of it with `pytest --thorough`.

Choices that a test draws by itself come from `seed`, so that a run can be repeated. Examples that hypothesis
generates differ from run to run.
"""

from __future__ import annotations

import math
import os
import random
from collections import defaultdict
from collections.abc import Callable
from typing import Any, TypeVar

import pytest

F = TypeVar("F", bound=Callable[..., Any])

THOROUGH = "MEGACKPT_TESTS_THOROUGH"
"""Set in the environment, for decorators and for processes that tests start."""


SEED = "MEGACKPT_TESTS_SEED"
"""Set in the environment to draw other choices, as in many runs of the sample."""


def seed() -> int:
    """Return the seed of what a test chooses at random, and print it: 0, or that of the environment."""
    value = _chosen_seed()
    print(f"{SEED}={value}")
    return value


def _chosen_seed() -> int:
    return int(os.environ.get(SEED, "0"))


def is_thorough() -> bool:
    """Whether `--thorough` was given."""
    return THOROUGH in os.environ


def only_thorough(why: str) -> pytest.MarkDecorator:
    """Return the mark of a test that `--thorough` alone runs; why says what else holds its claim."""
    return pytest.mark.skipif(not is_thorough(), reason=f"only with --thorough: {why}")


def costly(why: str) -> Callable[[F], F]:
    """Return a decorator of a test that a plain run skips visibly, and CI (`--thorough -m one_in`) runs.

    why says what a plain run has in its place.
    """

    def mark(test: F) -> F:
        marked: F = only_thorough(why)(pytest.mark.one_in(1)(test))
        return marked

    return mark


def sample_of(whole: int, *, at_least: int = 20) -> int:
    """Return how many of so many examples to try: an eighth, or all."""
    return whole if is_thorough() else max(at_least, whole // 8)


def skip_most_cases(items: list[pytest.Item]) -> None:
    """Skip all but one in n cases of each test marked `one_in(n)`.

    Which ones depends on the seed and on the test's name, so that two dimensions of cases never keep step.
    """
    cases: dict[tuple[str, int], list[pytest.Item]] = defaultdict(list)
    for item in items:
        mark = item.get_closest_marker("one_in")
        if mark is not None:
            cases[item.nodeid.partition("[")[0], mark.args[0]].append(item)
    for (name, n), members in cases.items():
        kept = random.Random(f"{_chosen_seed()} {name}").sample(
            range(len(members)), math.ceil(len(members) / n)
        )
        for index, item in enumerate(members):
            if index not in kept:
                item.add_marker(pytest.mark.skip(reason=f"only with --thorough: one in {n} cases is tried"))
