"""Saves that go on while training goes on: planned and staged here, written by a process beside each rank.

Owns what ranks agree on before such a save, and what becomes of its error. Ranks meet in `save` and `warm_up`
and nowhere else: between them, writer processes meet in a store (see `megackpt.comm.store_group`).
"""

from __future__ import annotations

import contextlib
import logging
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.reduction import ForkingPickler

from megackpt.comm import Group, Numbers, StoreHost, compare, decode_error, encode_error, host_store
from megackpt.comm.group import common_error
from megackpt.engine.arena import Layout, lay_out
from megackpt.engine.idle_writers import give_writer, take_writer
from megackpt.engine.save import SaveRequest, plan_state
from megackpt.engine.staging import Span, StreamClosedError, fill
from megackpt.engine.write import CommonFiles, Planned
from megackpt.engine.writer_messages import Job, Place, meetings_of
from megackpt.engine.writer_process import Follow, Work, WriterProcess
from megackpt.errors import CheckpointError, DeclarationError
from megackpt.formats.strategy import SaveStrategy, writes_in_order
from megackpt.options import AsyncOptions, SaveOptions, VerifyOptions
from megackpt.planning import SavePlan

log = logging.getLogger(__name__)

_MOST_QUEUED = 4


@dataclass(frozen=True, slots=True, eq=False)
class _Prepared:
    """A save of which this rank knows everything, before it is staged."""

    planned: Planned
    strategy: bytes
    common: CommonFiles | None
    rows: Sequence[int]
    layout: Layout
    in_order: bool


@dataclass(slots=True)
class _Session:
    """What a rank keeps between saves: a process, the memory that they share, what that process was told.

    It does not refer to the saver, so that it can be ended when that is gone.
    """

    options: AsyncOptions
    hook: str | None
    writer: WriterProcess
    host: StoreHost | None = None
    joined: tuple[int, int] | None = None  # rank and size
    timeout_s: float = 0.0
    warming: threading.Thread | None = None
    works: list[Work] = field(default_factory=list)  # whose error was not asked for
    staging: threading.Thread | None = None

    def running(self) -> WriterProcess:
        """Return the process; another one, with as much memory, if it has ended."""
        if self.writer.is_lost:
            nbytes = self.writer.arena.nbytes
            self.writer.close()
            self.writer = take_writer(self.options, hook=self.hook)
            self.writer.resize(nbytes)
            if self.joined is not None:
                self.join(*self.joined)
        return self.writer

    def join(self, rank: int, size: int) -> None:
        """Tell the process which rank it writes for."""
        self.joined = (rank, size)
        self.writer.join(rank=rank, size=size, host=self.host, timeout_s=self.timeout_s)

    def end(self, *, keeps_writer: bool) -> None:
        """Wait for what is under way, and let go of everything."""
        if self.staging is not None:
            self.staging.join()
        if self.warming is not None:
            self.warming.join()
        self.writer.wait_until(0)
        if keeps_writer and not self.writer.is_lost:
            give_writer(self.writer)
        else:
            self.writer.close()
        if self.host is not None:
            self.host.close()


