"""Files between processes that meet in a store: what arrives, and who is named when one is lost or late."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from megackpt import WriterFailedError
from megackpt.comm import run_on_all_ranks, store_group
from megackpt.comm.linked_group import LinkedGroup
from megackpt.comm.links import host_towards
from megackpt.comm.store_group import StoreAddress, connect_store

MIB = 1 << 20


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(store_group, "LOOK_EVERY_S", 0.2)
    return dist.TCPStore(
        "localhost", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=10)
    )


def on_ranks(
    server: Any, ranks: int, act: Callable[[LinkedGroup], Any], *, timeout_s: float = 20
) -> list[Any]:
    """Run on every rank, each with a client of its own; return results or errors."""
    address = StoreAddress("localhost", server.port)

    def one(rank: int) -> Any:
        group = LinkedGroup(
            connect_store(address, timeout_s=30),
            address=address,
            prefix="job",
            rank=rank,
            size=ranks,
            timeout_s=timeout_s,
        )
        try:
            return act(group)
        except Exception as error:  # noqa: BLE001 - looked at by the test
            return error
        finally:
            group.leave()

    with ThreadPoolExecutor(ranks) as threads:
        return list(threads.map(one, range(ranks)))


def text(rank: int, other: int, nbytes: int) -> memoryview:
    return memoryview(bytearray([1 + 16 * rank + other]) * nbytes)


@pytest.mark.parametrize("nbytes", [1, 5 * MIB])
def test_parcels_between_all_ranks_arrive_in_order_and_nothing_stays(server: Any, nbytes: int) -> None:
    ranks = 3

    def meet(group: LinkedGroup) -> None:
        others = [r for r in range(ranks) if r != group.rank]
        for _ in range(2):
            sends = [(r, text(group.rank, r, n)) for r in others for n in (nbytes, 0, 7)]
            receives = [(r, memoryview(bytearray(n))) for r in others for n in (nbytes, 0, 7)]
            group.exchange(sends, receives)
            for rank, data in receives:
                assert data == text(rank, group.rank, data.nbytes)
        group.exchange([], [])
        everyone = memoryview(bytearray(ranks * 3))
        group.all_gather_into(text(group.rank, 0, 3), everyone)
        assert everyone == b"".join(text(r, 0, 3) for r in range(ranks))
        run_on_all_ranks(group, lambda: b"", doing="ending")

    before = server.num_keys()
    assert on_ranks(server, ranks, meet) == [None] * ranks
    assert server.num_keys() == before


@pytest.mark.parametrize("ranks", [2, 3, 6])
def test_what_one_has_all_have_whichever_it_is(server: Any, ranks: int) -> None:
    def meet(group: LinkedGroup) -> None:
        for root in range(ranks):
            data = text(root, 0, 1000) if group.rank == root else memoryview(bytearray(1000))
            group.broadcast(data, root=root)
            assert data == text(root, 0, 1000)

    assert on_ranks(server, ranks, meet) == [None] * ranks


def test_a_stranger_who_connects_is_not_taken_for_a_rank(server: Any) -> None:
    def meet(group: LinkedGroup) -> bytes:
        if group.rank == 0:
            address = group._opened().address
            for said in (b"", bytes(5), bytes(16) + (1).to_bytes(4, "little") + b"bytes of others"):
                with socket.create_connection(("localhost", address.port)) as stranger:
                    stranger.sendall(said)
        run_on_all_ranks(group, lambda: b"", doing="beginning")
        data = memoryview(bytearray(b"bytes of rank 1" if group.rank else 15))
        group.exchange([(0, data)] if group.rank else [], [(1, data)] if group.rank == 0 else [])
        return bytes(data)

    assert on_ranks(server, 2, meet) == [b"bytes of rank 1"] * 2


def receive_from_next(group: LinkedGroup) -> None:
    """Each rank but the last waits for the next one."""
    run_on_all_ranks(group, lambda: b"", doing="beginning")
    group.exchange([], [(group.rank + 1, memoryview(bytearray(4)))])


def test_a_rank_that_is_late_is_named_also_by_those_who_wait_for_others(server: Any) -> None:
    is_over = threading.Event()

    def meet(group: LinkedGroup) -> None:
        if group.rank == 3:
            run_on_all_ranks(group, lambda: b"", doing="beginning")
            is_over.wait(20)
            return
        try:
            receive_from_next(group)
        finally:
            is_over.set()

    *errors, last = on_ranks(server, 4, meet, timeout_s=0.6)
    assert last is None
    assert {str(error) for error in errors} == {str(errors[0])}
    for error in errors:
        assert isinstance(error, WriterFailedError)
        assert error.rank == 3
        assert "No answer from the writer process of rank(s) 3 within 0.6 s" in str(error)


@pytest.mark.parametrize("says_why", [False, True])
def test_a_rank_that_is_gone_is_named_by_all_long_before_the_deadline(server: Any, says_why: bool) -> None:
    def meet(group: LinkedGroup) -> None:
        if group.rank < 2:
            receive_from_next(group)
            return
        run_on_all_ranks(group, lambda: b"", doing="beginning")
        group.exchange([(1, memoryview(bytearray(2)))], [])  # half of what it waits for
        if says_why:
            group.abort(WriterFailedError("rank 2 was killed", rank=2))
        raise KeyError("gone")

    began = time.monotonic()
    first, second, _ = on_ranks(server, 3, meet, timeout_s=60)
    assert time.monotonic() - began < 30
    assert str(first) == str(second)
    assert first.rank == second.rank == 2
    said = "rank 2 was killed" if says_why else "The connection to the writer process of rank 2 broke"
    assert said in str(first)


def test_a_rank_whose_port_is_closed_is_named(server: Any) -> None:
    def meet(group: LinkedGroup) -> None:
        if group.rank:
            group._opened()._listener.close()
        run_on_all_ranks(group, lambda: b"", doing="beginning")
        if group.rank == 0:
            group.exchange([(1, memoryview(bytearray(4)))], [])
        run_on_all_ranks(group, lambda: b"", doing="ending")

    for error in on_ranks(server, 2, meet):
        assert isinstance(error, WriterFailedError)
        assert error.rank == 1
        assert "its port cannot be reached" in str(error)


def test_a_host_is_called_what_others_call_it() -> None:
    assert host_towards("localhost", 1) == "localhost"
    assert host_towards(socket.gethostname(), 1) == socket.gethostname()
