"""How much a run of the tests tries: a sample by default, all of it with `pytest --thorough`.

Choices that a test draws by itself come from `seed`, so that a run can be repeated. Examples that hypothesis
generates differ from run to run.
"""

from __future__ import annotations

import os

import pytest

THOROUGH = "MEGACKPT_TESTS_THOROUGH"
"""Set in the environment, for decorators and for processes that tests start."""


SEED = "MEGACKPT_TESTS_SEED"
"""Set in the environment to draw other choices, as in many runs of the sample."""


def seed() -> int:
    """Return the seed of what a test chooses at random, and print it: 0, or that of the environment."""
    value = int(os.environ.get(SEED, "0"))
    print(f"{SEED}={value}")
    return value


def is_thorough() -> bool:
    """Whether `--thorough` was given."""
    return THOROUGH in os.environ


def only_thorough(why: str) -> pytest.MarkDecorator:
    """Return the mark of a test that `--thorough` alone runs; why says what else holds its claim."""
    return pytest.mark.skipif(not is_thorough(), reason=f"only with --thorough: {why}")


def sample_of(whole: int, *, at_least: int = 20) -> int:
    """Return how many of so many examples to try: a quarter, or all."""
    return whole if is_thorough() else max(at_least, whole // 4)
