"""Layers with a recurrence, over sequences of which each rank has a share, compute what they do on one rank.

Tolerance: everything is float32 and only the order of sums differs. Outputs are the same sums but for those
over tp. An element of a gradient is a sum over 32 tokens, whose parts the ranks add: some sqrt(32) * 2^-24 =
3e-7 of the largest element, which recurrences multiply. A token at the wrong position, or the head of
another rank, is off by as much as there is.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from megackpt.parallel import (
    GatedDeltaNet,
    MambaMixer,
    MambaSizes,
    ParallelGroups,
    ParallelLayout,
    collect_sequence,
    context_share,
    join_context,
    stable_seed,
)
from megackpt.testing.ranks import RankPool
from tests.support.effort import sampled
from tests.support.gpt import Box, assert_all_close, assert_close, gradient_boxes, join, tensors_of

LENGTH, BATCH, HIDDEN = 16, 2, 12
RELATIVE = 1e-5


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


def _random(*shape: int, key: str) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(stable_seed(7, key)))


def _train(
    layers: Mapping[str, Layer], layout: ParallelLayout, sequence_parallel: bool = False
) -> dict[str, Result]:
    groups = ParallelGroups.create(layout)
    results = {}
    for name, build in layers.items():
        layer = build(groups, sequence_parallel)
        for tensor in tensors_of(layer.sharded_state_dict()):
            whole = _random(*tensor.global_shape, key=tensor.key)
            with torch.no_grad():
                tensor.data.copy_(whole[tensor.global_slice()])
        x, target = (
            context_share(_random(LENGTH, BATCH, HIDDEN, key=key), groups.cp, dim=0)
            for key in ("input", "target")
        )
        own = x.chunk(groups.tp.size)[groups.tp.rank] if sequence_parallel else x
        own = own.clone().requires_grad_()
        out = layer(own)
        out = collect_sequence(out, groups.tp) if sequence_parallel else out
        (out * target).sum(-1).mean().backward()  # the mean over this rank's tokens
        assert own.grad is not None
        grad = collect_sequence(own.grad, groups.tp) if sequence_parallel else own.grad
        boxes = gradient_boxes(layer, layer.sharded_state_dict(), groups)
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
    ranks = rank_pool.run(_train, layout.world_size, layers, layout, sequence_parallel)
    for name, expected in _train(layers, ParallelLayout()).items():
        results = [rank[name] for rank in ranks]
        for part in ("output", "input_grad"):
            # Ranks of tp are neighbours, and have the same tokens.
            shares = [getattr(result, part) for result in results[:: layout.tp]]
            whole = join_context(shares, dim=0)
            assert_close(whole, getattr(expected, part), f"{name} {part}", relative=RELATIVE)
        grads = join(box for result in results for box in result.grads)
        assert_all_close(grads, join(expected.grads), relative=RELATIVE)
