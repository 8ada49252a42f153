"""What a fresh interpreter imports: help needs no torch, and a save no extra, command or other format."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.core.formats.test_formats import STALE
from tests.support.effort import with_all


def printed_by(program: str, *arguments: str) -> str:
    """Return the last line that a fresh interpreter prints."""
    command = [sys.executable, "-c", program, *arguments]
    root = Path(__file__).parents[2]
    ran = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=600, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout.splitlines()[-1]


HELP = """
import sys

import megackpt

HEAVY = {"torch", "matplotlib", "tensorstore", "obstore"}
assert not HEAVY & sys.modules.keys(), "import megackpt"
from megackpt.cli import main
from megackpt.cli.entry import COMMANDS

for arguments in (["--help"], ["--version"], *([name, "--help"] for name in COMMANDS)):
    assert main(arguments) == 0, arguments
    assert not HEAVY & sys.modules.keys(), arguments
megackpt.save
assert "torch" in sys.modules
print("done")
"""


def test_the_package_and_help_of_every_command_import_no_torch() -> None:
    assert printed_by(HELP) == "done"


OVER_STALE_FILES = """
import sys

import torch

import megackpt

megackpt.save({"w": torch.ones(2)}, sys.argv[1])
megackpt.load({}, sys.argv[1])
assert megackpt.verify(sys.argv[1], deep=True).is_whole
extras = {"click", "rich", "matplotlib", "tensorstore", "obstore"} & sys.modules.keys()
others = ("megackpt.formats.torch_dist", "megackpt.formats.zarr")
print(sorted(extras), [name for name in sys.modules if name.startswith(others)])
"""


def test_a_save_imports_no_extra_and_no_other_format_whose_stale_files_it_removes(tmp_path: Path) -> None:
    for name in STALE:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    assert printed_by(OVER_STALE_FILES, str(tmp_path)) == "[] []"
    assert not [name for name in STALE if (tmp_path / name).exists()]


SAVE_AND_LOAD = """
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
def test_a_plain_save_and_load_import_what_metrics_counts(tmp_path: Path) -> None:
    assert printed_by(SAVE_AND_LOAD, str(tmp_path / "checkpoint")) == "[]"
