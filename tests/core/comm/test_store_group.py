"""Collectives in a key-value store: what ranks receive, what stays there, and which lost rank is named."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from megackpt import RankFailedError, StorageError
from megackpt.comm import (
    Numbers,
    encode_error,
    run_and_compare,
    run_and_gather,
    run_on_all_ranks,
    scatter_from_rank_0,
    store_group,
)
from megackpt.comm.store_group import PART_BYTES, StoreGroup
from megackpt.comm.store_host import StoreAddress, StoreHost, connect_store

RANKS = 3


@pytest.fixture
def server() -> Any:
    return dist.TCPStore(
        "localhost", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=10)
    )


def on_ranks(server: Any, act: Callable[[StoreGroup], Any], *, timeout_s: float = 10) -> list[Any]:
    """Run on every rank, each with a client of its own; return results or errors."""
    address = StoreAddress("localhost", server.port)

    def run_rank(rank: int) -> Any:
        client = connect_store(address, timeout_s=30)
        try:
            return act(StoreGroup(client, prefix="job", rank=rank, size=RANKS, timeout_s=timeout_s))
        except Exception as error:  # noqa: BLE001 - looked at by the test
            return error

    with ThreadPoolExecutor(RANKS) as threads:
        return list(threads.map(run_rank, range(RANKS)))


@pytest.mark.parametrize("nbytes", [0, 3, PART_BYTES + 5])
def test_messages_arrive_and_nothing_of_them_stays(server: Any, nbytes: int) -> None:
    parts = [bytes([65 + rank]) * (nbytes * rank) for rank in range(RANKS)]

    def meet(group: StoreGroup) -> None:
        own_parts = parts[group.rank]
        assert run_on_all_ranks(group, lambda: own_parts, doing="sharing") == parts
        assert run_and_gather(group, lambda: own_parts, doing="sending") == ([] if group.rank else parts)
        assert scatter_from_rank_0(group, lambda: parts, doing="giving") == own_parts
        compared = run_and_compare(
            group, lambda: Numbers((1, group.rank), (group.rank,)), equal=2, largest=1, doing="x"
        )
        assert compared == Numbers((1, 0), (RANKS - 1,))
        group.leave()

    before = server.num_keys()
    assert on_ranks(server, meet) == [None] * RANKS
    assert server.num_keys() == before


def test_an_error_of_one_rank_is_that_of_all(server: Any) -> None:
    def meet(group: StoreGroup) -> None:
        def step() -> bytes:
            if group.rank == 2:
                raise StorageError("the disk is full", path="/data")
            return b""

        run_on_all_ranks(group, step, doing="writing")

    for error in on_ranks(server, meet):
        assert isinstance(error, StorageError)
        assert (error.rank, error.path) == (2, "/data")


def test_a_rank_that_does_not_come_is_named_to_all(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def meet(group: StoreGroup) -> None:
        group._while_waiting = lambda: beats.append(group.rank)
        if group.rank != 1:
            run_on_all_ranks(group, lambda: b"", doing="waiting")

    beats: list[int] = []  # of those who wait: they are not stuck
    monkeypatch.setattr(store_group, "LOOK_EVERY_S", 0.1)
    first, _, last = on_ranks(server, meet, timeout_s=0.5)
    assert set(beats) == {0, 2}
    for error in (first, last):
        assert isinstance(error, RankFailedError)
        assert error.rank == 1
        assert "No answer from the writer process of rank(s) 1 within 0.5 s" in str(error)


def test_those_who_wait_learn_that_a_rank_has_given_up(server: Any) -> None:
    host = StoreHost(server, StoreAddress("localhost", server.port))
    assert not host.is_aborted("job")

    def meet(group: StoreGroup) -> None:
        if group.rank == 1:
            host.abort("job", encode_error(RankFailedError("the writer was killed", rank=1)))
            return
        run_on_all_ranks(group, lambda: b"", doing="waiting")

    first, _, last = on_ranks(server, meet, timeout_s=60)
    assert str(first) == str(last) == "the writer was killed"
    assert first.rank == last.rank == 1
    assert host.is_aborted("job")


def test_a_store_that_goes_away_is_an_error_that_names_it() -> None:
    owned = [dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)]
    client = connect_store(StoreAddress("localhost", owned[0].port), timeout_s=30)
    group = StoreGroup(client, prefix="job", rank=1, size=2, timeout_s=30)
    threading.Timer(0.3, owned.clear).start()
    with pytest.raises(RankFailedError, match="Rank 0 hosts it") as raised:
        run_on_all_ranks(group, lambda: b"", doing="waiting")
    assert raised.value.rank == 0


def test_a_store_that_cannot_be_reached_is_named() -> None:
    with pytest.raises(RankFailedError, match=r"at localhost:1 cannot be reached.*coordinator_host"):
        connect_store(StoreAddress("localhost", 1), timeout_s=0.3)


def test_of_several_that_give_up_at_once_all_learn_of_the_first(server: Any) -> None:
    address = StoreAddress("localhost", server.port)
    together_now = threading.Barrier(RANKS)

    def give_up(group: StoreGroup) -> list[bytes]:
        host = StoreHost(connect_store(address, timeout_s=30), address)
        encoded = encode_error(RankFailedError("gone", rank=group.rank))
        message = []
        for number in range(200):
            together_now.wait()
            message.append(host.abort(f"job-{number}", encoded))
        return message

    first, *others = on_ranks(server, give_up)
    assert all(message == first for message in others)
