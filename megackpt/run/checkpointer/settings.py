"""The arguments of a Checkpointer that must be equal on all ranks.

Ranks compare them in their first collective call. If only one rank saved asynchronously, into tiers, or at
another interval, the others would wait for it, or it would remove steps that they keep.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from megackpt.comm import Group, compare_step, gather_step
from megackpt.engine.saving.preparation import Settings, as_number, check_settings
from megackpt.options import AsyncOptions, LoadOptions, SaveOptions
from megackpt.run.checkpointer.options import OnError, Retention, SaveSchedule, Tier, Tiers
from megackpt.storage import absolute_path


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSettings:
    """Arguments of a Checkpointer, under their names there.

    Attributes:
        async_options: None without asynchronous saves.
    """

    retention: Retention
    schedule: SaveSchedule
    async_options: AsyncOptions | None
    tiers: Tiers
    on_error: OnError
    verify_after_save: bool
    save_options: SaveOptions
    load_options: LoadOptions

    def compare(self, group: Group, *, root: str | None) -> None:
        """Raise an error if ranks have different arguments. Collective.

        Args:
            group: the ranks.
            root: the directory or the URL, absolute; None for a store, which each rank may name differently.

        Raises:
            DeclarationError: the same on every rank; it names the first argument that differs.
            RankFailedError: a rank did not answer, or calls another collective function.
        """
        if group.size > 1:
            compare_settings(
                group,
                {"root": root, **self._values()},
                what="Ranks have different Checkpointers",
                doing="comparing what their Checkpointers were given",
            )

    def _values(self) -> dict[str, Any]:
        """Return the values to compare as JSON, by the names that error texts use."""
        best = self.retention.keep_best
        schedule, options = self.schedule, self.async_options
        return {
            "async_save": options is not None,
            "AsyncOptions.when_busy": None if options is None else options.when_busy,
            "tiers": [_tier_values(tier) for tier in self.tiers.tiers],
            "Tiers.root_every": self.tiers.root_every,
            "SaveSchedule.steps": schedule.steps,
            "SaveSchedule.seconds": None if schedule.seconds is None else float(schedule.seconds),
            "SaveSchedule.signals": list(schedule.signals),
            "SaveSchedule.agree_s": float(schedule.agree_s),
            "SaveOptions.timeout_s": float(self.save_options.timeout_s),
            "LoadOptions.timeout_s": float(self.load_options.timeout_s),
            "on_error": self.on_error,
            "verify_after_save": self.verify_after_save,
            "Retention.keep_last": self.retention.keep_last,
            "Retention.keep_every": self.retention.keep_every,
            "Retention.keep_best": None if best is None else [best.metric, best.n, best.mode],
        }


def _tier_values(tier: Tier) -> list[object]:
    numbers = [tier.every, tier.keep_last, tier.replication_factor, tier.jump]
    return [type(tier).__name__, absolute_path(tier.path), *numbers]


def compare_settings(group: Group, settings: Settings, *, what: str, doing: str) -> None:
    """Check that all ranks have equal settings, by one small message of each rank. Collective.

    Args:
        group: the ranks.
        settings: of this rank.
        what: start of the error's text: "Ranks save differently".
        doing: name of the step, for the error's text.

    Raises:
        DeclarationError: settings differ; the same on every rank, naming the first that differs.
        RankFailedError: a rank did not answer, or is at another step.
    """
    encoded = json.dumps(settings).encode()
    with compare_step(group, doing, equal=("settings",)) as step:
        step.equal["settings"] = as_number(encoded)
    if not step.is_equal["settings"]:
        with gather_step(group, doing, on_all_ranks=True) as naming:
            naming.data = encoded
        check_settings([json.loads(settings) for settings in naming.results], what=what)
