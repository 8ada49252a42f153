"""Saves while training goes on, into tiers and the root.

Owns their order, when the next one may begin, and that the error of one is raised at the next call unless
training outlives it. How it is staged and written is `engine.background.saver`'s.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import SupportsFloat

from megackpt.checkpointer.saving import RootSaving, SaveAttempt
from megackpt.checkpointer.schedule import Destinations
from megackpt.checkpointer.tiers import TierSet, destinations_in_tiers, in_native_format
from megackpt.comm import Group
from megackpt.engine.background.messages import CheckpointLocation
from megackpt.engine.background.prepared_save import Destination
from megackpt.engine.background.saver import AsyncSaver
from megackpt.engine.checkpoint.steps import step_name
from megackpt.engine.saving.save import SaveRequest
from megackpt.errors import StorageError
from megackpt.formats.damage import Damage
from megackpt.options import AsyncOptions
from megackpt.storage import ObjectOptions


class AsyncSaving:
    """Saves into tiers and a root by a process beside each rank.

    saving is what is done for any save into the root; store is the root, pickled, if it is neither a path nor
    an URL. hook is for tests: what stands between writer
    processes and their stores.
    """

    def __init__(
        self,
        saving: RootSaving,
        tiers: TierSet,
        options: AsyncOptions,
        *,
        objects: ObjectOptions | None,
        store: bytes | None = None,
        hook: str | None = None,
    ) -> None:
        self._saving, self._failures = saving, saving.failures
        self._tiers = tiers
        self._options = options
        self._objects = objects
        self._store = store
        self._hook = hook
        self._rank = 0
        self._step: int | None = None  # the one that was begun last
        self.saver: AsyncSaver | None = AsyncSaver(options, hook=hook)

    @property
    def is_busy(self) -> bool:
        """Whether a save is under way on this rank."""
        return self.saver is not None and self.saver.is_busy

    def save(
        self,
        step: int,
        to: Destinations,
        request: SaveRequest,
        metrics: Mapping[str, SupportsFloat] | None,
        group: Group,
    ) -> bool:
        """Begin to save a step; return whether that is under way. Collective, after `may_save`.

        Into tiers first: what is wrong with the root is no reason to have the step nowhere.

        Raises:
            CheckpointError: the same on every rank: it has failed already, and training does not outlive it.
        """
        earlier, self._step = self._waiting(), step
        places = list(destinations_in_tiers(self._tiers, to.tiers, step, request, group))
        if to.root:
            places.append(self._destination_in_root(step, request, metrics, group))
        with self._failures.around(f"Saving step {step}", rank=group.rank) as around:
            return self._running().save(places, group, self._saving.options, earlier=earlier) > 0
        assert around.has_failed
        return False

    def warm_up(self, request: SaveRequest, group: Group) -> None:
        """Do what a first save would do besides copying. Collective."""
        self.wait()
        requests = [request]
        if len(self._tiers):
            self._tiers.open(group)
            requests.append(in_native_format(request))
        for one in requests:
            self._running().warm_up(one, group, self._saving.options)

    def wait_staged(self) -> None:
        """Return when the state that was saved may change. Local."""
        if self.saver is not None:
            self.saver.wait_staged()

    def poll(self) -> None:
        """Raise the error of a save that has failed since one last asked, unless training outlives it."""
        if self.saver is not None:
            with self._waiting():
                self.saver.poll()

    def wait(self) -> None:
        """Return when nothing is under way; errors as of `poll`. Local."""
        if self.saver is not None:
            with self._waiting():
                self.saver.wait()

    def close(self) -> None:
        """Wait, and let go of the process; errors as of `poll`. The next save starts another one."""
        saver, self.saver = self.saver, None
        if saver is not None:
            with self._waiting():
                saver.close()

    def may_save(self, group: Group, *, is_last: bool = False) -> bool:
        """Wait for earlier saves as the options say; return whether the next one is to be made. Collective.

        The last one of a run is, whatever they say. Where one may be left out, ranks meet here; elsewhere the
        save that is begun next asks for errors of earlier ones.

        Raises:
            CheckpointError: an earlier one has failed, and training does not outlive it.
        """
        self._rank = group.rank
        if not self._running().skips:
            self._running().turn(waits=is_last)
            return True
        while True:
            with self._waiting() as earlier:
                return self._running().may_save(group, self._saving.options, waits=is_last)
            assert earlier.has_failed

    def _destination_in_root(
        self, step: int, request: SaveRequest, metrics: Mapping[str, SupportsFloat] | None, group: Group
    ) -> Destination:
        saving = self._saving

        def follow(damages: Sequence[Damage] | None) -> None:
            saving.warn_of_newer(step, group)
            if self._store is not None:
                _check_visible(saving, step)
            saving.cleanup.committed(step, damages)

        def failed(_: Exception) -> bool:
            saving.clean_up(step, group)
            return False

        return Destination(
            request=request,
            place=CheckpointLocation(
                root=saving.places.location, name=step_name(step), objects=self._objects, store=self._store
            ),
            label=f"step {step}",
            follow=follow,
            failed=failed,
            planned=lambda: saving.note_metrics(step, metrics, group),
            verify=saving.verify,
        )

    def _running(self) -> AsyncSaver:
        if self.saver is None:
            self.saver = AsyncSaver(self._options, hook=self._hook)
        return self.saver

    def _waiting(self) -> SaveAttempt:
        """Return a block in which the error of the save that was begun last may be raised."""
        return self._failures.around(f"Saving step {self._step}", rank=self._rank)


def _check_visible(saving: RootSaving, step: int) -> None:
    """Refuse a store whose copy in another process does not write what this process reads.

    Raises:
        StorageError: the step was committed there, and is not here.
    """
    if not saving.places.committed([step_name(step)]):
        where = saving.places.location
        raise StorageError(
            f"{where}: the writer process has committed step {step} by its copy of this store, and this "
            f"process does not see it. A store for asynchronous saves must reach the same files after it was "
            f"pickled; one that keeps files in the memory of a process does not.",
            path=where,
        )
