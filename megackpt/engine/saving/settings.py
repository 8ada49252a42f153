"""Arguments that must be equal on all ranks: compared by a digest, and named if they differ."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from megackpt.comm import Group, Numbers, compare_step, run_on_all_ranks
from megackpt.errors import DeclarationError
from megackpt.storage import digest_of

Settings = Mapping[str, Any]
"""Arguments by the names that a user knows; values can be encoded as JSON."""


def compare_settings(group: Group, settings: Settings, *, what: str, doing: str) -> None:
    """Check that all ranks have equal settings, by one small message of each rank. Collective.

    Args:
        group: the ranks.
        settings: of this rank.
        what: start of the error's text: "Ranks save differently".
        doing: name of the step, for the error's text.

    Raises:
        DeclarationError: settings differ; the same on every rank, naming the first that differs.
        RankFailedError: a rank did not answer, or is at another step.
    """
    encoded = json.dumps(settings).encode()
    with compare_step(group, doing, equal=1) as step:
        step.numbers = Numbers((as_number(encoded),))
    if not all(step.reduced.equal):
        settings_of_ranks = run_on_all_ranks(group, lambda: encoded, doing=doing)
        check_settings([json.loads(settings) for settings in settings_of_ranks], what=what)


def check_settings(settings_of_ranks: Sequence[Settings], *, what: str) -> None:
    """Check that settings are equal, given those of all ranks. Pure.

    Raises:
        DeclarationError: names the first setting that differs, and a rank that differs from rank 0.
    """
    for name in dict.fromkeys(name for settings in settings_of_ranks for name in settings):
        values = [settings.get(name) for settings in settings_of_ranks]
        other = next((rank for rank, value in enumerate(values) if value != values[0]), None)
        if other is not None:
            raise DeclarationError(
                f"{what}: {name} is {values[0]!r} on rank 0 and {values[other]!r} on rank {other}. Give "
                f"all ranks the same arguments.",
                rank=other,
            )


def as_number(data: bytes) -> int:
    """Return a digest of data as one of the numbers that ranks compare."""
    return int(digest_of(data)[:15], 16)
