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
    name: str, *, rank: int, size: int, mark: int, tolerance: int, timeout_s: float
) -> list[int] | None:
    """Return the ranks of a group that do not report that it broke; None if the store does not answer. Local.

    Every rank reports with a mark; one that differs by more than tolerance is about another failure.
    """
    try:
        port = rendezvous_port()
        store = StoreClient(lambda: _reports(name), port=port, connect_s=timeout_s, answer_s=timeout_s)
        store.set(str(rank), str(mark))
        deadline = time.monotonic() + timeout_s
        absent = [r for r in range(size) if r != rank]
        while absent and time.monotonic() < deadline:
            absent = [r for r in absent if not _has_reported(store, r, mark, tolerance)]
            time.sleep(_PAUSE_S)
    except RuntimeError:  # its host is gone, or does not answer
        return None
    return absent


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


def _has_reported(store: StoreClient, rank: int, mark: int, tolerance: int) -> bool:
    return store.check([str(rank)]) and abs(int(store.get(str(rank))) - mark) <= tolerance


def _is_of_launcher() -> bool:
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # set by torchrun
