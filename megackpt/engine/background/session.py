"""What a rank keeps between asynchronous saves: a writer process, its memory, and where writers meet.

Owns starting another process where one has ended, how much memory it shares, and connecting the writers of
all ranks. What is saved with it, and when ranks meet, is in `saver`.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import deque
from dataclasses import dataclass, field

from megackpt.comm import Group
from megackpt.comm.store_group import StoreHost, host_store
from megackpt.engine.background.idle_writers import give_writer, take_writer
from megackpt.engine.background.prepared_save import PreparedSave
from megackpt.engine.background.process import WriterProcess
from megackpt.engine.background.submitted_job import SubmittedJob
from megackpt.errors import CheckpointError, DeclarationError
from megackpt.options import AsyncOptions
from megackpt.planning import SavePlan

log = logging.getLogger(__name__)


@dataclass(slots=True)
class WriterSession:
    """A process, the memory that is shared with it, and what it was told.

    It does not refer to the saver, so that it can be ended when that is gone.

    Attributes:
        writer: the process that was started last; it may have ended.
        host: the store where writers meet; None for a rank alone, or before the first save.
        joined: rank and size of the group whose writers are connected; None if they are to be, anew.
        works: jobs whose error was not asked for.
        staging: the thread that copies the state, if one does.
        roomy: the last plans for which all ranks have made room.
    """

    options: AsyncOptions
    hook: str | None
    writer: WriterProcess
    host: StoreHost | None = None
    joined: tuple[int, int] | None = None
    timeout_s: float = 0.0
    warming: threading.Thread | None = None
    works: list[SubmittedJob] = field(default_factory=list)
    staging: threading.Thread | None = None
    roomy: deque[SavePlan | None] = field(default_factory=lambda: deque(maxlen=8))

    @classmethod
    def start(cls, options: AsyncOptions, *, hook: str | None) -> WriterSession:
        """Start a process, or take one that waits; make its memory in the background, if it is known."""
        session = cls(options, hook, take_writer(options, hook=hook))
        if options.staging_bytes is not None:
            session.warming = threading.Thread(
                target=_make, args=(session.writer, options.staging_bytes), daemon=True
            )
            session.warming.start()
        return session

    def running(self) -> WriterProcess:
        """Return the process; another one, with as much memory, if it has ended."""
        if self.writer.is_lost:
            nbytes = self.writer.arena.nbytes
            self.writer.close()
            writer = take_writer(self.options, hook=self.hook)
            if self.joined is not None:  # first: one that is not told of others would write as if alone
                self._tell(writer, *self.joined)
            self.writer = writer
            self.writer.resize(nbytes)
        return self.writer

    def connect(self, group: Group, *, timeout_s: float) -> None:
        """Serve a store for the writers of a group, and tell this one of it. Collective.

        Raises:
            RankFailedError: a rank cannot reach it.
        """
        old, self.host, self.joined = self.host, None, None
        if old is not None:
            old.close()
        if group.size > 1:
            self.host = host_store(group, timeout_s=timeout_s, host=self.options.coordinator_host)
        self.timeout_s = timeout_s
        self._tell(self.writer, group.rank, group.size)
        self.joined = (group.rank, group.size)

    def make_room(self, ready: PreparedSave) -> None:
        """See to it that a save can be staged.

        Raises:
            StorageError: there is not as much memory.
            DeclarationError: it is bounded, and the format needs more at once.
        """
        needed = ready.layout.stop
        if self.warming is not None:
            self.warming.join()
            self.warming = None
        bound = self.options.staging_bytes
        if bound is None:
            if needed > self.running().arena.nbytes:
                self.writer.wait_until(0)
            self.running().resize(max(needed, self.writer.arena.nbytes))
            return
        self.running().resize(bound)  # if it could not be made beside, it says why now
        if not ready.in_order and needed > self.writer.arena.nbytes:
            raise DeclarationError(
                f"{needed:,} bytes are to be staged, and AsyncOptions.staging_bytes is {bound:,}. This "
                f"format writes the bytes of a rank in no fixed order, and needs all of them at once. Raise "
                f"staging_bytes, or choose a format that writes them in order: megackpt, or torch_dist with "
                f"thread_count=1."
            )

    def has_room_for(self, plan: SavePlan | None) -> bool:
        """Say whether all ranks have made room for a plan, of the few that they have used last."""
        return any(one is plan for one in self.roomy)

    def wait_staged(self) -> None:
        """Return when nothing is being copied. Local."""
        if (
            self.staging is not None and self.staging.ident is not None
        ):  # one that was not started copies nothing
            self.staging.join()
        self.staging = None

    def failure(self) -> CheckpointError | None:
        """Return the error of the first save that has failed; those of others that have ended are logged."""
        over = [work for work in self.works if work.is_over]
        self.works = [work for work in self.works if not work.is_over]
        errors = [work.error for work in over if work.error is not None]
        for error in errors[1:]:
            log.error("Another save has failed, too: %s", error)
        if errors:
            self.joined = None  # what has failed may be the store: the next save connects anew
        return errors[0] if errors else None

    def end(self, *, keeps_writer: bool) -> None:
        """Wait for what is under way, and let go of everything."""
        self.wait_staged()
        if self.warming is not None:
            self.warming.join()
        self.writer.wait_until(0)
        if keeps_writer and not self.writer.is_lost:
            give_writer(self.writer)
        else:
            self.writer.close()
        if self.host is not None:
            self.host.close()

    def _tell(self, writer: WriterProcess, rank: int, size: int) -> None:
        """Tell a process which rank it writes for."""
        writer.join(rank=rank, size=size, host=self.host, timeout_s=self.timeout_s)


def end_forgotten(session: WriterSession) -> None:
    """End a session whose saver is gone, and log what nobody has asked for."""
    if not session.writer.is_ours:
        return
    session.end(keeps_writer=False)
    for work in session.works:
        if work.error is not None:
            log.error("An asynchronous save has failed: %s", work.error)


def _make(writer: WriterProcess, nbytes: int) -> None:
    with contextlib.suppress(CheckpointError):  # tried again, and said, by the first save
        writer.resize(nbytes)
