"""Parallel layers and autograd collectives, on real ranks, against the same computation on one.

Tolerance of layers: fp32 sums of at most 100 products in another order; their rounding error is below
100 * 2^-24 = 6e-6 of the largest term, and terms here are of order 1. Values of collectives are small
integers, so that sums are exact in any order and results can be compared bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from megackpt.errors import DeclarationError
from megackpt.testing.ranks import RankPool
from megackpt.training.parallel import (
    Axis,
    ColumnParallelLinear,
    LayerNorm,
    ParallelGroups,
    ParallelLayout,
    QKVParallelLinear,
    RMSNorm,
    RowParallelLinear,
    VocabParallelEmbedding,
    VocabParallelOutput,
    sharded_state_dict,
    vocab_parallel_cross_entropy,
)
from megackpt.training.parallel.attributes import is_marked
from megackpt.training.parallel.collectives import (
    all_reduce,
    collect_rows,
    collect_sequence,
    copy_to,
    exchange_rows,
    gather_from,
    gather_rows,
    gather_sequence,
    reduce_from,
    reduce_scatter_rows,
    reduce_scatter_sequence,
    scatter_rows,
    scatter_sequence,
    scatter_to,
)
from tests.support.optimizers import scatter, tensors_of

TOLERANCE = {"rtol": 1e-5, "atol": 2e-5}
VOCAB = 11


def _random(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _groups() -> ParallelGroups:
    return ParallelGroups.create(ParallelLayout(tp=dist.get_world_size()))


def _set(layer: nn.Module, groups: ParallelGroups, whole: dict[str, Tensor]) -> None:
    """Copy this rank's boxes of the whole arrays, by key, into the layer."""
    with torch.no_grad():
        scatter(sharded_state_dict(layer, groups), whole)


def _check_grads(layer: nn.Module, groups: ParallelGroups, whole: Mapping[str, Tensor]) -> None:
    """Compare this rank's gradients with its boxes of the reference's."""
    grads = {}
    for name, param in layer.named_parameters():
        assert param.grad is not None
        partial = is_marked(param, "sequence_parallel")
        grads[name] = all_reduce(param.grad, groups.tp) if partial else param.grad
    state = sharded_state_dict(layer, groups)
    for tensor in tensors_of({name: e.retarget(key=e.key, data=grads[name]) for name, e in state.items()}):
        expected = whole[tensor.key].grad
        assert expected is not None
        torch.testing.assert_close(tensor.data, expected[tensor.global_slice()], **TOLERANCE)


