"""Saving one step to its destinations, tiers and root, before `save` returns or in the background."""

from __future__ import annotations

from collections.abc import Mapping
from typing import SupportsFloat

from megackpt.comm import Group
from megackpt.engine.saving.save_request import SaveRequest
from megackpt.ground.arguments import check_flag
from megackpt.run.checkpointer.async_saving import AsyncSaving
from megackpt.run.checkpointer.saving import RootSaving
from megackpt.run.checkpointer.schedule import DestinationChoice, Destinations, SaveTrigger
from megackpt.run.checkpointer.settings import compare_settings
from megackpt.run.checkpointer.tiers import TierSaving


class StepSaving:
    """Saves steps to the destinations that are due. All methods are collective.

    Args:
        root_saving: saves into the root.
        tier_saving: saves into tiers.
        async_saving: saves into both in the background; None for synchronous saves.
        choice: chooses the destinations of each step.
        trigger: has the signals, and is notified of each save.
    """

    def __init__(
        self,
        *,
        root_saving: RootSaving,
        tier_saving: TierSaving,
        async_saving: AsyncSaving | None,
        choice: DestinationChoice,
        trigger: SaveTrigger,
    ) -> None:
        self._root_saving, self._tier_saving, self._async_saving = root_saving, tier_saving, async_saving
        self._choice = choice
        self._trigger = trigger

    def destinations(self, step: int, to_root: bool | None, group: Group) -> Destinations:
        """Return the destinations of a step.

        Raises:
            DeclarationError: ranks would save it to different destinations.
        """
        destinations = self._choice.of(step, to_root=to_root, is_signalled=self._trigger.is_signalled)
        if self._choice.depends_on_step or to_root is not None:
            if to_root is not None:
                check_flag("to_root", to_root)
            values = {
                "step": step,
                "to_root": to_root,
                "is for the root": destinations.root,
                "tiers": list(destinations.tiers),
            }
            compare_settings(group, values, what="Ranks save differently", doing="choosing where a step goes")
        return destinations

    def save(
        self,
        step: int,
        destinations: Destinations,
        request: SaveRequest,
        metrics: Mapping[str, SupportsFloat] | None,
        group: Group,
    ) -> bool:
        """Save a step; return whether it is saved, or being saved in the background.

        Raises:
            CheckpointError: as `Checkpointer.save`.
        """
        async_saving = self._async_saving if destinations else None
        is_last = self._trigger.exit_signal is not None
        if async_saving is not None and not async_saving.may_save(group, is_last=is_last):
            self._choice.skipped(destinations)
            return False
        self._choice.saved(destinations)
        try:
            if async_saving is not None:
                return async_saving.save(step, destinations, request, metrics, group)
            # Tiers come first: an error of the root must not keep the step out of them.
            tiers = destinations.tiers
            is_in_tier = bool(tiers) and self._tier_saving.save(step, tiers, request, group)
            if not destinations.root:
                return is_in_tier
            return self._root_saving.save(step, request, metrics, group)
        finally:
            self._trigger.saved(step)
