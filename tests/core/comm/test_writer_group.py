"""Files between processes that meet in a store: what arrives, and who is named when one is lost or late."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from megackpt import WriterFailedError
from megackpt.comm import run_on_all_ranks, store_group, writer_group
from megackpt.comm.store_host import StoreAddress, connect_store, host_towards
from megackpt.comm.transport_choice import open_transport
from megackpt.comm.writer_group import WriterGroup

MIB = 1 << 20


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(store_group, "LOOK_EVERY_S", 0.2)
    return dist.TCPStore(
        "localhost", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=10)
    )


def on_ranks(
    server: Any, ranks: int, act: Callable[[WriterGroup], Any], *, timeout_s: float = 20
) -> list[Any]:
    """Run on every rank, each with a client of its own; return results or errors."""
    address = StoreAddress("localhost", server.port)

    def run_rank(rank: int) -> Any:
        group = WriterGroup(
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
        return list(threads.map(run_rank, range(ranks)))


def text(rank: int, other: int, nbytes: int) -> memoryview:
    return memoryview(bytearray([1 + 16 * rank + other]) * nbytes)


@pytest.mark.parametrize("nbytes", [1, 5 * MIB])
def test_messages_between_all_ranks_arrive_in_order_and_nothing_stays(server: Any, nbytes: int) -> None:
    ranks = 3

    def meet(group: WriterGroup) -> None:
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
    def meet(group: WriterGroup) -> None:
        for root in range(ranks):
            data = text(root, 0, 1000) if group.rank == root else memoryview(bytearray(1000))
            group.broadcast(data, root=root)
            assert data == text(root, 0, 1000)

    assert on_ranks(server, ranks, meet) == [None] * ranks


def test_a_stranger_who_connects_is_not_taken_for_a_rank(server: Any) -> None:
    def connect_as_strangers(before: set[int]) -> list[socket.socket]:
        strangers = []
        for port in listening_ports() - before:
            for greeting in (b"", b"abc", b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 64):
                strangers.append(socket.create_connection(("localhost", port)))
                strangers[-1].sendall(greeting)
        return strangers

    before = listening_ports()

    def act(group: WriterGroup) -> bytes:
        group.exchange([], [])  # begins to listen
        run_on_all_ranks(group, lambda: b"", doing="listening")
        strangers = connect_as_strangers(before) if group.rank == 0 else []
        run_on_all_ranks(group, lambda: b"", doing="beginning")
        data = memoryview(bytearray(b"bytes of rank 1" if group.rank else 15))
        group.exchange([(0, data)] if group.rank else [], [(1, data)] if group.rank == 0 else [])
        strangers += connect_as_strangers(before) if group.rank == 0 else []
        data2 = memoryview(bytearray(b"bytes of rank 1" if group.rank else 15))
        group.exchange([(0, data2)] if group.rank else [], [(1, data2)] if group.rank == 0 else [])
        for stranger in strangers:
            stranger.close()
        return bytes(data) + bytes(data2)

    assert on_ranks(server, 2, act) == [b"bytes of rank 1" * 2] * 2


def listening_ports() -> set[int]:
    """Return the TCP ports on which this process listens."""
    ports = set()
    for descriptor in os.listdir("/proc/self/fd"):
        with suppress(OSError), socket.socket(fileno=os.dup(int(descriptor))) as listener:
            if listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                ports.add(listener.getsockname()[1])
    return ports


def receive_from_next(group: WriterGroup) -> None:
    """Each rank but the last waits for the next one."""
    run_on_all_ranks(group, lambda: b"", doing="beginning")
    group.exchange([], [(group.rank + 1, memoryview(bytearray(2))) for _ in range(2)])


def test_a_rank_that_is_late_is_named_also_by_those_who_wait_for_others(server: Any) -> None:
    is_over = threading.Event()

    def meet(group: WriterGroup) -> None:
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


@pytest.mark.parametrize("reports_why", [False, True])
def test_a_rank_that_is_gone_is_named_by_all_long_before_the_deadline(server: Any, reports_why: bool) -> None:
    def meet(group: WriterGroup) -> None:
        if group.rank < 2:
            receive_from_next(group)
            return
        run_on_all_ranks(group, lambda: b"", doing="beginning")
        group.exchange([(1, memoryview(bytearray(2)))], [])  # half of what it waits for
        if reports_why:
            group.abort(WriterFailedError("rank 2 was killed", rank=2))
        raise KeyError("gone")

    began = time.monotonic()
    first, second, _ = on_ranks(server, 3, meet, timeout_s=60)
    assert time.monotonic() - began < 30
    assert str(first) == str(second)
    assert first.rank == second.rank == 2
    message = "rank 2 was killed" if reports_why else "The connection to the writer process of rank 2 broke"
    assert message in str(first)


def test_a_rank_that_cannot_listen_is_named_by_all(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def open_on_another_host(client: Any, *, prefix: str, rank: int, host: str) -> Any:
        # 192.0.2.0/24 is for documentation: it is no address of this host.
        return open_transport(client, prefix=prefix, rank=rank, host="192.0.2.1" if rank else host)

    monkeypatch.setattr(writer_group, "open_transport", open_on_another_host)

    def act(group: WriterGroup) -> None:
        group.exchange([(1 - group.rank, memoryview(bytearray(4)))], [])

    for error in on_ranks(server, 2, act):
        assert isinstance(error, WriterFailedError)
        assert error.rank == 1
        assert "rank 1 cannot listen at localhost: Cannot resolve 192.0.2.1" in str(error)


def test_a_host_is_called_what_others_call_it() -> None:
    assert host_towards("localhost", 1) == "localhost"
    assert host_towards(socket.gethostname(), 1) == socket.gethostname()
