"""A model and its optimizer, saved at each layout, loaded at each other and saved again: bit-equal arrays.

CI takes a sample of the 100 pairs; all of them: `pytest tests/system/ranks/test_layout_pairs.py --all`.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

import megackpt
from megackpt import load_common_state_dict, load_plain_tensors
from megackpt.engine.data.tensor_bytes import as_bits
from megackpt.optim import DistributedOptimizer
from megackpt.parallel import (
    MicroBatch,
    ModelChunks,
    ParallelGroups,
    ParallelLayout,
    StageTable,
    forward_backward,
)
from megackpt.testing.ranks import RankPool
from models import GPTConfig, build_gpt, init_weights
from tests.support.effort import sampled

LAYOUTS = {
    "TP4": ParallelLayout(tp=4),
    "PP4": ParallelLayout(pp=4),
    "DP4": ParallelLayout(dp=4),
    "TP2xPP2": ParallelLayout(tp=2, pp=2),
    "TP2xDP2": ParallelLayout(tp=2, dp=2),
    "PP2xDP2": ParallelLayout(pp=2, dp=2),
    "1": ParallelLayout(),
    "PP2xVPP2": ParallelLayout(pp=2, vpp=2),
    "PP2xVPP2xDP2-uneven": ParallelLayout(pp=2, vpp=2, dp=2),
    "PP3-uneven": ParallelLayout(pp=3),
}
TABLES = {"PP2xVPP2xDP2-uneven": "E|ttt||tL", "PP3-uneven": "Et|ttt|L"}
PAIRS = list(itertools.product(LAYOUTS, LAYOUTS))
VOCAB = 61  # not a multiple of 2 or 4: padded differently at each tp
STATES = ("exp_avg", "exp_avg_sq", "step", "fp32_param")


def config(*, tied: bool) -> GPTConfig:
    return GPTConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        num_layers=4,
        num_heads=4,
        num_query_groups=4,
        ffn_hidden_size=24,
        seq_length=8,
        tied_embeddings=tied,
        make_vocab_divisible=1,
        params_dtype=torch.bfloat16,
    )


def build(name: str, *, tied: bool, seed: int) -> tuple[ModelChunks, DistributedOptimizer, ParallelGroups]:
    groups = ParallelGroups.create(LAYOUTS[name])
    table = StageTable.from_string(TABLES[name], pp=groups.pp.size) if name in TABLES else None
    model = build_gpt(config(tied=tied), groups, stages=table)
    init_weights(model, seed)
    matrices = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim == 1]
    optimizer = DistributedOptimizer(
        [
            {"name": "matrices", "params": matrices, "weight_decay": 0.1},
            {"name": "others", "params": others, "weight_decay": 0.0},
        ],
        lambda groups: torch.optim.AdamW(groups, lr=0.01, betas=(0.8, 0.9)),
        groups,
        bucket_size=1001,  # shards begin and end at odd places of parameters
    )
    return model, optimizer, groups


def state_of(model: ModelChunks, optimizer: DistributedOptimizer) -> dict[str, Any]:
    sharded = model.sharded_state_dict()
    return {"model": sharded, "optimizer": optimizer.sharded_state_dict(sharded)}


def train_and_save(name: str, tied: bool, directory: Path) -> None:
    """Two steps make moments and step counters that no fresh optimizer has."""
    model, optimizer, groups = build(name, tied=tied, seed=1)
    generator = torch.Generator().manual_seed(5 + groups.dp.rank)
    for _ in range(2):
        tokens = torch.randint(0, VOCAB, (2, 9), generator=generator)
        optimizer.zero_grad()
        # As many micro-batches as stages, which the interleaved schedule needs.
        forward_backward(model, [MicroBatch(tokens[:, :-1], tokens[:, 1:])] * groups.pp.size, groups)
        optimizer.step()
    for group in optimizer.param_groups:
        group["lr"] = 0.0123
    megackpt.save(state_of(model, optimizer), directory)


def load_and_save(name: str, tied: bool, source: Path, target: Path) -> None:
    """Load into a model of another seed, and save again."""
    model, optimizer, _ = build(name, tied=tied, seed=2)
    loaded = megackpt.load(state_of(model, optimizer), source)
    optimizer.load_sharded_state_dict(loaded["optimizer"])
    assert {g["lr"] for g in optimizer.param_groups} == {0.0123}
    megackpt.save(state_of(model, optimizer), target)


def arrays_of(checkpoint: Path) -> dict[str, torch.Tensor]:
    """All arrays; those of the vocabulary without padding rows, whose number depends on the layout."""
    arrays = load_plain_tensors(checkpoint)
    padded = {k for k, a in arrays.items() if a.ndim and ("word_embeddings" in k or "output_layer" in k)}
    return {k: a[:VOCAB] if k in padded else a for k, a in arrays.items()}


def assert_equal(first: Path, second: Path) -> None:
    a, b = arrays_of(first), arrays_of(second)
    assert a.keys() == b.keys()
    for key in a:
        assert a[key].shape == b[key].shape, key
        assert torch.equal(as_bits(a[key]), as_bits(b[key])), key
    assert load_common_state_dict(first) == load_common_state_dict(second)


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory, rank_pool: RankPool) -> dict[tuple[str, bool], Path]:
    saved = {}
    for (name, layout), tied in itertools.product(LAYOUTS.items(), (True, False)):
        directory = tmp_path_factory.mktemp("pairs") / f"{name}-{tied}"
        rank_pool.run(train_and_save, layout.world_size, name, tied, directory)
        saved[name, tied] = directory
    return saved


@sampled(20)
@pytest.mark.parametrize(("source", "target"), PAIRS, ids=[f"{s}-to-{t}" for s, t in PAIRS])
def test_what_one_layout_saved_another_loads_and_saves_bit_equal(
    source: str,
    target: str,
    sources: dict[tuple[str, bool], Path],
    rank_pool: RankPool,
    tmp_path: Path,
) -> None:
    layout = LAYOUTS[target]
    for tied in (True, False):
        saved, again = sources[source, tied], tmp_path / f"again-{tied}"
        rank_pool.run(load_and_save, layout.world_size, target, tied, saved, again)
        assert_equal(saved, again)


def test_the_checkpoints_hold_model_masters_moments_and_steps(sources: dict[tuple[str, bool], Path]) -> None:
    for (name, tied), directory in sources.items():
        arrays = arrays_of(directory)
        model = {key for key in arrays if not key.startswith("optimizer.")}
        assert any(key.startswith("decoder.layers.") for key in model), name
        assert ("output_layer.weight" in model) == (not tied)
        for state in STATES:
            kept = {
                k.removeprefix(f"optimizer.state.{state}.")
                for k in arrays
                if k.startswith(f"optimizer.state.{state}.")
            }
            if state == "step":  # one number a parameter, whatever parts it is stored in
                assert all(bool((arrays[f"optimizer.state.step.{k}"] == 2).all()) for k in kept), name
            else:
                assert kept == model, (name, state)
        assert all(a.abs().sum() > 0 for k, a in arrays.items() if ".exp_avg" in k), name


def test_bf16_weights_are_the_rounded_masters_at_every_layout(sources: dict[tuple[str, bool], Path]) -> None:
    for directory in sources.values():
        arrays = arrays_of(directory)
        for key, weight in arrays.items():
            if not key.startswith("optimizer."):
                master = arrays[f"optimizer.state.fp32_param.{key}"]
                assert weight.dtype == torch.bfloat16
                assert torch.equal(as_bits(weight), as_bits(master.to(torch.bfloat16))), key
