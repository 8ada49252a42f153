"""A group of writer processes that send messages through a key-value store, without torch's collectives.

Rank 0 serves the store, a TCPStore (see `store_host`). So saves never wait for the collectives of the
training, and the training never waits for those of saves. All messages go through one server, so they must be
short.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, NoReturn, TypeVar

import torch.distributed as dist

from megackpt.comm.group import (
    Group,
    decode_error,
    describe_ranks,
    encode_error,
    first_line,
    join_fields,
    split_fields,
)
from megackpt.comm.store_client import StoreClient, StoreTimeoutError
from megackpt.comm.store_host import abort_key, first_error, left_key
from megackpt.errors import CheckpointError, RankFailedError, WriterFailedError

T = TypeVar("T")

PART_BYTES = 4 << 20
"""Length of one stored value. Longer messages are sent in parts: the store's server rejects 8 MiB."""

LOOK_EVERY_S = 1.0
"""How often a rank that waits for a message checks whether another rank has given up."""

LEAVE_S = 5.0
"""How long a leaving rank 0 waits for the other ranks to read its last messages."""

LEAVE_ABORTED_S = 2 * LOOK_EVERY_S
"""How long it waits if a rank has given up. In this time every live rank sees the error."""


class StoreGroup(Group):
    """Ranks that exchange messages under one prefix of a store, with a deadline. See `Group`.

    Rank 0 gathers and sends the results. A message is removed from the store when all ranks have read it.
    Each job has a group of its own, with a prefix that all ranks know.

    Args:
        while_waiting: called about every LOOK_EVERY_S as long as this rank waits for others.

    Raises:
        CheckpointError: from every method, the error with which another rank has given up (see
            `StoreHost.abort`).
        WriterFailedError: from every method, if a process did not answer before the deadline, or the store is
            gone. The training processes of these ranks may still run.
    """

    def __init__(
        self,
        store: StoreClient,
        *,
        prefix: str,
        rank: int,
        size: int,
        timeout_s: float,
        while_waiting: Callable[[], None] = lambda: None,
    ) -> None:
        self._store, self._prefix = store, prefix
        self._while_waiting = while_waiting
        self.rank, self.size = rank, size
        self._timeout_s = timeout_s
        self._collectives = 0
        self._sent_keys: list[str] = []  # keys of rank 0's results that some ranks may not have read yet

    @property
    def timeout_s(self) -> float:
        """How long a rank waits for the others, in seconds."""
        return self._timeout_s

    def all_gather(self, data: bytes) -> list[bytes]:
        """Return the data of every rank, in rank order."""
        messages = self._gather_on_root(data)
        return split_fields(self._broadcast_from_root(join_fields(messages)))

    def gather(self, data: bytes) -> list[bytes]:
        """Return on rank 0 the data of every rank; nothing on the other ranks, which do not wait."""
        return self._gather_on_root(data)

    def all_reduce_max(self, numbers: Sequence[int], *, step: bytes) -> list[int]:
        """Return the element-wise maximum over all ranks."""
        by_rank = [json.loads(data) for data in self._gather_on_root(json.dumps(list(numbers)).encode())]
        # Only rank 0 compares: on the other ranks `by_rank` is empty, and the maximum comes from rank 0.
        if len({len(of_rank) for of_rank in by_rank}) > 1:
            raise RankFailedError(
                "Ranks are at different steps: they sent different counts of numbers to compare. Call the "
                "same functions in the same order on all ranks, with equal arguments and options."
            )
        largest = [max(column) for column in zip(*by_rank, strict=True)]
        largest_of_ranks: list[int] = json.loads(self._broadcast_from_root(json.dumps(largest).encode()))
        return largest_of_ranks

    def scatter(self, parts: Sequence[bytes]) -> bytes:
        """Return this rank's part; rank 0 gives the parts of all ranks."""
        self._collectives += 1
        if self.rank:
            return self._receive_message(self._key(f"for/{self.rank}"), from_rank=0)
        # Each part has one reader, which removes it. So these keys are not kept in `_sent_keys`.
        for rank in range(1, self.size):
            self._send_message(self._key(f"for/{rank}"), parts[rank])
        return parts[0]

    def leave(self) -> None:
        """Leave the group. Rank 0 waits until all ranks have left, and removes the keys of the group.

        If a rank does not leave, rank 0 waits for a short time and raises no error; its last messages stay in
        the store.
        """
        left = left_key(self._prefix)
        with contextlib.suppress(RuntimeError):
            if self.rank:
                self._store.add(left, 1)
                return
            began = time.monotonic()
            while self._store.add(left, 0) < self.size - 1:
                # The trainer kills a writer process that waits longer: it looks stuck.
                is_aborted = self._store.check([abort_key(self._prefix)])
                limit_s = LEAVE_ABORTED_S if is_aborted else LEAVE_S
                if time.monotonic() - began > min(limit_s, self._timeout_s):
                    return  # without deleting keys: a late rank must still find the error
                time.sleep(0.005)
            # All ranks have left, so nobody reads these keys any more.
            for key in (*self._sent_keys, left, abort_key(self._prefix)):
                self._store.delete_key(key)

    def _gather_on_root(self, data: bytes) -> list[bytes]:
        """Return on rank 0 the data of each rank, and an empty list on the other ranks."""
        self._collectives += 1
        if self.rank:
            self._send_message(self._key(str(self.rank)), data)
            return []
        others = range(1, self.size)
        deadline = time.monotonic() + self._timeout_s  # one deadline for all ranks
        messages = [
            data,
            *(self._receive_message(self._key(str(r)), from_rank=r, deadline=deadline) for r in others),
        ]
        for key in self._sent_keys:  # a rank that has sent this message has read the earlier results
            self._ask(self._store.delete_key, key)
        self._sent_keys = []
        return messages

    def _broadcast_from_root(self, data: bytes) -> bytes:
        """Return rank 0's data on every rank."""
        key = self._key("all")
        if self.rank:
            return self._receive_message(key, from_rank=0, keep=True)
        if self.size > 1:
            self._sent_keys += self._send_message(key, data)
        return data

    def _send_message(self, key: str, data: bytes) -> list[str]:
        """Store a message in parts, the first part last; return the keys of the parts."""
        count = max(1, -(-len(data) // PART_BYTES))
        keys = [key, *(f"{key}.{n}" for n in range(1, count))]
        # The receiver waits for the first part only. So all others must be in the store before it.
        for n in reversed(range(count)):
            part = data[n * PART_BYTES : (n + 1) * PART_BYTES]
            head = count.to_bytes(4, "little") if n == 0 else b""
            self._ask(self._store.set, keys[n], head + part)
        return keys

    def _receive_message(
        self, key: str, *, from_rank: int, keep: bool = False, deadline: float | None = None
    ) -> bytes:
        """Wait for a message and return it; unless keep, remove it."""
        # Rank 0 names the missing ranks; the others wait a little longer, so that it can.
        self._await(key, from_rank, deadline or time.monotonic() + self._timeout_s + 2 * LOOK_EVERY_S)
        first = self._ask(self._store.get, key)
        keys = [f"{key}.{n}" for n in range(1, int.from_bytes(first[:4], "little"))]
        rest = [self._ask(self._store.get, name) for name in keys]
        for name in () if keep else (key, *keys):
            self._ask(self._store.delete_key, name)
        return b"".join((first[4:], *rest))

    def _await(self, key: str, from_rank: int, deadline: float) -> None:
        """Return when a key exists; raise an error on all ranks if the deadline passes first."""
        while True:
            rest_s = deadline - time.monotonic()
            if rest_s <= 0:
                self._give_up(self._missing_ranks(from_rank))
            # Short waits: between two of them, this rank sees whether another rank has given up.
            wait = timedelta(seconds=max(0.001, min(rest_s, LOOK_EVERY_S)))
            try:
                self._store.wait([key], wait)
            except dist.DistStoreError:  # the message is not there yet
                self._while_waiting()
                self._look_for_abort()
            except RuntimeError as error:
                raise self._store_is_gone(error) from error
            else:
                return

    def _look_for_abort(self) -> None:
        key = abort_key(self._prefix)
        if self._ask(self._store.check, [key]):
            raise decode_error(self._ask(self._store.get, key))

    def _missing_ranks(self, from_rank: int) -> list[int]:
        """Return the ranks whose message is missing; from_rank is the first."""
        missing = [from_rank]
        if self.rank == 0:
            later = range(from_rank + 1, self.size)
            # Rank 0 reads messages in rank order, so those of later ranks may have come.
            missing += [r for r in later if not self._ask(self._store.check, [self._key(str(r))])]
        return missing

    def _give_up(self, missing: Sequence[int]) -> NoReturn:
        """Raise an error on all ranks. It names the ranks that have not answered."""
        error = WriterFailedError(
            f"No answer from the writer process of rank(s) {describe_ranks(missing)} within "
            f"{self._timeout_s:g} s (seen by rank {self.rank}). That process or its rank is stuck, or gone: "
            f"look at its log. Raise timeout_s if it was only slow.",
            rank=missing[0],
        )
        raise self.abort(error)

    def abort(self, error: Exception) -> CheckpointError:
        """Make the other ranks raise an error, and return the error that all ranks raise. Local.

        If another rank gave up first, all ranks raise the error of that rank.
        """
        encoded = encode_error(error)
        with contextlib.suppress(RuntimeError):  # if the store is gone, they fail without this
            encoded = first_error(self._store, self._prefix, encoded)
        return decode_error(encoded)

    def _ask(self, request: Callable[..., T], *arguments: Any) -> T:
        try:
            return request(*arguments)
        except RuntimeError as error:
            raise self._store_is_gone(error) from error

    def _store_is_gone(self, error: RuntimeError) -> WriterFailedError:
        if isinstance(error, StoreTimeoutError):
            return WriterFailedError(
                f"Rank 0, which hosts the store of the writer processes, did not answer within "
                f"{error.waited_s:g} s (seen by rank {self.rank}). That process is stopped or stuck, or its "
                f"node is: look at its log. Raise timeout_s if it was only slow.",
                rank=0,
            )
        return WriterFailedError(
            f"The store of the writer processes is gone (seen by rank {self.rank}: {first_line(error)}). "
            f"Rank 0 hosts it: that process has ended; look at its log.",
            rank=0,
        )

    def _key(self, name: str) -> str:
        # Without the number, a late message of one collective could be read in the next one.
        return f"{self._prefix}/{self._collectives}/{name}"
