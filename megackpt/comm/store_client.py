"""Deadlines for calls to a store that may block for ever.

The deadlines of torch's TCPStore do not always hold: every call, `wait` and the constructor included, blocks
in the socket while the process that serves the store is stopped. So a thread makes the calls, and the caller
waits for the thread with a deadline. The calls are in C++ and release the interpreter lock.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import queue
import socket
import threading
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeAlias, TypeVar

T = TypeVar("T")

_Reply: TypeAlias = "queue.SimpleQueue[tuple[Any, Exception | None]]"
_Request: TypeAlias = "tuple[Callable[[], Any], _Reply]"


class StoreTimeoutError(RuntimeError):
    """A store did not answer before the deadline.

    Attributes:
        waited_s: how long the caller waited, in seconds.
    """

    def __init__(self, waited_s: float) -> None:
        super().__init__(f"no answer within {waited_s:g} s")
        self.waited_s = waited_s


class CallThread:
    """A thread that makes calls for other threads, one after the other.

    A call that misses its deadline may never return. So every later call fails immediately.

    Args:
        store_port: port of the TCPStore that the calls use; None for no TCPStore. When the interpreter ends,
            the connections of a stuck thread to this port are broken.
    """

    def __init__(self, store_port: int | None) -> None:
        self._store_port = store_port
        self._requests: queue.SimpleQueue[_Request | None] = queue.SimpleQueue()
        self._is_stuck = False
        # The thread refers to the queue and not to this object. So the object can be collected, and the
        # finalizer then ends the thread.
        self._thread = threading.Thread(
            target=_make_calls, args=(self._requests,), name="megackpt-calls", daemon=True
        )
        self._thread.start()
        weakref.finalize(self, self._requests.put, None)

    def call(self, act: Callable[[], T], *, timeout_s: float) -> T:
        """Return the result of act, or raise its error. Any thread may call this.

        Raises:
            TimeoutError: act did not return within timeout_s, or an earlier call missed its deadline.
        """
        if self._is_stuck:
            raise TimeoutError
        reply: _Reply = queue.SimpleQueue()
        self._requests.put((act, reply))
        try:
            value, error = reply.get(timeout=timeout_s)
        except queue.Empty:
            # Nothing can interrupt a call in C++. If it ever returns, the thread ends.
            self._is_stuck = True
            self._requests.put(None)
            _STUCK.append((self._thread, self._store_port))
            raise TimeoutError from None
        if error is not None:
            raise error
        returned: T = value
        return returned


class StoreClient:
    """A store of torch.distributed, each of whose calls ends before a deadline. Any thread may use it.

    Args:
        connect: returns the store, a `dist.Store`.
        port: where the store is served; None if it is not a TCPStore.
        connect_s: deadline of `connect`, in seconds.
        answer_s: deadline of every later call, in seconds.

    Raises:
        StoreTimeoutError: from every method, if the store did not answer in time to this call or to an
            earlier one. A store that was silent once counts as lost.
        RuntimeError: from every method, the error of the store.
    """

    def __init__(
        self, connect: Callable[[], Any], *, port: int | None, connect_s: float, answer_s: float
    ) -> None:
        self._answer_s = connect_s  # only for the first call, which connects
        self._thread = CallThread(port)
        self._store = self._call(connect)
        self._answer_s = answer_s

    def set(self, key: str, value: str | bytes) -> None:
        """Store a value."""
        self._call(lambda: self._store.set(key, value))

    def get(self, key: str) -> bytes:
        """Return the value of a key that exists; see `check` and `wait`."""
        return bytes(self._call(lambda: self._store.get(key)))

    def add(self, key: str, amount: int) -> int:
        """Add to a counter, and return it."""
        return int(self._call(lambda: self._store.add(key, amount)))

    def check(self, keys: Sequence[str]) -> bool:
        """Return whether all keys exist."""
        return bool(self._call(lambda: self._store.check(list(keys))))

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        """Replace the expected value ("": none) by another one, atomically; return the value after that."""
        return bytes(self._call(lambda: self._store.compare_set(key, expected, desired)))

    def delete_key(self, key: str) -> bool:
        """Remove a key; return whether it existed."""
        return bool(self._call(lambda: self._store.delete_key(key)))

    def num_keys(self) -> int:
        """Return how many keys the store holds."""
        return int(self._call(lambda: self._store.num_keys()))

    def wait(self, keys: Sequence[str], timeout: timedelta) -> None:
        """Return when all keys exist.

        Raises:
            dist.DistStoreError: a key did not exist within timeout.
        """
        self._call(lambda: self._store.wait(list(keys), timeout), beyond_s=timeout.total_seconds())

    def close(self) -> None:
        """Close the connection, and the server if this process has it."""
        self._store = None  # torch closes both when the last reference goes

    def _call(self, act: Callable[[], T], *, beyond_s: float = 0.0) -> T:
        try:
            return self._thread.call(act, timeout_s=self._answer_s + beyond_s)
        except TimeoutError:
            raise StoreTimeoutError(self._answer_s) from None


def _make_calls(requests: queue.SimpleQueue[_Request | None]) -> None:
    while (request := requests.get()) is not None:
        act, reply = request
        try:
            answer: tuple[Any, Exception | None] = act(), None
        except Exception as error:  # noqa: BLE001 - raised in the thread that asked for the call
            answer = None, error
        reply.put(answer)
        del request, act, reply, answer  # the waiting thread must not keep a store alive


def _break_stuck_connections() -> None:
    """Make stuck threads return before the interpreter ends, by breaking their connections.

    A thread that returns from C++ while the interpreter ends would end the process with SIGABRT ("terminate
    called without an active exception").
    """
    ports = {port for _, port in _STUCK}
    if not ports:
        return
    with contextlib.suppress(OSError):  # no such directory
        for descriptor in os.listdir("/proc/self/fd"):
            # A duplicate: torch still owns the descriptor. `shutdown` ends the connection for both.
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(descriptor))) as connection:
                is_tcp = connection.family in (socket.AF_INET, socket.AF_INET6)
                if is_tcp and connection.getpeername()[1] in ports:
                    connection.shutdown(socket.SHUT_RDWR)
    # A limit for each join: a thread that stays stuck must not keep the process from ending.
    for thread, _ in _STUCK:
        thread.join(_END_S)


_END_S = 1.0
_STUCK: list[tuple[threading.Thread, int | None]] = []
atexit.register(_break_stuck_connections)
