"""Saving while training goes on: what is saved is staged in host memory, then written by a thread.

Owns the staging memory, which is kept for the next save, and the thread. The thread speaks to other ranks
through a group of its own, so it never waits behind the training's collectives, nor they behind it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from megackpt.engine.write import Planned
from megackpt.formats.strategy import pieces_in_order


class Staging:
    """Host memory for one rank's share of a save, kept and reused; grows to the largest that was needed."""

    def __init__(self) -> None:
        self._memory: npt.NDArray[np.uint8] = np.zeros(0, np.uint8)

    @property
    def nbytes(self) -> int:
        """How much memory is kept."""
        return self._memory.nbytes

    def stage(self, planned: Planned, *, rank: int) -> Planned:
        """Copy this rank's bytes and the common state; return the save of these copies. Local.

        Afterwards the state may change. The copies are valid until the next call.
        """
        table, rows = planned.plan.table, planned.plan.rows_of(rank)
        ends = np.cumsum(table.nbytes[rows])
        total = int(ends[-1]) if len(rows) else 0
        if total > self.nbytes:
            self._memory = np.zeros(0, np.uint8)  # let go of the old before the new is taken
            self._memory = np.empty(total, np.uint8)
        memory = self._memory.data
        place: dict[int, memoryview] = {}
        in_order = pieces_in_order(planned.pieces, rows.tolist())
        for row, end, of_row in zip(rows.tolist(), ends.tolist(), in_order, strict=True):
            at = end - int(table.nbytes[row])
            place[row] = memory[at:end]
            for piece in of_row:
                self._memory[at : at + len(piece)] = np.frombuffer(piece, np.uint8)
                at += len(piece)

        def pieces(row: int) -> Iterator[memoryview]:
            yield place[int(row)]

        return replace(planned, pieces=pieces, common=copy.deepcopy(planned.common))


class Background:
    """One thread, and at most one piece of work at a time. Its error is raised where one looks for it."""

    def __init__(self) -> None:
        self._pool: ThreadPoolExecutor | None = None
        self._work: Future[None] | None = None

    @property
    def is_busy(self) -> bool:
        """Whether work is under way."""
        return self._work is not None and not self._work.done()

    def start(self, work: Callable[[], None]) -> None:
        """Begin work. What was begun before must have been waited for."""
        assert self._work is None
        if self._pool is None:
            self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="megackpt-save")
        self._work = self._pool.submit(work)

    def wait(self) -> None:
        """Return when nothing is under way; raise what the work raised."""
        work, self._work = self._work, None
        if work is not None:
            work.result()

    def close(self) -> None:
        """Wait, and let go of the thread."""
        try:
            self.wait()
        finally:
            if self._pool is not None:
                self._pool.shutdown()
                self._pool = None
