"""An error of any class in the thread of a peer reaches the caller."""

from __future__ import annotations

from typing import Any

import pytest

from megackpt.comm.gloo_transport import PairTransport, _PeerThread
from megackpt.comm.transport import LostPeerError


class NoConnection(PairTransport):
    """A transport whose peers cannot be connected: gloo raises a ValueError for some addresses."""

    def __init__(self) -> None:  # without a store and devices
        self._peers = {}

    def _connect(self, peer: int, deadline: float) -> tuple[Any, int]:
        raise ValueError("no such device")


def test_an_error_of_any_class_is_raised_as_that_of_the_peer() -> None:
    transport = NoConnection()
    transfer = transport.begin([(1, memoryview(bytearray(8)))], [], timeout_s=30)
    with pytest.raises(LostPeerError) as raised:
        transfer.wait(20)  # returns False if the thread has died
    assert raised.value.rank == 1
    assert isinstance(raised.value.why, ValueError)
    transport._peers[1].close()


def test_the_thread_of_a_peer_goes_on_after_an_error() -> None:
    """A second transfer connects again."""
    attempts: list[int] = []

    def connect(peer: int, deadline: float) -> tuple[Any, int]:
        attempts.append(peer)
        raise ValueError("no such device")

    thread = _PeerThread(3, connect)
    transport = NoConnection()
    transport._peers = {3: thread}
    for _ in range(2):
        transfer = transport.begin([(3, memoryview(bytearray(8)))], [], timeout_s=30)
        with pytest.raises(LostPeerError):
            transfer.wait(20)
    assert attempts == [3, 3]
    thread.close()
