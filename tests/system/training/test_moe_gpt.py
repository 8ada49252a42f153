"""A GPT with experts at every parallel layout: the one-rank model's loss and gradients, the same checkpoint.

Tolerance: everything is fp32 and only the order of sums differs. An element of a gradient is a sum of about
tokens * layers * width = 128 * 4 * 32 = 16384 rounded terms; random rounding errors add up to sqrt(16384) *
2^-24 = 8e-6 of the largest element of its array. A wrong or missing reduction is off by a factor of two.
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from megackpt import load, load_plain_tensors, save
from megackpt.engine.data.tensor_bytes import as_bits
from megackpt.options import LoadOptions
from megackpt.parallel import (
    ParallelGroups,
    ParallelLayout,
    all_reduce,
    forward_backward,
    mean_auxiliary_losses,
    share_losses,
    update_expert_bias,
)
from megackpt.testing.ranks import RankPool
from models import GPTConfig
from tests.support.effort import sampled
from tests.support.gpt import (
    ALL_MOE,
    CONFIG,
    Box,
    Case,
    assert_all_close,
    build,
    gradient_boxes,
    join,
    micro_batches,
)

RELATIVE = 1e-5
CONFIGS = {"mixed": CONFIG, "all": replace(ALL_MOE, tied_embeddings=False)}

CASES = {
    "dp4-ep4": Case(ParallelLayout(dp=4, ep=4)),
    "cp2-dp4-ep8": Case(ParallelLayout(cp=2, dp=4, ep=8)),
    "tp2-dp2-ep2-sequence": Case(ParallelLayout(tp=2, dp=2, ep=2), True),
    "tp4-ep4-etp1": Case(ParallelLayout(tp=4, ep=4, etp=1)),
    "dp4-ep2-etp2": Case(ParallelLayout(dp=4, ep=2, etp=2)),
    "tp2-cp2-dp2-ep2-etp4": Case(ParallelLayout(tp=2, cp=2, dp=2, ep=2, etp=4), True),
    "tp2-pp2-dp2-ep2-etp1": Case(ParallelLayout(tp=2, pp=2, dp=2, ep=2, etp=1), True),
    "pp2-vpp2-ep2": Case(ParallelLayout(pp=2, vpp=2, dp=2, ep=2)),
    "pp2-vpp2-uneven": Case(ParallelLayout(tp=2, pp=2, vpp=2, ep=2, etp=1), stages="E|tt|t|tL"),
}


class Result(NamedTuple):
    """What one rank has after a step."""

    losses: list[float]
    auxiliary: list[list[float]]
    grads: list[Box]
    biases: list[Box]


def _train(case: Case, config: GPTConfig) -> Result:
    groups = ParallelGroups.create(case.layout)
    model = build(case, config, groups, seed=11)
    batches = micro_batches(groups)
    losses = share_losses(forward_backward(model, batches, groups), len(batches), groups)
    losses = all_reduce(losses, groups.cp) / groups.cp.size
    grads = gradient_boxes(model, model.sharded_state_dict(), groups)
    auxiliary = mean_auxiliary_losses(model, groups).tolist()
    update_expert_bias(model, groups)
    biases = [
        Box(entity.key, entity.global_shape, entity.global_slice(), entity.data)
        for entity in model.sharded_state_dict().values()
        if entity.key.endswith("expert_bias")
    ]
    return Result(losses.tolist(), auxiliary, grads, biases)


@functools.cache
def _reference(kind: str) -> Result:
    return _train(Case(ParallelLayout()), CONFIGS[kind])


@sampled(6)
@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.parametrize("name", CASES)
def test_losses_gradients_and_biases_are_those_of_one_rank(rank_pool: RankPool, name: str, kind: str) -> None:
    layout = CASES[name].layout
    results = rank_pool.run(_train, layout.world_size, CASES[name], CONFIGS[kind])
    expected = _reference(kind)
    for rank, result in enumerate(results):
        dp = layout.coordinates(rank).dp
        assert result.losses == pytest.approx(expected.losses[dp :: layout.dp], rel=RELATIVE)
    # Each stage has its own routers: those of the stages together are those of the model.
    auxiliary = {tuple(row) for result in results for row in result.auxiliary}
    assert sorted(auxiliary) == [pytest.approx(row, rel=RELATIVE) for row in sorted(expected.auxiliary)]
    rows = CONFIG.vocab_size  # of the vocabulary, without padding
    grads = join(box for result in results for box in result.grads)
    trimmed = {k: v[:rows] if "embedding" in k or "output_layer" in k else v for k, v in grads.items()}
    assert_all_close(trimmed, join(expected.grads), relative=RELATIVE)
    biases, known = join(b for r in results for b in r.biases), join(expected.biases)
    assert biases.keys() == known.keys()
    assert all(torch.equal(biases[key], known[key]) for key in known)


def _save(case: Case, directory: Path) -> None:
    """Save a model whose biases are no longer those of a new one."""
    groups = ParallelGroups.create(case.layout)
    model = build(case, CONFIG, groups, seed=1)
    forward_backward(model, micro_batches(groups), groups)
    update_expert_bias(model, groups)
    save({"model": model.sharded_state_dict()}, directory)


def _load_and_save(case: Case, source: Path, target: Path) -> None:
    model = build(case, CONFIG, ParallelGroups.create(case.layout), seed=2)
    load({"model": model.sharded_state_dict()}, source, options=LoadOptions(complete=True))
    save({"model": model.sharded_state_dict()}, target)


PAIRED = ["cp2-dp4-ep8", "tp2-cp2-dp2-ep2-etp4", "tp2-pp2-dp2-ep2-etp1", "pp2-vpp2-uneven"]


@pytest.fixture(scope="module")
def saved(rank_pool: RankPool, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One model, saved at each of the layouts."""
    directory = tmp_path_factory.mktemp("saved")
    for name in PAIRED:
        rank_pool.run(_save, CASES[name].layout.world_size, CASES[name], directory / name)
    return {name: directory / name for name in PAIRED}


@sampled(8)
@pytest.mark.parametrize(("source", "target"), [*itertools.product(PAIRED, PAIRED)])
def test_a_checkpoint_of_any_layout_loads_at_any_other_bit_for_bit(
    rank_pool: RankPool, saved: dict[str, Path], tmp_path: Path, source: str, target: str
) -> None:
    case = CASES[target]
    rank_pool.run(_load_and_save, case.layout.world_size, case, saved[source], tmp_path / "again")
    before, after = load_plain_tensors(saved[source]), load_plain_tensors(tmp_path / "again")
    assert before.keys() == after.keys()
    for key, array in before.items():
        rows = CONFIG.vocab_size if "embedding" in key or "output_layer" in key else None
        assert torch.equal(as_bits(array[:rows]), as_bits(after[key][:rows])), key
    assert before["decoder.layers.1.mlp.experts.linear_fc1.weight.gate"].shape == (8, 16, 32)
    assert torch.count_nonzero(before["decoder.layers.1.mlp.router.expert_bias"])
