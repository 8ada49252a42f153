"""Layers over shares of sequences compute what they do over the whole ones, forward and backward.

Attention, and layers with a recurrence. The GPT's losses and gradients at layouts with cp are in
`test_gpt_layouts`.
"""

from __future__ import annotations

import functools
import importlib.util
import warnings
from collections.abc import Callable, Mapping
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from megackpt.errors import DeclarationError
from megackpt.testing.ranks import RankPool
from megackpt.training.parallel import (
    Axis,
    GatedDeltaNet,
    MambaMixer,
    MambaSizes,
    ParallelGroups,
    ParallelLayout,
    ParallelRng,
    causal_attention,
    context_share,
)
from megackpt.training.parallel.collectives import collect_sequence
from megackpt.training.parallel.context import AttentionPart, attention_parts, gather_context, join_context
from models import GPTConfig
from models.blocks.attention import SelfAttention
from models.stage import Stage
from tests.support.effort import sampled
from tests.support.gpt import Box, assert_all_close, assert_close, gradient_boxes, join
from tests.support.optimizers import random_of_key, scatter, tensors_of

LENGTH = 16
# fp32, sums of 8 products of head_dim and of 16 keys in another order: sqrt(8 * 16) * 2^-24 = 7e-7 of the
# largest element. A key that is missing, or seen too early, changes elements by about as much as they are.
RELATIVE = 2e-6


def _cp() -> Axis:
    return ParallelGroups.create(ParallelLayout(cp=dist.get_world_size())).cp


def _integers(seed: int, *shape: int) -> Tensor:
    return torch.randint(-4, 5, shape, generator=torch.Generator().manual_seed(seed)).float()


def _gather(dim: int) -> tuple[Tensor, Tensor]:
    cp = _cp()
    whole = _integers(0, 3, LENGTH, 2, LENGTH)
    share = context_share(whole, cp, dim=dim).requires_grad_()
    gathered = gather_context(share, cp, dim=dim)
    assert torch.equal(gathered, whole)
    (gathered * _integers(10 + cp.rank, *whole.shape)).sum().backward()
    assert share.grad is not None
    return gathered.detach(), share.grad


@pytest.mark.parametrize("dim", [1, -1])
@pytest.mark.parametrize("ranks", [2, 4])
def test_gathered_sequences_are_in_order_and_their_gradients_are_summed(
    rank_pool: RankPool, ranks: int, dim: int
) -> None:
    grads = [grad for _, grad in rank_pool.run(_gather, ranks, dim)]
    weights = [_integers(10 + rank, 3, LENGTH, 2, LENGTH) for rank in range(ranks)]
    # Small integers: sums are exact in any order.
    assert torch.equal(join_context(grads, dim=dim), torch.stack(weights).sum(0))


