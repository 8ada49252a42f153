"""Collectives that compare numbers, and that send from rank 0: in all kinds of groups."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from megackpt import CoverageError, RankFailedError, StorageError
from megackpt.comm import (
    Group,
    Numbers,
    broadcast_from_rank_0,
    run_and_compare,
    run_and_gather,
    run_on_all_ranks,
    scatter_from_rank_0,
)
from megackpt.testing.world import SimulatedWorld


class Plain(Group):
    """A group that has only the two methods that a group must implement."""

    def __init__(self, group: Group) -> None:
        self.rank, self.size, self._group = group.rank, group.size, group

    def all_gather(self, data: bytes) -> list[bytes]:
        return self._group.all_gather(data)

    def gather(self, data: bytes) -> list[bytes]:
        return self._group.gather(data)


KINDS: dict[str, Callable[[Group], Group]] = {"reducing": lambda group: group, "plain": Plain}
kinds = pytest.mark.parametrize("kind", KINDS)


@kinds
@pytest.mark.parametrize("ranks", [1, 3])
def test_ranks_learn_what_is_equal_and_what_is_largest(kind: str, ranks: int) -> None:
    def run(group: Group) -> Numbers:
        text = Numbers((7, 5 + (group.rank == 1), 0), (group.rank, 2**61))
        return run_and_compare(KINDS[kind](group), lambda: text, equal=3, largest=2, doing="comparing")

    for result in SimulatedWorld(ranks).run(run):
        assert result == Numbers((1, int(ranks == 1), 1), (ranks - 1, 2**61))


@kinds
def test_a_failure_of_one_rank_is_that_of_all(kind: str) -> None:
    def step(rank: int) -> Numbers:
        if rank == 2:
            raise StorageError("no space", path="p")
        return Numbers((1,))

    def run(group: Group) -> Numbers:
        return run_and_compare(KINDS[kind](group), lambda: step(group.rank), equal=1, doing="comparing")

    for error in SimulatedWorld(3).outcomes(run):
        assert isinstance(error, StorageError)
        assert (error.rank, error.path) == (2, "p")
        assert "Rank 2 failed while comparing: no space" in str(error)


@kinds
@pytest.mark.parametrize("other", ["run_on_all_ranks", "run_and_compare"])
def test_ranks_that_compare_while_others_do_something_else_raise_an_error(kind: str, other: str) -> None:
    def run(simulated: Group) -> object:
        group = KINDS[kind](simulated)
        if group.rank == 1 and other == "run_on_all_ranks":
            return run_on_all_ranks(group, lambda: b"x", doing="reading")
        doing = "reading" if group.rank == 1 else "comparing"
        return run_and_compare(group, lambda: Numbers((1,)), equal=1, doing=doing)

    for rank, error in enumerate(SimulatedWorld(2).outcomes(run)):
        assert isinstance(error, RankFailedError)
        assert f"rank(s) {1 - rank} sent what belongs to {('reading', 'comparing')[rank]!r}" in str(error)


@kinds
@pytest.mark.parametrize("ranks", [1, 3])
def test_rank_0_gives_each_rank_its_part_and_gathers_what_they_have(kind: str, ranks: int) -> None:
    def run(simulated: Group) -> tuple[bytes, bytes, list[bytes]]:
        group = KINDS[kind](simulated)
        part = scatter_from_rank_0(group, lambda: [bytes([r] * r) for r in range(ranks)], doing="giving")
        shared = broadcast_from_rank_0(group, b"abc" if group.rank == 0 else b"", doing="sharing")
        return part, shared, run_and_gather(group, lambda: part, doing="gathering")

    parts = [bytes([r] * r) for r in range(ranks)]
    for rank, results in enumerate(SimulatedWorld(ranks).run(run)):
        assert results == (parts[rank], b"abc", parts if rank == 0 else [])


@kinds
def test_what_rank_0_finds_wrong_with_others_is_reported_unchanged(kind: str) -> None:
    def find() -> list[bytes]:
        raise CoverageError("nobody saves 'w'", key="w", rank=2)

    def run(group: Group) -> bytes:
        return scatter_from_rank_0(KINDS[kind](group), find, doing="planning")

    for error in SimulatedWorld(3).outcomes(run):
        assert isinstance(error, CoverageError)
        assert (error.message, error.key, error.rank) == ("nobody saves 'w'", "w", 2)


@kinds
def test_a_mistake_of_rank_0_is_called_so(kind: str) -> None:
    def fail() -> list[bytes]:
        raise ZeroDivisionError("oh")

    def run(group: Group) -> bytes:
        return scatter_from_rank_0(KINDS[kind](group), fail, doing="planning")

    for error in SimulatedWorld(3).outcomes(run):
        assert isinstance(error, RankFailedError)
        assert error.rank == 0
        assert "Rank 0 failed while planning: ZeroDivisionError: oh" in str(error)


@kinds
@pytest.mark.parametrize("collective", ["run_and_compare", "scatter_from_rank_0"])
def test_what_failed_here_is_not_forgotten_when_another_rank_is_gone(kind: str, collective: str) -> None:
    def run(simulated: Group, own: Exception) -> object:
        group = KINDS[kind](simulated)

        def fail() -> Numbers:
            raise own

        if group.rank == 1:
            return None  # does not come
        if collective == "run_and_compare":
            return run_and_compare(group, fail, equal=0, doing="comparing")
        return scatter_from_rank_0(group, fail, doing="giving")  # type: ignore[arg-type]

    mistake = ZeroDivisionError("oh")
    error = SimulatedWorld(2).outcomes(lambda group: run(group, mistake))[0]
    assert isinstance(error, RankFailedError)
    assert error.__cause__ is mistake
    first = RankFailedError("rank 1 was lost in the step", rank=1)
    assert SimulatedWorld(2).outcomes(lambda group: run(group, first))[0] is first
