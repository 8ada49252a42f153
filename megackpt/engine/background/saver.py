"""Asynchronous saves: planned and staged by the training process, written by a writer process of each rank.

Ranks of the training synchronise in `save`, `may_save` and `warm_up` only. Between these calls, writer
processes synchronise with each other over a store of their own. What a rank keeps between saves is in
`session`.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

from megackpt.comm import Group, compare_step, encode_error, errors_on_all_ranks
from megackpt.comm.group import common_error
from megackpt.comm.store_host import StoreHost
from megackpt.engine.background.messages import Job, store_prefix
from megackpt.engine.background.prepared_save import (
    Destination,
    PreparedSave,
    SubmittedJob,
    sendable,
    shares_bytes,
)
from megackpt.engine.background.session import WriterSession, end_forgotten
from megackpt.engine.background.staging_memory import StreamClosedError, StreamRange, copy_rows
from megackpt.engine.saving.planned_save import PlannedSave
from megackpt.engine.saving.preparation import WRITER_STATUS, WriterStatus, compare_states
from megackpt.engine.saving.save import plan_compared
from megackpt.engine.saving.save_request import SaveRequest
from megackpt.formats.strategy import SaveStrategy
from megackpt.options import AsyncOptions, SaveOptions

_MAX_QUEUED = 4


@dataclass(frozen=True, slots=True, eq=False)
class _StagedCopy:
    """Bytes that are copied once, and the jobs that read them."""

    jobs: Sequence[SubmittedJob]
    prepared: PreparedSave


class AsyncSaver:
    """The asynchronous saves of one training run, one after the other.

    The constructor starts a writer process on each rank, which lives until `close`. A saver that is garbage
    is closed, at the latest when the interpreter ends.

    Args:
        options: how saves are made.
        hook: for tests, see `jobs.StoreHook`.
    """

    def __init__(self, options: AsyncOptions, *, hook: str | None = None) -> None:
        self._options = options
        self._session = WriterSession(options, hook)
        self._closing = weakref.finalize(self, end_forgotten, self._session)
        self._session.start()

    @property
    def is_busy(self) -> bool:
        """Whether a save is pending on this rank."""
        return self._session.writer.is_busy

    @property
    def writer_pid(self) -> int:
        """Process id of the writer process."""
        return self._session.writer.pid

    @property
    def staging_nbytes(self) -> int:
        """Size of the staging memory, in bytes."""
        return self._session.writer.memory.nbytes

    @property
    def store(self) -> StoreHost | None:
        """The store over which writer processes synchronise; None for one rank, or before the first save."""
        return self._session.host

    def warm_up(self, request: SaveRequest, group: Group, options: SaveOptions) -> None:
        """Do all steps of a first save except the copy: plan, allocate staging memory, start. Collective.

        Raises:
            CheckpointError: as `save`.
        """
        self.wait()
        self._exchange_status(group, options, doing="warming up for asynchronous saves")
        local, compared, _ = compare_states(request, None, group, writer_status=_status_if_sendable)
        planned = plan_compared(local, compared, group)
        self._stageable(planned, group)
        self._session.writer.use_plan(planned.plan)
        with errors_on_all_ranks(group, "starting its writer process"):
            self._session.running().wait_ready()

    def may_save(self, group: Group, options: SaveOptions, *, waits: bool = False) -> bool:
        """Wait as long as `when_busy` says; return whether the next save is to be made. Collective.

        If waits is true, this waits until no save is pending, for any `when_busy`.

        Raises:
            CheckpointError: the same on every rank: an earlier save has failed.
        """
        self.turn(waits=waits)
        is_any_busy = self._exchange_status(group, options, doing="beginning an asynchronous save")
        return not (self.skips and is_any_busy)

    @property
    def skips(self) -> bool:
        """Whether a save is skipped if an earlier one is pending; ranks must then call `may_save`."""
        return self._options.when_busy == "skip"

    def turn(self, *, waits: bool = False) -> None:
        """Wait for earlier saves as long as `when_busy` says, or for all of them if waits is true. Local."""
        self.wait_staged()
        if waits or not self.skips:
            # One less than the maximum: the save that follows is pending, too.
            most = _MAX_QUEUED - 1 if self._options.when_busy == "queue" and not waits else 0
            self._session.writer.wait_until(most)

    def save(
        self,
        destinations: Sequence[Destination],
        group: Group,
        options: SaveOptions,
        *,
        earlier: AbstractContextManager[Any] | None = None,
    ) -> int:
        """Plan and stage a state for some destinations; return when it may change.

        Collective, after `may_save` or `turn`, with the same destinations on all ranks. Destinations that
        follow each other and take the same bytes share one copy of the state, if all of it fits in memory.

        Args:
            destinations: where the state is saved; the first ones first.
            group: the ranks.
            options: tunables.
            earlier: a context in which the error of an earlier save is raised. If the context suppresses the
                error, this save goes on. None leaves the error for the next call.

        Returns:
            For how many destinations a save is under way. A destination whose `on_failure` has handled an
            error of planning does not count.

        Raises:
            CheckpointError: the same on every rank: an earlier save has failed, or this save fails for a
                destination. It goes on for the destinations before that one. If the state cannot be copied
                on one rank, only that rank raises an error; the other ranks raise one at the next call.
        """
        prepared: list[tuple[Destination, PreparedSave]] = []
        # The status of the writer travels with the first destination, so it needs no collective of its own.
        # If that destination fails, it travels with the next one.
        status: Callable[[], WriterStatus] | None
        status = partial(self._session.status, group, with_failure=earlier is not None)
        try:
            for destination in destinations:
                try:
                    local, compared, _ = compare_states(
                        destination.request,
                        None,
                        group,
                        writer_status=partial(_status_if_sendable, status=status),
                    )
                except Exception as error:
                    if not destination.on_failure(error):
                        raise
                    continue
                if status is not None:  # ranks exchange it once
                    status = None
                    self._session.follow_status(
                        compared.maximum, group, timeout_s=options.timeout_s, raised_in=earlier
                    )
                try:
                    save = self._stageable(plan_compared(local, compared, group), group)
                    destination.on_planned()
                except Exception as error:
                    if not destination.on_failure(error):
                        raise
                else:
                    prepared.append((destination, save))
        finally:
            try:
                # Also after an error: all ranks have agreed on the destinations before the one that has
                # failed, and their writers expect these saves.
                self._stage([self._submit(copied) for copied in self._shared_copies(prepared)])
            except BaseException as error:  # Ctrl-C, too: writers would wait for the rest for ever
                self._cancel(prepared, error)
                raise
        return len(prepared)

    def wait_staged(self) -> None:
        """Return when the state that was saved may change. Local."""
        self._session.wait_staged()

    def wait(self) -> None:
        """Wait until no save is pending. Local.

        Raises:
            CheckpointError: a save has failed since the last call that raises such errors.
        """
        self.wait_staged()
        self._session.writer.wait_until(0)
        self.poll()

    def poll(self) -> None:
        """Raise the error of a save that has failed; never wait. Local.

        Raises:
            CheckpointError: a save has failed since the last call that raises such errors.
        """
        error = self._session.failure()
        if error is not None:
            raise error

    def close(self) -> None:
        """Wait, end the process and release the memory. With several ranks, all call it.

        Raises:
            CheckpointError: a save has failed since the last call that raises such errors.
        """
        if not self._session.writer.is_ours:  # a forked child: its parent uses the process and the memory
            return
        try:
            self.wait()
        finally:
            self._session.end(keeps_writer=True)
            self._closing.detach()

    def abandon(self) -> None:
        """End the process immediately. Uncommitted saves stay incomplete; no error is raised. Local."""
        # The jobs of a killed process fail at once, so that `end` does not wait for them.
        self._session.writer.kill()
        self._session.end(keeps_writer=False)
        self._closing.detach()

    def _exchange_status(self, group: Group, options: SaveOptions, *, doing: str) -> bool:
        """Exchange the status of all ranks' writers; return whether a save is pending on any. Collective.

        Raises:
            CheckpointError: the error of a save that has failed, of the first rank that has one.
        """
        with compare_step(group, doing, largest=WRITER_STATUS) as step:
            step.largest = dict(self._session.status(group, with_failure=True))
        self._session.follow_status(
            step.maximum, group, timeout_s=options.timeout_s, raised_in=contextlib.nullcontext()
        )
        return bool(step.maximum["writer is busy"])

    def _stageable(self, planned: PlannedSave, group: Group) -> PreparedSave:
        """Return a planned save as the writer process takes it, with room for it in memory. Collective."""
        session = self._session
        if not session.has_room_for(planned.plan):
            with errors_on_all_ranks(group, "making room for its state"):
                prepared = self._with_room(planned, rank=group.rank)
            session.plans_with_room.append(planned.plan)
            return prepared
        # All ranks use this plan again and had room for it, so they need not synchronise. If it fails all the
        # same, the writers of other ranks receive the error.
        try:
            return self._with_room(planned, rank=group.rank)
        except Exception as error:
            if session.host is not None:
                common = common_error({group.rank: encode_error(error)}, "making room for its state")
                session.host.abort(store_prefix(planned.attempt), encode_error(common))
            raise

    def _with_room(self, planned: PlannedSave, *, rank: int) -> PreparedSave:
        prepared = PreparedSave.of(planned, rank=rank)
        self._session.make_room(prepared)
        if prepared.parts.device is not None:
            self._session.writer.memory.pin(prepared.parts.device)
        return prepared

    def _shared_copies(
        self, prepared: Sequence[tuple[Destination, PreparedSave]]
    ) -> list[list[tuple[Destination, PreparedSave]]]:
        """Group the saves that read the same bytes."""
        groups: list[list[tuple[Destination, PreparedSave]]] = []
        for destination, save in prepared:
            previous = groups[-1][0][1] if groups else None
            # Memory that is smaller than the rows is overwritten while the first job reads it. The next job
            # could not read the same bytes again.
            fits = save.layout.stop <= self._session.writer.memory.nbytes
            if previous is not None and fits and shares_bytes(previous, save):
                groups[-1].append((destination, save))
            else:
                groups.append([(destination, save)])
        return groups

    def _submit(self, saves: Sequence[tuple[Destination, PreparedSave]]) -> _StagedCopy:
        """Submit jobs that read the same bytes; the last of them frees the memory."""
        jobs: list[SubmittedJob] = []
        for number, (destination, save) in enumerate(saves):
            start = jobs[0].job.start if jobs else None
            jobs.append(self._submit_one(destination, save, start, keeps=number + 1 < len(saves)))
        self._session.jobs.extend(jobs)
        return _StagedCopy(jobs, saves[0][1])

    def _submit_one(
        self, destination: Destination, save: PreparedSave, start: int | None, *, keeps: bool
    ) -> SubmittedJob:
        planned, writer = save.planned, self._session.writer
        plan = writer.use_plan(planned.plan)
        number, position = writer.next_job()
        job = Job(
            number=number,
            label=destination.label,
            attempt=planned.attempt,
            location=destination.location,
            strategy=save.strategy,
            hooks=planned.hooks,
            plan=plan,
            commit_fields=planned.commit_fields,
            exchanged=planned.exchanged,
            object_sizes=planned.parts.object_sizes,
            common=save.common,
            start=position if start is None else start,
            in_order=planned.strategy.capabilities.writes_in_order,
            keeps=keeps,
            verify=destination.verify,
            unpadded=planned.unpadded,
        )
        # A job that reads the bytes of an earlier one takes no bytes of the stream for itself.
        nbytes = save.layout.stop if start is None else 0
        return writer.submit(job, nbytes, destination.on_commit, destination.on_failure)

    def _stage(self, copies: Sequence[_StagedCopy]) -> None:
        if not self._options.stage_in_background or not copies:
            self._copy(copies)
            return
        # Noted in the session before it starts: an interrupt in between leaves a thread without an id, which
        # `wait_staged` and `_cancel` recognise.
        self._session.staging = threading.Thread(
            target=self._copy_in_background, args=(copies,), name="megackpt-stage", daemon=True
        )
        self._session.staging.start()

    def _copy(self, copies: Sequence[_StagedCopy]) -> None:
        writer = self._session.writer
        for copied in copies:
            save = copied.prepared
            where = StreamRange(start=copied.jobs[0].job.start, layout=save.layout)
            try:
                copy_rows(writer.memory.array, where, save.rows, save.parts, writer)
            except StreamClosedError:  # the saves have failed; the next call raises their error
                return
            for job in copied.jobs:
                job.is_staged = True

    def _copy_in_background(self, copies: Sequence[_StagedCopy]) -> None:
        try:
            self._copy(copies)
        except BaseException as error:  # noqa: BLE001 - raised at the next call
            self._session.writer.cancel_unstaged(error)

    def _cancel(self, prepared: Sequence[tuple[Destination, PreparedSave]], error: BaseException) -> None:
        """Make the saves fail that any rank has begun, unless a thread copies their state."""
        staging = self._session.staging
        if staging is not None and staging.ident is not None:
            return
        writer = self._session.writer
        cancelled = writer.cancel_unstaged(error)
        # An interrupt in `_submit` leaves jobs that the writer has and the session does not. Their errors are
        # raised from here.
        self._session.jobs += [job for job in cancelled if job not in self._session.jobs]
        # Other ranks may have submitted saves that this rank has only prepared: their writers must not wait.
        submitted = {job.job.attempt for job in self._session.jobs}
        for _, save in prepared:
            if save.planned.attempt not in submitted:
                writer.abort(save.planned.attempt, error)


def _status_if_sendable(
    strategy: SaveStrategy, *, status: Callable[[], WriterStatus] | None = None
) -> WriterStatus:
    """Return the status of this rank's writer, if it can be sent the strategy; empty without one. Local.

    Raises:
        DeclarationError: the strategy cannot be sent to another process.
    """
    sendable(strategy)
    return {} if status is None else status()
