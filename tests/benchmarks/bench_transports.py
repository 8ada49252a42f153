"""Throughput of transports between two processes of this machine.

Usage: `python tests/benchmarks/bench_transports.py [--transports gloo,nixl] [--rounds 9] [--mib 256]`.

Two ranks exchange buffers as long as those of copies between nodes. Transports take turns, so that a busy
machine is equally busy for all of them.
"""

from __future__ import annotations

import multiprocessing
import os
import statistics
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from megackpt.comm.store_host import StoreAddress, connect_store
from megackpt.comm.transport import TRANSPORT_VARIABLE, open_transport
from megackpt.engine.tiers.transfer import PART_BYTES
from tests.benchmarks.measuring import MIB, options

LIMIT_S = 300.0
DIRECTIONS = ("one way", "both ways")


def exchange_of(name: str, client: Any, rank: int) -> Callable[[Any, Any], bool]:
    os.environ[TRANSPORT_VARIABLE] = name
    transport = open_transport(client, prefix=f"bench/{name}", rank=rank, host="127.0.0.1")
    return lambda sends, receives: transport.begin(sends, receives, timeout_s=LIMIT_S).wait()


def run_rank(rank: int, port: int, names: list[str], rounds: int, nbytes: int, results: Any) -> None:
    client = connect_store(StoreAddress("127.0.0.1", port), timeout_s=LIMIT_S)
    exchanges = {name: exchange_of(name, client, rank) for name in names}
    peer, barriers = 1 - rank, 0
    source, target = (memoryview(bytearray(os.urandom(PART_BYTES))) for _ in range(2))
    measured: dict[tuple[str, str], list[tuple[float, float]]] = {}

    def wait_for_peer() -> None:
        nonlocal barriers
        barriers += 1
        client.set(f"barrier/{barriers}/{rank}", b"1")
        while not client.check([f"barrier/{barriers}/{peer}"]):
            time.sleep(0.001)

    for number in range(rounds + 1):  # the first one connects
        for direction in DIRECTIONS:
            for name in names if number % 2 else names[::-1]:
                sends = [(peer, source)] if rank == 0 or direction == "both ways" else []
                receives = [(peer, target)] if rank == 1 or direction == "both ways" else []
                wait_for_peer()
                began, cpu_s = time.perf_counter(), time.process_time()
                for _ in range(nbytes // PART_BYTES):
                    exchanges[name](sends, receives)
                wait_for_peer()
                elapsed, cpu_s = time.perf_counter() - began, time.process_time() - cpu_s
                if number:
                    measured.setdefault((name, direction), []).append((nbytes / elapsed / 1e9, cpu_s))
    if rank == 0:
        results.put(measured)


def main() -> None:
    chosen = options(__doc__, transports="gloo,nixl", rounds=9, mib=256)
    store = dist.TCPStore(
        "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=LIMIT_S)
    )
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    names, nbytes = chosen.transports.split(","), chosen.mib * MIB
    arguments = (store.port, names, chosen.rounds, nbytes, results)
    processes = [context.Process(target=run_rank, args=(rank, *arguments)) for rank in range(2)]
    for process in processes:
        process.start()
    measured = results.get(timeout=LIMIT_S)
    for process in processes:
        process.join()
    buffers = f"{chosen.mib} MiB in buffers of {PART_BYTES // MIB} MiB"
    print(f"{buffers}; GB/s in each direction; {chosen.rounds} rounds")
    for (name, direction), rows in sorted(measured.items()):
        rates, cpu_s = ([row[i] for row in rows] for i in range(2))
        print(
            f"{name:>8} {direction:<10} median {statistics.median(rates):.2f} "
            f"({min(rates):.2f} to {max(rates):.2f}), {statistics.median(cpu_s):.2f} s of CPU on rank 0"
        )


if __name__ == "__main__":
    main()
