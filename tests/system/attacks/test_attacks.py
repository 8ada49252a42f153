"""Crafted directories before every reader: nothing runs, hangs, takes memory or reads what is outside.

What cannot be raises an error of ours that names the file, or every value is the one that was saved.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import megackpt
from tests.support.effort import few, tries_all
from tests.system.attacks import trial
from tests.system.attacks.importers import IMPORTERS, case

ROOT = Path(megackpt.__file__).parents[1]
SAMPLED = 50


def sample(names: list[str]) -> list[str]:
    """Every so many of all: neighbours differ by one value only."""
    step = max(1, len(names) // SAMPLED)
    return names[::step]


def faults_of(message: dict[str, Any]) -> list[str]:
    """What an attack led to that it must not."""
    outcomes, kind = message["outcomes"], message["kind"]
    bad = ("WRONG",) if kind == "another" else ("WRONG", "other")
    faults = [f"{reader}: {what}" for reader, what in outcomes.items() if what.startswith(bad)]
    faults += message["seen"]
    rejected = [f"{reader}: {what}" for reader, what in outcomes.items() if what.startswith("rejected")]
    if kind == "rejected" and not rejected and outcomes.get("verify") == "exit 0":
        faults.append("nobody rejects it")
    # verify makes no objects, so a class that is not known is no damage to it.
    damaged = [what for what in rejected if "UnknownClassError" not in what]
    if kind == "rejected" and damaged and outcomes.get("verify") == "exit 0":
        faults.append(f"verify says that it is whole; {damaged[0]}")
    if kind == "harmless" and rejected:
        faults.append(f"rejected although harmless: {rejected[0]}")
    return [f"{message['attack']} ({message['claim']}): {fault}" for fault in faults]


@pytest.mark.skipif(sys.platform != "linux", reason="limits and forks are those of Linux")
def test_no_crafted_directory_gets_anywhere(tmp_path: Path, pytestconfig: pytest.Config) -> None:
    names = list(trial.ATTACKS)
    assert len(names) >= 50
    chosen = names if tries_all() else sample(names)
    done = subprocess.run(
        [sys.executable, "-m", "tests.system.attacks.trial", str(tmp_path), *chosen],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "2"},
        capture_output=True,
        text=True,
        check=False,
    )
    message = [json.loads(line) for line in done.stdout.splitlines()]
    assert [directory["attack"] for directory in message] == chosen, done.stderr[-3000:]
    faults = [fault for directory in message for fault in faults_of(directory)]
    assert not faults, "\n".join(fault[:600] for fault in faults[:40])
    rejected = sum("rejected" in str(directory["outcomes"]) for directory in message)
    print(f"{len(message)} directories, {rejected} of them rejected")
    assert rejected > len(message) // 2


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
