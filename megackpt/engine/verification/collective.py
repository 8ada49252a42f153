"""Verifies a checkpoint on all ranks: each reads a share of it, and all ranks return the same damage."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from megackpt.comm import (
    Group,
    compare_step,
    gather_step,
    scatter_step,
)
from megackpt.engine.data.progress import Progress
from megackpt.engine.verification.digests import ArrayShare, compare_arrays
from megackpt.engine.verification.verify import WHOLE, Share, ShareReport
from megackpt.errors import StorageError
from megackpt.formats.damage import Damage

VerifyShare = Callable[[Progress, Share], ShareReport]
"""Verifies a share of a checkpoint; see `verify.verify_share`."""

_SYNC_INTERVAL_S = 5.0
_MAX_SENT_DAMAGES = 20
"""The most damages that a rank sends. If a directory is lost, each rank finds as many as there are files."""
_DOING = "verifying the step"
_FLAGS = ("is running", "is damaged", "has arrays")
"""What each rank says of its share, every few seconds."""


def verify_on_all_ranks(
    group: Group,
    verify_share: VerifyShare,
    *,
    timeout_s: float,
    while_reading: Callable[[], None] = lambda: None,
) -> list[Damage]:
    """Verify a share on every rank, and return the damage of all shares, at most 20 of each rank. Collective.

    Shares are about equal in bytes, but disks are not equally fast. So the deadline is not one for a whole
    share: ranks synchronise every few seconds while they read, and a rank fails if it has read nothing for
    timeout_s.

    Args:
        group: the ranks.
        verify_share: verifies a share of the checkpoint.
        timeout_s: how long a rank may read nothing, in seconds.
        while_reading: called by any thread as bytes are read.

    Raises:
        CheckpointError: the same on every rank: StorageError if a rank has read nothing for timeout_s, else
            the error that verify_share raised, as in `errors_on_all_ranks`.
    """
    if group.size == 1:
        return list(verify_share(_WatchedProgress(while_reading), WHOLE).damages)
    share = _ShareThread(
        verify_share, (group.rank, group.size), timeout_s=timeout_s, while_reading=while_reading
    )
    try:
        any_rank = {"is running": 1}
        while any_rank["is running"]:
            with compare_step(group, _DOING, largest=_FLAGS) as step:
                step.largest = share.wait_and_report()
            # The maximum over ranks: all of them stay in the loop until the last one has read its share.
            any_rank = step.maximum
    finally:
        share.stop()  # after an error of another rank, too: the caller closes the store next
    if not any_rank["is damaged"]:
        return _compare_arrays(group, share.arrays()) if any_rank["has arrays"] else []
    with gather_step(group, _DOING, on_all_ranks=True) as reporting:
        reporting.data = _encode(share.damages())
    return list(dict.fromkeys(damage for message in reporting.results for damage in _decode(message)))


def work_after_commit(damages: Sequence[Damage] | None) -> str:
    """Return, for error texts, what rank 0 does after the commit of a step with these damages."""
    return _DOING if damages else "removing old steps"


def _compare_arrays(group: Group, shares: Sequence[ArrayShare]) -> list[Damage]:
    """Compare digests of arrays; each rank has read a part of them. Collective.

    Nothing is compared if a rank lacks the library that computes digests.
    """
    with gather_step(group, _DOING) as reading:
        reading.data = json.dumps([[share.read, share.contribution] for share in shares]).encode()
    with scatter_step(group, _DOING) as comparing:
        if group.rank == 0:
            of_ranks = [json.loads(message) for message in reading.results]
            comparing.parts = [_encode(_damaged_arrays(shares, of_ranks))] * group.size
    return _decode(comparing.part)


def _damaged_arrays(shares: Sequence[ArrayShare], of_ranks: Sequence[Any]) -> Sequence[Damage]:
    # A rank without the library has no shares.
    if any(len(of_rank) != len(shares) for of_rank in of_ranks):
        return []
    # All ranks list the same arrays, so rank 0 takes keys, lengths and digests from its own list.
    by_rank = [
        [replace(share, read=n, contribution=c) for share, (n, c) in zip(shares, of_rank, strict=True)]
        for of_rank in of_ranks
    ]
    _, damages = compare_arrays(by_rank)
    return damages


def _encode(damages: Sequence[Damage]) -> bytes:
    fields: list[dict[str, Any]] = [damage.to_json() for damage in damages[:_MAX_SENT_DAMAGES]]
    if len(damages) > _MAX_SENT_DAMAGES:
        fields.append({"what": f"{len(damages) - _MAX_SENT_DAMAGES} more that one rank has found"})
    return json.dumps(fields).encode()


def _decode(message: bytes) -> list[Damage]:
    return [Damage(**fields) for fields in json.loads(message)]


class _StoppedError(Exception):
    """Ends the verification of a share whose result is no longer needed."""


class _WatchedProgress:
    """A `Progress` that counts reads, and raises an error in the reading thread to stop it."""

    def __init__(self, while_reading: Callable[[], None]) -> None:
        self.while_reading = while_reading
        self._is_stopped = False
        self.reads = 0  # counted by several threads without a lock: it may be too small, but it changes

    def begin(self, doing: str, nbytes: int) -> None:
        """Count the beginning of a phase as a read."""
        self.advance(0)

    def advance(self, nbytes: int) -> None:
        """Count a read."""
        if self._is_stopped:
            raise _StoppedError
        self.reads += 1
        self.while_reading()

    def stop(self) -> None:
        """Stop the reading thread at its next read."""
        self._is_stopped = True


class _ShareThread:
    """Verifies the share of this rank in a thread of its own."""

    def __init__(
        self,
        verify_share: VerifyShare,
        share: Share,
        *,
        timeout_s: float,
        while_reading: Callable[[], None],
    ) -> None:
        self._progress = _WatchedProgress(while_reading)
        self._timeout_s = timeout_s
        self._interval_s = min(_SYNC_INTERVAL_S, timeout_s / 4)
        self._known_reads = 0
        self._idle_s = 0.0
        self._report: ShareReport | None = None
        self._error: Exception | None = None
        self._thread = threading.Thread(
            target=self._run, args=(verify_share, share), name="megackpt-verify", daemon=True
        )
        self._thread.start()

    def _run(self, verify_share: VerifyShare, share: Share) -> None:
        try:
            self._report = verify_share(self._progress, share)
        except Exception as error:  # noqa: BLE001 - raised on all ranks, by `wait_and_report`
            self._error = error

    def wait_and_report(self) -> dict[str, int]:
        """Wait for one interval; return whether the thread runs, has found damage, and has read arrays.

        Raises:
            StorageError: nothing was read for too long.
            Exception: the error of the thread.
        """
        self._thread.join(self._interval_s)
        if not self._thread.is_alive():
            if self._report is None:
                raise self._error or RuntimeError("the thread that reads the step has ended")
            flags = (False, bool(self._report.damages), bool(self._report.arrays))
            return dict(zip(_FLAGS, map(int, flags), strict=True))
        # Counts as progress even if a read hangs: this method has its own deadline for that.
        self._progress.while_reading()
        # Count intervals instead of reading a clock, which goes on while the process is stopped.
        is_idle = self._progress.reads == self._known_reads
        self._idle_s = self._idle_s + self._interval_s if is_idle else 0.0
        self._known_reads = self._progress.reads
        if self._idle_s >= self._timeout_s:
            raise StorageError(
                f"nothing could be read for {self._timeout_s:g} s. The disk or mount does not answer; raise "
                f"timeout_s if it is only slow."
            )
        return dict.fromkeys(_FLAGS, 0) | {"is running": 1}

    def stop(self) -> None:
        """Stop the thread. Wait a short time for its end: the caller closes the store next."""
        self._progress.stop()
        self._thread.join(self._interval_s)

    def damages(self) -> tuple[Damage, ...]:
        """Return what this rank has found."""
        return () if self._report is None else self._report.damages

    def arrays(self) -> tuple[ArrayShare, ...]:
        """Return what this rank has read of arrays that have a digest."""
        return () if self._report is None else self._report.arrays
