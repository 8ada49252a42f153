"""Asynchronous saves into tiers and the root: their order, when the next one may begin, and their errors.

An error of a save is raised at the next call, unless training tolerates it. How a state is staged and written
is decided in `engine.background.saver`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import SupportsFloat

from megackpt.comm import Group
from megackpt.engine.background.messages import CheckpointLocation
from megackpt.engine.background.prepared_save import Destination, pickled_for_a_writer
from megackpt.engine.background.saver import AsyncSaver
from megackpt.engine.checkpoint.steps import step_name
from megackpt.engine.saving.save_request import SaveRequest
from megackpt.engine.tiers.save import NodeLocation
from megackpt.errors import StorageError
from megackpt.formats.damage import Damage
from megackpt.options import AsyncOptions
from megackpt.run.checkpointer.options import Tier
from megackpt.run.checkpointer.saving import RootSaving, SaveAttempt
from megackpt.run.checkpointer.schedule import Destinations
from megackpt.run.checkpointer.tiers import TierSet, in_native_format, warn_of_failure
from megackpt.storage import ObjectOptions, Store


class AsyncSaving:
    """Saves steps into tiers and a root with a writer process of each rank. See `StepSaving`.

    Args:
        root_saving: saves steps into the root.
        tiers: the tiers of the run.
        options: options of the writer process.
        objects: options of the object store, if the root is a URL.
        store: the root, if it is neither a path nor a URL.
        hook: for tests: wraps the stores of writer processes.

    Raises:
        DeclarationError: the store cannot be sent to a writer process.

    Attributes:
        saver: stages and writes; None after `close`, until the next save.
    """

    def __init__(
        self,
        root_saving: RootSaving,
        tiers: TierSet,
        options: AsyncOptions,
        *,
        objects: ObjectOptions | None,
        store: Store | None = None,
        hook: str | None = None,
    ) -> None:
        self._root_saving = root_saving
        self._tiers = tiers
        self._options = options
        self._objects = objects
        self._store = None if store is None else pickled_for_a_writer(store)
        self._hook = hook
        self._rank = 0
        self._step: int | None = None  # the step of the last save
        self.saver: AsyncSaver | None = AsyncSaver(options, hook=hook)

    @property
    def is_busy(self) -> bool:
        """Whether a save is pending on this rank."""
        return self.saver is not None and self.saver.is_busy

    def save(
        self,
        step: int,
        to: Destinations,
        request: SaveRequest,
        metrics: Mapping[str, SupportsFloat] | None,
        group: Group,
    ) -> bool:
        """Begin to save a step; return whether a save is pending. Collective, after `may_save`.

        Tiers come first: an error of the root must not keep the step out of them.

        Raises:
            CheckpointError: the save has already failed, and the error is not tolerated; the same on every
                rank.
        """
        earlier, self._step = self._last_save(), step
        destinations = list(_destinations_in_tiers(self._tiers, to.tiers, step, request, group))
        if to.root:
            destinations.append(self._destination_in_root(step, request, metrics, group))
        options = self._root_saving.options
        with self._root_saving.failures.attempt(f"Saving step {step}", rank=group.rank):
            return self._started_saver().save(destinations, group, options, earlier=earlier) > 0
        return False  # a tolerated error

    def warm_up(self, request: SaveRequest, group: Group) -> None:
        """Do everything that a first save does, except the copy. Collective."""
        self.wait()
        requests = [request]
        if len(self._tiers):
            self._tiers.open(group)
            requests.append(in_native_format(request))
        for request_in_format in requests:
            self._started_saver().warm_up(request_in_format, group, self._root_saving.options)

    def wait_staged(self) -> None:
        """Wait until the saved state may change. Local."""
        if self.saver is not None:
            self.saver.wait_staged()

    def poll(self) -> None:
        """Raise the error of a save that has failed since the last call, unless it is tolerated. Local."""
        if self.saver is not None:
            with self._last_save():
                self.saver.poll()

    def wait(self) -> None:
        """Wait until no save is pending; raise errors as `poll` does. Local."""
        if self.saver is not None:
            with self._last_save():
                self.saver.wait()

    def close(self) -> None:
        """Wait, and end the writer process; raise errors as `poll` does. The next save starts another one."""
        saver, self.saver = self.saver, None
        if saver is not None:
            with self._last_save():
                saver.close()

    def may_save(self, group: Group, *, is_last: bool) -> bool:
        """Wait for earlier saves as the options say; return whether to make the next save. Collective.

        With is_last, for the last save of a run, it returns True. Ranks synchronise here only if saves may be
        skipped; otherwise the next save finds errors of earlier ones.

        Raises:
            CheckpointError: an earlier save has failed, and the error is not tolerated.
        """
        self._rank = group.rank
        saver = self._started_saver()
        if not saver.skips:
            saver.turn(waits=is_last)
            return True
        while True:  # each tolerated error of an earlier save ends the block
            with self._last_save():
                return saver.may_save(group, self._root_saving.options, waits=is_last)

    def _destination_in_root(
        self, step: int, request: SaveRequest, metrics: Mapping[str, SupportsFloat] | None, group: Group
    ) -> Destination:
        # A Checkpointer may be dropped during the save. These functions stay and must not refer to self:
        # then the saver would never be garbage, and its writer process would stay.
        root_saving, store = self._root_saving, self._store

        def follow(damages: Sequence[Damage] | None) -> None:
            if store is not None:
                _check_visible(root_saving, step)
            root_saving.after_commit(step, damages)

        def failed(_: Exception) -> bool:
            root_saving.clean_up(step, group)
            return False

        location = CheckpointLocation(
            root=root_saving.directories.location,
            name=step_name(step),
            objects=self._objects,
            store=store,
        )
        return Destination(
            request=request,
            location=location,
            label=f"step {step}",
            on_commit=follow,
            on_failure=failed,
            on_planned=lambda: root_saving.store_metrics(step, metrics, group),
            verify=root_saving.verify,
        )

    def _started_saver(self) -> AsyncSaver:
        if self.saver is None:
            self.saver = AsyncSaver(self._options, hook=self._hook)
        return self.saver

    def _last_save(self) -> SaveAttempt:
        """Return a context that handles an error of the last save."""
        return self._root_saving.failures.attempt(f"Saving step {self._step}", rank=self._rank)


def _check_visible(root_saving: RootSaving, step: int) -> None:
    """Check that this process sees the step that the writer process committed.

    Raises:
        StorageError: the writer's copy of the store writes to other files than this process reads.
    """
    if not root_saving.directories.committed([step_name(step)]):
        where = root_saving.directories.location
        raise StorageError(
            f"{where}: the writer process has committed step {step} with its copy of this store, but this "
            f"process does not see it. A pickled copy of a store for asynchronous saves must reach the same "
            f"files; the copy of a store in the memory of a process does not.",
            path=where,
        )


def _destinations_in_tiers(
    tiers: TierSet, due: Iterable[int], step: int, request: SaveRequest, group: Group
) -> Iterator[Destination]:
    """Yield the destinations of a step in the tiers with these numbers, for an asynchronous save.

    Collective at the first call in a run.

    Raises:
        DeclarationError: as `TierSet.open`.
    """
    native = in_native_format(request)
    for number in due:
        yield _destination_in_tier(tiers.location(number, step, group), tiers[number], native, group)


def _destination_in_tier(
    location: NodeLocation, tier: Tier, request: SaveRequest, group: Group
) -> Destination:
    def follow(_: Sequence[Damage] | None) -> None:
        return None

    def failed(error: Exception) -> bool:
        if not isinstance(error, StorageError):
            return False
        warn_of_failure(location, tier, error, rank=group.rank)
        return True

    return Destination(
        request=request,
        location=location,
        label=f"step {location.step} in {tier}",
        on_commit=follow,
        on_failure=failed,
    )
