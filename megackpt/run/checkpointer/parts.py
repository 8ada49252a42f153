"""The objects that save and load the steps of a run, made from its settings."""

from __future__ import annotations

from dataclasses import dataclass

from megackpt.comm import AnyGroup
from megackpt.engine.background.prepared_save import pickled_for_a_writer
from megackpt.engine.checkpoint.steps import StepDirectories
from megackpt.run.checkpointer.async_saving import AsyncSaving
from megackpt.run.checkpointer.loading import RootLoading, StepLoading
from megackpt.run.checkpointer.saving import RootSaving, SaveFailures
from megackpt.run.checkpointer.schedule import DestinationChoice, SaveTrigger, SignalWatch
from megackpt.run.checkpointer.settings import RunSettings
from megackpt.run.checkpointer.step_saving import StepSaving
from megackpt.run.checkpointer.tiers import TierLoading, TierSaving, TierSet
from megackpt.storage import ObjectOptions, Store


@dataclass(frozen=True, slots=True, kw_only=True)
class RunParts:
    """The objects to which a `Checkpointer` leaves the work.

    Attributes:
        failures: counts failed saves.
        loading: loads steps, from the root, or from tiers and the root.
        async_saving: saves in the background; None for synchronous saves.
        signals: the signals that were received. Until it is closed, handlers are set.
        trigger: decides when a save is due.
        step_saving: saves steps to their destinations.
    """

    failures: SaveFailures
    loading: StepLoading
    async_saving: AsyncSaving | None
    signals: SignalWatch
    trigger: SaveTrigger
    step_saving: StepSaving

    @classmethod
    def of(
        cls,
        settings: RunSettings,
        directories: StepDirectories,
        *,
        exchange_group: AnyGroup | None,
        objects: ObjectOptions | None,
        store: Store | None,
        hook: str | None,
    ) -> RunParts:
        """Make the objects, start the writer process of asynchronous saves, and set handlers of signals.

        Args:
            settings: the arguments of the Checkpointer.
            directories: the step directories under the root.
            exchange_group: exchange group of the loads.
            objects: options of the object store, if the root is a URL.
            store: the root, if it is neither a path nor a URL.
            hook: for tests; see `AsyncSaving`.

        Raises:
            DeclarationError: the store cannot be pickled for a writer process, or signals cannot be handled
                because this is not the main thread.
        """
        failures = SaveFailures(settings.on_error)
        tiers = TierSet(settings.tiers)
        root_saving = RootSaving.of(directories, settings, failures)
        root_loading = RootLoading(
            directories=directories, options=settings.load_options, exchange_group=exchange_group
        )
        async_saving = None
        if settings.async_options is not None:
            pickled = None if store is None else pickled_for_a_writer(store)
            async_saving = AsyncSaving(
                root_saving, tiers, settings.async_options, objects=objects, store=pickled, hook=hook
            )
        # Nothing after this line may fail: handlers of signals are set, and only `close` removes them.
        signals = SignalWatch(settings.schedule.signals)
        trigger = SaveTrigger(settings.schedule, signals)
        step_saving = StepSaving(
            root_saving=root_saving,
            tier_saving=TierSaving(tiers, settings.save_options),
            async_saving=async_saving,
            choice=DestinationChoice(settings.tiers),
            trigger=trigger,
        )
        return cls(
            failures=failures,
            loading=TierLoading(tiers=tiers, root=root_loading) if len(tiers) else root_loading,
            async_saving=async_saving,
            signals=signals,
            trigger=trigger,
            step_saving=step_saving,
        )
