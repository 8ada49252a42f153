"""Changed folders of other tools before their importers: an error of ours, or every bit as in the folder."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.support.effort import few
from tests.system.attacks.importers import IMPORTERS, case


@pytest.mark.skipif(sys.platform != "linux", reason="limits and forks are those of Linux")
@pytest.mark.parametrize("name", IMPORTERS)
def test_an_importer_rejects_a_changed_folder_or_stores_what_it_has(name: str, tmp_path: Path) -> None:
    outcomes = {seed: case(name, seed, tmp_path) for seed in range(few(24, of=500))}
    faults = {seed: outcome for seed, outcome in outcomes.items() if outcome.startswith("FAULT")}
    equal = sum(outcome == "equal" for outcome in outcomes.values())
    print(f"{name}: {len(outcomes)} folders, {equal} stored as they are")
    assert not faults, "\n".join(f"{name} {seed}: {fault}" for seed, fault in list(faults.items())[:20])
    # Both happen: the changes reach the readers, and are not all noticed at the door.
    assert 0 < equal < len(outcomes)
