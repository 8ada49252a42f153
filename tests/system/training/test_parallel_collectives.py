"""Every autograd collective against the same computation written densely, on real ranks.

Values are small integers, so that sums are exact in any order and results can be compared bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megackpt.errors import DeclarationError
from megackpt.parallel import (
    Axis,
    ParallelGroups,
    ParallelLayout,
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
from megackpt.testing.ranks import RankPool

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
    groups = ParallelGroups.create(ParallelLayout(tp=dist.get_world_size()))
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
    groups = ParallelGroups.create(ParallelLayout(tp=2))
    scatter_sequence(torch.zeros(3, 2), groups.tp)


def test_a_sequence_that_does_not_divide_raises_an_error_on_every_rank(rank_pool: RankPool) -> None:
    for rank, outcome in enumerate(rank_pool.outcomes(_scatter_uneven, 2)):
        assert isinstance(outcome.error, DeclarationError)
        assert "dim 0 of a tensor of shape (3, 2) cannot be cut into 2" in str(outcome.error)
        assert outcome.rank == rank


def _groups_of(layout: ParallelLayout) -> dict[str, tuple[int, int, tuple[int, ...], float]]:
    """Sum the global ranks over each axis: the sum tells which ranks took part."""
    groups = ParallelGroups.create(layout)
    seen = {}
    for name in ("tp", "pp", "dp", "embedding"):
        axis = getattr(groups, name)
        total = reduce_from(torch.tensor([float(groups.rank)]), axis)
        seen[name] = (axis.size, axis.rank, axis.ranks, total.item())
    return seen


@pytest.mark.parametrize(
    "layout",
    [
        ParallelLayout(tp=4),
        ParallelLayout(pp=4),
        ParallelLayout(dp=4),
        ParallelLayout(tp=2, pp=2),
        ParallelLayout(tp=2, dp=2),
    ],
    ids=str,
)
def test_groups_join_the_ranks_of_the_layout(rank_pool: RankPool, layout: ParallelLayout) -> None:
    for rank, seen in enumerate(rank_pool.run(_groups_of, 4, layout)):
        offline = ParallelGroups.offline(layout, rank)
        for name, (size, index, ranks, total) in seen.items():
            axis = getattr(offline, name)
            assert (size, index, ranks) == (axis.size, axis.rank, axis.ranks)
            assert total == sum(ranks)
