"""Messages of real processes: short and long ones, and ranks that are in collectives of different kinds."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from megackpt import RankFailedError
from megackpt.comm import (
    Numbers,
    broadcast_from_rank_0,
    run_and_compare,
    run_and_gather,
    run_on_all_ranks,
    scatter_from_rank_0,
    world_group,
)
from megackpt.testing.ranks import RankPool


def exchange_of(nbytes: int) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    group = world_group(timeout_s=60)
    parts = [bytes([r]) * (nbytes * r) for r in range(size)]  # rank 0 has none, and is given none
    assert scatter_from_rank_0(group, lambda: parts, doing="giving") == parts[rank]
    assert run_and_gather(group, lambda: parts[rank], doing="sending") == (parts if rank == 0 else [])
    assert run_on_all_ranks(group, lambda: parts[rank], doing="sharing") == parts
    assert broadcast_from_rank_0(group, parts[-1] if rank == 0 else b"", doing="telling") == parts[-1]
    compared = run_and_compare(
        group, lambda: Numbers((1, rank), (rank,)), equal=2, largest=1, doing="comparing"
    )
    assert compared == Numbers((1, 0), (size - 1,))


@pytest.mark.parametrize("nbytes", [3, 680, 681, 400_000])  # 2040 bytes of rank 3 are sent along
def test_messages_arrive_whatever_their_lengths(rank_pool: RankPool, nbytes: int) -> None:
    rank_pool.run(exchange_of, 4, nbytes)


def meet_differently() -> None:
    group = world_group(timeout_s=60)
    if dist.get_rank() == 0:
        run_and_compare(group, lambda: Numbers((1,)), equal=1, doing="saving")
    elif dist.get_rank() == 1:
        run_on_all_ranks(group, lambda: b"what is read", doing="loading")
    else:
        group.gather(b"\xff" * 300)


def test_ranks_in_collectives_of_different_kinds_raise_an_error_that_names_both(rank_pool: RankPool) -> None:
    errors = [outcome.error for outcome in rank_pool.outcomes(meet_differently, 3)]
    assert all(isinstance(error, RankFailedError) for error in errors)
    for error in errors:
        assert "Ranks are at different steps" in str(error)
    assert "rank(s) 1, 2 sent what belongs to 'loading' while this one sent what belongs to 'saving'" in str(
        errors[0]
    )
