"""Megatron-Bridge's own functions save and load models of Megatron-Core through the manager of megackpt."""

from __future__ import annotations

import importlib.util
import os
import sys
import types
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import megackpt
from megackpt.contrib.megatron_bridge import MegackptManager
from megackpt.errors import UnsupportedError
from megackpt.testing.ranks import JobFailedError, RankPool

has_core = importlib.util.find_spec("megatron") is not None
has_bridge = has_core and importlib.util.find_spec("megatron.bridge") is not None
needs_bridge = pytest.mark.skipif(
    not has_bridge, reason="Megatron-Bridge is not in a folder of PYTHONPATH, as it is in .ci/run"
)
if has_core:
    from tests.contrib.megatron import bridge_world as world
    from tests.contrib.megatron.megatron_world import Layout

Pool = tuple[RankPool, bool]


@pytest.fixture(scope="module", params=[True, False], ids=["installed", "foreign"])
def pool(request: pytest.FixtureRequest) -> Iterator[Pool]:
    ranks = RankPool()  # not the session's: what a worker has imported, it keeps
    yield ranks, request.param
    ranks.close()


@needs_bridge
@pytest.mark.parametrize("async_save", [False, True])
def test_a_checkpoint_is_saved_and_loaded_at_another_layout(
    pool: Pool, async_save: bool, tmp_path: Path
) -> None:
    ranks, installed = pool
    if async_save and not installed:
        with pytest.raises(JobFailedError, match=r"async_save=True needs .*megatron\.install\(\) before"):
            ranks.run(world.save, 2, Layout(tp=2), str(tmp_path), installed, async_save)
        return
    *_, expected = ranks.run(world.save, 2, Layout(tp=2), str(tmp_path), installed, async_save)
    iteration = tmp_path / f"iter_{world.STEP:07d}"
    files = set(os.listdir(iteration))
    assert {".metadata", "metadata.json", "run_config.yaml", "train_state.pt"} <= files
    assert any(file.startswith("megackpt-") for file in files)  # Megatron-Core writes no such file
    assert megackpt.verify(iteration, deep=True).damages == ()

    for layout in (Layout(), Layout(tp=2)):
        for numbers, logits in ranks.run(world.load, layout.ranks, layout, str(tmp_path), installed):
            assert numbers == (world.STEP, world.OPERATIONS)
            # As in test_megatron_into_models.py: only the order of sums differs.
            torch.testing.assert_close(logits, expected, rtol=0, atol=1e-5 * expected.abs().max().item())


def test_a_version_without_managers_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("megatron.bridge", "megatron.bridge.training", "megatron.bridge.training.checkpointing"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    with pytest.raises(UnsupportedError, match=r"has no checkpoint managers. Call .*install\(\)"):
        MegackptManager(types.SimpleNamespace(async_save=False))