class AsyncSaver:
    """Saves below one root, one after the other, each written by a process of its own on every rank.

    The process is started at once, and lives until `close`; a saver that is forgotten is closed, at the
    latest when the interpreter ends. hook is for tests, see `writer_main.Hook`.
    """

    def __init__(self, options: AsyncOptions, *, hook: str | None = None) -> None:
        self._options = options
        self._session = _Session(options, hook, take_writer(options, hook=hook))
        self._made_room_for: deque[SavePlan | None] = deque(maxlen=8)
        self._closing = weakref.finalize(self, _end_forgotten, self._session)
        if options.staging_bytes is not None:
            self._session.warming = threading.Thread(
                target=_make, args=(self._session.writer, options.staging_bytes), daemon=True
            )
            self._session.warming.start()

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
        self._meet(group, options, doing="warming up for asynchronous saves")
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
        place: Place,
        label: str,
        group: Group,
        options: SaveOptions,
        verify: VerifyOptions | None = None,
        follow: Follow,
        failed: Callable[[], None],
    ) -> None:
        """Plan and stage a save; return when the state may change. Collective, after `may_save`.

        place, label and verify are equal on all ranks; label is what to call it in messages. With verify,
        writers read what is committed again, each its share. On rank 0, follow is called then, in a thread of
        its own, with what they have found, and failed when the save has failed.

        Raises:
            CheckpointError: the same on every rank: this save cannot be made; on one rank alone, that its
                bytes could not be copied: others find that at the next call.
        """
        ready = self._prepare(request, group, options)
        steps = (follow, failed) if group.rank == 0 else (_nothing, _nothing)
        work = self._begin(ready, place, label, verify, *steps)
        if not self._options.stage_in_background:
            self._stage(work, ready)
            return
        self._session.staging = threading.Thread(
            target=self._stage_behind, args=(work, ready), name="megackpt-stage", daemon=True
        )
        self._session.staging.start()

    def wait_staged(self) -> None:
        """Return when the state that was saved may change. Local."""
        staging, self._session.staging = self._session.staging, None
        if staging is not None:
            staging.join()

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
        error = self._failure()
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

    def _failure(self) -> CheckpointError | None:
        """Return the error of the first save that has failed; those of others that have ended are logged."""
        over = [work for work in self._session.works if work.is_over]
        self._session.works = [work for work in self._session.works if not work.is_over]
        errors = [work.error for work in over if work.error is not None]
        for error in errors[1:]:
            log.error("Another save has failed, too: %s", error)
        if errors:
            self._session.joined = None  # what has failed may be the store: the next save connects anew
        return errors[0] if errors else None

    def _meet(
        self, group: Group, options: SaveOptions, *, doing: str = "beginning an asynchronous save"
    ) -> bool:
        """Find out together whether to save; connect what is not connected. Collective.

        Raises:
            CheckpointError: the error of a save that has failed, of the first rank that has one.
        """
        session = self._session
        error = self._failure()
        skips = self._options.when_busy == "skip"

        def look() -> Numbers:
            session.running()
            is_joined = session.joined == (group.rank, group.size)
            return Numbers((), (int(error is not None), int(skips and self.is_busy), int(not is_joined)))

        found = compare(group, look, alike=0, largest=3, doing=doing)
        has_failed, is_skipped, is_apart = found.largest
        if has_failed:
            session.joined = None
            said = group.all_gather(encode_error(error) if error is not None else b"")
            raise decode_error(next(one for one in said if one)) from error
        if is_apart:
            self._connect(group, options)
        return not is_skipped

    def _connect(self, group: Group, options: SaveOptions) -> None:
        session = self._session
        old, session.host = session.host, None
        if old is not None:
            old.close()
        if group.size > 1:
            session.host = host_store(group, timeout_s=options.timeout_s, host=self._options.coordinator_host)
        session.timeout_s = options.timeout_s
        session.join(group.rank, group.size)

    def _prepare(self, request: SaveRequest, group: Group, options: SaveOptions) -> _Prepared:
        """Plan a save, and make room for it. Collective."""
        planned, strategy = plan_state(request, None, group, options)
        made: list[_Prepared] = []

        def make() -> Numbers:
            made.append(_prepared(planned, strategy, rank=group.rank))
            self._make_room(made[0])
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

    def _make_room(self, ready: _Prepared) -> None:
        session, needed = self._session, ready.layout.stop
        if session.warming is not None:
            session.warming.join()
            session.warming = None
        bound = self._options.staging_bytes
        if bound is None:
            if needed > session.running().arena.nbytes:
                session.writer.wait_until(0)
                session.running().resize(needed)
            return
        session.running().resize(bound)  # if it could not be made beside, it says why now
        if not ready.in_order and needed > session.writer.arena.nbytes:
            raise DeclarationError(
                f"{needed:,} bytes are to be staged, and AsyncOptions.staging_bytes is {bound:,}. This "
                f"format writes the bytes of a rank in no fixed order, and needs all of them at once. Raise "
                f"staging_bytes, or choose a format that writes them in order: megackpt, or torch_dist with "
                f"thread_count=1."
            )

    def _begin(
        self,
        ready: _Prepared,
        place: Place,
        label: str,
        verify: VerifyOptions | None,
        follow: Follow,
        failed: Callable[[], None],
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

    def _stage(self, work: Work, ready: _Prepared) -> None:
        writer = self._session.writer
        span = Span(start=work.job.start, layout=ready.layout)
        try:
            fill(writer.arena.memory, span, ready.rows, ready.planned.pieces, writer)
        except StreamClosedError:  # the save has failed, which is raised at the next call
            return
        except BaseException as error:  # Ctrl-C, too: else the writer would wait for the rest for ever
            writer.cancel(work, error)
            raise

    def _stage_behind(self, work: Work, ready: _Prepared) -> None:
        with contextlib.suppress(Exception):  # the job was cancelled, and tells the error
            self._stage(work, ready)

    def _await_ready(self) -> Numbers:
        self._session.running().wait_ready()
        return Numbers(())


def for_a_writer(request: SaveRequest) -> SaveRequest:
    """Return the request, refused if a process of its own cannot be given its strategy."""
    return replace(request, choose=lambda: sendable(request.choose()))


def sendable(strategy: SaveStrategy) -> SaveStrategy:
    """Return a strategy that another process can be given.

    Raises:
        DeclarationError: it cannot.
    """
    kind = type(strategy)
    if kind.__module__ == "__main__" or "<locals>" in kind.__qualname__:
        raise DeclarationError(
            f"{kind.__qualname__} is defined in the script itself, or in a function, where the process that "
            f"writes asynchronous saves cannot import it. Define it in a module."
        )
    try:
        ForkingPickler.dumps(strategy)
    except Exception as error:
        raise DeclarationError(
            f"{kind.__qualname__} cannot be sent to the process that writes asynchronous saves: {error}. "
            f"Give it attributes that can be pickled, or save synchronously."
        ) from error
    return strategy


def _prepared(planned: Planned, strategy: SaveStrategy, *, rank: int) -> _Prepared:
    """Encode what is not tensors, and lay out what is. Local."""
    common = None
    if rank == 0:  # here, where the user's types are known, and now, before they change
        common = CommonFiles.of(planned.common, strategy, attempt=planned.attempt)
    rows = planned.plan.rows_of(rank)
    layout = lay_out(planned.plan.table.nbytes[rows])
    pickled = bytes(ForkingPickler.dumps(strategy))
    return _Prepared(planned, pickled, common, rows.tolist(), layout, writes_in_order(strategy))


def _nothing(*_: object) -> None: ...


def _make(writer: WriterProcess, nbytes: int) -> None:
    with contextlib.suppress(CheckpointError):  # tried again, and said, by the first save
        writer.resize(nbytes)


def _end_forgotten(session: _Session) -> None:
    if not session.writer.is_ours:
        return
    session.end(keeps_writer=False)
    for work in session.works:
        if work.error is not None:
            log.error("An asynchronous save has failed: %s", work.error)
