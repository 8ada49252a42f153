"""Bulk bytes between processes over each transport: what arrives, and who is named when a peer is lost."""

from __future__ import annotations

import importlib.util
import multiprocessing
import os
import signal
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import megackpt
from megackpt import LoadOptions, ShardedTensor
from megackpt.comm.store_host import StoreAddress, connect_store
from megackpt.comm.transport import TRANSPORT_VARIABLE
from megackpt.comm.writer_group import WriterGroup
from megackpt.errors import WriterFailedError
from megackpt.testing.ranks import RankPool
from tests.support.effort import sampled
from tests.support.groups import shared

RANKS = 3
TROUBLED = RANKS - 1
MIB = 1 << 20
NBYTES = 9 * MIB + 5
TIMEOUT_S = 6.0
LIMIT_S = 20 * TIMEOUT_S

needs_nixl = pytest.mark.skipif(importlib.util.find_spec("nixl_cu12") is None, reason="needs the extra nixl")


@pytest.fixture(params=["gloo", pytest.param("nixl", marks=needs_nixl)])
def transport(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv(TRANSPORT_VARIABLE, request.param)
    return request.param


def content(rank: int, peer: int, number: int) -> bytearray:
    return bytearray([1 + rank + 16 * peer + 64 * number]) * NBYTES


def exchange_with_all(group: WriterGroup, number: int) -> None:
    """Send different bytes to every peer, and check what comes from every peer."""
    peers = [rank for rank in range(group.size) if rank != group.rank]
    received = {peer: bytearray(NBYTES) for peer in peers}
    group.exchange(
        [(peer, memoryview(content(group.rank, peer, number))) for peer in peers],
        [(peer, memoryview(data)) for peer, data in received.items()],
    )
    for peer, data in received.items():
        assert data == content(peer, group.rank, number), (group.rank, peer, number)


def run_rank(rank: int, port: int, trouble: str, results: Any) -> None:
    address = StoreAddress("127.0.0.1", port)
    client = connect_store(address, timeout_s=LIMIT_S)

    def open_group(prefix: str, size: int) -> WriterGroup:
        return WriterGroup(client, address=address, prefix=prefix, rank=rank, size=size, timeout_s=TIMEOUT_S)

    # The time-out counts from here on, and not while processes start.
    client.set(f"started.{rank}", b"")
    client.wait([f"started.{other}" for other in range(RANKS)], timedelta(seconds=LIMIT_S))
    group = open_group("job", RANKS)
    for number in range(2):
        exchange_with_all(group, number)
    shared(group, b"", doing="beginning")
    if rank == TROUBLED and trouble in ("SIGKILL", "SIGSTOP"):
        os.kill(os.getpid(), getattr(signal, trouble))
    if rank == TROUBLED and trouble == "slow":
        time.sleep(TIMEOUT_S / 4)
    try:
        exchange_with_all(group, 2)
        outcome: tuple[str, int | None] = "", None
    except WriterFailedError as error:
        outcome = str(error), error.rank
    group.leave()
    if rank != TROUBLED:  # the process is still of use
        survivors = open_group("next job", RANKS - 1)
        exchange_with_all(survivors, 0)
        survivors.leave()
    results.put((rank, *outcome))
    results.close()
    results.join_thread()
    os._exit(0)


def outcomes(trouble: str) -> dict[int, tuple[str, int | None]]:
    """Run the ranks, and return by rank the error and the rank that it names."""
    store = dist.TCPStore(
        "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=LIMIT_S)
    )
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    processes = [
        context.Process(target=run_rank, args=(rank, store.port, trouble, results)) for rank in range(RANKS)
    ]
    for process in processes:
        process.start()
    try:
        expected = RANKS - (trouble in ("SIGKILL", "SIGSTOP"))
        reports = [results.get(timeout=LIMIT_S) for _ in range(expected)]
    finally:
        for process in processes:
            process.kill()
            process.join()
    return {rank: (text, named) for rank, text, named in reports}


def test_a_slow_peer_is_waited_for(transport: str) -> None:
    reports = outcomes("slow")  # each rank has checked what it was sent
    assert [text for text, _ in reports.values()] == [""] * RANKS


@sampled(4)
@pytest.mark.parametrize("trouble", ["SIGKILL", "SIGSTOP"])
def test_a_lost_peer_is_named_by_all(transport: str, trouble: str) -> None:
    reports = outcomes(trouble)
    assert sorted(reports) == [0, 1]
    for text, named in reports.values():
        print(transport, trouble, text)
        assert named == TROUBLED
        assert text == reports[0][0]


def load_by_exchange(directory: Path, transport: str) -> None:
    """Save rows of a tensor, and load the columns, which every rank reads for the others."""
    rank, size = dist.get_rank(), dist.get_world_size()
    whole = torch.arange(size * 40 * 6000, dtype=torch.float32).reshape(size * 40, size * 2000)
    rows = {"w": ShardedTensor.from_rank_offsets("w", whole[rank * 40 :][:40].clone(), (0, rank, size))}
    megackpt.save(rows, directory)
    os.environ[TRANSPORT_VARIABLE] = transport
    try:
        columns = {"w": ShardedTensor.from_rank_offsets("w", torch.zeros(size * 40, 2000), (1, rank, size))}
        # A deadline of its own, so that the group is a new one and opens the transport.
        options = LoadOptions(exchange="all_to_all", timeout_s=61.0 + (transport == "nixl"))
        loaded = megackpt.load(columns, directory, options=options)
    finally:
        del os.environ[TRANSPORT_VARIABLE]
    assert torch.equal(loaded["w"], whole[:, rank * 2000 :][:, :2000])


def test_a_load_exchanges_over_each_transport(rank_pool: RankPool, tmp_path: Path, transport: str) -> None:
    rank_pool.run(load_by_exchange, RANKS, tmp_path / "c", transport)
