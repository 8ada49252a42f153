"""Groups of torch.distributed: ranks are threads here, which gloo connects as it connects processes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed

from megackpt import DeclarationError, RankFailedError
from megackpt.comm import missing_ranks, torch_group
from megackpt.comm.missing_ranks import describe_missing_ranks, rendezvous_port
from megackpt.comm.process_groups import DeviceGroup
from megackpt.comm.store_client import StoreClient
from megackpt.comm.torch_group import TorchGroup
from megackpt.comm.transport import LatePeersError, LostPeerError, MeshTransport, PairTransport
from megackpt.testing.world import SimulatedWorld
from tests.support.writers import wait_for

dist: Any = torch.distributed  # not all that it has is exported by its types
c10d = dist.distributed_c10d
RANKS = 3


class Threads:
    """Lets the functions of torch.distributed that groups call answer for the rank of a thread."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.store: Any = dist.HashStore()
        self._of_thread = threading.local()
        monkeypatch.setattr(dist, "get_rank", lambda: self._of_thread.rank)
        monkeypatch.setattr(c10d, "_get_default_store", lambda: self.store)
        monkeypatch.setattr(missing_ranks, "_REPORTS_S", 2.0)

    def gloo(self, rank: int, timeout_s: float = 30, size: int = RANKS) -> Any:
        store = c10d.PrefixStore("gloo", self.store)
        return c10d.ProcessGroupGloo(store, rank, size, timeout=timedelta(seconds=timeout_s))

    def run(self, act: Callable[[int], Any], size: int = RANKS) -> list[Any]:
        """Return what each rank returns, or the error that it raises."""

        def run_rank(rank: int) -> Any:
            self._of_thread.rank = rank
            try:
                return act(rank)
            except Exception as error:  # noqa: BLE001 - an outcome like any other
                return error

        with ThreadPoolExecutor(size) as pool:
            return list(pool.map(run_rank, range(size)))

    def in_group(self, act: Callable[[TorchGroup], Any], timeout_s: float = 30) -> list[Any]:
        """Run on each rank of a group, whose ranks have the numbers 0 to 2 in torch.distributed, too."""

        class Connected(TorchGroup):
            def _connect(group) -> tuple[str, Any]:
                return "name", self.gloo(group.rank, timeout_s)

        return self.run(lambda _: act(Connected(ranks=list(range(RANKS)), timeout_s=timeout_s)))


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> Threads:
    return Threads(monkeypatch)


def text(rank: int, nbytes: int) -> bytes:
    return bytes((rank + i) % 251 for i in range(nbytes))


