"""Saves that go on while training goes on: planned and staged here, written by a process beside each rank.

Owns what ranks agree on before such a save, and what becomes of its error. Ranks meet in `save` and `warm_up`
and nowhere else: between them, writer processes meet in a store (see `megackpt.comm.store_group`). What is
kept between saves is in `writer_session`.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections import deque

from megackpt.comm import Group, Numbers, StoreHost, compare, decode_error, encode_error
from megackpt.comm.group import common_error
from megackpt.engine.prepared_save import Prepared
from megackpt.engine.save import SaveRequest, plan_state
from megackpt.engine.staging import Span, StreamClosedError, fill
from megackpt.engine.tier_save import NodePlace
from megackpt.engine.write import Planned
from megackpt.engine.writer_messages import Job, Place, meetings_of
from megackpt.engine.writer_process import Failed, Follow, Work
from megackpt.engine.writer_session import WriterSession, end_forgotten
from megackpt.options import AsyncOptions, SaveOptions, VerifyOptions
from megackpt.planning import SavePlan

_MOST_QUEUED = 4


class AsyncSaver:
    """Saves of one run, one after the other, each written by a process of its own on every rank.

    The process is started at once, and lives until `close`; a saver that is forgotten is closed, at the
    latest when the interpreter ends. hook is for tests, see `writer_main.Hook`.
    """

    def __init__(self, options: AsyncOptions, *, hook: str | None = None) -> None:
        self._options = options
        self._session = WriterSession.start(options, hook=hook)
        self._made_room_for: deque[SavePlan | None] = deque(maxlen=8)
        self._closing = weakref.finalize(self, end_forgotten, self._session)

    @property
    def is_busy(self) -> bool:
        """Whether a save is under way on this rank."""
        return self._session.writer.is_busy

    @property
    def writer_pid(self) -> int:
        """Process id of the writer."""
        return self._session.writer.pid

    @property
    def staging_nbytes(self) -> int:
        """How much staging memory is kept."""
        return self._session.writer.arena.nbytes

    @property
    def store(self) -> StoreHost | None:
        """Where writers meet; None for a rank alone, or before the first save."""
        return self._session.host

    def warm_up(self, request: SaveRequest, group: Group, options: SaveOptions) -> None:
        """Do what a first save would do besides copying: plan, make staging memory, start. Collective.

        Raises:
            CheckpointError: as `save`.
        """
        self.wait()
        self._meet(group, options)
        ready = self._prepare(request, group, options)
        self._use_plan(ready.planned)
        compare(group, self._await_ready, alike=0, doing="starting its writer process")

    def may_save(self, group: Group, options: SaveOptions, *, waits: bool = False) -> bool:
        """Wait as long as `when_busy` says, and say whether the next save is to be made. Collective.

        With waits, until nothing is under way, whatever `when_busy` says.

        Raises:
            CheckpointError: the same on every rank: an earlier save has failed.
        """
        self.wait_staged()
        if waits or self._options.when_busy != "skip":
            most = _MOST_QUEUED - 1 if self._options.when_busy == "queue" and not waits else 0
            self._session.running().wait_until(most)
        return self._meet(group, options)

    def save(
        self,
        request: SaveRequest,
        *,
        place: Place | NodePlace,
        label: str,
        group: Group,
        options: SaveOptions,
        verify: VerifyOptions | None = None,
        follow: Follow,
        failed: Failed,
    ) -> None:
        """Plan and stage a save; return when the state may change. Collective, after `may_save`.

        label and verify are equal on all ranks; label is what to call it in messages. With verify, writers
        read what is committed again, each its share; not on nodes. On rank 0, follow is called then, in a
        thread of its own, with what they have found; on every rank, failed when the save has failed.

        Raises:
            CheckpointError: the same on every rank: this save cannot be made; on one rank alone, that its
                bytes could not be copied: others find that at the next call.
        """
        ready = self._prepare(request, group, options)
        work = self._begin(ready, place, label, verify, follow, failed)
        if not self._options.stage_in_background:
            self._stage(work, ready)
            return
        before = self._session.staging  # of another place for the same state
        self._session.staging = threading.Thread(
            target=self._stage_behind, args=(work, ready, before), name="megackpt-stage", daemon=True
        )
        self._session.staging.start()

    def wait_staged(self) -> None:
        """Return when the state that was saved may change. Local."""
        self._session.wait_staged()

    def wait(self) -> None:
        """Return when nothing is under way. Local.

        Raises:
            CheckpointError: a save has failed since one last asked.
        """
        self.wait_staged()
        self._session.writer.wait_until(0)
        self.poll()

    def poll(self) -> None:
        """Do nothing if no save has failed since one last asked. Local.

        Raises:
            CheckpointError: one has failed.
        """
        error = self._session.failure()
        if error is not None:
            raise error

    def close(self) -> None:
        """Wait, end the process and let go of the memory. All ranks do so if there are several.

        Raises:
            CheckpointError: a save has failed since one last asked.
        """
        try:
            self.wait()
        finally:
            self._closing.detach()
            self._session.end(keeps_writer=True)

    def abandon(self) -> None:
        """End the process at once; what it has not committed stays torn, and no error is raised. Local."""
        self._closing.detach()
        self._session.writer.kill()
        self._session.end(keeps_writer=False)

    def _meet(self, group: Group, options: SaveOptions) -> bool:
        """Find out together whether to save; connect what is not connected. Collective.

        Raises:
            CheckpointError: the error of a save that has failed, of the first rank that has one.
        """
        session = self._session
        error = session.failure()
        skips = self._options.when_busy == "skip"

        def look() -> Numbers:
            session.running()
            is_joined = session.joined == (group.rank, group.size)
            return Numbers((), (int(error is not None), int(skips and self.is_busy), int(not is_joined)))

        found = compare(group, look, alike=0, largest=3, doing="beginning an asynchronous save")
        has_failed, is_skipped, is_apart = found.largest
        if has_failed:
            session.joined = None
            said = group.all_gather(encode_error(error) if error is not None else b"")
            raise decode_error(next(one for one in said if one)) from error
        if is_apart:
            session.connect(group, timeout_s=options.timeout_s)
        return not is_skipped

    def _prepare(self, request: SaveRequest, group: Group, options: SaveOptions) -> Prepared:
        """Plan a save, and make room for it. Collective."""
        planned, strategy = plan_state(request, None, group, options)
        made: list[Prepared] = []

        def make() -> Numbers:
            made.append(Prepared.of(planned, strategy, rank=group.rank))
            self._session.make_room(made[0])
            return Numbers(())

        if any(plan is planned.kept for plan in self._made_room_for):
            # All ranks take this plan again, and there was room for it: no need to ask each other.
            try:
                make()
            except Exception as error:
                if self._session.host is not None:
                    said = common_error({group.rank: encode_error(error)}, "making room for its state")
                    self._session.host.abort(meetings_of(planned.attempt), encode_error(said))
                raise
        else:
            compare(group, make, alike=0, doing="making room for its state")
            self._made_room_for.append(planned.kept)
        return made[0]

    def _begin(
        self,
        ready: Prepared,
        place: Place | NodePlace,
        label: str,
        verify: VerifyOptions | None,
        follow: Follow,
        failed: Failed,
    ) -> Work:
        planned, plan = ready.planned, self._use_plan(ready.planned)

        def job(number: int, start: int) -> Job:
            return Job(
                number=number,
                label=label,
                attempt=planned.attempt,
                place=place,
                strategy=ready.strategy,
                plan=plan,
                sizes=planned.sizes,
                report=planned.report,
                parity=planned.parity,
                common=ready.common,
                start=start,
                in_order=ready.in_order,
                verify=verify,
            )

        work = self._session.writer.begin(job, ready.layout.stop, follow, failed)
        self._session.works.append(work)
        return work

    def _use_plan(self, planned: Planned) -> int:
        assert planned.kept is not None
        return self._session.writer.use_plan(planned.kept, planned.complete)

    def _stage(self, work: Work, ready: Prepared) -> None:
        writer = self._session.writer
        span = Span(start=work.job.start, layout=ready.layout)
        try:
            fill(writer.arena.memory, span, ready.rows, ready.planned.pieces, writer)
        except StreamClosedError:  # the save has failed, which is raised at the next call
            return
        except BaseException as error:  # Ctrl-C, too: else the writer would wait for the rest for ever
            writer.cancel(work, error)
            raise

    def _stage_behind(self, work: Work, ready: Prepared, before: threading.Thread | None) -> None:
        if before is not None:
            before.join()
        with contextlib.suppress(Exception):  # the job was cancelled, and tells the error
            self._stage(work, ready)

    def _await_ready(self) -> Numbers:
        self._session.running().wait_ready()
        return Numbers(())
