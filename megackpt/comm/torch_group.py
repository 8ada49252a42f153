"""The group over torch.distributed.

A `TorchGroup` has its own CPU (gloo) process group with its own deadline. So checkpointing neither waits
behind the collectives of the training nor hangs with them, and an error names the ranks that did not answer.
"""

from __future__ import annotations

import hashlib
import os
import struct
import time
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist

from megackpt.comm.group import MAX_NUMBERS, Group, PeerBuffer, check_same_step, first_line, read_step_header
from megackpt.comm.missing_ranks import (
    describe_lost_rendezvous,
    describe_missing_ranks,
    rendezvous_port,
    rendezvous_rank,
)
from megackpt.comm.store_client import CallThread, StoreClient
from megackpt.errors import RankFailedError

T = TypeVar("T")
_c10d: Any = dist.distributed_c10d  # gloo's class and options: not all builds of torch have them

# How many groups of the same ranks were connected, for each default process group of torch.distributed.
_CONNECTED: weakref.WeakKeyDictionary[Any, Counter[tuple[int, ...]]] = weakref.WeakKeyDictionary()

_ALL_GATHER, _GATHER, _MAXIMUM, _SCATTER, _COLLECT, _REDUCE = 1, 2, 3, 4, 5, 6
_HEAD_NUMBERS = 3 + MAX_NUMBERS
_MAX_ENCLOSED_BYTES = 2048  # of each rank's data that go with the first message of a gather
_STEP_BYTES = 200
_SMALL_BYTES = 2**20  # of all ranks in sum: up to this, one collective is faster than single messages

_EXTRA_S = 2.0  # beyond the deadline, so that torch can raise its own error first


@dataclass(frozen=True, slots=True)
class _FirstMessages:
    """What a rank received in the first message of every rank of a collective.

    Attributes:
        numbers: element-wise maximum of the numbers of all ranks.
        sums: element-wise sums of the same numbers; right where a sum fits into 64 bits.
        enclosed: on rank 0, the first bytes of each rank's data, padded; empty on the other ranks.
    """

    numbers: list[int]
    sums: list[int]
    enclosed: list[bytes]