ENCLOSED = torch_group._MAX_ENCLOSED_BYTES
SMALL = torch_group._SMALL_BYTES
LENGTHS = [
    (0, 0, 0),
    (3, 0, 5),
    (0, ENCLOSED - 8, 1),
    (1, 0, ENCLOSED - 7),
    (SMALL // RANKS - 8, 0, 1),
    (0, SMALL // RANKS - 7, 2),
    (9, 2 * SMALL, 0),
]


@pytest.mark.parametrize("lengths", LENGTHS)
def test_collectives_give_what_those_of_a_simulated_group_give(
    lengths: tuple[int, int, int], threads: Threads
) -> None:
    def act(group: Any) -> Any:
        data = text(group.rank, lengths[group.rank])
        parts = [text(r, n) for r, n in enumerate(lengths)] if group.rank == 0 else []
        maximum, gather = group.all_reduce_max_then_gather([group.rank, -5 - group.rank], data, step=b"")
        at_root = gather()
        shared = bytearray(text(1, 40) if group.rank == 1 else 40)
        group.broadcast(memoryview(shared), root=1)
        # Two buffers for each peer: the i-th fills the i-th.
        peers = [r for r in range(RANKS) if r != group.rank]
        sends = [
            (r, memoryview(bytearray(text(10 * group.rank + i, 5 + i)))) for r in peers for i in range(2)
        ]
        receives = [(r, memoryview(bytearray(5 + i))) for r in peers for i in range(2)]
        group.exchange(sends, receives)
        return (
            [group.all_gather(data), group.gather(data), maximum, at_root, group.scatter(parts)],
            [group.all_reduce_max([group.rank], step=b""), shared],
            group.all_reduce([group.rank, -3], [2**40 - 1 - group.rank, 7], step=b""),
            [bytes(buffer) for _, buffer in receives],
        )

    assert threads.in_group(act) == SimulatedWorld(RANKS).run(act)


def test_ranks_in_different_collectives_all_raise_an_error(threads: Threads) -> None:
    def act(group: TorchGroup) -> Any:
        return group.gather(b"x") if group.rank == 1 else group.all_gather(b"x")

    for error in threads.in_group(act):
        assert isinstance(error, RankFailedError)
        assert "Ranks are at different steps" in str(error)


def test_every_rank_counts_the_collectives_so_that_reports_of_one_failure_belong_together(
    threads: Threads,
) -> None:
    def act(group: TorchGroup) -> list[int]:
        counts = []
        for collective in (
            lambda: group.all_gather(b""),
            lambda: group.gather(b""),
            lambda: group.all_reduce_max([1], step=b""),
            lambda: group.all_reduce_max_then_gather([1], b"", step=b"")[1](),
            lambda: group.scatter([b""] * RANKS if group.rank == 0 else []),
        ):
            collective()
            counts.append(group._collectives)
        return counts

    assert threads.in_group(act) == [[1, 2, 3, 4, 5]] * RANKS


def test_a_rank_that_is_gone_is_named_by_the_others(threads: Threads) -> None:
    def act(group: TorchGroup) -> Any:
        assert group.all_gather(b"") == [b""] * RANKS
        if group.rank == 1:
            group.close()
            return group.gather(b"")
        return group.all_gather(b"here")

    first, gone, third = threads.in_group(act)
    assert "The connections of this group are closed" in str(gone)
    for rank, error in ((0, first), (2, third)):
        assert isinstance(error, RankFailedError)
        assert error.rank == 1
        assert f"No answer from rank(s) 1 (seen by rank {rank}): the connection broke after" in str(error)


def test_a_group_is_idle_between_its_collectives(threads: Threads) -> None:
    begun = threading.Barrier(RANKS)

    def act(group: TorchGroup) -> list[bool]:
        seen = [group.is_idle]
        if group.rank:
            begun.wait(60)  # rank 0 looks before the others answer
        wait = group.begin_all_reduce_max([group.rank], step=b"")
        if group.rank == 0:
            seen.append(group.is_idle)
            begun.wait(60)
        assert wait() == [RANKS - 1]
        return [*seen, group.is_idle]

    assert threads.in_group(act) == [[True, False, True], [True, True], [True, True]]


@pytest.mark.parametrize(
    ("waits", "marks", "expected"),
    [
        ((10, 10, 10), (4, 5, 6), (None, "a rank that has answered since", "")),
        ((10, 4.9, 10), (4, 4, 4), (5, "rank(s) 5, which answered only later,", "")),
        ((10, 5, 1), (4, 4, 4), (8, "rank(s) 8, which answered only later,", "")),
        ((10, 10, 10), (4, 4, 7), (8, "rank(s) 8", "")),  # a report of another failure
        ((10, 10, 10), (4, 1, None), (5, "rank(s) 5, 8", "")),
    ],
)
def test_ranks_are_missing_or_late_by_what_they_report(
    waits: tuple[float, ...], marks: tuple[int | None, ...], expected: object, threads: Threads
) -> None:
    ranks = [0, 5, 8]
    reports = c10d.PrefixStore("lost", threads.store)
    for number, (wait, mark) in enumerate(zip(waits, marks, strict=True)):
        if number and mark is not None:
            reports.set(str(number), f"{mark} {wait:.3f}")
    assert marks[0] is not None
    reported = threads.run(lambda _: describe_missing_ranks("lost", ranks, marks[0], 2, waits[0], 30), size=1)  # type: ignore[arg-type]
    assert reported == [expected]
    assert reports.get("0") == b"4 10.000"  # its own report, for the others


@pytest.mark.parametrize(
    ("by_launcher", "rank", "host"),
    [(True, None, "the launcher (torchrun)"), (False, 0, "rank 0, unless a launcher does")],
)
def test_a_rendezvous_store_that_is_gone_is_named_with_its_host(
    by_launcher: bool, rank: int | None, host: str, threads: Threads, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    threads.store = c10d.PrefixStore("a", c10d.PrefixStore("b", server))  # as torch.distributed wraps it
    assert rendezvous_port() == server.port

    def fail(*_: object) -> None:
        raise RuntimeError("connection reset")

    monkeypatch.setattr(missing_ranks, "_store_of_reports", fail)
    if by_launcher:
        monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    else:
        monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    ((first, who, hint),) = threads.run(lambda _: describe_missing_ranks("lost", [0, 1], 1, 2, 1, 30), size=1)
    assert (first, who) == (rank, "a rank")
    assert f"at port {server.port} does not answer" in hint
    assert f"The process that hosts it, {host}, is gone" in hint


@pytest.mark.parametrize("peer_comes", [True, False])
def test_a_transfer_ends_when_its_bytes_have_come_or_at_its_deadline(
    peer_comes: bool, threads: Threads
) -> None:
    is_over = threading.Event()

    def act(rank: int) -> Any:
        # gloo closes the connections of a rank that ends, so that one that sends nothing waits here.
        transport = MeshTransport(threads.gloo(rank, size=2))
        if rank:
            if peer_comes:
                transport.begin([(0, memoryview(bytearray(text(3, 1 << 20))))], [], timeout_s=30).wait()
            is_over.wait(60)
            return None
        try:
            data = bytearray(1 << 20)
            timeout_s = 30 if peer_comes else 0.5
            assert transport.begin([], [(1, memoryview(data))], timeout_s=timeout_s).wait()
            return data
        finally:
            is_over.set()

    result = threads.run(act, size=2)[0]
    if peer_comes:
        assert result == text(3, 1 << 20)
    else:
        assert isinstance(result, LatePeersError)
        assert result.ranks == [1]


def test_a_thread_that_waits_for_transfers_keeps_no_memory_of_the_last(threads: Threads) -> None:
    def act(rank: int) -> list[bytearray]:
        transport = PairTransport(
            StoreClient(lambda: threads.store, port=None, connect_s=30, answer_s=30),
            prefix="pairs",
            rank=rank,
            host="127.0.0.1",
        )
        buffers = [bytearray(64) for _ in range(2)]
        messages = [(1 - rank, memoryview(buffer)) for buffer in buffers]
        sends, receives = (messages, []) if rank else ([], messages)
        assert transport.begin(sends, receives, timeout_s=30).wait()
        both_have_ended.wait(60)
        messages.clear()
        wait_for(lambda: all(map(is_released, buffers)))
        both_have_ended.wait(60)  # a transport that closes takes the connection of its peer away
        transport.close()
        return buffers

    both_have_ended = threading.Barrier(2)

    assert [len(buffers) for buffers in threads.run(act, size=2)] == [2, 2]


def is_released(buffer: bytearray) -> bool:
    """Return whether nobody has a view of a buffer: only then its length can change."""
    try:
        buffer.append(0)
    except BufferError:
        return False
    return True


@pytest.mark.parametrize("broke", ["before", "while it waits"])
def test_a_transfer_names_the_peer_whose_connection_broke(threads: Threads, broke: str) -> None:
    begun, lost = threading.Event(), threading.Event()

    def act(rank: int) -> Any:
        group = threads.gloo(rank, size=2)
        if rank == 1:
            assert broke == "before" or begun.wait(60)
            del group  # which closes its connections
            lost.set()
            return None
        transport = MeshTransport(group)
        receives = [(1, memoryview(bytearray(8)))]
        if broke == "before":
            assert lost.wait(60)
            for _ in range(200):  # until gloo has seen it
                transport.begin([], receives, timeout_s=60)
                time.sleep(0.05)
        transfer = transport.begin([], receives, timeout_s=60)
        begun.set()
        return transfer.wait()

    error = threads.run(act, size=2)[0]
    assert isinstance(error, LostPeerError)
    assert error.rank == 1


# One rank in this process.


_WORLDS: list[Any] = []  # torch 2.6 ends the threads of a group while it holds a lock that they may wait for


@pytest.fixture
def alone(tmp_path: Path) -> Any:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    _WORLDS.append(dist.group.WORLD)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("alone")
def test_two_groups_of_the_same_ranks_have_different_names() -> None:
    groups = [TorchGroup(ranks=[0], timeout_s=30) for _ in range(3)]
    assert len({group._name for group in groups}) == 3
    assert [group.all_gather(b"here") for group in groups] == [[b"here"]] * 3
    for group in groups:
        group.close()


@pytest.mark.usefixtures("alone")
def test_a_group_of_devices_is_on_the_cpu_by_default() -> None:
    for group in (DeviceGroup(None), DeviceGroup(dist.group.WORLD), DeviceGroup(None, torch.device("cpu"))):
        assert group.empty(5).device == torch.device("cpu")
        assert group.broadcast(torch.tensor([1, 2], dtype=torch.uint8), root=0).tolist() == [1, 2]
    elsewhere = group.on(torch.device("meta")).empty(5)
    assert (elsewhere.device.type, elsewhere.dtype, elsewhere.shape) == ("meta", torch.uint8, (5,))
    assert DeviceGroup(None, torch.device("meta")).empty(1).is_meta


@pytest.mark.usefixtures("alone")
def test_a_broadcast_between_devices_that_fails_is_the_failure_of_a_rank(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("no route")

    monkeypatch.setattr(dist, "broadcast", fail)
    with pytest.raises(RankFailedError, match=r"\(seen by rank 0\): no route.*load with cpu_transfer=True"):
        DeviceGroup(None).broadcast(torch.zeros(2, dtype=torch.uint8), root=0)


@pytest.mark.parametrize("group", [None, SimulatedWorld(1)])
def test_a_group_of_devices_needs_a_process_group(group: Any) -> None:
    with pytest.raises(DeclarationError, match=r"cpu_transfer=False.*needs a process group"):
        DeviceGroup(group)
