"""What all ranks of a run do besides saving: load a step, wait for saves, end.

`run.checkpointer.checkpointer` adds the saves, and `run` needs no ranks.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal, TypeVar

from megackpt.comm import Group, world_group
from megackpt.entities import ShardedStateDict, StateDict
from megackpt.errors import CheckpointError, DeclarationError
from megackpt.ground.arguments import checked_step
from megackpt.maps import MapChoice
from megackpt.plans.validation import LoadReport, ReturnsState, StrictHandling
from megackpt.run.checkpointer.loading import LastLoad, StepRequest, load_checkpoint
from megackpt.run.checkpointer.options import Groups
from megackpt.run.checkpointer.parts import RunParts
from megackpt.run.checkpointer.run import Run
from megackpt.run.checkpointer.settings import RunSettings
from megackpt.storage import Location, ObjectOptions, Store

log = logging.getLogger(__name__)

Self = TypeVar("Self", bound="CollectiveRun")


class CollectiveRun(Run):
    """A run whose ranks have compared their settings: it is loaded, its saves are awaited, and it ends.

    Args:
        root: as for `Checkpointer`.
        settings: the arguments of the `Checkpointer` that must be equal on all ranks.
        groups: the ranks.
        objects: options of the object store, if the root is a URL.
        hook: for tests; see `AsyncSaving`.

    Raises:
        DeclarationError: as `RunParts.of`.
    """

    def __init__(
        self,
        root: str | os.PathLike[str] | Store,
        settings: RunSettings,
        groups: Groups,
        *,
        objects: ObjectOptions | None,
        hook: str | None,
    ) -> None:
        trusted = settings.load_options.allow_unsafe_pickle
        super().__init__(root, objects=objects, allow_unsafe_pickle=trusted)
        self.last_load: LastLoad | None = None
        self.last_report: LoadReport | None = None
        self._settings = settings
        self._groups = groups
        self._is_compared = False
        store = None if isinstance(root, (str, os.PathLike)) else root
        self._common_root = self._directories.location if store is None else None
        self._parts = RunParts.of(
            settings,
            self._directories,
            exchange_group=groups.exchange,
            objects=objects,
            store=store,
            hook=hook,
        )
        self._async_saving = self._parts.async_saving
        # Nothing may fail here: the handlers of signals are set, and only `close` removes them.

    def __enter__(self: Self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object, /) -> None:
        try:
            self.close()
        except CheckpointError as failure:
            if error is None:
                raise
            log.error("A save has failed, too: %s", failure)  # raised here it would hide the first error

    def load(
        self,
        state: ShardedStateDict,
        step: int | Literal["latest"] | None = None,
        *,
        strict: ReturnsState = StrictHandling.ASSUME_OK_UNEXPECTED,
        maps: MapChoice | None = None,
        config: Mapping[str, Any] | None = None,
    ) -> StateDict:
        """Load a step. Collective.

        "latest" and None mean the newest committed step that rank 0 finds. With tiers, they mean the newest
        step that is complete over all nodes and the root; a damaged or incomplete step is skipped with a
        warning. Without tiers, a damaged step is skipped only with `LoadOptions(on_corrupt="fallback")`. If
        step is a number, no other step is loaded. `last_load` has the step that was used.

        Args:
            state: the request, as for `megackpt.load`.
            step: the number of a step, "latest" or None.
            strict: as for `megackpt.load`.
            maps: as for `megackpt.load`, for steps in another family's names.
            config: as for `megackpt.load`.

        Returns:
            The loaded state dict, as `megackpt.load`.

        Raises:
            DeclarationError: step is neither a number nor "latest".
            NotACheckpointError: there is no committed step, or the given step is not committed.
            CheckpointError: as `megackpt.load`.
        """
        if isinstance(step, str) and step != "latest":
            raise DeclarationError(f"step is {step!r}; give the number of a step, or 'latest'.")
        number = None if step is None or isinstance(step, str) else checked_step(step)
        self.wait()  # a step that is being saved is the newest, and removals after it must not cross the load
        group = self._ranks(self._settings.load_options.timeout_s)
        request = StepRequest(state=state, strict=strict, maps=maps, config=config)
        loaded, self.last_load = self._parts.loading.load(request, number, group)
        self.last_report = self.last_load.report
        self._parts.trigger.loaded(self.last_load.step)
        return loaded

    def load_from(
        self,
        state: ShardedStateDict,
        location: Location,
        *,
        strict: ReturnsState = StrictHandling.ASSUME_OK_UNEXPECTED,
        maps: MapChoice | None = None,
        config: Mapping[str, Any] | None = None,
    ) -> StateDict:
        """Load a checkpoint that is no step of this run, to start it. Collective.

        It may be of any format, and with `maps` have another family's names, as a Hugging Face folder has.
        `last_report` has the report of this load; `last_load`, a step of this run, does not change.
        `LoadOptions.copies` are roots of this run, and are not used.

        Args:
            state: the request, as for `megackpt.load`.
            location: the checkpoint, not a root: a directory, a URL or a `Store`.
            strict: as for `megackpt.load`.
            maps: as for `megackpt.load`.
            config: as for `megackpt.load`.

        Returns:
            The loaded state dict, as `megackpt.load`.

        Raises:
            CheckpointError: as `megackpt.load`.
        """
        group = self._ranks(self._settings.load_options.timeout_s)
        request = StepRequest(state=state, strict=strict, maps=maps, config=config)
        options = replace(self._settings.load_options, copies=())
        loaded, self.last_report = load_checkpoint(request, location, options, group, self._groups.exchange)
        return loaded

    def find_latest(self) -> int | None:
        """Return the step that `load` would take, the same on all ranks; None if there is none. Collective.

        Waits for pending saves. Without tiers, the step is the newest committed one that rank 0 finds; a
        newer incomplete step is a warning. With tiers, it is the newest step of which every byte is stored.

        Raises:
            CheckpointError: a pending save failed.
        """
        self.wait()
        return self._parts.loading.find_latest(self._ranks(self._settings.load_options.timeout_s))

    def wait(self) -> None:
        """Wait until every save is committed or has failed. Local.

        Raises:
            CheckpointError: a save has failed; older steps are untouched. on_error decides which errors are
                raised, as for `save`.
        """
        if self._async_saving is not None:
            self._async_saving.wait()

    @property
    def is_saving(self) -> bool:
        """Whether an asynchronous save is pending on this rank. Local."""
        return self._async_saving is not None and self._async_saving.is_busy

    def wait_staged(self) -> None:
        """Wait until the saved state may change. Local.

        With `AsyncOptions.stage_in_background`, call it before `optimizer.step()`. Otherwise it returns at
        once.
        """
        if self._async_saving is not None:
            self._async_saving.wait_staged()

    def poll(self) -> bool:
        """Return whether an asynchronous save is pending on this rank. Local.

        Raises:
            CheckpointError: a save has failed; older steps do not change. on_error decides which errors are
                raised, as for `save`.
        """
        if self._async_saving is not None:
            self._async_saving.poll()
        return self.is_saving

    @property
    def failed_saves(self) -> int:
        """The number of failed saves. Local; equal on all ranks once all of them know of the last error."""
        return self._parts.failures.count

    def close(self) -> None:
        """Wait for pending saves, end the writer process, and restore the handlers of signals.

        Collective, if anything was saved asynchronously. If the schedule has signals, call it in the main
        thread. The checkpointer can be used again, but no longer handles signals.

        Raises:
            CheckpointError: a save under way failed.
        """
        try:
            if self._async_saving is not None:
                self._async_saving.close()
        finally:
            self._parts.signals.close()

    def _ranks(self, timeout_s: float) -> Group:
        """Return the group. The first call compares the arguments of all ranks. Collective."""
        group = self._groups.world or world_group(timeout_s=timeout_s)
        if not self._is_compared:
            self._settings.compare(group, root=self._common_root)
            self._is_compared = True
        return group
