"""A GPT, dense or with experts, at every parallel layout: the one-rank model's losses, gradients and biases.

Tolerance: everything is fp32 and only the order of sums differs. An element of a gradient is a sum of about
tokens * layers * width rounded terms: 32 * 4 * 32 = 4096 in a dense model and 128 * 4 * 32 = 16384 in one
with experts. Random rounding errors add up to sqrt(4096) * 2^-24 = 4e-6 and sqrt(16384) * 2^-24 = 8e-6 of the
largest element of its array. A wrong or missing reduction is off by a factor of two. Pipelining alone
reorders no sum and has to be exact, except where the two copies of a tied embedding are added.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import megackpt
from megackpt.entities import ShardedStateDict, ShardedTensor
from megackpt.testing.ranks import RankPool
from megackpt.training.optim import DistributedOptimizer
from megackpt.training.parallel import (
    ModelChunks,
    ParallelGroups,
    ParallelLayout,
    RoutingOptions,
    SwiGLU,
    share_losses,
    update_expert_bias,
)
from megackpt.training.parallel.attributes import copied_rows
from megackpt.training.parallel.collectives import all_reduce
from megackpt.training.parallel.pipeline import forward_only
from megackpt.training.parallel.rng import stable_seed
from megackpt.training.parallel.router import mean_auxiliary_losses
from models import GPTConfig, LearnedPositions, MoEConfig
from tests.support.effort import sampled
from tests.support.gpt import (
    ALL_MOE,
    CONFIG,
    FAMILIES,
    Box,
    Case,
    as_family,
    assert_equal_checkpoints,
    build,
    gradient_boxes,
    join,
    losses_of,
    micro_batches,
    resume,
    state_of,
)
from tests.support.optimizers import tensors_of

DENSE = replace(CONFIG, moe=None)
# Biases of routers and experts, and a clamped activation.
BIASED = replace(
    CONFIG,
    linear_bias=False,  # that of dense layers
    moe=MoEConfig(
        num_experts=8,
        ffn_hidden_size=16,
        routing=RoutingOptions(top_k=3),
        activation=SwiGLU(alpha=1.702, limit=0.3, up_offset=1.0),
        bias=True,
        router_bias=True,
    ),
)
CONFIGS = {
    "untied": replace(DENSE, tied_embeddings=False),
    "tied": DENSE,
    **{family: as_family(DENSE, family) for family in FAMILIES},
    "mixed": CONFIG,
    "all": replace(ALL_MOE, tied_embeddings=False),
    "biased": BIASED,
}
OF_DENSE, OF_EXPERTS = 4e-6, 1e-5

DENSE_CASES = {
    "tp4": Case(ParallelLayout(tp=4)),
    "tp4-sequence": Case(ParallelLayout(tp=4), True),
    "pp4": Case(ParallelLayout(pp=4)),
    "pp3-uneven": Case(ParallelLayout(pp=3), stages="Ett||ttL"),
    "pp2": Case(ParallelLayout(pp=2)),
    "pp2-vpp2": Case(ParallelLayout(pp=2, vpp=2)),
    "pp2-vpp2-ends-alone": Case(ParallelLayout(pp=2, vpp=2), stages="E|ttt|t|L"),
    "pp2-vpp3": Case(ParallelLayout(pp=2, vpp=3), stages="Et|t||t||tL"),
    "pp4-vpp2": Case(ParallelLayout(pp=4, vpp=2), stages="Et|(|)*2t|t||t|L"),
    "tp2-pp2-vpp2-sequence": Case(ParallelLayout(tp=2, pp=2, vpp=2), True),
    "tp2-pp2": Case(ParallelLayout(tp=2, pp=2)),
    "tp2-pp2-sequence": Case(ParallelLayout(tp=2, pp=2), True),
    "tp2-dp2": Case(ParallelLayout(tp=2, dp=2)),
    "tp2-dp2-sequence": Case(ParallelLayout(tp=2, dp=2), True),
    "pp2-dp2": Case(ParallelLayout(pp=2, dp=2)),
    "cp2": Case(ParallelLayout(cp=2)),
    "cp4": Case(ParallelLayout(cp=4)),
    "tp2-cp2": Case(ParallelLayout(tp=2, cp=2)),
    "tp2-cp2-sequence": Case(ParallelLayout(tp=2, cp=2), True),
    "cp2-dp2": Case(ParallelLayout(cp=2, dp=2)),
    "cp2-pp2": Case(ParallelLayout(cp=2, pp=2)),
    "cp2-pp2-vpp2": Case(ParallelLayout(cp=2, pp=2, vpp=2)),
    "tp2-cp2-pp2-sequence": Case(ParallelLayout(tp=2, cp=2, pp=2), True),
}
EXPERT_CASES = {
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
BIAS_CASES = {
    "dp2-ep2": Case(ParallelLayout(dp=2, ep=2)),
    "dp2-etp2": Case(ParallelLayout(dp=2, etp=2)),
    "tp2-ep2-etp1": Case(ParallelLayout(tp=2, ep=2, etp=1), True),
    "pp2-tp2-dp2-ep2-etp2": Case(ParallelLayout(tp=2, pp=2, dp=2, ep=2, etp=2)),
}
CASES = DENSE_CASES | EXPERT_CASES | BIAS_CASES


class Result(NamedTuple):
    """What one rank has after a step."""

    losses: list[float]
    auxiliary: list[list[float]]
    grads: list[Box]
    biases: list[Box]


def _set_biases(model: ModelChunks) -> None:
    """Set every bias to random values of its key, the same at all layouts.

    Biases are not 0, so that one that each rank of etp adds counts twice, and a part of what the activation
    gets is clamped.
    """
    with torch.no_grad():
        for tensor in tensors_of(model.sharded_state_dict()):
            if ".bias" in tensor.key and tensor.data is not None:
                generator = torch.Generator().manual_seed(stable_seed(5, tensor.key))
                whole = 0.3 * torch.randn(tensor.global_shape, generator=generator)
                tensor.data.copy_(whole[tensor.global_slice()].view_as(tensor.data))


def _train(case: Case, kind: str) -> Result:
    """Return what this rank has; gradients are reduced as an optimizer would."""
    groups = ParallelGroups.create(case.layout)
    model = build(case, CONFIGS[kind], groups, seed=11)
    if kind == "biased":
        _set_biases(model)
    losses = losses_of(model, micro_batches(groups, count=8 if CONFIGS[kind].moe else 4), groups)
    grads = gradient_boxes(model, model.sharded_state_dict(), groups)
    auxiliary = mean_auxiliary_losses(model, groups).tolist()
    update_expert_bias(model, groups)
    biases = [
        Box(tensor.key, tensor.global_shape, tensor.global_slice(), tensor.data)
        for tensor in biases_of(model.sharded_state_dict())
    ]
    return Result(losses.tolist(), auxiliary, grads, biases)


def biases_of(declared: ShardedStateDict) -> list[ShardedTensor]:
    return [tensor for tensor in tensors_of(declared) if tensor.key.endswith(".expert_bias")]


@functools.cache
def _reference(kind: str) -> Result:
    return _train(Case(ParallelLayout()), kind)


def _rows(names: Iterable[str], kinds: Iterable[str], *marks: pytest.MarkDecorator) -> list[Any]:
    pairs = itertools.product(names, kinds)
    return [pytest.param(name, kind, marks=marks, id=f"{name}-{kind}") for name, kind in pairs]


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *_rows(DENSE_CASES, ["untied", "tied"], sampled(6)),
        *_rows(["tp4", "tp2-cp2-sequence", "cp2-pp2"], FAMILIES, sampled(4)),
        *_rows(EXPERT_CASES, ["mixed", "all"], sampled(5)),
        *_rows(BIAS_CASES, ["biased"]),
    ],
)
def test_losses_gradients_and_biases_are_those_of_one_rank(rank_pool: RankPool, name: str, kind: str) -> None:
    case, config = CASES[name], CONFIGS[kind]
    relative = OF_DENSE if config.moe is None else OF_EXPERTS
    results = rank_pool.run(_train, case.layout.world_size, case, kind)
    expected = _reference(kind)
    for rank, result in enumerate(results):
        dp = case.layout.coordinates(rank).dp
        assert result.losses == pytest.approx(expected.losses[dp :: case.layout.dp], rel=relative)
    # Each stage has its own routers: those of the stages together are those of the model.
    auxiliary = {tuple(row) for result in results for row in result.auxiliary}
    known = sorted(set(map(tuple, expected.auxiliary)))
    assert sorted(auxiliary) == [pytest.approx(row, rel=relative) for row in known]
    exact = case.layout.world_size == case.layout.pp and not config.tied_embeddings
    grads = join(box for result in results for box in result.grads)
    _assert_gradients_close(grads, join(expected.grads), config, 0.0 if exact else relative)
    biases, wanted = (join(b for r in side for b in r.biases) for side in (results, [expected]))
    assert biases.keys() == wanted.keys()
    assert all(torch.equal(biases[key], wanted[key]) for key in wanted)


def _assert_gradients_close(
    actual: dict[str, Tensor], expected: dict[str, Tensor], config: GPTConfig, relative: float
) -> None:
    assert actual.keys() == expected.keys()
    for key, grad in expected.items():
        of_rows, padding = actual[key].tensor_split([len(grad)])
        assert of_rows.shape == grad.shape
        # It adds the same number to all scores of a query, so the sum is 0 but for rounding.
        is_zero = key.endswith("linear_qkv.bias.k") and isinstance(config.positions, LearnedPositions)
        summed = expected[key.removesuffix("k") + "q"] if is_zero else grad
        error = (of_rows - grad).abs().max() / summed.abs().max().clamp(min=1e-30)
        assert error <= relative, f"{key}: off by {error:.1e} of the largest element"
        assert not padding.any(), f"{key}: padding has a gradient"


def test_biases_of_routers_and_experts_have_gradients() -> None:
    grads = join(_reference("biased").grads)
    biases = [key for key in grads if ".bias" in key]
    assert sorted(key.removeprefix("decoder.layers.mlp.") for key in biases) == [
        "experts.linear_fc1.bias.gate",
        "experts.linear_fc1.bias.up",
        "experts.linear_fc2.bias",
        "router.bias",
    ]
    assert all(grads[key].any() for key in biases)


def _evaluate(layout: ParallelLayout) -> tuple[list[float], bool]:
    groups = ParallelGroups.create(layout)
    model = build(Case(layout), DENSE, groups, seed=11)
    batches = micro_batches(groups, count=4)
    losses = share_losses(forward_only(model, batches, groups), len(batches), groups)
    return losses.tolist(), any(param.grad is not None for param in model.parameters())


@pytest.mark.parametrize("vpp", [1, 2])
def test_evaluation_gives_the_losses_and_no_gradients(rank_pool: RankPool, vpp: int) -> None:
    expected = pytest.approx(_reference("tied").losses, rel=OF_DENSE)
    for losses, has_grads in rank_pool.run(_evaluate, 4, ParallelLayout(tp=2, pp=2, vpp=vpp)):
        assert losses == expected
        assert not has_grads


# Key and value heads are fewer than the ranks of tp.
FEW_KEYS = replace(DENSE, vocab_size=32, num_layers=2, num_heads=4)  # no layout pads this vocabulary
FEW_KEYS_CASES = {
    "1": Case(ParallelLayout()),
    "tp2-dp2": Case(ParallelLayout(tp=2, dp=2)),
    "tp4": Case(ParallelLayout(tp=4)),
    "tp4-sequence": Case(ParallelLayout(tp=4), True),
}
STEPS = 4
Run = tuple[list[float], list[float]]


def train_with_few_keys(name: str, key_heads: int, source: Path | None, target: Path | None) -> Run:
    """Resume, save, and train; return the losses of all samples and the gradient norms of the steps."""
    case, seed = FEW_KEYS_CASES[name], 1 if source is None else 2
    groups = ParallelGroups.create(case.layout)
    model = build(case, replace(FEW_KEYS, num_query_groups=key_heads), groups, seed=seed)
    optimizer = DistributedOptimizer(
        model.parameters(),
        lambda g: torch.optim.AdamW(g, lr=0.01),
        groups,
        clip_grad=0.1,  # so that a norm that counts copies twice shows in the losses
        bucket_size=1001,
    )
    if source is not None:
        resume(model, optimizer, source)
        assert target is not None
        megackpt.save(state_of(model, optimizer), target)
    losses, norms = [], []
    for step in range(STEPS):
        optimizer.zero_grad()
        mean = losses_of(model, micro_batches(groups, seed=10 * seed + step, count=4), groups).mean()
        losses.append(float(all_reduce(mean, groups.dp)) / groups.dp.size)
        norms.append(float(optimizer.step()))
    if source is None and target is not None:
        megackpt.save(state_of(model, optimizer), target)
    assert_neighbours_hold_the_same(model, key_heads, groups)
    return losses, norms


def assert_neighbours_hold_the_same(model: ModelChunks, key_heads: int, groups: ParallelGroups) -> None:
    """Compare, over tp, key heads with those of the first rank that holds them."""
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
def test_with_few_key_heads_it_trains_as_on_one_rank_and_resumes_at_every_layout(
    rank_pool: RankPool, tmp_path: Path, key_heads: int
) -> None:
    def run(name: str, source: Path | None, target: Path | None) -> Run:
        ranks = FEW_KEYS_CASES[name].layout.world_size
        results = rank_pool.run(train_with_few_keys, ranks, name, key_heads, source, target)
        assert all(result == results[0] for result in results)
        return results[0]

    names = [n for n in FEW_KEYS_CASES if key_heads < 2 or n != "tp2-dp2"]  # at tp=2, 2 heads have no copies
    trained = {name: run(name, None, tmp_path / name) for name in names}
    for name in names:
        assert trained[name][0] == pytest.approx(trained["1"][0], abs=1e-5), name
        assert trained[name][1] == pytest.approx(trained["1"][1], rel=1e-4), name
    for source, target in itertools.pairwise([*names, names[0]]):
        again = tmp_path / f"{source}-to-{target}"
        resumed = run(target, tmp_path / source, again)
        assert_equal_checkpoints(tmp_path / source, again, FEW_KEYS.vocab_size)
        assert resumed[0] == pytest.approx(run(source, tmp_path / source, again)[0], abs=1e-5)
