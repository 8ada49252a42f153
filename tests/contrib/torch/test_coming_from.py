"""docs/coming-from.md: the code of every library, before and after the change, run by real ranks.

A block under a paragraph that begins with "Before" or "After" runs in a namespace of its own, behind the
blocks of its section that belong to both, and behind those at the head of the page.
"""

from __future__ import annotations

import ast
import importlib.util
import os
from pathlib import Path
from typing import Any

import pytest

from megackpt.testing.ranks import RankPool
from tests.contrib.megatron.megatron_world import may_start_processes, without_gpu
from tests.support.docs import ON_RANKS, Block, blocks_of
from tests.support.effort import with_all

RANKS = {"Orbax": 1}
"""Ranks of a section, if not 2. Without jax.distributed, each process of Orbax is a job of its own."""
OTHERS = {"deepspeed", "jax", "megatron", "orbax"}
INSTALLS = "NeMo and Megatron-Bridge"
"""The section whose code changes what the whole process imports: test_installing.py runs it."""
BLOCKS = [b for b in blocks_of(ON_RANKS.read_text()) if b.kind == "python" and b.section != INSTALLS]
SECTIONS = sorted({b.section for b in BLOCKS} - {""})


def side(block: Block) -> str:
    """Return "before" or "after"; "both" for a block that belongs to both."""
    word = block.lead.split("\n\n")[-1].partition(" ")[0].strip(":,").lower()
    return word if word in ("before", "after") else "both"


def programs(section: str, wanted: str) -> list[list[Block]]:
    """Return the blocks of each program to run: those of both sides, then one of the wanted side."""
    common = [b for b in BLOCKS if b.section == "" or (b.section == section and side(b) == "both")]
    return [[*common, b] for b in BLOCKS if b.section == section and side(b) == wanted]


def packages(program: list[Block]) -> set[str]:
    """Return the top-level packages that a program imports."""
    nodes = [node for block in program for node in ast.walk(ast.parse(block.code))]
    modules = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    modules |= {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)}
    return {module.partition(".")[0] for module in modules}


def _run_blocks(program: list[Block], directory: str) -> None:
    if "megatron" in packages(program):
        without_gpu()
    home = Path.cwd()
    os.chdir(directory)
    try:
        namespace: dict[str, Any] = {"__name__": "__main__"}
        for block in program:
            code = compile("\n" * block.line + block.code, str(ON_RANKS), "exec")
            with may_start_processes():
                exec(code, namespace)
    finally:
        os.chdir(home)


def case(section: str, wanted: str) -> Any:
    """Return the parameters of the test; what imports another library takes seconds and is left to CI."""
    others = {name for program in programs(section, wanted) for name in packages(program)} & OTHERS
    marks = [with_all("CI imports the other libraries")] if others else []
    return pytest.param(section, wanted, marks=marks)


@pytest.mark.parametrize(
    ("section", "wanted"), [case(section, wanted) for section in SECTIONS for wanted in ("before", "after")]
)
def test_the_code_runs(section: str, wanted: str, rank_pool: RankPool, tmp_path: Path) -> None:
    for number, program in enumerate(programs(section, wanted)):
        for name in sorted(packages(program)):
            if importlib.util.find_spec(name) is None:
                pytest.skip(f"{name} is not installed")
        directory = tmp_path / str(number)
        directory.mkdir()
        rank_pool.run(_run_blocks, RANKS.get(section, 2), program, str(directory))


def test_every_library_has_code_of_both_sides() -> None:
    sides = {section: {side(b) for b in BLOCKS if b.section == section} for section in SECTIONS}
    assert {section for section, kinds in sides.items() if not {"before", "after"} <= kinds} == set()
    assert len(SECTIONS) >= 4
