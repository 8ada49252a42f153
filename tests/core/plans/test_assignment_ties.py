"""Ranks with equally few bytes: the lowest one writes, so that every rank comes to the same plan."""

from __future__ import annotations

import numpy as np
import pytest

from megackpt.planning.assignment import FEW, assign_writers


def writers(nbytes: list[int], owners: list[list[int]], *, ranks: int) -> list[int]:
    """Return the rank that writes each chunk."""
    start = np.cumsum([0, *(len(of_chunk) for of_chunk in owners)])
    flat = np.array([rank for of_chunk in owners for rank in of_chunk])
    return flat[assign_writers(np.array(nbytes), start, flat, ranks=ranks)].tolist()


def one_after_the_other(nbytes: list[int], owners: list[list[int]], *, ranks: int) -> list[int]:
    """The rule of `assign_writers`, the slow way."""
    load = [0] * ranks
    writer = [0] * len(nbytes)
    order = sorted(range(len(nbytes)), key=lambda chunk: (len(owners[chunk]), -nbytes[chunk], chunk))
    for chunk in order:
        writer[chunk] = min(owners[chunk], key=lambda rank: (load[rank], rank))
        load[writer[chunk]] += nbytes[chunk]
    return writer


@pytest.mark.parametrize("count", [1, 3, FEW, FEW + 1, 3 * FEW + 2])
def test_chunks_of_one_size_go_to_replicas_in_turn_from_the_lowest(count: int) -> None:
    expected = [(2, 5, 7)[i % 3] for i in range(count)]
    assert writers([8] * count, [[2, 5, 7]] * count, ranks=8) == expected


@pytest.mark.parametrize("count", [2, FEW + 4])
def test_of_ranks_that_have_equally_many_bytes_already_the_lowest_is_next(count: int) -> None:
    nbytes = [6, 6, *[3] * count]
    owners = [[0], [1], *[[0, 1, 2]] * count]
    assert writers(nbytes, owners, ranks=3) == one_after_the_other(nbytes, owners, ranks=3)
    assert writers(nbytes, owners, ranks=3)[2:6] == [2, 2, 0, 1][:count]


def test_ties_between_sets_that_overlap_go_to_the_lowest_rank_of_each() -> None:
    owners = [[1, 2], [0, 2], [0, 1], [1, 2]]
    assert writers([4, 4, 4, 4], owners, ranks=3) == [1, 0, 0, 2]
    assert writers([4, 4, 4, 4], owners, ranks=3) == one_after_the_other([4] * 4, owners, ranks=3)


@pytest.mark.parametrize("count", [2, FEW + 1])
def test_empty_chunks_add_nothing_so_one_rank_has_them_all(count: int) -> None:
    nbytes = [5, *[0] * count]
    owners = [[0], *[[0, 1, 2]] * count]
    assert writers(nbytes, owners, ranks=3) == [0, *[1] * count]
