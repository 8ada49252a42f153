"""The transport over NIXL, which moves bytes by UCX: over RDMA, shared memory or TCP, whatever hosts share.

A rank receives from each peer into a ring: memory of RING_PARTS parts, to which the peer writes. The peer
sends a notification of each part that it has written. The rank sends one back for each part that it has
copied out; then the peer may write there again. Needs the extra `nixl`.
"""

from __future__ import annotations

import math
import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from megackpt.comm.group import PeerBuffer
from megackpt.comm.store_client import StoreClient
from megackpt.comm.transport import LatePeersError, LostPeerError, Transfer, Transport, by_peer
from megackpt.errors import DeclarationError

PART_BYTES = 1 << 20
RING_PARTS = 8

_SENT, _COPIED = b"s", b"c"  # first byte of a notification
_BUSY_ROUNDS = 50  # without progress, before this rank sleeps between two rounds
_PAUSE_S = 0.0005


@dataclass(slots=True)
class _ReceiveState:
    """The ring that a peer writes to.

    Attributes:
        ring: uint8, [RING_PARTS * PART_BYTES].
        lengths: lengths in bytes of the parts that the peer has written and this rank has not copied out yet.
        copied: how many parts were copied out so far.
    """

    ring: np.ndarray
    lengths: deque[int] = field(default_factory=deque)
    copied: int = 0


@dataclass(slots=True)
class _SendState:
    """The ring of a peer that this rank writes to.

    Attributes:
        address: of the ring in the peer's memory.
        sent: how many parts were written so far.
        copied: how many of them the peer has copied out.
    """

    address: int
    sent: int = 0
    copied: int = 0


@dataclass(slots=True)
class _NixlTransfer(Transfer):
    """The unfinished part of one transfer.

    Attributes:
        transport: moves the bytes.
        deadline: of the transfer.
        parts: address and length of the parts to send, by peer.
        buffers: the buffers to fill, by peer; the first one of each peer may be partly filled: its rest.
        under_way: peer and handle of the parts that are being written.
        registered: memory that is registered for the transfer.
    """

    transport: NixlTransport
    deadline: float
    parts: dict[int, deque[tuple[int, int]]] = field(default_factory=dict)
    buffers: dict[int, deque[memoryview]] = field(default_factory=dict)
    under_way: list[tuple[int, Any]] = field(default_factory=list)
    registered: list[Any] = field(default_factory=list)

    def unfinished(self) -> set[int]:
        """Return the peers with unfinished messages."""
        return {*self.parts, *self.buffers, *(peer for peer, _ in self.under_way)}

    def wait(self, most_s: float = math.inf) -> bool:
        """Move bytes until all are moved; see `Transfer.wait`."""
        until, idle_rounds = time.monotonic() + most_s, 0
        while peers := self.unfinished():
            now = time.monotonic()
            if now > self.deadline:
                raise LatePeersError(sorted(peers))
            if now >= until:
                return False
            idle_rounds = 0 if self.transport.move(self) else idle_rounds + 1
            if idle_rounds > _BUSY_ROUNDS:
                time.sleep(_PAUSE_S)
        # Not after an error: UCX may still read the caller's memory then, so it stays registered.
        self.transport.release(self)
        return True


