"""Qwen3-Next: logits and gradients of transformers, on one rank and over tp, pp, cp and ep.

Its folders, config and map are in the tests of all families.

Tolerance: everything is float32 and only the order of sums differs. An element of a gradient is a sum of some
2 * 24 * 50 rounded terms, whose random errors are sqrt(2400) * 2^-24 = 3e-6 of their size; the recurrence
multiplies them, as it divides queries and keys by their lengths: 4e-5 of the largest element was seen. A
missing sum is off by a factor of 2.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import megackpt
from megackpt import KeyRule, LoadOptions, Policy
from megackpt.maps import family
from megackpt.parallel import ParallelGroups, ParallelLayout
from megackpt.testing.ranks import RankPool
from models import DeltaNetConfig, MTPConfig, RotaryConfig, build_gpt
from models.huggingface import gpt_config
from tests.contrib.transformers.huggingface_cases import Case, batch, check, run
from tests.support.effort import few, sampled
from tests.support.huggingface_configs import random_fields
from tests.support.huggingface_folders import assert_same_tensors, folder_tensors, write_folder
from tests.support.huggingface_models import (
    SCAN_RELATIVE,
    arrays_in_our_names,
    random_config,
    random_model,
    reference,
)
from tests.support.optimizers import tensors_of
from tests.support.states import assembled, random_arrays

pytest.importorskip("transformers", reason="the extra huggingface is not installed")

FAMILY = "qwen3_next"
SEEDS = range(few(2, of=6))


@functools.cache
def case(seed: int) -> Case:
    """Return a random model, and the gradients of its loss."""
    config, arrays, logits = reference(FAMILY, seed)
    weights = {key: array.detach().numpy().copy() for key, array in arrays.items()}
    model: Any = random_model(random_config(FAMILY, seed), seed)
    tokens, labels = batch(config)
    F.cross_entropy(model(tokens, use_cache=False).logits.flatten(0, 1), labels.flatten()).backward()
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(torch.zeros_like(param) if param.grad is None else param.grad)
    return Case(config, weights, logits, arrays_in_our_names(model))


def test_seeds_have_all_kinds_of_the_family() -> None:
    configs = [reference(FAMILY, seed)[0] for seed in range(6)]
    blocks = {block for config in configs for layer in config.blocks for block in layer}
    assert blocks == {"attention", "delta_net", "mlp", "moe"}
    nets = [config.delta_net for config in configs if isinstance(config.delta_net, DeltaNetConfig)]
    assert {net.num_value_heads // net.num_key_heads for net in nets} >= {1, 2}
    assert len({net.conv_kernel_size for net in nets}) > 1
    rotary = [config.positions for config in configs if isinstance(config.positions, RotaryConfig)]
    assert {positions.fraction < 1 for positions in rotary} == {True, False}
    assert {config.attention.qkv_bias for config in configs} == {True, False}
    assert {config.tied_embeddings for config in configs} == {True, False}


def test_one_rank_computes_logits_and_gradients_of_transformers() -> None:
    cases = [case(seed) for seed in SEEDS]
    ranks = [run([(made.config, made.weights) for made in cases], ParallelLayout())]
    check(ranks, ParallelLayout(), cases, relative=SCAN_RELATIVE)


LAYOUTS = {
    "tp2": ParallelLayout(tp=2),
    "tp2-sequence": ParallelLayout(tp=2),
    "pp2": ParallelLayout(pp=2),
    "ep2": ParallelLayout(dp=2, ep=2),
    "cp2": ParallelLayout(cp=2),
    "tp2-cp2": ParallelLayout(tp=2, cp=2),
    "tp2-cp2-sequence": ParallelLayout(tp=2, cp=2),
}


@sampled(7)
@pytest.mark.parametrize("name", LAYOUTS)
def test_more_ranks_compute_logits_and_gradients_of_transformers(rank_pool: RankPool, name: str) -> None:
    layout = LAYOUTS[name]
    cases = [case(100 * seed) for seed in SEEDS]  # those that 2 ranks of tp can have, and 2 of cp
    models = [(made.config, made.weights) for made in cases]
    ranks = rank_pool.run(run, layout.world_size, models, layout, name.endswith("sequence"))
    check(ranks, layout, cases, relative=SCAN_RELATIVE)


def test_the_layer_for_further_tokens_of_published_folders_is_loaded_and_written(tmp_path: Path) -> None:
    fields = {"model_type": FAMILY, **random_fields(FAMILY, 0), "num_experts": 4, "num_experts_per_tok": 2}
    fields |= {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
    made = family("qwen3_next_mtp").region_map(fields)
    tensors = random_arrays(made, 0)
    assert tensors["mtp.fc.weight"].shape == (fields["hidden_size"], 2 * fields["hidden_size"])
    write_folder(tmp_path / "folder", fields, tensors)

    config = replace(gpt_config(fields), make_vocab_divisible=1)
    expected = assembled(made, tensors)
    for mtp in (MTPConfig(num_layers=1), None):
        model = build_gpt(replace(config, mtp=mtp), ParallelGroups.create(ParallelLayout()))
        state = {"model": model.sharded_state_dict()}
        rules = () if mtp is not None else (KeyRule(keys="mtp.*", missing=Policy.IGNORE),)
        megackpt.load(state, tmp_path / "folder", maps="auto", options=LoadOptions(rules=rules))
        loaded = {tensor.key: tensor.data for tensor in tensors_of(state)}
        assert loaded.keys() == {key for key in expected if mtp is not None or not key.startswith("mtp.")}
        assert all(torch.equal(data, expected[key]) for key, data in loaded.items())

    megackpt.import_huggingface(tmp_path / "folder", tmp_path / "imported")
    megackpt.export_huggingface(tmp_path / "imported", tmp_path / "again", map="qwen3_next_mtp")
    assert_same_tensors(folder_tensors(tmp_path / "again"), tensors)
