"""A GPT whose key and value heads are fewer than the ranks of tp: it trains, and resumes at any layout.

Losses are those of one rank up to the order of sums: see test_gpt_layouts for the tolerance.
"""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch

import megackpt
from megackpt import load_plain_tensors
from megackpt.optim import DistributedOptimizer
from megackpt.parallel import (
    MicroBatch,
    ParallelGroups,
    ParallelLayout,
    all_reduce,
    copied_rows,
    forward_backward,
)
from megackpt.testing.ranks import RankPool
from models import GPT, GPTConfig, init_weights
from tests.support.effort import sampled

LAYOUTS = {
    "1": (ParallelLayout(), False),
    "tp2-dp2": (ParallelLayout(tp=2, dp=2), False),
    "tp4": (ParallelLayout(tp=4), False),
    "tp4-sequence": (ParallelLayout(tp=4), True),
}
STEPS = 4

Run = tuple[list[float], list[float]]


def build(
    layout: ParallelLayout, key_heads: int, sequence_parallel: bool, seed: int
) -> tuple[GPT, DistributedOptimizer, ParallelGroups]:
    config = GPTConfig(
        vocab_size=28,
        hidden_size=32,
        num_layers=2,
        num_heads=4,
        num_query_groups=key_heads,
        ffn_hidden_size=24,
        seq_length=8,
        make_vocab_divisible=1,
        linear_bias=True,
    )
    groups = ParallelGroups.create(layout)
    model = GPT(config, groups, sequence_parallel=sequence_parallel)
    init_weights(model, seed)
    optimizer = DistributedOptimizer(
        model.parameters(),
        lambda g: torch.optim.AdamW(g, lr=0.01),
        groups,
        clip_grad=0.1,  # so that a norm that counts copies twice shows in the losses
        bucket_size=1001,
    )
    return model, optimizer, groups


def state_of(model: GPT, optimizer: DistributedOptimizer) -> dict[str, object]:
    sharded = model.sharded_state_dict()
    return {"model": sharded, "optimizer": optimizer.sharded_state_dict(sharded)}


def train(
    layout: ParallelLayout, key_heads: int, sequence_parallel: bool, source: Path | None, target: Path | None
) -> Run:
    """Resume, save, and train; return the losses of all samples and the gradient norms of the steps."""
    model, optimizer, groups = build(layout, key_heads, sequence_parallel, seed=1 if source is None else 2)
    if source is not None:
        loaded = megackpt.load(state_of(model, optimizer), source)
        optimizer.load_sharded_state_dict(loaded["optimizer"])
        assert target is not None
        megackpt.save(state_of(model, optimizer), target)
    generator = torch.Generator().manual_seed(5 if source is None else 6)
    losses, norms = [], []
    for _ in range(STEPS):
        tokens = torch.randint(0, 28, (4, 9), generator=generator).chunk(groups.dp.size)[groups.dp.rank]
        optimizer.zero_grad()
        mean = forward_backward(model, [MicroBatch(tokens[:, :-1], tokens[:, 1:])], groups).mean()
        losses.append(float(all_reduce(mean, groups.dp)) / groups.dp.size)
        norms.append(float(optimizer.step()))
    if source is None and target is not None:
        megackpt.save(state_of(model, optimizer), target)
    assert_neighbours_hold_the_same(model, groups)
    return losses, norms


def assert_neighbours_hold_the_same(model: GPT, groups: ParallelGroups) -> None:
    """Compare, over tp, key heads with those of the first rank that holds them."""
    key_heads = model.config.query_groups
    copies = max(1, groups.tp.size // key_heads)
    for name, param in model.named_parameters():
        if "linear_qkv" not in name:
            continue
        layer = model.get_submodule(name.rpartition(".")[0])
        rows = param.detach()[layer.local_components["q"] :]
        everyone = rows.new_zeros((groups.tp.size, *rows.shape))
        everyone[groups.tp.rank] = rows
        everyone = all_reduce(everyone, groups.tp)
        assert torch.equal(rows, everyone[groups.tp.rank // copies * copies]), name
        assert bool(copied_rows(param)) == bool(groups.tp.rank % copies), name


@sampled(4)
@pytest.mark.parametrize("key_heads", [1, 2])
def test_it_trains_as_on_one_rank_and_resumes_at_every_layout(
    rank_pool: RankPool, tmp_path: Path, key_heads: int
) -> None:
    def run(name: str, source: Path | None, target: Path | None) -> Run:
        layout, sequence_parallel = LAYOUTS[name]
        ranks = rank_pool.run(train, layout.world_size, layout, key_heads, sequence_parallel, source, target)
        assert all(rank == ranks[0] for rank in ranks)
        return ranks[0]

    names = [n for n in LAYOUTS if key_heads < 2 or n != "tp2-dp2"]  # at tp=2, 2 heads have no copies
    trained = {name: run(name, None, tmp_path / name) for name in names}
    for name in names:
        assert trained[name][0] == pytest.approx(trained["1"][0], abs=1e-5), name
        assert trained[name][1] == pytest.approx(trained["1"][1], rel=1e-4), name
    for source, target in itertools.pairwise([*names, names[0]]):
        again = tmp_path / f"{source}-to-{target}"
        resumed = run(target, tmp_path / source, again)
        saved, read = load_plain_tensors(tmp_path / source), load_plain_tensors(again)
        assert saved.keys() == read.keys()
        assert all(torch.equal(saved[key], read[key]) for key in saved)
        assert resumed[0] == pytest.approx(run(source, tmp_path / source, again)[0], abs=1e-5)