class NixlTransport(Transport):
    """A transport over an agent of NIXL, which finds the addresses of hosts; arguments as of `OpenTransport`.

    Raises:
        DeclarationError: NIXL is not installed.
    """

    def __init__(self, client: StoreClient, *, prefix: str, rank: int, host: str = "") -> None:
        os.environ.setdefault("NIXL_LOG_LEVEL", "WARN")
        try:
            from nixl_cu12 import nixl_agent, nixl_agent_config
        except ImportError as error:
            raise DeclarationError(
                f"NIXL cannot be imported: {error}. Install the extra: pip install 'megackpt[nixl]'."
            ) from error
        self._client, self._prefix, self._rank = client, f"{prefix}/nixl", rank
        # The progress thread of NIXL would poll all the time and take a processor from the training.
        config = nixl_agent_config(enable_prog_thread=False, backends=["UCX"])
        self._agent: Any = nixl_agent(self._name(rank), config)
        self._receiving: dict[int, _ReceiveState] = {}
        self._sending: dict[int, _SendState] = {}
        self._own_keys: list[str] = []

    def begin(
        self, sends: Sequence[PeerBuffer], receives: Sequence[PeerBuffer], *, timeout_s: float
    ) -> _NixlTransfer:
        """Begin to move bytes between this rank and its peers; see `Transport.begin`."""
        transfer = _NixlTransfer(self, time.monotonic() + timeout_s)
        for peer, (outgoing, incoming) in by_peer(sends, receives).items():
            self._publish_ring(peer)  # also to a peer that only receives: it notifies this rank
            if incoming:
                transfer.buffers[peer] = deque(incoming)
            for data in outgoing:
                array = np.frombuffer(data, np.uint8)
                address = array.ctypes.data
                transfer.registered.append(
                    self._agent.register_memory([(address, array.nbytes, 0, "")], "DRAM")
                )
                transfer.parts.setdefault(peer, deque()).extend(
                    (address + begin, min(PART_BYTES, array.nbytes - begin))
                    for begin in range(0, array.nbytes, PART_BYTES)
                )
        return transfer

    def move(self, transfer: _NixlTransfer) -> bool:
        """Do what can be done for a transfer without waiting; return whether there was anything."""
        # All three each time: a peer may wait for any of them.
        has_moved = self._read_notifications()
        has_moved |= self._copy_out(transfer)
        has_moved |= self._write(transfer)
        return has_moved

    def release(self, transfer: _NixlTransfer) -> None:
        """Release the memory that is registered for a transfer."""
        for memory in transfer.registered:
            self._agent.deregister_memory(memory)

    def close(self) -> None:
        """Close the connections."""
        self._agent = None
        try:
            for key in self._own_keys:
                self._client.delete_key(key)
        except RuntimeError:  # the store is gone, and the keys with it
            return

    def _publish_ring(self, peer: int) -> None:
        """Publish in the store, for a peer, the address of this rank and the memory to write to."""
        if peer in self._receiving:
            return
        ring = np.empty(PART_BYTES * RING_PARTS, np.uint8)
        self._agent.register_memory([(ring.ctypes.data, ring.nbytes, 0, "")], "DRAM")
        key = f"{self._prefix}/{self._rank}/{peer}"
        self._client.set(key, ring.ctypes.data.to_bytes(8, "little") + self._agent.get_agent_metadata())
        self._own_keys.append(key)
        self._receiving[peer] = _ReceiveState(ring)

    def _find_ring(self, peer: int) -> _SendState | None:
        """Return the ring of a peer; None if the peer has not published it yet."""
        if peer not in self._sending:
            key = f"{self._prefix}/{peer}/{self._rank}"
            if not self._client.check([key]):
                return None
            published = self._client.get(key)
            self._agent.add_remote_agent(published[8:])
            self._sending[peer] = _SendState(int.from_bytes(published[:8], "little"))
        return self._sending[peer]

    def _read_notifications(self) -> bool:
        """Note which parts peers have written and copied out; return whether there were any."""
        notifications = self._agent.get_new_notifs()
        for name, messages in notifications.items():
            peer = int(name.rpartition("/")[2])
            for message in messages:
                number = int.from_bytes(message[1:], "little")
                if message[:1] == _SENT:
                    self._receiving[peer].lengths.append(number)
                else:
                    self._sending[peer].copied = number
        return bool(notifications)

    def _copy_out(self, transfer: _NixlTransfer) -> bool:
        """Copy the parts that have come into the buffers; return whether there were any."""
        has_moved = False
        for peer, buffers in list(transfer.buffers.items()):
            receiving = self._receiving[peer]
            # Until the peer has published its address, this rank cannot notify it.
            if not receiving.lengths or self._find_ring(peer) is None:
                continue
            has_moved = True
            # Parts of the next transfer stay in the ring, as the peer may have begun with it.
            while receiving.lengths and buffers:
                length, begin = receiving.lengths.popleft(), receiving.copied % RING_PARTS * PART_BYTES
                # A part never crosses two buffers: the sender cuts each buffer into parts of its own.
                buffers[0][:length] = receiving.ring[begin : begin + length].data
                buffers[0] = buffers[0][length:]
                if not buffers[0]:
                    buffers.popleft()
                receiving.copied += 1
                self._call(
                    peer, self._agent.send_notif, self._name(peer), _notification(_COPIED, receiving.copied)
                )
            if not buffers:
                del transfer.buffers[peer]
        return has_moved

    def _write(self, transfer: _NixlTransfer) -> bool:
        """Write parts into the rings of peers where there is room; return whether anything began or ended."""
        has_moved = False
        for peer, parts in list(transfer.parts.items()):
            ring = self._find_ring(peer)
            # Never more than RING_PARTS ahead: the peer has not copied out what would be overwritten.
            while ring is not None and parts and ring.sent - ring.copied < RING_PARTS:
                transfer.under_way.append((peer, self._start(peer, ring, *parts.popleft())))
                has_moved = True
            if not parts:
                del transfer.parts[peer]
        written = [self._is_written(peer, handle) for peer, handle in transfer.under_way]
        transfer.under_way = [
            entry for entry, is_written in zip(transfer.under_way, written, strict=True) if not is_written
        ]
        return has_moved or any(written)

    def _start(self, peer: int, ring: _SendState, address: int, length: int) -> Any:
        to = ring.address + ring.sent % RING_PARTS * PART_BYTES
        ring.sent += 1
        local, remote = (self._agent.get_xfer_descs([(start, length, 0)], "DRAM") for start in (address, to))
        # NIXL delivers the notification after the bytes, so the peer may copy the part when it reads it.
        handle = self._agent.initialize_xfer(
            "WRITE", local, remote, self._name(peer), _notification(_SENT, length)
        )
        if self._call(peer, self._agent.transfer, handle) == "ERR":
            raise LostPeerError(peer, OSError("NIXL could not begin to write to it"))
        return handle

    def _is_written(self, peer: int, handle: Any) -> bool:
        state = self._call(peer, self._agent.check_xfer_state, handle)
        if state == "ERR":
            raise LostPeerError(peer, OSError("NIXL could not write to it"))
        if state == "DONE":
            self._agent.release_xfer_handle(handle)
        return bool(state == "DONE")

    def _call(self, peer: int, method: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return method(*arguments)
        except Exception as error:
            raise LostPeerError(peer, error) from error

    def _name(self, rank: int) -> str:
        return f"{self._prefix}/{rank}"


def _notification(kind: bytes, number: int) -> bytes:
    return kind + number.to_bytes(8, "little")
