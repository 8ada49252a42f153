"""Mamba-2 and Nemotron-H: logits and gradients of transformers, on one rank and over tp, pp, cp and ep.

Tolerance: everything is float32 and only the order of sums differs. `RELATIVE` of test_huggingface_logits is
used for logits. An element of a gradient is a sum of some 2 * 24 * 50 rounded terms, whose random errors are
sqrt(2400) * 2^-24 = 3e-6 of their size; in the scan, they are products of exponentials of differences of
sums, and cancel, so that errors of up to 3e-5 of the largest element were seen. A missing sum is off by a
factor of 2.
"""

from __future__ import annotations

import functools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import megackpt
from megackpt.maps import weights_of
from megackpt.parallel import ParallelGroups, ParallelLayout
from megackpt.testing.ranks import RankPool
from models import GPTConfig, build_gpt
from models.huggingface import gpt_config
from tests.contrib.transformers.huggingface_cases import Case, batch, check, run
from tests.support.effort import sampled
from tests.support.huggingface_experts import randomise
from tests.support.huggingface_folders import assert_same_tensors, folder_tensors
from tests.support.huggingface_recurrent import FAMILIES, arrays_in_our_names, random_config

transformers = pytest.importorskip("transformers", reason="the extra huggingface is not installed")

SEEDS = range(5)
RELATIVE = 1e-4


def random_model(family: str, seed: int) -> Any:
    model = transformers.AutoModelForCausalLM.from_config(random_config(family, seed)).eval()
    randomise(model, seed)
    return model


@functools.cache
def case(family: str, seed: int) -> Case:
    """Return a random model."""
    model = random_model(family, seed)
    config = replace(gpt_config(json.loads(model.config.to_json_string())), make_vocab_divisible=1)
    arrays = arrays_in_our_names(model.state_dict(), model.config)
    weights = {key: array.numpy().copy() for key, array in arrays.items()}
    tokens, labels = batch(config)
    logits = model(tokens, use_cache=False).logits
    F.cross_entropy(logits.flatten(0, 1), labels.flatten()).backward()
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(torch.zeros_like(param) if param.grad is None else param.grad)
    gradients = arrays_in_our_names(model.state_dict(), model.config)
    gradients = {key: gradient for key, gradient in gradients.items() if "expert_bias" not in key}
    return Case(config, weights, logits.detach(), gradients)


def expected(family: str) -> list[Case]:
    return [case(family, seed) for seed in SEEDS]


def cases(family: str) -> list[tuple[GPTConfig, Any]]:
    return [(made.config, made.weights) for made in expected(family)]


def test_seeds_have_all_kinds_of_the_families() -> None:
    mamba, hybrids = ([random_config(family, seed) for seed in SEEDS] for family in FAMILIES)
    for field in ("use_bias", "use_conv_bias"):
        assert {bool(getattr(config, field)) for config in (*mamba, *hybrids)} == {True, False}, field
    assert {config.tie_word_embeddings for config in mamba} == {True, False}
    assert {config.mlp_bias for config in hybrids} == {True, False}
    assert {config.n_groups for config in mamba} == {1, 2, 4}  # fewer than ranks of tp, as many, and more
    assert {config.chunk_size < 24 for config in mamba} == {True, False}


@pytest.mark.parametrize("family", FAMILIES)
def test_one_rank_computes_logits_and_gradients_of_transformers(family: str) -> None:
    check([run(cases(family), ParallelLayout())], ParallelLayout(), expected(family), relative=RELATIVE)


LAYOUTS = {
    "tp2": ParallelLayout(tp=2),
    "tp2-sequence": ParallelLayout(tp=2),
    "tp4": ParallelLayout(tp=4),
    "pp2": ParallelLayout(pp=2),
    "ep2": ParallelLayout(dp=2, ep=2),
    "cp2": ParallelLayout(cp=2),
    "cp4": ParallelLayout(cp=4),
    "tp2-cp2-sequence": ParallelLayout(tp=2, cp=2),
}


@sampled(8)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", LAYOUTS)
def test_more_ranks_compute_logits_and_gradients_of_transformers(
    rank_pool: RankPool, name: str, family: str
) -> None:
    layout = LAYOUTS[name]
    ranks = rank_pool.run(run, layout.world_size, cases(family), layout, name.endswith("sequence"))
    check(ranks, layout, expected(family), relative=RELATIVE)


@sampled(3)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("seed", SEEDS)
def test_a_folder_loads_and_comes_back_from_a_checkpoint(family: str, seed: int, tmp_path: Path) -> None:
    """Transformers writes a folder; our model loads it, and an export is bit-equal and loads there."""
    written, load = random_model(family, seed), transformers.AutoModelForCausalLM.from_pretrained
    written.save_pretrained(tmp_path / "original")
    model = build_gpt(case(family, seed).config, ParallelGroups.create(ParallelLayout()))
    state = {"model": model.sharded_state_dict()}
    megackpt.load(weights_of(state), tmp_path / "original", maps="auto")
    fields = json.loads((tmp_path / "original" / "config.json").read_text())
    megackpt.save(state["model"], tmp_path / "saved", content_metadata={"huggingface_config": fields})
    saved = megackpt.load_plain_tensors(tmp_path / "saved")
    assert_same_tensors(
        {key: array for key, array in saved.items()},
        {key: torch.from_numpy(array) for key, array in case(family, seed).weights.items()},
    )
    megackpt.export_huggingface(tmp_path / "saved", tmp_path / "folder")
    assert_same_tensors(folder_tensors(tmp_path / "folder"), folder_tensors(tmp_path / "original"))
    read, notes = load(tmp_path / "folder", output_loading_info=True)
    assert not any(notes.values()), notes
    assert_same_tensors(dict(read.state_dict()), dict(written.state_dict()))
