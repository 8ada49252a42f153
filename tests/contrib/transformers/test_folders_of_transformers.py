"""Folders that transformers has written are written again, from checkpoints of any layout, and load."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import megackpt
from megackpt.maps import weights_of
from megackpt.optim import DistributedOptimizer
from megackpt.parallel import ParallelGroups, ParallelLayout
from megackpt.testing.ranks import RankPool
from models import GPTConfig, build_gpt
from models.huggingface import gpt_config
from tests.support.effort import few, sampled
from tests.support.huggingface_folders import assert_same_tensors, folder_tensors
from tests.support.huggingface_models import (
    FAMILIES,
    layout_of,
    random_config,
    random_model,
    stays_in_float32,
)

transformers = pytest.importorskip("transformers", reason="the extra huggingface is not installed")

SEEDS = range(few(2, of=5))
SHARDS = 40_000  # bytes


def _written(path: Path, family: str, seed: int) -> dict[str, Tensor]:
    """Let transformers write a folder; return its tensors."""
    model: Any = random_model(random_config(family, seed), seed)
    model.save_pretrained(path, max_shard_size=f"{SHARDS // 1000}KB")
    return folder_tensors(path)


def _assert_loads(folder: Path, original: Path) -> None:
    """Check that transformers loads a folder completely, to the same weights as the original."""
    load = transformers.AutoModelForCausalLM.from_pretrained
    model, notes = load(folder, output_loading_info=True)
    assert not any(notes.values()), notes
    reference = load(original)
    assert type(model) is type(reference)
    assert_same_tensors(dict(model.state_dict()), dict(reference.state_dict()))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_folder_comes_back_from_a_checkpoint(family: str, seed: int, tmp_path: Path) -> None:
    tensors = _written(tmp_path / "original", family, seed)
    megackpt.import_huggingface(tmp_path / "original", tmp_path / "saved")
    megackpt.export_huggingface(tmp_path / "saved", tmp_path / "folder", max_file_bytes=SHARDS)
    assert_same_tensors(folder_tensors(tmp_path / "folder"), tensors)
    _assert_loads(tmp_path / "folder", tmp_path / "original")


def _adam(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups, lr=1e-3)


def _save(folder: Path, target: Path, config: GPTConfig, layout: ParallelLayout) -> None:
    """Load a folder into a model in bfloat16 and its distributed optimizer, and save both."""
    groups = ParallelGroups.create(layout)
    config = replace(config, params_dtype=torch.bfloat16, make_vocab_divisible=8)
    model = build_gpt(config, groups, sequence_parallel=layout.tp > 1)
    optimizer = DistributedOptimizer([{"params": list(model.parameters()), "name": "all"}], _adam, groups)
    declared = model.sharded_state_dict()
    state = {"model": declared, "optimizer": optimizer.sharded_state_dict(declared)}
    megackpt.load(weights_of(state), folder, maps="auto")
    metadata = {"huggingface_config": json.loads((folder / "config.json").read_text())}
    megackpt.save(state, target, content_metadata=metadata)


def _save_all(cases: list[tuple[Any, ...]]) -> None:
    for case in cases:
        _save(*case)


@sampled(4)
@pytest.mark.parametrize("family", FAMILIES)
def test_weights_and_masters_of_any_layout_are_exported(
    rank_pool: RankPool, family: str, tmp_path: Path
) -> None:
    cases, tensors = [], []
    for seed in SEEDS:
        folder = tmp_path / f"original{seed}"
        tensors.append(_written(folder, family, seed))
        config = gpt_config(json.loads((folder / "config.json").read_text()))
        (tmp_path / f"saved{seed}").mkdir()
        cases.append((folder, tmp_path / f"saved{seed}", config, layout_of(config)))
    assert cases[0][-1].tp == 2
    rank_pool.run(_save_all, 4, cases)
    for seed, expected in zip(SEEDS, tensors, strict=True):
        masters, model = tmp_path / f"masters{seed}", tmp_path / f"model{seed}"
        megackpt.export_huggingface(tmp_path / f"saved{seed}", masters, weights="masters", buffer_bytes=9000)
        assert_same_tensors(folder_tensors(masters), expected)
        _assert_loads(masters, tmp_path / f"original{seed}")
        megackpt.export_huggingface(tmp_path / f"saved{seed}", model, max_file_bytes=SHARDS)
        assert_same_tensors(
            folder_tensors(model),
            {key: array if stays_in_float32(key) else array.bfloat16() for key, array in expected.items()},
        )