def _shares_of_megatron() -> tuple[list[list[int]], list[list[int]]]:
    """Return the share of some tokens that Megatron-Core gives this rank, and ours."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from megatron.core.utils import get_batch_on_this_cp_rank
    cp, tokens = _cp(), torch.arange(2 * LENGTH).view(2, LENGTH)
    batch = get_batch_on_this_cp_rank({"tokens": tokens}, cp_group=cp.group)
    return batch["tokens"].tolist(), context_share(tokens, cp, dim=1).tolist()


@pytest.mark.skipif(importlib.util.find_spec("megatron") is None, reason="Megatron-Core is not installed")
def test_a_rank_has_the_tokens_that_it_has_in_megatron(rank_pool: RankPool) -> None:
    for expected, actual in rank_pool.run(_shares_of_megatron, 2):
        assert actual == expected


def _inputs() -> list[Tensor]:
    """Return queries, keys and values of whole sequences; heads share keys, and values are narrower."""
    generator = torch.Generator().manual_seed(1)
    shapes = [(2, 4, LENGTH, 8), (2, 2, LENGTH, 8), (2, 2, LENGTH, 6)]
    return [torch.randn(shape, generator=generator) for shape in shapes]


def _grad_of_output() -> Tensor:
    return torch.randn(2, 4, LENGTH, 6, generator=torch.Generator().manual_seed(2))


def _written_out(part: AttentionPart) -> Tensor:
    """Return the attention of a part as a user may compute it."""
    shared = part.queries.shape[1] // part.keys.shape[1]
    k, v = (x.repeat_interleave(shared, dim=1) for x in (part.keys, part.values))
    scores = part.queries @ k.transpose(-1, -2) / part.queries.shape[-1] ** 0.5
    return scores.masked_fill(~part.mask, float("-inf")).softmax(-1) @ v


def _attend(by_parts: bool) -> list[Tensor]:
    cp = _cp()
    q, k, v = (context_share(x, cp, dim=2).requires_grad_() for x in _inputs())
    if by_parts:
        out = torch.cat([_written_out(part) for part in attention_parts(q, k, v, cp)], dim=2)
    else:
        out = causal_attention(q, k, v, cp)
    out.backward(context_share(_grad_of_output(), cp, dim=2))
    grads = [x.grad for x in (q, k, v)]
    return [out.detach(), *(grad for grad in grads if grad is not None)]


@pytest.mark.parametrize("by_parts", [False, True], ids=["fused", "by-parts"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_attention_and_its_gradients_are_those_of_the_whole_sequence(
    rank_pool: RankPool, ranks: int, by_parts: bool
) -> None:
    q, k, v = (x.requires_grad_() for x in _inputs())
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    out.backward(_grad_of_output())
    per_rank = rank_pool.run(_attend, ranks, by_parts)
    for shares, expected in zip(zip(*per_rank, strict=True), (out, q.grad, k.grad, v.grad), strict=True):
        error = (join_context(shares, dim=2) - expected).abs().max() / expected.abs().max()
        assert error <= RELATIVE


def _odd_share() -> None:
    gather_context(torch.zeros(3, 1), _cp(), dim=0)


def test_a_share_that_has_no_two_parts_is_an_error_on_every_rank(rank_pool: RankPool) -> None:
    for outcome in rank_pool.outcomes(_odd_share, 2):
        assert isinstance(outcome.error, DeclarationError)
        assert "Shares of 3 tokens cannot be cut into their two parts" in str(outcome.error)


CONFIG = GPTConfig(
    vocab_size=8,
    hidden_size=16,
    num_layers=1,
    num_heads=4,
    num_query_groups=2,
    seq_length=LENGTH,
    dropout=0.5,
)


@functools.cache
def _hidden() -> Tensor:
    return torch.randn(LENGTH, 2, 16, generator=torch.Generator().manual_seed(3))


def _model_attention(layout: ParallelLayout, drops: bool) -> tuple[Tensor, list[Tensor]]:
    """Return the output for this rank's share, and the attention weights' dropout masks."""
    groups = ParallelGroups.create(layout)
    stage = Stage(config=CONFIG, groups=groups, rng=ParallelRng(1, groups))
    torch.manual_seed(4)
    attention = SelfAttention(stage)
    masks: list[Tensor] = []
    dropout = attention.dropout.forward

    def recorded(weights: Tensor) -> Tensor:
        masks.append(dropout(torch.ones_like(weights)))
        return weights

    attention.dropout.forward = recorded  # type: ignore[method-assign]
    attention.train(drops)
    return attention(context_share(_hidden(), groups.cp, dim=0)).detach(), masks


def test_the_written_out_attention_of_the_model_is_the_fused_one_and_ranks_drop_differently(
    rank_pool: RankPool,
) -> None:
    """Dropout needs the written-out one; without dropping anything it must be equal."""
    whole, _ = rank_pool.run(_model_attention, 1, ParallelLayout(), False)[0]
    for drops in (False, True):
        per_rank = rank_pool.run(_model_attention, 2, ParallelLayout(cp=2), drops)
        torch.testing.assert_close(join_context([out for out, _ in per_rank], dim=0), whole)
    first, second = (masks for _, masks in per_rank)
    assert [tuple(mask.shape) for mask in first] == [(2, 4, 4, 4), (2, 4, 4, 16)]  # parts 0 and 3
    assert [tuple(mask.shape) for mask in second] == [(2, 4, 4, 8), (2, 4, 4, 12)]
    # The same numbers of the stream stand for different tokens if ranks drew the same.
    assert not torch.equal(first[0].flatten(), second[0].flatten()[: first[0].numel()])


BATCH, HIDDEN = 2, 12
# Everything is float32 and only the order of sums differs. Outputs of layers with a recurrence are the same
# sums but for those over tp. An element of a gradient is a sum over 32 tokens, whose parts the ranks add:
# some sqrt(32) * 2^-24 = 3e-7 of the largest element, which recurrences multiply. A token at the wrong
# position, or the head of another rank, is off by as much as there is.
OF_LAYERS = 1e-5


def _mamba(heads: int, num_groups: int, groups: ParallelGroups, sequence_parallel: bool) -> MambaMixer:
    sizes = MambaSizes(
        num_heads=heads, head_dim=3, state_size=5, num_groups=num_groups, chunk_size=5, bias=True
    )
    return MambaMixer(HIDDEN, sizes, groups, sequence_parallel=sequence_parallel)


def _delta_net(values: int, keys: int, groups: ParallelGroups, sequence_parallel: bool) -> GatedDeltaNet:
    return GatedDeltaNet(HIDDEN, keys, values, 8, 3, groups, sequence_parallel=sequence_parallel)


Layer = Callable[[ParallelGroups, bool], MambaMixer | GatedDeltaNet]
# By heads, and by groups of B and C or heads of keys: some ranks of cp have the same one. With 3 of them, a
# rank of 2 has one and a half.
EVEN: Mapping[str, Layer] = {
    "mamba-8-2": functools.partial(_mamba, 8, 2),
    "delta-net-8-2": functools.partial(_delta_net, 8, 2),
}
ODD: Mapping[str, Layer] = {
    "mamba-12-3": functools.partial(_mamba, 12, 3),
    "delta-net-12-3": functools.partial(_delta_net, 12, 3),
}


class Result(NamedTuple):
    """What a rank has of a layer: for its share of tokens, `[s/cp, b, hidden]`, and for its weights."""

    output: Tensor
    input_grad: Tensor
    grads: list[Box]


def _compute(
    layers: Mapping[str, Layer], layout: ParallelLayout, sequence_parallel: bool = False
) -> dict[str, Result]:
    groups = ParallelGroups.create(layout)
    results = {}
    for name, build in layers.items():
        layer = build(groups, sequence_parallel)
        declared = layer.sharded_state_dict()
        scatter(declared, {t.key: random_of_key(*t.global_shape, key=t.key) for t in tensors_of(declared)})
        x, target = (
            context_share(random_of_key(LENGTH, BATCH, HIDDEN, key=key), groups.cp, dim=0)
            for key in ("input", "target")
        )
        own = x.chunk(groups.tp.size)[groups.tp.rank] if sequence_parallel else x
        own = own.clone().requires_grad_()
        out = layer(own)
        out = collect_sequence(out, groups.tp) if sequence_parallel else out
        (out * target).sum(-1).mean().backward()  # the mean over this rank's tokens
        assert own.grad is not None
        grad = collect_sequence(own.grad, groups.tp) if sequence_parallel else own.grad
        boxes = gradient_boxes(layer, declared, groups)
        results[name] = Result(out.detach(), grad / groups.cp.size, boxes)
    return results


@sampled(4)
@pytest.mark.parametrize(
    ("layout", "sequence_parallel"),
    [
        (ParallelLayout(cp=2), False),
        (ParallelLayout(cp=4), False),
        (ParallelLayout(tp=2, cp=2), False),
        (ParallelLayout(tp=2, cp=2), True),
    ],
    ids=["cp2", "cp4", "tp2-cp2", "tp2-cp2-sequence"],
)
def test_outputs_and_gradients_are_those_of_whole_sequences(
    rank_pool: RankPool, layout: ParallelLayout, sequence_parallel: bool
) -> None:
    layers = {**EVEN, **(ODD if layout.tp == 1 else {})}
    ranks = rank_pool.run(_compute, layout.world_size, layers, layout, sequence_parallel)
    for name, expected in _compute(layers, ParallelLayout()).items():
        results = [rank[name] for rank in ranks]
        for part in ("output", "input_grad"):
            # Ranks of tp are neighbours, and have the same tokens.
            shares = [getattr(result, part) for result in results[:: layout.tp]]
            whole = join_context(shares, dim=0)
            assert_close(whole, getattr(expected, part), f"{name} {part}", relative=OF_LAYERS)
        grads = join(box for result in results for box in result.grads)
        assert_all_close(grads, join(expected.grads), relative=OF_LAYERS)
