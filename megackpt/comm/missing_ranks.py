"""Which ranks are missing after a collective broke, asked in the rendezvous store of torch.distributed.

That store may be what is lost: it is served by rank 0, by the launcher, or by a process of its own, which may
be stopped as well. So every question has a deadline.
"""

from __future__ import annotations

import os
import time
from typing import Any

import torch.distributed as dist

from megackpt.comm.store_client import StoreClient

ROLL_CALL_S = 3.0
"""How long survivors of a broken collective wait for each other's names before they say who is missing."""

_PAUSE_S = 0.05


def find_missing_ranks(
    name: str, *, rank: int, size: int, mark: int, tolerance: int, waited_s: float, timeout_s: float
) -> tuple[list[int], list[int]] | None:
    """Return the ranks of a group that do not report that it broke, and those that came late. Local.

    Every rank reports a mark, and how long it waited in the collective. A mark that differs by more than
    `tolerance` belongs to another failure. A rank came late if it waited less than half as long as this
    one: it was busy while this one waited, for instance with a writer process that does not answer.

    Returns:
        Missing and late ranks of the group; None if the rendezvous store does not answer.
    """
    try:
        port = rendezvous_port()
        store = StoreClient(lambda: _reports(name), port=port, connect_s=timeout_s, answer_s=timeout_s)
        store.set(str(rank), f"{mark} {waited_s:.3f}")
        deadline = time.monotonic() + timeout_s
        absent = [r for r in range(size) if r != rank]
        late: list[int] = []
        while absent and time.monotonic() < deadline:
            for other in list(absent):
                waited = _reported_wait(store, other, mark, tolerance)
                if waited is None:
                    continue
                absent.remove(other)
                if waited < waited_s / 2:
                    late.append(other)
            time.sleep(_PAUSE_S)
    except RuntimeError:  # its host is gone, or does not answer
        return None
    return absent, sorted(late)


def describe_lost_rendezvous() -> str:
    """Say which process is gone or stopped if the rendezvous store does not answer."""
    port = rendezvous_port()
    where = f" at port {port}" if port is not None else ""
    host = "the launcher (torchrun)" if _is_of_launcher() else "rank 0, unless a launcher does"
    return (
        f"The rendezvous store of torch.distributed{where} does not answer. The process that hosts it, "
        f"{host}, is gone or stopped: look at its log."
    )


def rendezvous_rank() -> int | None:
    """Return the rank that hosts the rendezvous store, as far as is known; None for no rank."""
    return None if _is_of_launcher() else 0


def rendezvous_port() -> int | None:
    """Return the port of the rendezvous store; None if it is no TCPStore. Local."""
    store = dist.distributed_c10d._get_default_store()
    while isinstance(store, dist.PrefixStore):  # type: ignore[attr-defined]
        store = store.underlying_store
    return getattr(store, "port", None)


def _reports(name: str) -> Any:
    store = dist.distributed_c10d._get_default_store()
    return dist.PrefixStore(name, store)  # type: ignore[attr-defined]


def _reported_wait(store: StoreClient, rank: int, mark: int, tolerance: int) -> float | None:
    """Return the seconds that a rank waited before it reported this failure; None if it has not."""
    if not store.check([str(rank)]):
        return None
    reported_mark, waited_s = store.get(str(rank)).split()
    return float(waited_s) if abs(int(reported_mark) - mark) <= tolerance else None


def _is_of_launcher() -> bool:
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # set by torchrun
