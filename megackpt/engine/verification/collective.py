"""A checkpoint that was just saved, read again by all ranks that saved it: each its share, all told the same.

Owns how they meet meanwhile, and what each may tell of what it has found and read. What is looked for, and
how a share is chosen, is in `verify`; what becomes of a damaged step is up to the caller.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from megackpt.comm import (
    Group,
    Numbers,
    run_and_compare,
    run_and_gather,
    run_on_all_ranks,
    scatter_from_rank_0,
)
from megackpt.engine.data.progress import Progress
from megackpt.engine.verification.arrays import ArrayShare, compare_arrays
from megackpt.engine.verification.shares import WHOLE
from megackpt.engine.verification.verify import ShareReport
from megackpt.errors import StorageError
from megackpt.formats.damage import Damage

Look = Callable[[Progress, tuple[int, int]], ShareReport]
"""Looks at a share of a checkpoint; see `verify.verify_share`."""

_MEET_EVERY_S = 5.0
_MOST_TOLD = 20
"""Damages that a rank tells of: where a directory is gone, each rank finds as many as there are files."""


def verify_on_all_ranks(
    group: Group, look: Look, *, timeout_s: float, while_reading: Callable[[], None] = lambda: None
) -> list[Damage]:
    """Let every rank look at its share; return what they have found, at most 20 of each rank. Collective.

    Shares are about equal in bytes, and disks are not, so no rank waits for the end of another's share: ranks
    meet every few seconds, and one fails that has read nothing for timeout_s. while_reading is called by any
    thread as bytes are read.

    Raises:
        CheckpointError: the same on every rank: StorageError where one has read nothing for so long, else
            what a look has raised, as `run_on_all_ranks`.
    """
    if group.size == 1:
        return list(look(_Reading(while_reading), WHOLE).damages)
    work = _Work(look, (group.rank, group.size), timeout_s=timeout_s, while_reading=while_reading)
    try:
        is_under_way, is_damaged, has_arrays = 1, 0, 0
        while is_under_way:
            found = run_and_compare(group, work.state, equal=0, largest=3, doing="verifying the step")
            is_under_way, is_damaged, has_arrays = found.largest
    finally:
        work.stop()
    if not is_damaged:
        return _compare_arrays(group, work.arrays()) if has_arrays else []
    told = run_on_all_ranks(group, work.told, doing="verifying the step")
    return [*dict.fromkeys(Damage(**damage) for of_rank in told for damage in json.loads(of_rank))]


def _compare_arrays(group: Group, mine: Sequence[ArrayShare]) -> list[Damage]:
    """Compare digests of arrays of which each rank has read a part; nothing where a rank cannot digest."""
    said = json.dumps([[share.read, share.contribution] for share in mine]).encode()
    told = run_and_gather(group, lambda: said, doing="verifying the step")

    def compared() -> list[bytes]:
        shares = [json.loads(of_rank) for of_rank in told]
        if any(len(of_rank) != len(mine) for of_rank in shares):
            return [b"[]"] * group.size
        parts = [
            [replace(a, read=n, contribution=value) for a, (n, value) in zip(mine, of_rank, strict=True)]
            for of_rank in shares
        ]
        _, damages = compare_arrays(parts)
        return [json.dumps(_shown(damages)).encode()] * group.size

    answer = scatter_from_rank_0(group, compared, doing="verifying the step")
    return [Damage(**damage) for damage in json.loads(answer)]


def _shown(found: Sequence[Damage]) -> list[dict[str, Any]]:
    """Return what a rank tells of damages."""
    shown = [damage.to_json() for damage in found[:_MOST_TOLD]]
    if len(found) > _MOST_TOLD:
        shown.append({"what": f"{len(found) - _MOST_TOLD} more that one rank has found"})
    return shown


def work_after_commit(damages: Sequence[Damage] | None) -> str:
    """Say what rank 0 does with a step that is committed, in which verifying it has found these."""
    return "verifying the step" if damages else "removing old steps"


class _StoppedError(Exception):
    """Ends a look whose result nobody waits for any more."""


class _Reading:
    """A `Progress` by which a look is watched, and stopped."""

    def __init__(self, while_reading: Callable[[], None]) -> None:
        self.while_reading = while_reading
        self._is_stopped = False
        self.count = 0  # of reads; that of several threads may be too small, but it changes

    def begin(self, doing: str, nbytes: int) -> None:
        """Go on."""
        self.advance(0)

    def advance(self, nbytes: int) -> None:
        """Note that something was read."""
        if self._is_stopped:
            raise _StoppedError
        self.count += 1
        self.while_reading()

    def stop(self) -> None:
        """Let the look end where it is."""
        self._is_stopped = True


class _Work:
    """The look of this rank, in a thread of its own."""

    def __init__(
        self, look: Look, share: tuple[int, int], *, timeout_s: float, while_reading: Callable[[], None]
    ) -> None:
        self.reading = _Reading(while_reading)
        self._timeout_s = timeout_s
        self._pause_s = min(_MEET_EVERY_S, timeout_s / 4)
        self._seen = 0
        self._silent_s = 0.0
        self._found: ShareReport | None = None
        self._error: Exception | None = None
        self._thread = threading.Thread(
            target=self._run, args=(look, share), name="megackpt-verify", daemon=True
        )
        self._thread.start()

    def _run(self, look: Look, share: tuple[int, int]) -> None:
        try:
            self._found = look(self.reading, share)
        except Exception as error:  # noqa: BLE001 - raised on all ranks, by `state`
            self._error = error

    def state(self) -> Numbers:
        """Wait a little; say whether the look is under way, and whether it has found damage.

        Raises:
            StorageError: it is stuck.
            Exception: what it has raised.
        """
        self._thread.join(self._pause_s)
        if not self._thread.is_alive():
            if self._found is None:
                raise self._error or RuntimeError("the thread that reads the step has ended")
            return Numbers((), (0, int(bool(self._found.damages)), int(bool(self._found.arrays))))
        self.reading.while_reading()  # what is read is watched here, with a deadline of its own
        # Pauses are added up, no clock is asked: it goes on while a process is stopped.
        self._silent_s = self._silent_s + self._pause_s if self.reading.count == self._seen else 0.0
        self._seen = self.reading.count
        if self._silent_s >= self._timeout_s:
            raise StorageError(
                f"nothing could be read for {self._timeout_s:g} s. The disk or mount does not answer; raise "
                f"timeout_s if it is only slow."
            )
        return Numbers((), (1, 0, 0))

    def stop(self) -> None:
        """Let it end where it is, and wait for that a little: the store is going to be closed."""
        self.reading.stop()
        self._thread.join(self._pause_s)

    def told(self) -> bytes:
        """Return what was found, for the others."""
        return json.dumps(_shown(self._found.damages if self._found is not None else ())).encode()

    def arrays(self) -> tuple[ArrayShare, ...]:
        """Return what was read of arrays that have a digest."""
        return self._found.arrays if self._found is not None else ()
