"""A simulated world: ranks as threads of one process.

Its Group synchronises ranks at barriers in memory. The same save and load run on it as on real processes,
so a property test can try thousands of layouts in the time that starting one real world takes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from megackpt.comm import Group, PeerBuffer
from megackpt.comm.group import check_same_step
from megackpt.errors import RankFailedError

T = TypeVar("T")


class RankAbsentError(RankFailedError):
    """Another rank did not join a collective: it has ended, or it did not answer in time."""


class SimulatedWorld:
    r"""A number of ranks that run a function at the same time, each in a thread.

    >>> SimulatedWorld(3).run(lambda group: group.all_gather(bytes([group.rank])))[2]
    [b'\x00', b'\x01', b'\x02']

    Attributes:
        bytes_sent: how many bytes each rank has put into messages so far, `[size]`.
        messages: how many messages each rank has taken part in, `[size]`.
    """

    def __init__(self, size: int, *, timeout_s: float = 60.0) -> None:
        self.size = size
        self.bytes_sent = [0] * size
        self.messages = [0] * size
        self._timeout_s = timeout_s
        self._changed = threading.Condition()
        self._contributions: dict[int, Any] = {}  # what ranks gave to the present collective
        self._collective = 0
        self._results: list[Any] = []  # the contributions to the last one that ended
        self._gone: set[int] = set()
        self._parts: dict[tuple[int, ...], SimulatedWorld] = {}

    def run(self, fn: Callable[[SimulatedRank], T]) -> list[T]:
        """Return what `fn(group)` returned on each rank, or raise the lowest failing rank's error.

        The error of a rank comes before those of ranks that have waited for it in vain.
        """
        outcomes = self.outcomes(fn)
        errors = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
        if errors:
            raise next((error for error in errors if not isinstance(error, RankAbsentError)), errors[0])
        return outcomes

    def outcomes(self, fn: Callable[[SimulatedRank], T]) -> list[Any]:
        """Return per rank what `fn(group)` returned, or the exception that it raised."""

        def call(rank: int) -> T | Exception:
            try:
                return fn(SimulatedRank(self, rank))
            except Exception as error:  # noqa: BLE001 - an outcome like any other
                return error
            finally:
                self._leave(rank)

        self._contributions, self._gone, self._parts = {}, set(), {}
        if self.size == 1:
            return [call(0)]
        with ThreadPoolExecutor(max_workers=self.size) as pool:
            return list(pool.map(call, range(self.size)))

    def _leave(self, rank: int) -> None:
        """Let nobody wait for a rank that has ended."""
        with self._changed:
            self._gone.add(rank)
            self._changed.notify_all()
            parts = [(part, ranks.index(rank)) for ranks, part in self._parts.items() if rank in ranks]
        for part, at in parts:
            part._leave(at)

    def _part(self, ranks: tuple[int, ...]) -> SimulatedWorld:
        with self._changed:
            if ranks not in self._parts:
                self._parts[ranks] = SimulatedWorld(len(ranks), timeout_s=self._timeout_s)
                self._parts[ranks]._gone = {i for i, rank in enumerate(ranks) if rank in self._gone}
            return self._parts[ranks]

    def _meet(self, rank: int, data: Any, nbytes: int) -> list[Any]:
        with self._changed:
            self.bytes_sent[rank] += nbytes
            self.messages[rank] += 1
            self._contributions[rank] = data
            collective = self._collective
            if len(self._contributions) == self.size:
                # Nobody can finish the next collective before all have joined it, so the results stay until
                # all have read them.
                self._results = [self._contributions[r] for r in range(self.size)]
                self._contributions = {}
                self._collective += 1
                self._changed.notify_all()
            self._changed.wait_for(lambda: self._collective != collective or self._absent(), self._timeout_s)
            if self._collective == collective:
                ended = self._absent()
                who = sorted(ended or set(range(self.size)) - set(self._contributions))
                del self._contributions[rank]  # who comes late shall not find it complete
                self._gone.add(rank)
                how = "ended without this step" if ended else f"did not answer within {self._timeout_s:g} s"
                raise RankAbsentError(
                    f"Simulated rank(s) {who} {how}. Look at what they raised: SimulatedWorld.outcomes(fn) "
                    f"returns it for each rank."
                )
            return self._results

    def _absent(self) -> set[int]:
        """Return the ranks that ended and did not join the present collective."""
        return self._gone - set(self._contributions)


class SimulatedRank(Group):
    """One rank's group; see `Group` for what its methods do."""

    def __init__(self, world: SimulatedWorld, rank: int) -> None:
        self._world = world
        self.rank = rank
        self.size = world.size

    def subgroup(self, ranks: Sequence[int]) -> Group:
        """Return the group of some ranks of this one. Each of them calls it. Local."""
        members = tuple(ranks)
        return SimulatedRank(self._world._part(members), members.index(self.rank))

    def all_gather(self, data: bytes) -> list[bytes]:
        """Return what every rank gave."""
        everyone = self._world._meet(self.rank, data, len(data))
        return _messages(everyone)

    def gather(self, data: bytes) -> list[bytes]:
        """Return on rank 0 what every rank gave."""
        everyone = self._world._meet(self.rank, data, len(data))
        return everyone if self.rank == 0 else []

    def _columns(self, numbers: Sequence[int], step: bytes) -> list[tuple[int, ...]]:
        """Return each number of all ranks, for the reductions of `Group`."""
        everyone = self._world._meet(self.rank, (step, list(numbers)), 8 * len(numbers))
        check_same_step(_messages(everyone), step)
        return list(zip(*(numbers for _, numbers in everyone), strict=True))

    def scatter(self, parts: Sequence[bytes]) -> bytes:
        """Return this rank's part; rank 0 gives those of all."""
        everyone = self._world._meet(self.rank, list(parts), sum(map(len, parts)))
        return bytes(everyone[0][self.rank])

    def exchange(self, sends: Sequence[PeerBuffer], receives: Sequence[PeerBuffer]) -> None:
        """Send and receive between pairs of ranks."""
        going = [(peer, bytes(data)) for peer, data in sends]
        everyone = self._world._meet(self.rank, going, sum(len(data) for _, data in going))
        coming = {peer: iter([d for to, d in sent if to == self.rank]) for peer, sent in enumerate(everyone)}
        for peer, out in receives:
            out[:] = next(coming[peer])  # of another length, or none: an error, as it would be in the world
        left = [peer for peer, rest in coming.items() if next(rest, None) is not None]
        if left:
            raise RankFailedError(f"Simulated rank {self.rank} did not take all that ranks {left} sent.")

    def broadcast(self, data: memoryview, *, root: int) -> None:
        """Fill data with what root has in it."""
        own_data = bytes(data) if self.rank == root else b""
        data[:] = self._world._meet(self.rank, own_data, len(own_data))[root]


def _messages(everyone: Sequence[Any]) -> list[bytes]:
    """Return the messages; for ranks in a collective of another kind, their step if they have one."""
    return [s[0] if isinstance(s, tuple) else s if isinstance(s, bytes) else b"" for s in everyone]
