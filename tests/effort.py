"""How much a run of the tests tries: a sample by default, all of it with `pytest --thorough`.

Owns what a sample is. Generated examples differ from run to run, so that many runs of the sample find what
one thorough run does.
"""

from __future__ import annotations

import os

import pytest

THOROUGH = "MEGACKPT_TESTS_THOROUGH"
"""Set in the environment, for decorators and for processes that tests start."""


def is_thorough() -> bool:
    """Whether `--thorough` was given."""
    return THOROUGH in os.environ


def only_thorough(why: str) -> pytest.MarkDecorator:
    """Return the mark of a test that `--thorough` alone runs; why says what else holds its claim."""
    return pytest.mark.skipif(not is_thorough(), reason=f"only with --thorough: {why}")


def sample_of(whole: int, *, at_least: int = 20) -> int:
    """Return how many of so many examples to try: a quarter, or all."""
    return whole if is_thorough() else max(at_least, whole // 4)
