"""Arguments that all ranks must give alike: compared by a digest, and named where they differ.

Owns the comparison and its error. Which arguments these are, each caller knows.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from megackpt.comm import Group, Numbers, run_and_compare, run_on_all_ranks
from megackpt.errors import DeclarationError
from megackpt.storage import digest_of

Settings = Mapping[str, Any]
"""Arguments by the names that a user knows; values are what JSON takes."""


def compare_settings(group: Group, settings: Settings, *, what: str, doing: str) -> None:
    """Refuse ranks that were given different settings; one small message each where they are alike.

    Collective. what begins the error's text, as in "Ranks save differently".

    Raises:
        DeclarationError: the same on every rank; it names the first that differs.
        RankFailedError: a rank did not come, or is about to do something else.
    """
    said = json.dumps(settings).encode()
    found = run_and_compare(group, lambda: Numbers((as_number(said),)), equal=1, doing=doing)
    if not all(found.equal):
        everyone = run_on_all_ranks(group, lambda: said, doing=doing)
        check_settings([json.loads(one) for one in everyone], what=what)


def check_settings(of_ranks: Sequence[Settings], *, what: str) -> None:
    """Refuse settings that differ; the same on every rank, given those of all. Pure.

    Raises:
        DeclarationError: naming the first setting that differs, and a rank that differs from rank 0.
    """
    for setting in dict.fromkeys(name for settings in of_ranks for name in settings):
        values = [settings.get(setting) for settings in of_ranks]
        other = next((rank for rank, value in enumerate(values) if value != values[0]), None)
        if other is not None:
            raise DeclarationError(
                f"{what}: {setting} is {values[0]!r} on rank 0 and {values[other]!r} on rank {other}. Give "
                f"all ranks the same arguments.",
                rank=other,
            )


def as_number(data: bytes) -> int:
    """Return a digest that fits among what `run_and_compare` compares."""
    return int(digest_of(data)[:15], 16)
