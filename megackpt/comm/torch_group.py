"""A Group over torch.distributed.

Owns a CPU (gloo) process group of its own with its own deadline, so that checkpointing neither waits behind
the training's collectives nor hangs with them, and names the ranks that did not answer.
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

from megackpt.comm.group import MAX_NUMBERS, Group, PeerBuffer, all_gather_by_exchange
from megackpt.comm.messages import check_same_step, describe_ranks, read_step_header
from megackpt.comm.missing_ranks import (
    ROLL_CALL_S,
    describe_lost_rendezvous,
    find_missing_ranks,
    rendezvous_port,
    rendezvous_rank,
)
from megackpt.comm.store_client import CallThread
from megackpt.errors import RankFailedError

T = TypeVar("T")
_c10d: Any = dist.distributed_c10d  # gloo's class and options: not all builds of torch have them

# How many groups of the same ranks were connected, in each world.
_CONNECTED: weakref.WeakKeyDictionary[Any, Counter[tuple[int, ...]]] = weakref.WeakKeyDictionary()

_ALL_GATHER, _GATHER, _MAXIMUM, _SCATTER, _COLLECT = 1, 2, 3, 4, 5
_WORDS = 3 + MAX_NUMBERS
_MOST_ENCLOSED_BYTES = 2048  # by each rank, of what a meeting gathers: the rest is sent afterwards
_STEP_BYTES = 200
_SMALL_BYTES = 2**20  # of all ranks together: up to this, one collective is faster than messages one by one

_ENDING_S = 2.0  # longer than the deadline: torch says itself what is wrong where it can


@dataclass(frozen=True, slots=True)
class _Opened:
    """What a rank has heard as a meeting began.

    Attributes:
        numbers: the largest that ranks gave, number by number.
        enclosed: on rank 0, the first bytes of what each had for it, padded; nothing on others.
    """

    numbers: list[int]
    enclosed: list[bytes]


class TorchGroup(Group):
    """Messages between the ranks of a torch process group, each with a deadline.

    ranks are those of torch.distributed, ascending; None for all of them. Creating one is a collective over
    these ranks, and over no others. Messages may have different lengths on each rank.

    Raises:
        RankFailedError: from every method, when a rank did not answer within `timeout_s`; also when they
            cannot be connected.
    """

    def __init__(self, *, ranks: Sequence[int] | None = None, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._ranks = list(range(dist.get_world_size())) if ranks is None else list(ranks)
        self.rank = self._ranks.index(dist.get_rank())
        self.size = len(self._ranks)
        self._name, self._group = self._connected()
        self._meetings = 0  # how often all have waited for each other
        self._opening_work: Any = None  # dist.Work of the meeting that was begun last
        self._has_returned = True  # as far as it was waited for
        self._process = os.getpid()
        # Rank 0 is sent so many by all, in every meeting: to begin with all meetings have to be alike.
        self._enclosed_bytes = max(8, min(_MOST_ENCLOSED_BYTES, _SMALL_BYTES // self.size))

    def _connected(self) -> tuple[str, Any]:
        """Return a new gloo process group of the ranks, and the name under which they met in its store.

        Not by `dist.new_group`: with use_local_synchronization=True it takes the name, under which ranks find
        each other, from the number of groups that this process is a member of. Under pipeline parallelism
        that number differs between ranks, so they would wait for each other under different names. Our name
        is made of the ranks, and of how many groups of just these ranks there were.
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
        most_s = self._timeout_s + _ENDING_S
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
            tolerance = int(self._timeout_s) + 6
            first, who, hint = self._absent(
                f"{name}/unmet", int(time.time()), tolerance=tolerance, waited_s=time.monotonic() - began
            )
            raise RankFailedError(
                f"The ranks could not be connected: no answer from {who} (seen by rank {dist.get_rank()}): "
                f"{error}. Look at the logs of the others, and call with an equal timeout_s and equal groups "
                f"on all of them.{hint}",
                rank=first,
            ) from error
        counts[members] += 1  # not before: a rank that failed has to find the others at its next try
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
        """Whether nothing is under way: what this rank has begun is over, and was not broken off.

        Never in a fork of the process, which has none of the threads.
        """
        work = self._opening_work
        is_over = self._has_returned and (work is None or work.is_completed())
        return is_over and self._process == os.getpid()

    def close(self) -> None:
        """Let go of the connections; the group cannot be used any more. Every rank calls it, or ends."""
        self._group = self._opening_work = None

    def all_gather(self, data: bytes) -> list[bytes]:
        """Return what every rank gave, in rank order."""
        self._meetings += 1
        return self._guarded(lambda: self._all_gather(data))

    def gather(self, data: bytes) -> list[bytes]:
        """Return on rank 0 what every rank gave; nothing on the others."""
        self._meetings += 1
        return self._guarded(lambda: self._gather(data))

    def all_reduce_max(self, numbers: Sequence[int], *, step: bytes) -> list[int]:
        """Return the largest of what the ranks gave, number by number; each sends each one small message."""
        return self.begin_all_reduce_max(numbers, step=step)()

    def begin_all_reduce_max(self, numbers: Sequence[int], *, step: bytes) -> Callable[[], list[int]]:
        """Send the numbers; return a function that waits for the other ranks and returns the maximum."""
        self._meetings += 1
        opened = self._guarded(lambda: self._opening(_MAXIMUM, numbers, step))
        return lambda: self._guarded(lambda: opened().numbers[: len(numbers)])

    def all_reduce_max_then_gather(
        self, numbers: Sequence[int], data: bytes, *, step: bytes
    ) -> tuple[list[int], Callable[[], list[bytes]]]:
        """`all_reduce_max`, and what `gather` returns, by a function that all call next or none."""
        self._meetings += 1
        return self._guarded(lambda: self._collect(numbers, data, step))

    def scatter(self, parts: Sequence[bytes]) -> bytes:
        """Return this rank's part; rank 0 gives those of all."""
        self._meetings += 1
        return self._guarded(lambda: self._scatter(parts))

    def exchange(self, sends: Sequence[PeerBuffer], receives: Sequence[PeerBuffer]) -> None:
        """Move parcels between pairs of ranks, all of them at once."""
        self._guarded(lambda: self._exchange(sends, receives))

    def broadcast(self, data: memoryview, *, root: int) -> None:
        """Fill data on every rank with what root has in it."""
        if data.nbytes:
            options = _c10d.BroadcastOptions()
            options.rootRank = root
            self._guarded(lambda: self._group.broadcast([_tensor_over(data)], options).wait())

    def all_gather_into(self, data: memoryview, gathered: memoryview) -> None:
        """Fill gathered with the data of each rank, in rank order.

        Not with gloo's all-gather, which makes a copy of everything.
        """
        all_gather_by_exchange(self, data, gathered)

    def _exchange(self, sends: Sequence[PeerBuffer], receives: Sequence[PeerBuffer]) -> None:
        deadline = time.monotonic() + self._timeout_s
        # The tag is the number of the message between two ranks, so that none takes another's place.
        coming, going = Counter[int](), Counter[int]()
        under_way: list[Any] = []  # dist.Work, which torch has only where it was built with it
        for peer, data in receives:
            under_way.append(self._group.recv([_tensor_over(data)], peer, coming[peer]))
            coming[peer] += 1
        for peer, data in sends:
            under_way.append(self._group.send([_tensor_over(data)], peer, going[peer]))
            going[peer] += 1
        for work in under_way:
            work.wait(timedelta(seconds=max(0.001, deadline - time.monotonic())))

    def _open(self, kind: int, numbers: Sequence[int], said: bytes, data: bytes = b"") -> _Opened:
        """Begin a meeting, and wait for the others; see `_opening`."""
        return self._opening(kind, numbers, said, data)()

    def _opening(
        self, kind: int, numbers: Sequence[int], said: bytes, data: bytes = b""
    ) -> Callable[[], _Opened]:
        """Begin a meeting: all of them alike, so that none is taken for another.

        Return a function that waits for the others; it raises RankFailedError if they are in a meeting of
        another kind. said begins with the name of a step.
        """
        words = [kind, -kind, *numbers]
        head = struct.pack(f"<{_WORDS}q", *words, *[0] * (_WORDS - len(words)))
        enclosed = data[: self._enclosed_bytes].ljust(self._enclosed_bytes, b"\0")
        told = bytearray(head + enclosed + head * (self.size - 1))
        longer = len(head) + len(enclosed)
        heard = torch.empty(self.size * (len(head) if self.rank else longer), dtype=torch.uint8)
        # Not gloo's all-reduce: that is a ring of 4 (size - 1) messages a rank, each waiting for the one
        # before. Here it is size - 1, all at once; and whoever is gone is missed by all at once.
        work = self._group.alltoall_base(
            heard,
            torch.frombuffer(told, dtype=torch.uint8),
            [len(head) if self.rank else longer] * self.size,
            [longer] + [len(head)] * (self.size - 1),
        )
        self._opening_work = work

        def opened() -> _Opened:
            work.wait()
            return self._heard(heard, len(head), said)

        return opened

    def _heard(self, heard: torch.Tensor, head: int, said: bytes) -> _Opened:
        """Take apart what all ranks have sent, head bytes of numbers each."""
        of_ranks = heard.numpy().reshape(self.size, -1)
        found: list[int] = of_ranks[:, :head].copy().view(np.int64).max(0).tolist()
        if found[0] != -found[1]:  # every rank sees it, so they can ask each other
            step = read_step_header(said)[:_STEP_BYTES]
            check_same_step(self._gather_equal(_padded(step, _STEP_BYTES)), step)
            raise RankFailedError(
                "Ranks are at different steps, which have no names. Call the same functions in the same "
                "order on all ranks, with equal options."
            )
        return _Opened(found[2:], [] if self.rank else [one[head:].tobytes() for one in of_ranks])

    def _gather_equal(self, data: torch.Tensor) -> list[bytes]:
        """All-gather buffers that are equally long."""
        received = torch.empty(self.size * len(data), dtype=torch.uint8)
        self._group.allgather([list(received.chunk(self.size))], [data]).wait()
        everyone, length = received.numpy().tobytes(), len(data)
        return [everyone[i : i + length] for i in range(0, len(everyone), length)]

    def _all_gather(self, data: bytes) -> list[bytes]:
        longest = self._open(_ALL_GATHER, [len(data)], data).numbers[0]
        head = len(data).to_bytes(8, "little")
        received = self._gather_equal(_padded(head + data, 8 + longest))
        return [m[8 : 8 + int.from_bytes(m[:8], "little")] for m in received]

    def _collect(
        self, numbers: Sequence[int], data: bytes, step: bytes
    ) -> tuple[list[int], Callable[[], list[bytes]]]:
        opened = self._open(_COLLECT, [len(data), *numbers], step, _headed(data))
        gathered = partial(self._guarded, lambda: self._gathered(data, opened))
        return opened.numbers[1 : 1 + len(numbers)], gathered

    def _gather(self, data: bytes) -> list[bytes]:
        return self._gathered(data, self._open(_GATHER, [len(data)], data, _headed(data)))

    def _gathered(self, data: bytes, opened: _Opened) -> list[bytes]:
        """Send rank 0 what the opening of the meeting had no room for: see `_open`, and `_Opened`.

        The first of the largest numbers is the length of the longest.
        """
        padded = 8 + opened.numbers[0]
        lengths = [int.from_bytes(part[:8], "little") for part in opened.enclosed]
        if padded <= self._enclosed_bytes:
            return [part[8 : 8 + n] for n, part in zip(lengths, opened.enclosed, strict=True)]
        if padded * self.size <= _SMALL_BYTES:
            sent = _padded(data, padded)
            received = [torch.empty_like(sent) for _ in range(self.size)] if self.rank == 0 else []
            self._group.gather([received] if received else [], [sent], _c10d.GatherOptions()).wait()
            return [bytes(r[:n].numpy()) for r, n in zip(received, lengths, strict=True)]
        if self.rank == 0:
            buffers = [bytearray(n) for n in lengths]
            self._exchange([], [(r, memoryview(b)) for r, b in enumerate(buffers) if r and b])
            return [data, *(bytes(b) for b in buffers[1:])]
        if data:
            self._exchange([(0, memoryview(bytearray(data)))], [])
        return []

    def _scatter(self, parts: Sequence[bytes]) -> bytes:
        """Send each what is its own, as `_gather` does."""
        padded = 8 + self._open(_SCATTER, [max(map(len, parts), default=0)], b"").numbers[0]
        is_small = padded * self.size <= _SMALL_BYTES
        mine = torch.empty(padded if is_small else 8, dtype=torch.uint8)
        heads = [len(p).to_bytes(8, "little") + (p if is_small else b"") for p in parts]
        sent = [[_padded(head, len(mine)) for head in heads]] if self.rank == 0 else []
        self._group.scatter([mine], sent, _c10d.ScatterOptions()).wait()
        length = int.from_bytes(bytes(mine[:8].numpy()), "little")
        if is_small:
            return bytes(mine[8 : 8 + length].numpy())
        if self.rank == 0:
            self._exchange([(r, memoryview(bytearray(p))) for r, p in enumerate(parts) if r and p], [])
            return parts[0]
        buffer = bytearray(length)
        if buffer:
            self._exchange([], [(0, memoryview(buffer))])
        return bytes(buffer)

    def _guarded(self, exchange: Callable[[], T]) -> T:
        if self._group is None:
            raise RankFailedError("The connections of this group are closed. Take another group.")
        began = time.monotonic()
        self._has_returned = False
        try:
            returned = exchange()
            self._has_returned = True
            return returned
        except RankFailedError:  # a RuntimeError, too, that says already what happened
            raise
        except (RuntimeError, ValueError) as error:  # what gloo raises for a lost peer or a passed deadline
            waited_s = time.monotonic() - began
            # Some get further than others before they notice, but none past the meeting behind the next one.
            first, who, hint = self._absent(
                f"{self._name}/lost", self._meetings, tolerance=2, waited_s=waited_s
            )
            if waited_s < 0.95 * self._timeout_s:
                text = (
                    f"No answer from {who} (seen by rank {self.rank}): the connection broke after "
                    f"{waited_s:.1f} s, before the deadline of {self._timeout_s:g} s. That process is gone, "
                    f"or has failed itself: look at its log."
                )
            else:
                text = (
                    f"No answer from {who} within {self._timeout_s:g} s (seen by rank {self.rank}). That "
                    f"process died or is stuck: look at its log. Raise timeout_s if it was only slow."
                )
            raise RankFailedError(text + hint, rank=first) from error

    def _absent(
        self, name: str, mark: int, *, tolerance: int, waited_s: float
    ) -> tuple[int | None, str, str]:
        """Ask which ranks are missing: return the first of them, text that names all, and a further hint."""
        reports = find_missing_ranks(
            name,
            rank=self.rank,
            size=self.size,
            mark=mark,
            tolerance=tolerance,
            waited_s=waited_s,
            timeout_s=min(ROLL_CALL_S, self._timeout_s),
        )
        if reports is None:
            return rendezvous_rank(), "a rank", f" {describe_lost_rendezvous()}"
        missing, late = ([self._ranks[r] for r in ranks] for ranks in reports)
        if missing:
            return missing[0], f"rank(s) {describe_ranks(missing)}", ""
        if late:
            return late[0], f"rank(s) {describe_ranks(late)}, which answered only later,", ""
        return None, "a rank that has answered since", ""


def _headed(data: bytes) -> bytes:
    return len(data).to_bytes(8, "little") + data[:_MOST_ENCLOSED_BYTES]


def _tensor_over(data: memoryview) -> torch.Tensor:
    return torch.frombuffer(data, dtype=torch.uint8)


def _padded(data: bytes, length: int) -> torch.Tensor:
    buffer = torch.zeros(length, dtype=torch.uint8)
    if data:
        buffer[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    return buffer