class TorchGroup(Group):
    """A group of ranks of torch.distributed, with connections and a deadline of its own.

    The constructor is a collective over these ranks only.

    Args:
        ranks: ranks of torch.distributed, ascending; None for all of them.
        timeout_s: how long a rank waits for the others, in seconds; equal on all ranks.

    Raises:
        RankFailedError: from every method, when a rank did not answer within timeout_s; from the constructor
            also when the ranks cannot be connected.
    """

    def __init__(self, *, ranks: Sequence[int] | None = None, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._ranks = list(range(dist.get_world_size())) if ranks is None else list(ranks)
        self.rank = self._ranks.index(dist.get_rank())
        self.size = len(self._ranks)
        self._name, self._group = self._connect()
        self._transport: Any = None  # a Transport, opened by the first exchange
        self._collectives = 0  # how many collectives this rank has begun
        self._first_work: Any = None  # dist.Work of the first messages of the last collective
        self._has_returned = True  # whether the last collective has returned without an error
        self._process = os.getpid()
        # The first messages of all collectives have one length, so that none is taken for another: every rank
        # sends rank 0 so many bytes of data in each of them.
        self._enclosed_bytes = max(8, min(_MAX_ENCLOSED_BYTES, _SMALL_BYTES // self.size))

    def _connect(self) -> tuple[str, Any]:
        """Return a name that only this group has, and a new gloo process group of the ranks.

        `dist.new_group` is not used: with use_local_synchronization=True it makes the name, under which ranks
        find each other, from the number of groups that this process is a member of. Under pipeline
        parallelism that number differs between ranks, so they would wait under different names. The name here
        is made of the ranks, and of the number of groups of exactly these ranks.
        """
        counts = _CONNECTED.setdefault(dist.group.WORLD, Counter())
        members = tuple(self._ranks)
        digest = hashlib.sha256(repr(members).encode()).hexdigest()[:16]
        name = f"megackpt/{digest}/{counts[members]}"

        def connect() -> Any:
            store = dist.PrefixStore(name, _c10d._get_default_store())  # type: ignore[attr-defined]
            timeout = timedelta(seconds=self._timeout_s)
            return _c10d.ProcessGroupGloo(store, self.rank, self.size, timeout=timeout)

        # The store has no deadline if the process that serves it is stopped; gloo has one.
        most_s = self._timeout_s + _EXTRA_S
        began = time.monotonic()
        try:
            group = CallThread(rendezvous_port()).call(connect, timeout_s=most_s)
        except TimeoutError:
            raise RankFailedError(
                f"The ranks could not be connected within {most_s:g} s (seen by rank {dist.get_rank()}): "
                f"{describe_lost_rendezvous()}",
                rank=rendezvous_rank(),
            ) from None
        except RuntimeError as error:  # what the rendezvous store and gloo raise
            waited_s, tolerance = time.monotonic() - began, int(self._timeout_s) + 6
            first, who, hint = describe_missing_ranks(
                f"{name}/unmet", self._ranks, int(time.time()), tolerance, waited_s, self._timeout_s
            )
            raise RankFailedError(
                f"The ranks could not be connected: no answer from {who} (seen by rank {dist.get_rank()}): "
                f"{first_line(error)}. Look at the logs of the others, and call with an equal timeout_s and "
                f"equal groups on all of them.{hint}",
                rank=first,
            ) from error
        counts[members] += 1  # only now: a rank that failed must use the same name at its next attempt
        return name, group

    @property
    def timeout_s(self) -> float:
        """How long a rank waits for the others, in seconds."""
        return self._timeout_s

    @property
    def ranks(self) -> tuple[int, ...]:
        """The members' ranks in torch.distributed."""
        return tuple(self._ranks)

    @property
    def is_idle(self) -> bool:
        """Whether every collective of this rank has ended without an error; False in a forked process."""
        work = self._first_work
        is_over = self._has_returned and (work is None or work.is_completed())
        return is_over and self._process == os.getpid()

    def close(self) -> None:
        """Close the connections. The group cannot be used afterwards; all ranks close it, or end."""
        if self._transport is not None:
            self._transport.close()
        self._group = self._first_work = self._transport = None

    def all_gather(self, data: bytes) -> list[bytes]:
        """Return the data of every rank, in rank order."""
        self._collectives += 1
        return self._guarded(lambda: self._all_gather(data))

    def gather(self, data: bytes) -> list[bytes]:
        """Return on rank 0 the data of every rank, and an empty list on the other ranks."""
        self._collectives += 1
        return self._guarded(lambda: self._gather(data))

    def all_reduce_max(self, numbers: Sequence[int], *, step: bytes) -> list[int]:
        """Return the element-wise maximum over all ranks. Each rank sends each other rank a small message."""
        return self.begin_all_reduce_max(numbers, step=step)()

    def begin_all_reduce_max(self, numbers: Sequence[int], *, step: bytes) -> Callable[[], list[int]]:
        """Send the numbers; return a function that waits for the other ranks and returns the maximum."""
        self._collectives += 1
        wait = self._guarded(lambda: self._send_first(_MAXIMUM, numbers, step))
        return lambda: self._guarded(lambda: wait().numbers[: len(numbers)])

    def all_reduce(
        self, largest: Sequence[int], added: Sequence[int], *, step: bytes
    ) -> tuple[list[int], list[int]]:
        """Return the element-wise maximum and the sums over all ranks; one message, as `all_reduce_max`."""
        self._collectives += 1
        first = self._guarded(lambda: self._send_first(_REDUCE, (*largest, *added), step)())
        return first.numbers[: len(largest)], first.sums[len(largest) : len(largest) + len(added)]

    def all_reduce_max_then_gather(
        self, numbers: Sequence[int], data: bytes, *, step: bytes
    ) -> tuple[list[int], Callable[[], list[bytes]]]:
        """Return the element-wise maximum, and a function that gathers data on rank 0."""
        self._collectives += 1
        return self._guarded(lambda: self._reduce_then_gather(numbers, data, step))

    def scatter(self, parts: Sequence[bytes]) -> bytes:
        """Return this rank's part; rank 0 gives the parts of all ranks."""
        self._collectives += 1
        return self._guarded(lambda: self._scatter(parts))

    def exchange(self, sends: Sequence[PeerBuffer], receives: Sequence[PeerBuffer]) -> None:
        """Send and receive between pairs of ranks, all of them at once."""
        self._guarded(lambda: self._exchange(sends, receives))

    def broadcast(self, data: memoryview, *, root: int) -> None:
        """Fill data on every rank with the bytes that root has in it."""
        if data.nbytes:
            options = _c10d.BroadcastOptions()
            options.rootRank = root
            tensor = torch.frombuffer(data, dtype=torch.uint8)
            self._guarded(lambda: self._group.broadcast([tensor], options).wait())

    def _exchange(self, sends: Sequence[PeerBuffer], receives: Sequence[PeerBuffer]) -> None:
        if self._transport is None:
            self._transport = self._open_transport()
        self._transport.begin(sends, receives, timeout_s=self._timeout_s).wait()

    def _open_transport(self) -> Any:
        from megackpt.comm.transport import MeshTransport, open_transport, transport_name

        if transport_name() == "gloo":
            return MeshTransport(self._group)
        client = StoreClient(
            _c10d._get_default_store,
            port=rendezvous_port(),
            connect_s=self._timeout_s,
            answer_s=self._timeout_s,
        )
        # Only gloo's transport uses the host, and it is not opened here.
        return open_transport(client, prefix=self._name, rank=self.rank, host="")

    def _send_first(
        self, kind: int, numbers: Sequence[int], step: bytes, data: bytes = b""
    ) -> Callable[[], _FirstMessages]:
        """Send the first messages of a collective; they have one form, so that none is taken for another.

        Args:
            kind: of the collective.
            numbers: at most MAX_NUMBERS + 1, to maximise or to add.
            step: a message that begins with a step header, or an empty one.
            data: for rank 0, as much as there is room for.

        Returns:
            A function that waits for the first messages of the other ranks. It raises RankFailedError if they
            have begun a collective of another kind.
        """
        head_numbers = [kind, -kind, *numbers]
        padding = [0] * (_HEAD_NUMBERS - len(head_numbers))
        head = struct.pack(f"<{_HEAD_NUMBERS}q", *head_numbers, *padding)
        enclosed = data[: self._enclosed_bytes].ljust(self._enclosed_bytes, b"\0")
        # Only rank 0 uses the enclosed data, so the others receive just the head.
        sent = bytearray(head + enclosed + head * (self.size - 1))
        to_rank_0 = len(head) + len(enclosed)
        received = torch.empty(self.size * (len(head) if self.rank else to_rank_0), dtype=torch.uint8)
        # gloo's all-reduce is a ring of 4 (size - 1) messages a rank, and each waits for the one before.
        # This is size - 1 messages at once, and all ranks notice at the same time that a rank is gone.
        work = self._group.alltoall_base(
            received,
            torch.frombuffer(sent, dtype=torch.uint8),
            [len(head) if self.rank else to_rank_0] * self.size,
            [to_rank_0] + [len(head)] * (self.size - 1),
        )
        self._first_work = work

        def wait() -> _FirstMessages:
            work.wait()
            return self._read_first(received, len(head), step)

        return wait

    def _read_first(self, received: torch.Tensor, head_bytes: int, step: bytes) -> _FirstMessages:
        """Split the first messages of all ranks into numbers, which are reduced, and enclosed data."""
        messages = received.numpy().reshape(self.size, -1)
        # The columns of a larger array are not contiguous, and a view as integers needs rows that are.
        heads = messages[:, :head_bytes].copy().view(np.int64)
        numbers: list[int] = heads.max(0).tolist()
        # The maximum of the kinds differs from their minimum. All ranks see that, so they send their steps.
        if numbers[0] != -numbers[1]:
            header = read_step_header(step)[:_STEP_BYTES]
            check_same_step(self._gather_equal(_padded(header, _STEP_BYTES)), header)
            raise RankFailedError(
                "Ranks are at different steps of a save or load. Call the same functions in the same order "
                "on all ranks, with equal options."
            )
        enclosed = [] if self.rank else [message[head_bytes:].tobytes() for message in messages]
        return _FirstMessages(numbers[2:], heads[:, 2:].sum(0).tolist(), enclosed)

    def _gather_equal(self, data: torch.Tensor) -> list[bytes]:
        """All-gather messages of equal length."""
        received = torch.empty(self.size * len(data), dtype=torch.uint8)
        self._group.allgather([list(received.chunk(self.size))], [data]).wait()
        return [message.tobytes() for message in received.numpy().reshape(self.size, -1)]

    def _all_gather(self, data: bytes) -> list[bytes]:
        # gloo gathers messages of one length, so all are padded to the longest.
        # Data that begins with a step header is also the step: an error names it if the kinds differ.
        longest = self._send_first(_ALL_GATHER, [len(data)], data)().numbers[0]
        head = len(data).to_bytes(8, "little")
        received = self._gather_equal(_padded(head + data, 8 + longest))
        return [m[8 : 8 + int.from_bytes(m[:8], "little")] for m in received]

    def _reduce_then_gather(
        self, numbers: Sequence[int], data: bytes, step: bytes
    ) -> tuple[list[int], Callable[[], list[bytes]]]:
        first = self._send_first(_COLLECT, [len(data), *numbers], step, _with_length(data))()
        gather = partial(self._guarded, lambda: self._gather_rest(data, first))
        return first.numbers[1 : 1 + len(numbers)], gather

    def _gather(self, data: bytes) -> list[bytes]:
        return self._gather_rest(data, self._send_first(_GATHER, [len(data)], data, _with_length(data))())

    def _gather_rest(self, data: bytes, first: _FirstMessages) -> list[bytes]:
        """Gather data on rank 0; the first number of the first messages is the length of the longest data."""
        padded = 8 + first.numbers[0]
        lengths = [int.from_bytes(enclosed[:8], "little") for enclosed in first.enclosed]
        # Short data came with the first messages. Longer data takes one collective, long data a message each.
        if padded <= self._enclosed_bytes:
            return [enclosed[8 : 8 + n] for n, enclosed in zip(lengths, first.enclosed, strict=True)]
        if padded * self.size <= _SMALL_BYTES:
            sent = _padded(data, padded)
            received = [torch.empty_like(sent) for _ in range(self.size)] if self.rank == 0 else []
            self._group.gather([received] if received else [], [sent], _c10d.GatherOptions()).wait()
            return [bytes(r[:n].numpy()) for r, n in zip(received, lengths, strict=True)]
        # Empty messages are not sent: rank 0 knows from the first messages which ranks have none.
        if self.rank == 0:
            buffers = [bytearray(n) for n in lengths]
            self._exchange([], [(r, memoryview(b)) for r, b in enumerate(buffers) if r and b])
            return [data, *(bytes(b) for b in buffers[1:])]
        if data:
            self._exchange([(0, memoryview(bytearray(data)))], [])
        return []

    def _scatter(self, parts: Sequence[bytes]) -> bytes:
        """Send each rank its part: in one collective if the parts are small, else one message each."""
        padded = 8 + self._send_first(_SCATTER, [max(map(len, parts), default=0)], b"")().numbers[0]
        is_small = padded * self.size <= _SMALL_BYTES
        received = torch.empty(padded if is_small else 8, dtype=torch.uint8)
        heads = [len(p).to_bytes(8, "little") + (p if is_small else b"") for p in parts]
        sent = [[_padded(head, len(received)) for head in heads]] if self.rank == 0 else []
        self._group.scatter([received], sent, _c10d.ScatterOptions()).wait()
        # Otherwise a rank has received only the length of its part, which follows in a message of its own.
        length = int.from_bytes(bytes(received[:8].numpy()), "little")
        if is_small:
            return bytes(received[8 : 8 + length].numpy())
        if self.rank == 0:
            self._exchange([(r, memoryview(bytearray(p))) for r, p in enumerate(parts) if r and p], [])
            return parts[0]
        buffer = bytearray(length)
        if buffer:
            self._exchange([], [(0, memoryview(buffer))])
        return bytes(buffer)

    def _guarded(self, exchange: Callable[[], T]) -> T:
        """Run a part of a collective, and raise an error that names the missing ranks if it fails."""
        if self._group is None:
            raise RankFailedError("The connections of this group are closed. Create a new group.")
        began = time.monotonic()
        # Before the call: after an interrupt such as KeyboardInterrupt, the group does not count as idle.
        self._has_returned = False
        try:
            returned = exchange()
            self._has_returned = True
            return returned
        except RankFailedError:  # it names the rank and the cause already
            raise
        except (RuntimeError, ValueError) as error:  # of gloo or a transport: a rank is lost or late
            waited_s = time.monotonic() - began
            # A rank may begin two more collectives before it notices, but no third one.
            first, who, hint = describe_missing_ranks(
                f"{self._name}/lost", self._ranks, self._collectives, 2, waited_s, self._timeout_s
            )
            raise RankFailedError(self._lost_text(who, waited_s) + hint, rank=first) from error

    def _lost_text(self, who: str, waited_s: float) -> str:
        if waited_s < 0.95 * self._timeout_s:
            return (
                f"No answer from {who} (seen by rank {self.rank}): the connection broke after {waited_s:.1f} "
                f"s, before the deadline of {self._timeout_s:g} s. That process is gone, or has failed "
                f"itself: look at its log."
            )
        return (
            f"No answer from {who} within {self._timeout_s:g} s (seen by rank {self.rank}). That process "
            f"died or is stuck: look at its log. Raise timeout_s if it was only slow."
        )


def _with_length(data: bytes) -> bytes:
    """Return the length of data and as many of its bytes as may be enclosed in a first message."""
    return len(data).to_bytes(8, "little") + data[:_MAX_ENCLOSED_BYTES]


def _padded(data: bytes, length: int) -> torch.Tensor:
    buffer = torch.zeros(length, dtype=torch.uint8)
    if data:
        buffer[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    return buffer