def _whole_input(seed: int, groups: ParallelGroups, sequence_parallel: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return the dense input, the layer's input, and the leaf that both of the latter come from."""
    dense, leaf = _random(seed, 8, 2, 12).requires_grad_(), _random(seed, 8, 2, 12).requires_grad_()
    return dense, scatter_sequence(leaf, groups.tp) if sequence_parallel else leaf * 1.0, leaf


def _whole_linear() -> dict[str, Tensor]:
    return {"weight": _random(1, 8, 12).requires_grad_(), "bias": _random(2, 8).requires_grad_()}


def _column(sequence_parallel: bool, gather_output: bool) -> None:
    groups = _groups()
    layer = ColumnParallelLinear(
        12, 8, groups, gather_output=gather_output, sequence_parallel=sequence_parallel
    )
    whole = _whole_linear()
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
    whole = _whole_linear()
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


Dense = Callable[[list[Tensor]], list[Tensor]]


def _slices(dim: int) -> Dense:
    return lambda xs: [x.chunk(len(xs), dim)[r] for r, x in enumerate(xs)]


def _sums_sliced(xs: list[Tensor]) -> list[Tensor]:
    return list(torch.stack(xs).sum(0).chunk(len(xs), 0))


def _counts(ranks: int) -> list[int]:
    """Rows of each rank: different numbers, and one without any."""
    return [3, 0, 4, 1][:ranks]


def _sent(rank: int, ranks: int) -> list[int]:
    """Rows that a rank sends to each other one."""
    return [(2 * rank + peer) % 3 for peer in range(ranks)]


def _exchange_rows(x: Tensor, axis: Axis) -> Tensor:
    received = [_sent(peer, axis.size)[axis.rank] for peer in range(axis.size)]
    sent = _sent(axis.rank, axis.size)
    return exchange_rows(x[: sum(sent)], axis, sent, received)


def _rows_for_each(xs: list[Tensor]) -> list[Tensor]:
    parts = [x[: sum(_sent(r, len(xs)))].split(_sent(r, len(xs))) for r, x in enumerate(xs)]
    return [torch.cat([part[peer] for part in parts]) for peer in range(len(xs))]


def _own(collective: Callable[..., Tensor]) -> Callable[[Tensor, Axis], Tensor]:
    """Return the collective for as many rows as the rank has."""
    return lambda x, axis: collective(x[: _counts(axis.size)[axis.rank]], axis, _counts(axis.size))


def _all(collective: Callable[..., Tensor]) -> Callable[[Tensor, Axis], Tensor]:
    """Return the collective for the rows of all ranks."""
    return lambda x, axis: collective(x[: sum(_counts(axis.size))], axis, _counts(axis.size))


def _joined_rows(xs: list[Tensor]) -> list[Tensor]:
    return [torch.cat([x[:count] for x, count in zip(xs, _counts(len(xs)), strict=True)])] * len(xs)


def _own_rows(xs: list[Tensor]) -> list[Tensor]:
    counts = _counts(len(xs))
    return [x[: sum(counts)].split(counts)[r] for r, x in enumerate(xs)]


def _summed_rows(xs: list[Tensor]) -> list[Tensor]:
    return _own_rows([torch.stack(xs).sum(0)] * len(xs))


# function -> (collective, what rank r gets written densely, inputs equal on all ranks, outputs equal on all
# ranks)
CASES: dict[str, tuple[Callable[..., Tensor], Dense, bool, bool]] = {
    "copy_to": (copy_to, lambda xs: xs, True, False),
    "reduce_from": (reduce_from, lambda xs: [torch.stack(xs).sum(0)] * len(xs), False, True),
    "scatter_to": (scatter_to, _slices(-1), True, False),
    "gather_from": (gather_from, lambda xs: [torch.cat(xs, -1)] * len(xs), False, True),
    "scatter_sequence": (scatter_sequence, _slices(0), True, False),
    "collect_sequence": (collect_sequence, lambda xs: [torch.cat(xs, 0)] * len(xs), False, True),
    "gather_sequence": (gather_sequence, lambda xs: [torch.cat(xs, 0)] * len(xs), False, False),
    "reduce_scatter_sequence": (reduce_scatter_sequence, _sums_sliced, False, False),
    "exchange_rows": (_exchange_rows, _rows_for_each, False, False),
    "gather_rows": (_own(gather_rows), _joined_rows, False, False),
    "reduce_scatter_rows": (_all(reduce_scatter_rows), _summed_rows, False, False),
    "collect_rows": (_own(collect_rows), _joined_rows, False, True),
    "scatter_rows": (_all(scatter_rows), _own_rows, True, False),
}


def _integers(seed: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.randint(-4, 5, shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def _inputs(ranks: int, replicated: bool, dtype: torch.dtype) -> list[Tensor]:
    return [_integers(0 if replicated else r, (8, 3, 4), dtype) for r in range(ranks)]


def _dense(name: str, ranks: int, dtype: torch.dtype) -> tuple[list[Tensor], list[Tensor]]:
    """Return every rank's output and input gradient, computed in one process."""
    _, dense, replicated, shared_output = CASES[name]
    leaves = [x.requires_grad_() for x in _inputs(ranks, replicated, dtype)]
    # Equal inputs are one tensor that all ranks use; equal outputs are one tensor with one loss.
    outputs = dense([leaves[0]] * ranks if replicated else leaves)
    loss = [(y * _integers(100 + r, tuple(y.shape), dtype)).sum() for r, y in enumerate(outputs)]
    (loss[0] if shared_output else torch.stack(loss).sum()).backward()
    grads = [leaves[0].grad] * ranks if replicated else [x.grad for x in leaves]
    return [y.detach() for y in outputs], [g for g in grads if g is not None]


def _on_ranks(name: str, dtype: torch.dtype) -> tuple[list, list]:
    groups = _groups()
    collective, _, replicated, shared_output = CASES[name]
    rank, ranks = groups.tp.rank, groups.tp.size
    # Transposed twice in memory: collectives must not rely on contiguous inputs.
    x = _inputs(ranks, replicated, dtype)[rank].transpose(0, 1).contiguous().transpose(0, 1).requires_grad_()
    before = x.detach().clone()
    y = collective(x, groups.tp)
    weight = _integers(100 + (0 if shared_output else rank), tuple(y.shape), dtype)
    (y * weight).sum().backward()
    assert torch.equal(x.detach(), before), "the input was changed"
    assert x.grad is not None
    return y.detach().float().tolist(), x.grad.float().tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", CASES)
def test_output_and_gradient_are_those_of_the_dense_computation(
    rank_pool: RankPool, name: str, ranks: int, dtype: torch.dtype
) -> None:
    outputs, grads = _dense(name, ranks, dtype)
    for rank, (y, grad) in enumerate(rank_pool.run(_on_ranks, ranks, name, dtype)):
        assert y == outputs[rank].tolist()
        assert grad == grads[rank].tolist()


def _scatter_uneven() -> None:
    scatter_sequence(torch.zeros(3, 2), _groups().tp)


def test_a_sequence_that_does_not_divide_raises_an_error_on_every_rank(rank_pool: RankPool) -> None:
    for outcome in rank_pool.outcomes(_scatter_uneven, 2):
        assert isinstance(outcome.error, DeclarationError)
        assert "dim 0 of a tensor of shape (3, 2) cannot be cut into 2" in str(outcome.error)
