"""A GPT at every parallel layout computes the loss and the gradients of the one-rank model.

Tolerance: everything is fp32 and only the order of sums differs. An element of a gradient is a sum of about
    tokens * layers * width = 32 * 4 * 32 = 4096 rounded terms; random rounding errors add up to sqrt(4096)
    * 2^-24 = 4e-6 of the largest element of its array. A wrong or missing reduction is off by a factor of
    two. Pipelining alone reorders no sum and has to be exact, except where the two copies of a tied
    embedding are added.
"""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from megackpt.mapping import ShardedLayout, is_main_replica
from megackpt.parallel import (
    MicroBatch,
    ParallelGroups,
    ParallelLayout,
    ParallelRng,
    StageTable,
    all_reduce,
    context_share,
    forward_backward,
    forward_only,
    is_marked,
    share_losses,
)
from megackpt.testing.ranks import RankPool
from models import GPT, GPTConfig, LearnedPositions, build_gpt, init_weights
from tests.support.effort import sampled
from tests.support.gpt import FAMILIES, as_family

CONFIG = GPTConfig(
    vocab_size=29,
    hidden_size=32,
    num_layers=4,
    num_heads=8,
    num_query_groups=4,
    ffn_hidden_size=24,
    seq_length=8,
    make_vocab_divisible=1,
    linear_bias=True,
)
MICRO_BATCHES = 4  # in the whole job, divided among dp
RELATIVE = 4e-6

Grads = dict[str, Tensor]


def _batches(groups: ParallelGroups) -> list[MicroBatch]:
    """Return this dp rank's share of the job's micro-batches, and of them this cp rank's tokens."""
    generator = torch.Generator().manual_seed(3)
    draw = functools.partial(torch.randint, 0, CONFIG.vocab_size, (2, 8), generator=generator)
    whole = [(draw(), draw()) for _ in range(MICRO_BATCHES)][groups.dp.rank :: groups.dp.size]
    return [MicroBatch(*(context_share(x, groups.cp, dim=1) for x in batch)) for batch in whole]


def _train(
    layout: ParallelLayout, config: GPTConfig, sequence_parallel: bool, stages: str | None
) -> tuple[list[float], list[tuple]]:
    """Return the losses of this dp rank and its boxes of the gradients, reduced as an optimizer would."""
    groups = ParallelGroups.create(layout)
    table = None if stages is None else StageTable.from_string(stages, pp=layout.pp)
    model = build_gpt(config, groups, sequence_parallel=sequence_parallel, stages=table)
    init_weights(model, seed=11)
    batches = _batches(groups)
    losses = forward_backward(model, batches, groups)
    grads = {name: _reduced(param, groups) for name, param in model.named_parameters()}
    boxes = []
    for name, entity in model.sharded_state_dict().items():
        moved = entity.retarget(key=entity.key, data=grads[name])
        for t in moved.tensors() if isinstance(moved, ShardedLayout) else [moved]:
            main = is_main_replica(t.replica_id)
            boxes.append((t.key, t.global_shape, t.global_slice(), t.data.numpy(), main))
    shared = share_losses(losses, len(batches), groups)
    return (all_reduce(shared, groups.cp) / groups.cp.size).tolist(), boxes


def _reduced(param: Tensor, groups: ParallelGroups) -> Tensor:
    grad = param.grad
    assert grad is not None
    if is_marked(param, "sequence_parallel"):
        grad = all_reduce(grad, groups.tp)
    if is_marked(param, "shared_embedding"):
        grad = all_reduce(grad, groups.embedding)
    return all_reduce(grad, groups.dp_cp) / groups.dp_cp.size


def _join(per_rank: list[tuple[list[float], list[tuple]]]) -> Grads:
    """Put the global gradients together; replicas have to agree with each other to the bit."""
    whole: Grads = {}
    for main_ones in (True, False):
        for _, boxes in per_rank:
            for key, shape, box, data, main in boxes:
                if main != main_ones:
                    continue
                joined = whole.setdefault(key, torch.full(shape, float("nan")))
                if not main:
                    assert torch.equal(joined[box], torch.from_numpy(data)), f"replicas of {key} differ"
                joined[box] = torch.from_numpy(data)
    return whole


@functools.cache
def _reference(config: GPTConfig) -> tuple[list[float], Grads]:
    result = _train(ParallelLayout(), config, False, None)
    return result[0], _join([result])


