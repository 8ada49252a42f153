"""A plain save and load import what `tests/metrics.py` counts: no import is hidden from the count."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.support.effort import with_all

PROGRAM = """
import sys

import torch

import megackpt


def state(value):
    weight = megackpt.ShardedTensor.from_rank_offsets("w", torch.full((4, 4), value))
    order = megackpt.ShardedObject("order", {"seeds": (1, 2), "mean": torch.ones(3)}, (1,), (0,))
    return {"model": {"w": weight}, "order": order, "step": 3, "plain": torch.arange(6.0)}


megackpt.save(state(1.0), sys.argv[1])
loaded = megackpt.load(state(0.0), sys.argv[1])
assert loaded["model"]["w"].eq(1).all() and loaded["order"]["seeds"] == (1, 2)
imported = {name for name in sys.modules if name.split(".")[0] == "megackpt"}

sys.argv = ["metrics"]
from tests import metrics

print(sorted(imported ^ metrics.import_closure(metrics.PLAIN_SAVE_AND_LOAD)))
"""


@with_all("tests/metrics.py itself, which counts from the sources")
def test_a_plain_save_and_load_import_what_is_counted(tmp_path: Path) -> None:
    command = [sys.executable, "-c", PROGRAM, str(tmp_path / "checkpoint")]
    ran = subprocess.run(
        command, cwd=Path(__file__).parents[3], capture_output=True, text=True, timeout=120, check=False
    )
    assert (ran.returncode, ran.stdout.strip()) == (0, "[]"), ran.stdout + ran.stderr
