"""Saves while training goes on: what all of them share, whichever place they go to, and those into the root.

Owns when the next one may begin, and that the error of one is raised at the next call unless training
outlives it. How it is staged and written is `engine.async_save`'s.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import SupportsFloat

from megackpt.checkpointer.failures import Around, Failures
from megackpt.checkpointer.saving import RootSaving
from megackpt.comm import Group
from megackpt.engine.async_save import AsyncSaver
from megackpt.engine.save import SaveRequest
from megackpt.engine.steps import step_name
from megackpt.engine.writer_messages import Place
from megackpt.errors import CheckpointError
from megackpt.formats.damage import Damage
from megackpt.options import AsyncOptions, SaveOptions
from megackpt.storage import ObjectOptions


class SavingBehind:
    """What saves by a process beside each rank.

    failures says which errors training outlives; options are those of all saves. hook is for tests: what
    stands between writer processes and their stores.
    """

    def __init__(
        self,
        failures: Failures,
        options: SaveOptions,
        async_options: AsyncOptions,
        *,
        hook: str | None = None,
    ) -> None:
        self._failures = failures
        self._options = options
        self._async_options = async_options
        self._hook = hook
        self._rank = 0
        self._step: int | None = None  # the one that was begun last
        self.saver: AsyncSaver | None = AsyncSaver(async_options, hook=hook)

    @property
    def is_busy(self) -> bool:
        """Whether a save is under way on this rank."""
        return self.saver is not None and self.saver.is_busy

    def begin(self, step: int) -> AsyncSaver:
        """Return what saves a step, whose errors are raised from now on."""
        self._step = step
        return self._running()

    def warm_up(self, request: SaveRequest, group: Group) -> None:
        """Do what a first save would do besides copying. Collective."""
        self.wait()
        self._running().warm_up(request, group, self._options)

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
        """Wait for an earlier save as the options say; return whether the next one is to be made. Collective.

        The last one of a run is, whatever they say.

        Raises:
            CheckpointError: an earlier one has failed, and training does not outlive it.
        """
        self._rank = group.rank
        while True:
            with self._waiting() as earlier:
                return self._running().may_save(group, self._options, waits=is_last)
            assert earlier.has_failed

    def _running(self) -> AsyncSaver:
        if self.saver is None:
            self.saver = AsyncSaver(self._async_options, hook=self._hook)
        return self.saver

    def _waiting(self) -> Around:
        return self._failures.around(f"Saving step {self._step}", rank=self._rank)


@dataclass(frozen=True, slots=True)
class RootSavingBehind:
    """Saves into a root by a process beside each rank.

    Attributes:
        saving: what is done for any save into it.
        behind: what has the processes.
        objects: options of the root, if it is in an object store.
    """

    saving: RootSaving
    behind: SavingBehind
    objects: ObjectOptions | None

    def save(
        self, step: int, request: SaveRequest, metrics: Mapping[str, SupportsFloat] | None, group: Group
    ) -> bool:
        """Begin the save of a step; return whether it is under way. Collective, after `may_save`.

        Raises:
            CheckpointError: the same on every rank: it has failed already, and training does not outlive it.
        """
        saving = self.saving

        def follow(damages: Sequence[Damage] | None) -> None:
            saving.warn_of_newer(step, group)
            saving.housekeeping.committed(step, damages)

        def failed(_: CheckpointError) -> bool:
            saving.clean_up(step, group)
            return False

        with saving.failures.around(f"Saving step {step}", rank=group.rank) as around:
            saving.note_metrics(step, metrics, group)
            saver = self.behind.begin(step)
            try:
                saver.save(
                    request,
                    place=Place(root=saving.places.location, name=step_name(step), objects=self.objects),
                    label=f"step {step}",
                    group=group,
                    options=saving.options,
                    verify=saving.verify,
                    follow=follow,
                    failed=failed,
                )
            except Exception:
                saving.clean_up(step, group)
                raise
        return not around.has_failed
