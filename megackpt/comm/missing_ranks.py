"""Finds the ranks that are missing after a collective broke.

Each rank reports itself in the rendezvous store of torch.distributed, and waits for the reports of the
others. The process that serves the store (rank 0, the launcher or a separate process) may be stopped, too.
So every request has a deadline.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from megackpt.comm.group import describe_ranks
from megackpt.comm.store_client import StoreClient

_REPORTS_S = 3.0  # how long the other ranks of a broken collective wait for each other's reports
_PAUSE_S = 0.05


def describe_missing_ranks(
    name: str, ranks: Sequence[int], mark: int, tolerance: int, waited_s: float, timeout_s: float
) -> tuple[int | None, str, str]:
    """Find out which ranks are missing after a collective broke. Every rank that sees the failure calls this.

    Args:
        name: of the group and the kind of failure; prefix of the reports' keys.
        ranks: members of the group, as ranks of torch.distributed.
        mark: number of the collective that broke.
        tolerance: reports whose mark differs by more than this are about another failure.
        waited_s: how long this rank waited in the collective, in seconds.
        timeout_s: deadline of the group, in seconds.

    Returns:
        The first missing rank of torch.distributed, or None; text for all missing ranks; and a further
        sentence for the error, or "".
    """
    reports = _missing_and_late(
        name,
        rank=ranks.index(dist.get_rank()),
        size=len(ranks),
        mark=mark,
        tolerance=tolerance,
        waited_s=waited_s,
        timeout_s=min(_REPORTS_S, timeout_s),
    )
    if reports is None:
        return rendezvous_rank(), "a rank", f" {describe_lost_rendezvous()}"
    missing, late = ([ranks[r] for r in numbers] for numbers in reports)
    if missing:
        return missing[0], f"rank(s) {describe_ranks(missing)}", ""
    if late:
        return late[0], f"rank(s) {describe_ranks(late)}, which answered only later,", ""
    return None, "a rank that has answered since", ""


def _missing_and_late(
    name: str, *, rank: int, size: int, mark: int, tolerance: int, waited_s: float, timeout_s: float
) -> tuple[list[int], list[int]] | None:
    """Report this rank to the others; return the ranks that do not report, and the late ones.

    A rank is late if it waited less than half as long as this one. It was busy while this one waited, for
    instance with a writer process that does not answer.

    Returns:
        Missing and late ranks of the group; None if the rendezvous store does not answer.
    """
    try:
        port = rendezvous_port()
        store = StoreClient(
            lambda: _store_of_reports(name), port=port, connect_s=timeout_s, answer_s=timeout_s
        )
        store.set(str(rank), f"{mark} {waited_s:.3f}")
        peers = [r for r in range(size) if r != rank]
        waits = _reported_waits(store, peers, mark, tolerance, timeout_s)
    # StoreTimeoutError included: without the store, no rank can find out who is missing.
    except RuntimeError:
        return None
    late = [peer for peer, peer_waited_s in waits.items() if peer_waited_s < waited_s / 2]
    return [peer for peer in peers if peer not in waits], sorted(late)


def _reported_waits(
    store: StoreClient, peers: Sequence[int], mark: int, tolerance: int, timeout_s: float
) -> dict[int, float]:
    """Return how long each rank waited, of those that report it before the timeout."""
    deadline = time.monotonic() + timeout_s
    waits: dict[int, float] = {}
    while len(waits) < len(peers) and time.monotonic() < deadline:
        for peer in peers:
            peer_waited_s = None if peer in waits else _reported_wait(store, peer, mark, tolerance)
            if peer_waited_s is not None:
                waits[peer] = peer_waited_s
        time.sleep(_PAUSE_S)
    return waits


def describe_lost_rendezvous() -> str:
    """Return the error text for a rendezvous store that does not answer; it names the store's host."""
    port = rendezvous_port()
    where = f" at port {port}" if port is not None else ""
    host = "the launcher (torchrun)" if _is_of_launcher() else "rank 0, unless a launcher does"
    return (
        f"The rendezvous store of torch.distributed{where} does not answer. The process that hosts it, "
        f"{host}, is gone or stopped: look at its log."
    )


def rendezvous_rank() -> int | None:
    """Return the rank that hosts the rendezvous store; None if the launcher does."""
    return None if _is_of_launcher() else 0


def rendezvous_port() -> int | None:
    """Return the port of the rendezvous store; None if it is no TCPStore. Local."""
    store = dist.distributed_c10d._get_default_store()
    # torch wraps the TCPStore in views with a prefix, which have no port.
    while isinstance(store, dist.PrefixStore):  # type: ignore[attr-defined]
        store = store.underlying_store
    return getattr(store, "port", None)


def _store_of_reports(name: str) -> Any:
    store = dist.distributed_c10d._get_default_store()
    return dist.PrefixStore(name, store)  # type: ignore[attr-defined]


def _reported_wait(store: StoreClient, rank: int, mark: int, tolerance: int) -> float | None:
    """Return the seconds that a rank waited before it reported this failure; None if it has not."""
    if not store.check([str(rank)]):
        return None
    # The key may be left from an earlier failure of this group. Its mark is far from this one then.
    reported_mark, waited_s = store.get(str(rank)).split()
    return float(waited_s) if abs(int(reported_mark) - mark) <= tolerance else None


def _is_of_launcher() -> bool:
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # set by torchrun
