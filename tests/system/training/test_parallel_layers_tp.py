"""Parallel layers on tp ranks against plain torch layers with the joined weights.

Tolerance: fp32 sums of at most 100 products in another order; their rounding error is below 100 * 2^-24 =
6e-6 of the largest term, and terms here are of order 1.
"""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from megackpt.mapping import ShardedLayout
from megackpt.parallel import (
    ColumnParallelLinear,
    LayerNorm,
    ParallelGroups,
    ParallelLayout,
    QKVParallelLinear,
    RMSNorm,
    RowParallelLinear,
    VocabParallelEmbedding,
    VocabParallelOutput,
    all_reduce,
    collect_sequence,
    gather_from,
    is_marked,
    scatter_sequence,
    sharded_state_dict,
    vocab_parallel_cross_entropy,
)
from megackpt.testing.ranks import RankPool

TOLERANCE = {"rtol": 1e-5, "atol": 2e-5}
VOCAB = 11


def _random(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _groups() -> ParallelGroups:
    return ParallelGroups.create(ParallelLayout(tp=dist.get_world_size()))


def _set(layer: nn.Module, groups: ParallelGroups, whole: Mapping[str, Tensor]) -> None:
    """Copy this rank's boxes of the whole arrays, by key, into the layer."""
    for entity in sharded_state_dict(layer, groups).values():
        for tensor in entity.tensors() if isinstance(entity, ShardedLayout) else [entity]:
            with torch.no_grad():
                tensor.data.copy_(whole[tensor.key][tensor.global_slice()])


def _check_grads(layer: nn.Module, groups: ParallelGroups, whole: Mapping[str, Tensor]) -> None:
    """Compare this rank's gradients with its boxes of the reference's."""
    grads = {}
    for name, param in layer.named_parameters():
        assert param.grad is not None
        partial = is_marked(param, "sequence_parallel")
        grads[name] = all_reduce(param.grad, groups.tp) if partial else param.grad
    for name, entity in sharded_state_dict(layer, groups).items():
        entity = entity.retarget(key=entity.key, data=grads[name])
        for tensor in entity.tensors() if isinstance(entity, ShardedLayout) else [entity]:
            expected = whole[tensor.key].grad
            assert expected is not None
            torch.testing.assert_close(tensor.data, expected[tensor.global_slice()], **TOLERANCE)


def _whole_input(seed: int, groups: ParallelGroups, sequence_parallel: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return the dense input, the layer's input, and the leaf that both of the latter come from."""
    dense, leaf = _random(seed, 8, 2, 12).requires_grad_(), _random(seed, 8, 2, 12).requires_grad_()
    return dense, scatter_sequence(leaf, groups.tp) if sequence_parallel else leaf * 1.0, leaf


def _column(sequence_parallel: bool, gather_output: bool) -> None:
    groups = _groups()
    layer = ColumnParallelLinear(
        12, 8, groups, gather_output=gather_output, sequence_parallel=sequence_parallel
    )
    whole = {"weight": _random(1, 8, 12).requires_grad_(), "bias": _random(2, 8).requires_grad_()}
    _set(layer, groups, whole)
    dense, local_input, leaf = _whole_input(3, groups, sequence_parallel)
    expected, actual = F.linear(dense, whole["weight"], whole["bias"]), layer(local_input)
    joined = actual if gather_output else gather_from(actual, groups.tp)
    torch.testing.assert_close(joined, expected, **TOLERANCE)
    joined.square().sum().backward()
    expected.square().sum().backward()
    torch.testing.assert_close(leaf.grad, dense.grad, **TOLERANCE)
    _check_grads(layer, groups, whole)


def _row(sequence_parallel: bool, input_is_parallel: bool) -> None:
    groups = _groups()
    layer = RowParallelLinear(
        12, 8, groups, input_is_parallel=input_is_parallel, sequence_parallel=sequence_parallel
    )
    whole = {"weight": _random(1, 8, 12).requires_grad_(), "bias": _random(2, 8).requires_grad_()}
    _set(layer, groups, whole)
    dense, leaf = _random(3, 8, 2, 12).requires_grad_(), _random(3, 8, 2, 12)
    local_input = leaf.chunk(groups.tp.size, -1)[groups.tp.rank] if input_is_parallel else leaf
    local_input = local_input.clone().requires_grad_()
    expected, actual = F.linear(dense, whole["weight"], whole["bias"]), layer(local_input)
    joined = collect_sequence(actual, groups.tp) if sequence_parallel else actual
    torch.testing.assert_close(joined, expected, **TOLERANCE)
    joined.square().sum().backward()
    expected.square().sum().backward()
    assert dense.grad is not None
    grad = dense.grad.chunk(groups.tp.size, -1)[groups.tp.rank] if input_is_parallel else dense.grad
    torch.testing.assert_close(local_input.grad, grad, **TOLERANCE)
    _check_grads(layer, groups, whole)


def _qkv() -> None:
    """Fused grouped-query projection: 8 heads of 2, 4 groups; parts joined over tp are plain projections."""
    groups = _groups()
    layer = QKVParallelLinear(12, 8, 4, 2, groups)
    sizes = {"q": 16, "k": 8, "v": 8}
    weights = {f"weight.{n}": _random(i, s, 12).requires_grad_() for i, (n, s) in enumerate(sizes.items())}
    biases = {f"bias.{n}": _random(9 + i, s).requires_grad_() for i, (n, s) in enumerate(sizes.items())}
    whole = weights | biases
    _set(layer, groups, whole)
    x = _random(3, 8, 2, 12)
    loss, reference = torch.zeros(()), torch.zeros(())
    for name, part in zip(sizes, layer.split(layer(x)), strict=True):
        expected = F.linear(x, whole[f"weight.{name}"], whole[f"bias.{name}"])
        joined = gather_from(part, groups.tp)
        torch.testing.assert_close(joined, expected, **TOLERANCE)
        loss, reference = loss + joined.square().sum(), reference + expected.square().sum()
    loss.backward()
    reference.backward()
    _check_grads(layer, groups, whole)


def _norms() -> None:
    groups = _groups()
    for layer, weight in ((RMSNorm(12, groups, sequence_parallel=True), ["weight"]),
                          (LayerNorm(12, groups, sequence_parallel=True), ["weight", "bias"])):  # fmt: skip
        whole = {name: _random(i, 12).requires_grad_() for i, name in enumerate(weight)}
        _set(layer, groups, whole)
        dense, local_input, leaf = _whole_input(3, groups, sequence_parallel=True)
        reference = F.rms_norm if isinstance(layer, RMSNorm) else F.layer_norm
        expected, joined = reference(dense, (12,), *whole.values(), eps=1e-5), layer(local_input)
        expected.square().sum().backward()
        joined.square().sum().backward()  # this rank's share: the whole loss is the sum over tp
        torch.testing.assert_close(leaf.grad, dense.grad, **TOLERANCE)
        _check_grads(layer, groups, whole)


def _vocabulary(sequence_parallel: bool) -> None:
    """Embedding, logits and cross entropy of an 11-word vocabulary; padding depends on tp."""
    groups = _groups()
    tokens = torch.randint(0, VOCAB, (8, 2), generator=torch.Generator().manual_seed(4))
    labels = torch.randint(0, VOCAB, (8, 2), generator=torch.Generator().manual_seed(5))
    embedding = VocabParallelEmbedding(
        VOCAB, 12, groups, make_divisible=1, sequence_parallel=sequence_parallel
    )
    output = VocabParallelOutput(VOCAB, 12, groups, make_divisible=1, sequence_parallel=sequence_parallel)
    table = _padded(_random(1, VOCAB, 12), groups).requires_grad_()
    logit = _padded(_random(2, VOCAB, 12), groups).requires_grad_()
    _set(embedding, groups, {"weight": table})
    _set(output, groups, {"weight": logit})
    losses = vocab_parallel_cross_entropy(output(embedding(tokens)), labels, groups.tp, vocab_size=VOCAB)
    expected = F.linear(F.embedding(tokens, table), logit[:VOCAB])
    reference = F.cross_entropy(expected.flatten(0, 1), labels.flatten(), reduction="none")
    torch.testing.assert_close(losses.flatten(), reference, **TOLERANCE)
    losses.mean().backward()
    reference.mean().backward()
    _check_grads(embedding, groups, {"weight": table})
    _check_grads(output, groups, {"weight": logit})


def _padded(whole: Tensor, groups: ParallelGroups) -> Tensor:
    return F.pad(whole, (0, 0, 0, -len(whole) % groups.tp.size))


RANKS = pytest.mark.parametrize("ranks", [1, 2, 4])
SEQUENCE = pytest.mark.parametrize("sequence_parallel", [False, True], ids=["whole", "sequence"])


@RANKS
@SEQUENCE
@pytest.mark.parametrize("gather_output", [False, True], ids=["cut", "gathered"])
def test_column_parallel_linear_is_nn_linear(
    rank_pool: RankPool, ranks: int, sequence_parallel: bool, gather_output: bool
) -> None:
    rank_pool.run(_column, ranks, sequence_parallel, gather_output)


@RANKS
@pytest.mark.parametrize(
    ("sequence_parallel", "input_is_parallel"), [(False, True), (True, True), (False, False)]
)
def test_row_parallel_linear_is_nn_linear(
    rank_pool: RankPool, ranks: int, sequence_parallel: bool, input_is_parallel: bool
) -> None:
    rank_pool.run(_row, ranks, sequence_parallel, input_is_parallel)


@RANKS
def test_fused_grouped_query_projection_is_three_projections(rank_pool: RankPool, ranks: int) -> None:
    rank_pool.run(_qkv, ranks)


@RANKS
def test_norm_gradients_sum_up_over_the_sequence(rank_pool: RankPool, ranks: int) -> None:
    rank_pool.run(_norms, ranks)


@RANKS
@SEQUENCE
def test_vocabulary_layers_are_embedding_linear_and_cross_entropy(
    rank_pool: RankPool, ranks: int, sequence_parallel: bool
) -> None:
    rank_pool.run(_vocabulary, ranks, sequence_parallel)