LAYOUTS = {
    "tp4": (ParallelLayout(tp=4), False, None),
    "tp4-sequence": (ParallelLayout(tp=4), True, None),
    "pp4": (ParallelLayout(pp=4), False, None),
    "pp3-uneven": (ParallelLayout(pp=3), False, "Ett||ttL"),
    "pp2": (ParallelLayout(pp=2), False, None),
    "pp2-vpp2": (ParallelLayout(pp=2, vpp=2), False, None),
    "pp2-vpp2-ends-alone": (ParallelLayout(pp=2, vpp=2), False, "E|ttt|t|L"),
    "pp2-vpp3": (ParallelLayout(pp=2, vpp=3), False, "Et|t||t||tL"),
    "pp4-vpp2": (ParallelLayout(pp=4, vpp=2), False, "Et|(|)*2t|t||t|L"),
    "tp2-pp2-vpp2-sequence": (ParallelLayout(tp=2, pp=2, vpp=2), True, None),
    "tp2-pp2": (ParallelLayout(tp=2, pp=2), False, None),
    "tp2-pp2-sequence": (ParallelLayout(tp=2, pp=2), True, None),
    "tp2-dp2": (ParallelLayout(tp=2, dp=2), False, None),
    "tp2-dp2-sequence": (ParallelLayout(tp=2, dp=2), True, None),
    "pp2-dp2": (ParallelLayout(pp=2, dp=2), False, None),
    "cp2": (ParallelLayout(cp=2), False, None),
    "cp4": (ParallelLayout(cp=4), False, None),
    "tp2-cp2": (ParallelLayout(tp=2, cp=2), False, None),
    "tp2-cp2-sequence": (ParallelLayout(tp=2, cp=2), True, None),
    "cp2-dp2": (ParallelLayout(cp=2, dp=2), False, None),
    "cp2-pp2": (ParallelLayout(cp=2, pp=2), False, None),
    "cp2-pp2-vpp2": (ParallelLayout(cp=2, pp=2, vpp=2), False, None),
    "tp2-cp2-pp2-sequence": (ParallelLayout(tp=2, cp=2, pp=2), True, None),
}


@sampled(6)
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_loss_and_gradients_are_those_of_one_rank(rank_pool: RankPool, name: str, tied: bool) -> None:
    _compare_with_one_rank(rank_pool, name, replace(CONFIG, tied_embeddings=tied))


@sampled(4)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", ["tp4", "tp2-cp2-sequence", "cp2-pp2"])
def test_choices_of_other_families_have_the_gradients_of_one_rank(
    rank_pool: RankPool, name: str, family: str
) -> None:
    _compare_with_one_rank(rank_pool, name, as_family(CONFIG, family))


def _size(key: str, config: GPTConfig, grads: Grads) -> Tensor:
    """Return the size of the numbers that a gradient is the sum of."""
    if key.endswith("linear_qkv.bias.k") and isinstance(config.positions, LearnedPositions):
        # It adds the same number to all scores of a query, so the sum is 0 but for rounding.
        key = key.removesuffix("k") + "q"
    return grads[key].abs().max()


def _compare_with_one_rank(rank_pool: RankPool, name: str, config: GPTConfig) -> None:
    layout, sequence_parallel, stages = LAYOUTS[name]
    per_rank = rank_pool.run(_train, layout.world_size, layout, config, sequence_parallel, stages)
    losses, grads = _reference(config)
    for rank, (known, _) in enumerate(per_rank):
        dp = layout.coordinates(rank).dp
        assert known == pytest.approx(losses[dp :: layout.dp], rel=RELATIVE)
    actual = _join(per_rank)
    assert actual.keys() == grads.keys()
    exact = layout.world_size == layout.pp and not config.tied_embeddings
    for key, expected in grads.items():
        rows = min(len(actual[key]), len(expected))
        error = (actual[key][:rows] - expected[:rows]).abs().max() / _size(key, config, grads)
        assert error <= (0 if exact else RELATIVE), f"{key}: off by {error:.1e} of the largest element"
        assert torch.count_nonzero(actual[key][rows:]) == 0, f"{key}: padding has a gradient"


def _evaluate(layout: ParallelLayout) -> tuple[list[float], bool]:
    groups = ParallelGroups.create(layout)
    model = build_gpt(CONFIG, groups)
    init_weights(model, seed=11)
    batches = _batches(groups)
    losses = share_losses(forward_only(model, batches, groups), len(batches), groups)
    return losses.tolist(), any(param.grad is not None for param in model.parameters())


@pytest.mark.parametrize("vpp", [1, 2])
def test_evaluation_gives_the_losses_and_no_gradients(rank_pool: RankPool, vpp: int) -> None:
    expected = pytest.approx(_reference(CONFIG)[0], rel=RELATIVE)
    for losses, has_grads in rank_pool.run(_evaluate, 4, ParallelLayout(tp=2, pp=2, vpp=vpp)):
        assert losses == expected
        assert not has_grads


def _train_with_dropout(
    layout: ParallelLayout, sequence_parallel: bool
) -> tuple[list[float], list[float], list[float]]:
    """Return losses, the losses after restoring the streams, and those after reseeding."""
    groups = ParallelGroups.create(layout)
    rng = ParallelRng(5, groups)
    model = GPT(replace(CONFIG, dropout=0.3), groups, rng, sequence_parallel=sequence_parallel)
    init_weights(model, seed=11)

    def step() -> list[float]:
        return share_losses(forward_backward(model, _batches(groups), groups), MICRO_BATCHES, groups).tolist()

    step()
    state = rng.sharded_state_dict()["rng_state"].data
    expected = step()
    rng.reseed(9)
    reseeded = step()
    rng.load_state_dict(state)
    return expected, step(), reseeded


@sampled(4)
@pytest.mark.parametrize("layout", [ParallelLayout(tp=2, pp=2), ParallelLayout(tp=2, cp=2)], ids=str)
@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["whole", "sequence"])
def test_dropout_is_reproduced_bit_for_bit_after_the_streams_are_restored(
    rank_pool: RankPool, layout: ParallelLayout, sequence_parallel: bool
) -> None:
    ranks = rank_pool.run(_train_with_dropout, 4, layout, sequence_parallel)
    for expected, restored, reseeded in ranks:
        assert restored == expected
        assert reseeded != expected
