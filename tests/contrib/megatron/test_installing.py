"""install(): the real Megatron-Core finds our modules in the place of its own."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.contrib.megatron.imports_table import IMPORT_VERSIONS, load_imports
from tests.support.docs import ON_RANKS, blocks_of

ROOT = Path(__file__).parents[3]
MEGATRONS = [path for path in os.environ.get("MEGATRON_PATHS", "").split(os.pathsep) if path]
"""Checkouts of Megatron-LM, or unpacked wheels from 0.17 on, to import `megatron.training` from."""
IMPORTS_TRAINING = """
from megackpt.contrib import megatron
megatron.install()
import megatron.training
from megatron.training import arguments, async_utils, checkpointing, training
from megatron.core import dist_checkpointing
assert dist_checkpointing.__name__.startswith("megackpt."), dist_checkpointing
assert checkpointing.dist_checkpointing is dist_checkpointing
"""
needs_megatron = pytest.mark.skipif(
    importlib.util.find_spec("megatron") is None,
    reason="Megatron-Core is not installed: pip install megatron-core==0.16.1",
)


def run_python(program: str, *paths: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *paths]), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", program]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)


@needs_megatron
def test_megatron_core_finds_our_modules_and_classes_under_its_own_names() -> None:
    done = run_python("""
import megackpt
from megackpt.contrib import megatron
megatron.install()
megatron.install()                                     # a second time does nothing
import megatron.core
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper
import megatron.core.dist_checkpointing.dict_utils as dict_utils
from megatron.core.transformer import mlp
from megackpt.contrib.megatron import dist_checkpointing as ours

assert dist_checkpointing is ours is megatron.core.dist_checkpointing
assert megatron.core.dist_checkpointing.dict_utils is dict_utils is ours.dict_utils
assert mlp.ShardedTensor is megackpt.ShardedTensor
assert mlp.ShardedTensorFactory is megackpt.ShardedTensorFactory
assert dist_checkpointing.mapping.CheckpointingException is megackpt.errors.CheckpointingException
from megatron.core.optimizer import distrib_optimizer
changed = distrib_optimizer.DistributedOptimizer.sharded_param_state_fully_reshardable
assert changed.__module__ == "megackpt.contrib.megatron.optimizer_ranges"
assert distrib_optimizer.__loader__ is distrib_optimizer.__spec__.loader
assert type(distrib_optimizer.__loader__).__name__ == "SourceFileLoader"
assert ours.__spec__.name == ours.__name__ == "megackpt.contrib.megatron.dist_checkpointing"
try:
    import megatron.core.dist_checkpointing.not_of_ours
except ModuleNotFoundError as error:
    assert "is not offered by megackpt" in str(error) and error.name.endswith("not_of_ours")
else:
    raise AssertionError("a module that is not ours was found")
""")
    assert done.returncode == 0, done.stderr


@needs_megatron
def test_the_lines_for_hosts_that_save_through_megatron_core_are_those_of_the_docs() -> None:
    (block,) = (
        b for b in blocks_of(ON_RANKS.read_text()) if b.section.startswith("NeMo") and b.kind == "python"
    )
    done = run_python(f"""{block.code}
from megatron.core import dist_checkpointing
from megackpt.contrib.megatron import dist_checkpointing as ours
assert dist_checkpointing is ours
""")
    assert done.returncode == 0, done.stderr


@needs_megatron
def test_install_after_megatron_core_was_imported_raises_an_error_with_the_way_out() -> None:
    done = run_python("""
import megatron.core
from megackpt.contrib import megatron
megatron.install()
""")
    assert done.returncode == 1
    assert "install() came too late: megatron.core.dist_checkpointing" in done.stderr
    assert "Call install() at the top of the program" in done.stderr


def test_our_modules_need_no_megatron_core() -> None:
    done = run_python("""
import sys
from megackpt.contrib.megatron import dist_checkpointing
from megackpt.contrib.megatron.dist_checkpointing import serialization
assert not [name for name in sys.modules if name == "megatron" or name.startswith("megatron.")]
""")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("module", ["megackpt.contrib.megatron", "megackpt.compat.megatron"])
def test_a_program_that_cannot_be_edited_runs_under_install(module: str, tmp_path: Path) -> None:
    (tmp_path / "neighbour.py").write_text("VALUE = 7")
    (tmp_path / "pretrain.py").write_text(
        "import sys, neighbour, megackpt\n"
        "from megatron.core.dist_checkpointing import ShardedTensor\n"
        "from megackpt.contrib.megatron.settings import OPTIONS\n"
        "assert ShardedTensor is megackpt.ShardedTensor and __name__ == '__main__'\n"
        "assert OPTIONS.replicas == 'error'\n"
        "print(sys.argv[1:], neighbour.VALUE)"
    )
    command = [sys.executable, "-m", module, "--replicas", "error", "pretrain.py", "--replicas", "2"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.stdout == "['--replicas', '2'] 7\n", done.stderr
    command[command.index("pretrain.py")] = "missing.py"
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "missing.py is no file" in done.stderr


@pytest.mark.parametrize("path", MEGATRONS or ["installed"])
def test_megatron_training_can_be_imported_under_install(path: str) -> None:
    done = run_python(IMPORTS_TRAINING, *([path] if MEGATRONS else []))
    if "ModuleNotFoundError" in done.stderr and "dist_checkpointing" not in done.stderr.splitlines()[-1]:
        pytest.skip(f"{done.stderr.splitlines()[-1]} (name checkouts in MEGATRON_PATHS)")
    assert done.returncode == 0, done.stderr[-2000:]


@needs_megatron
def test_every_name_that_megatron_imports_is_found_under_install() -> None:
    names = sorted({name for version in IMPORT_VERSIONS for name in load_imports(version)})
    lines = [
        f"from megatron.core.dist_checkpointing.{m} import {n}".replace("checkpointing. ", "checkpointing ")
        for m, _, n in (name.rpartition(".") for name in names)
    ]
    done = run_python("\n".join(["from megackpt.contrib import megatron; megatron.install()", *lines]))
    assert done.returncode == 0, done.stderr[-2000:]


def test_install_sets_the_option() -> None:
    done = run_python(
        "from megackpt.contrib import megatron\n"
        "from megackpt.contrib.megatron.settings import OPTIONS\n"
        "megatron.install(silent_cast=True); assert OPTIONS.silent_cast\n"
        "megatron.install(); assert not OPTIONS.silent_cast\n"
        "megatron.install(replicas='error'); assert OPTIONS.replica_policy.value == 'error'\n"
        "megatron.install(); assert OPTIONS.replica_policy.value == 'warn'\n"
        "megatron.install(gather_optimizer=True); assert OPTIONS.gather_optimizer\n"
        "megatron.install(); assert not OPTIONS.gather_optimizer\n"
        "try: megatron.install(gather_optimizer='no')\n"
        "except ValueError as error: assert \"gather_optimizer is 'no'\" in str(error)\n"
        "try: megatron.install(replicas='no')\n"
        "except ValueError as error: assert \"replicas='no' is not known\" in str(error)\n"
        "try: megatron.install(load_options={'complete': False})\n"
        "except ValueError as error: assert 'LoadOptions(...), or None' in str(error)\n"
        "megatron.install(silent_cast='yes')"
    )
    assert "silent_cast is 'yes'" in done.stderr, done.stderr
