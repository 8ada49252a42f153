"""A run that begins with a Hugging Face folder learns the same at any layout, and ends with such a folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from training.arguments import parse_arguments

import megackpt
from megackpt.testing.ranks import RankPool
from megackpt.training.parallel import ParallelGroups, ParallelLayout
from models import build_gpt
from tests.support.huggingface_models import arrays_in_our_names, assert_close, random_config, random_model
from tests.system.examples.training_runs import arguments_for, metrics_of, run_trainer, write_text

pytest.importorskip("transformers", reason="the extra huggingface is not installed")
STEPS = 3
ALLOWED = 1e-5
"""Relative, as in `test_resume_other_layouts`: layouts differ by the order of sums only. A weight that is not
imported changes the first loss by parts of a hundred."""
LAYOUTS = {"llama": ParallelLayout(tp=2, dp=2), "qwen2_moe": ParallelLayout(tp=2, dp=2, ep=2, etp=2)}


def _folder(path: Path, family: str) -> Path:
    config = random_config(family, 0)
    config.vocab_size = 300  # bytes, and the end of a text
    model: Any = random_model(config, 0)
    model.save_pretrained(path)
    return path


def _train(pool: RankPool, layout: ParallelLayout, directory: Path, folder: Path, text: Path) -> None:
    sizes = [f"--{axis}={getattr(layout, axis)}" for axis in ("tp", "pp", "ep", "etp")]
    flags = ["--seq-length=16", "--micro-batches=2", f"--steps={STEPS}", "--lr=1e-3", "--warmup-steps=1"]
    files = [f"--data={text}", f"--ckpt={directory}/ckpt", f"--export-to={directory}/folder"]
    arguments = parse_arguments(
        [*sizes, *flags, *files, f"--init-from={folder}"], world_size=layout.world_size
    )
    pool.run(run_trainer, layout.world_size, arguments)


@pytest.mark.parametrize("family", LAYOUTS)
def test_losses_after_an_import_are_those_of_one_rank_and_the_end_is_exported(
    family: str, rank_pool: RankPool, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM

    folder, text = _folder(tmp_path / "folder", family), write_text(tmp_path / "text")
    layouts = {"one": ParallelLayout(), "several": LAYOUTS[family]}
    for name, layout in layouts.items():
        _train(rank_pool, layout, tmp_path / name, folder, text)
    alone, several = (metrics_of(tmp_path / name / "ckpt") for name in layouts)
    assert list(alone) == list(several) == list(range(1, STEPS + 1))
    off = {step: abs(several[step]["loss"] / alone[step]["loss"] - 1) for step in alone}
    assert max(off.values()) <= ALLOWED, off
    assert alone[STEPS]["loss"] != alone[1]["loss"]

    for name in layouts:
        written = AutoModelForCausalLM.from_pretrained(tmp_path / name / "folder")
        stored = megackpt.load_plain_tensors(tmp_path / name / "ckpt" / f"iter_{STEPS:07d}")
        for key, array in arrays_in_our_names(written).items():
            assert torch.equal(array, stored[key][tuple(map(slice, array.shape))]), key


@pytest.mark.parametrize(
    ("flags", "family"),
    [
        ((), "llama"),
        (("--untie-embeddings",), "llama"),
        (("--experts=4", "--expert-ffn-hidden-size=24", "--capacity-factor=8"), "mixtral"),
    ],
    ids=["tied", "untied", "experts"],
)
def test_a_run_from_scratch_ends_as_a_model_of_transformers(
    flags: tuple[str, ...], family: str, rank_pool: RankPool, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM

    layout, text = ParallelLayout(tp=2, pp=2), write_text(tmp_path / "text")
    files = [f"--data={text}", f"--ckpt={tmp_path}/ckpt", f"--export-to={tmp_path}/folder", "--steps=1"]
    arguments = arguments_for(layout, [*files, *flags])
    rank_pool.run(run_trainer, layout.world_size, arguments)
    groups = ParallelGroups.create(ParallelLayout())
    model = build_gpt(arguments.model, groups)
    megackpt.load({"model": model.sharded_state_dict()}, tmp_path / "ckpt" / "iter_0000001")
    ids = torch.arange(32).view(2, 16)
    with torch.no_grad():
        written = AutoModelForCausalLM.from_pretrained(tmp_path / "folder")
        assert written.config.model_type == family
        expected = written(ids).logits
        (chunk,) = model
        assert_close(chunk(ids).transpose(0, 1).numpy(), expected)
