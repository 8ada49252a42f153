"""Saves that go on while training goes on: planned and staged here, written by a process beside each rank.

Owns what ranks agree on before such a save, and what becomes of its error. Ranks meet in `save` and `warm_up`
and nowhere else: between them, writer processes meet in a store (see `megackpt.comm.store_group`). What is
kept between saves is in `session`.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from megackpt.comm import Group, Numbers, encode_error, run_and_compare
from megackpt.comm.messages import common_error
from megackpt.comm.store_group import StoreHost
from megackpt.engine.background.begin import Beginning
from megackpt.engine.background.messages import Job, meetings_of
from megackpt.engine.background.prepared_save import Destination, PreparedSave, shares_bytes
from megackpt.engine.background.session import WriterSession, end_forgotten
from megackpt.engine.background.stage_ahead import Ahead
from megackpt.engine.background.staging import StreamClosedError, StreamRange, fill
from megackpt.engine.background.submitted_job import SubmittedJob
from megackpt.engine.saving.save import Beside, SaveRequest, plan_state
from megackpt.engine.saving.write import PlannedSave
from megackpt.options import AsyncOptions, SaveOptions

_MOST_QUEUED = 4


@dataclass(frozen=True, slots=True, eq=False)
class _Part:
    """What is copied once, and the jobs that read it."""

    works: Sequence[SubmittedJob]
    ready: PreparedSave


class AsyncSaver:
    """Saves of one run, one after the other, each written by a process of its own on every rank.

    The process is started at once, and lives until `close`; a saver that is forgotten is closed, at the
    latest when the interpreter ends. hook is for tests, see `main.Hook`.
    """

    def __init__(self, options: AsyncOptions, *, hook: str | None = None) -> None:
        self._options = options
        self._session = WriterSession.start(options, hook=hook)
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
        self._meet(group, options, doing="warming up for asynchronous saves")
        ready = self._prepare(request, group, options)
        self._use_plan(ready.planned)
        run_and_compare(group, self._await_ready, equal=0, doing="starting its writer process")

    def may_save(self, group: Group, options: SaveOptions, *, waits: bool = False) -> bool:
        """Wait as long as `when_busy` says, and say whether the next save is to be made. Collective.

        With waits, until nothing is under way, whatever `when_busy` says.

        Raises:
            CheckpointError: the same on every rank: an earlier save has failed.
        """
        self.turn(waits=waits)
        return self._meet(group, options)

    @property
    def skips(self) -> bool:
        """Whether a save may be left out, so that ranks have to meet in `may_save` before they begin one."""
        return self._options.when_busy == "skip"

    def turn(self, *, waits: bool = False) -> None:
        """Wait for earlier saves as long as `when_busy` says; with waits, for all of them. Local."""
        self.wait_staged()
        if waits or not self.skips:
            most = _MOST_QUEUED - 1 if self._options.when_busy == "queue" and not waits else 0
            self._session.writer.wait_until(most)

    def save(
        self,
        destinations: Sequence[Destination],
        group: Group,
        options: SaveOptions,
        *,
        earlier: AbstractContextManager[Any] | None = None,
    ) -> int:
        """Plan and stage a state for some places; return when it may change.

        Collective, after `may_save` or `turn`, with the same places on all ranks. It is copied once for those
        that follow each other and take the same bytes, if there is memory for all of it.

        The error of an earlier save is raised within earlier: where that holds it back, this save goes on.
        Without, it is left for the next call.

        Return for how many a save is under way: those whose failure was dealt with have none.

        Raises:
            CheckpointError: the same on every rank: an earlier save has failed, or this one cannot be made in
                a place; in those before it is. On one rank alone, that its bytes could not be copied: others
                find that at the next call.
        """
        ready: list[tuple[Destination, PreparedSave]] = []
        beginning = Beginning(self._session, group, options, earlier=earlier)
        try:
            for one in destinations:
                beside = None if beginning.is_over else beginning
                try:
                    prepared = self._prepare(one.request, group, options, beside)
                    one.planned()
                except Exception as error:
                    if beginning.has_raised or not one.failed(error):
                        raise
                else:
                    ready.append((one, prepared))
        finally:
            try:
                self._stage([self._begin(part) for part in self._parts(ready)], beginning.ahead)
            except BaseException as error:  # Ctrl-C, too: else writers would wait for the rest for ever
                self._cancel(ready, error)
                raise
        return len(ready)

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

    def _meet(
        self, group: Group, options: SaveOptions, *, doing: str = "beginning an asynchronous save"
    ) -> bool:
        """Find out together whether to save; connect what is not connected. Collective.

        Raises:
            CheckpointError: the error of a save that has failed, of the first rank that has one.
        """
        beginning = Beginning(self._session, group, options, earlier=contextlib.nullcontext())

        def look() -> Numbers:
            return Numbers((), beginning.numbers())

        found = run_and_compare(group, look, equal=0, largest=beginning.count, doing=doing)
        beginning.heard(found.largest)
        return not (self.skips and beginning.is_any_busy)

    def _prepare(
        self, request: SaveRequest, group: Group, options: SaveOptions, beside: Beside | None = None
    ) -> PreparedSave:
        """Plan a save, and make room for it. Collective."""
        planned, strategy = plan_state(request, None, group, options, beside)
        made: list[PreparedSave] = []

        def make() -> Numbers:
            made.append(PreparedSave.of(planned, strategy, rank=group.rank))
            self._session.make_room(made[0])
            return Numbers(())

        if self._session.has_room_for(planned.kept):
            # All ranks take this plan again, and there was room for it: no need to ask each other.
            try:
                make()
            except Exception as error:
                if self._session.host is not None:
                    said = common_error({group.rank: encode_error(error)}, "making room for its state")
                    self._session.host.abort(meetings_of(planned.attempt), encode_error(said))
                raise
        else:
            run_and_compare(group, make, equal=0, doing="making room for its state")
            self._session.roomy.append(planned.kept)
        return made[0]

    def _parts(
        self, ready: Sequence[tuple[Destination, PreparedSave]]
    ) -> list[list[tuple[Destination, PreparedSave]]]:
        """Return those together that read the same bytes."""
        parts: list[list[tuple[Destination, PreparedSave]]] = []
        for one in ready:
            before = parts[-1][0][1] if parts else None
            fits = one[1].layout.stop <= self._session.writer.arena.nbytes
            if before is not None and fits and shares_bytes(before, one[1]):
                parts[-1].append(one)
            else:
                parts.append([one])
        return parts

    def _begin(self, part: Sequence[tuple[Destination, PreparedSave]]) -> _Part:
        """Take up jobs that read the same bytes, which the last of them lets go."""
        works: list[SubmittedJob] = []
        for number, (one, ready) in enumerate(part):
            start = works[0].job.start if works else None
            works.append(self._begin_one(one, ready, start, keeps=number + 1 < len(part)))
        self._session.works.extend(works)
        return _Part(works, part[0][1])

    def _begin_one(
        self, one: Destination, ready: PreparedSave, start: int | None, *, keeps: bool
    ) -> SubmittedJob:
        planned, plan = ready.planned, self._use_plan(ready.planned)

        def job(number: int, position: int) -> Job:
            return Job(
                number=number,
                label=one.label,
                attempt=planned.attempt,
                place=one.place,
                strategy=ready.strategy,
                plan=plan,
                sizes=planned.sizes,
                report=planned.report,
                parity=planned.parity,
                common=ready.common,
                start=position if start is None else start,
                in_order=ready.in_order,
                keeps=keeps,
                verify=one.verify,
            )

        nbytes = ready.layout.stop if start is None else 0
        return self._session.writer.begin(job, nbytes, one.follow, one.failed)

    def _use_plan(self, planned: PlannedSave) -> int:
        assert planned.kept is not None
        return self._session.writer.use_plan(planned.kept, planned.complete)

    def _stage(self, parts: Sequence[_Part], ahead: Ahead | None) -> None:
        if not self._options.stage_in_background or not parts:
            self._fill(parts, ahead)
            return
        self._session.staging = threading.Thread(
            target=self._fill_behind, args=(parts,), name="megackpt-stage", daemon=True
        )
        self._session.staging.start()

    def _fill(self, parts: Sequence[_Part], ahead: Ahead | None = None) -> None:
        writer = self._session.writer
        for part in parts:
            span = StreamRange(start=part.works[0].job.start, layout=part.ready.layout)
            if ahead is not None and ahead.is_of(writer, part.ready.planned, span.start):
                writer.tell_staged(span.stop)
            else:
                try:
                    fill(writer.arena.memory, span, part.ready.rows, part.ready.planned.pieces, writer)
                except StreamClosedError:  # the saves have failed, which is raised at the next call
                    return
            for work in part.works:
                work.is_staged = True

    def _fill_behind(self, parts: Sequence[_Part]) -> None:
        try:
            self._fill(parts)
        except BaseException as error:  # noqa: BLE001 - raised at the next call
            self._session.writer.cancel_unstaged(error)

    def _cancel(self, ready: Sequence[tuple[Destination, PreparedSave]], error: BaseException) -> None:
        """Let the saves fail that this rank or others have begun, unless a thread copies their state."""
        staging = self._session.staging
        if staging is not None and staging.ident is not None:
            return
        writer = self._session.writer
        cancelled = writer.cancel_unstaged(error)
        self._session.works += [work for work in cancelled if work not in self._session.works]
        begun = {work.job.attempt for work in self._session.works}
        for _, prepared in ready:
            if prepared.planned.attempt not in begun:
                writer.abort(prepared.planned.attempt, error)

    def _await_ready(self) -> Numbers:
        self._session.running().wait_ready()
        return Numbers(())
