"""The arguments of a Checkpointer: short forms, checks, and the comparison between ranks.

Ranks compare them in their first collective call. If only one rank saved asynchronously, into tiers, or at
another interval, the others would wait for it, or it would remove steps that they keep.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, get_args

from megackpt.comm import Group, check_group, compare_step, world_group
from megackpt.engine.saving.preparation import Settings, as_number, raise_different_settings
from megackpt.errors import DeclarationError
from megackpt.ground.arguments import check_count, check_flag, check_kind
from megackpt.options import AsyncOptions, LoadOptions, SaveOptions
from megackpt.run.checkpointer.options import (
    Groups,
    OnError,
    OnNewerSteps,
    Retention,
    SaveSchedule,
    Tier,
    Tiers,
)
from megackpt.storage import absolute_path


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSettings:
    """Arguments of a Checkpointer that must be equal on all ranks, under their names there.

    Attributes:
        async_options: None without asynchronous saves.
    """

    retention: Retention
    schedule: SaveSchedule
    async_options: AsyncOptions | None
    tiers: Tiers
    on_error: OnError
    on_newer_steps: OnNewerSteps
    verify_after_save: bool
    save_options: SaveOptions
    load_options: LoadOptions

    @classmethod
    def from_arguments(
        cls,
        *,
        keep_last: int | None,
        retention: Retention | None,
        save_interval: int | None,
        schedule: SaveSchedule | None,
        async_save: bool | AsyncOptions,
        tiers: Sequence[Tier] | Tiers,
        on_error: OnError,
        on_newer_steps: OnNewerSteps,
        verify_after_save: bool,
        timeout_s: float | None,
        save_options: SaveOptions | None,
        load_options: LoadOptions | None,
    ) -> RunSettings:
        """Return the settings of a Checkpointer with these arguments, of which some are short for others.

        Raises:
            DeclarationError: an argument has the wrong type or is out of range, or two contradict each other.
        """
        check_flag("verify_after_save", verify_after_save)
        if on_newer_steps not in get_args(OnNewerSteps):
            raise DeclarationError(
                f"on_newer_steps={on_newer_steps!r} is not known. Give 'error', 'keep' or 'discard'."
            )
        saving, loading = _options(save_options, load_options, timeout_s)
        return cls(
            retention=_retention(retention, keep_last),
            schedule=_schedule(schedule, save_interval),
            async_options=_async_options(async_save),
            tiers=_tiers(tiers),
            on_error=on_error,
            on_newer_steps=on_newer_steps,
            verify_after_save=verify_after_save,
            save_options=saving,
            load_options=loading,
        )

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
            "on_newer_steps": self.on_newer_steps,
            "verify_after_save": self.verify_after_save,
            "Retention.keep_last": self.retention.keep_last,
            "Retention.keep_every": self.retention.keep_every,
            "Retention.keep_best": None if best is None else [best.metric, best.n, best.mode],
        }


def _tier_values(tier: Tier) -> list[object]:
    numbers = [tier.every, tier.keep_last, tier.replication_factor, tier.jump]
    return [type(tier).__name__, absolute_path(tier.path), *numbers]


class RunRanks:
    """The ranks of a run, which compare their settings in their first collective call.

    Args:
        groups: the groups of ranks.
        settings: of this rank.
        root: as for `RunSettings.compare`.

    Attributes:
        groups: the argument.
    """

    def __init__(self, groups: Groups, settings: RunSettings, *, root: str | None) -> None:
        self.groups = groups
        self._settings, self._root = settings, root
        self._is_compared = False

    def group(self, *, timeout_s: float) -> Group:
        """Return the group of all ranks. The first call compares the settings. Collective.

        Raises:
            DeclarationError, RankFailedError: as `RunSettings.compare`.
        """
        group = self.groups.world or world_group(timeout_s=timeout_s)
        if not self._is_compared:
            self._settings.compare(group, root=self._root)
            self._is_compared = True
        return group


def checked_groups(group: Group | Groups | None) -> Groups:
    """Return the groups of `Checkpointer(group=...)`; a group is short for `Groups(world=group)`.

    Raises:
        DeclarationError: the argument is neither a group nor `Groups`.
    """
    if isinstance(group, Groups):
        return group
    if group is not None:
        check_group(group)
    return Groups(world=group)


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
    with compare_step(group, doing, equal=("settings",)) as step:
        step.equal["settings"] = as_number(settings)
    if not step.is_equal["settings"]:
        raise_different_settings(settings, group, what=what, doing=doing)


def _retention(retention: Retention | None, keep_last: int | None) -> Retention:
    """Return the retention of `Checkpointer(retention=..., keep_last=...)`.

    Raises:
        DeclarationError: both are given, or one is of the wrong type.
    """
    check_kind("retention", retention, Retention, give="Retention(keep_last=3), or None", optional=True)
    if keep_last is not None:
        check_count("keep_last", keep_last, otherwise=", or None")
        _check_given_once("keep_last", keep_last, "retention", retention, "keep_last")
    return retention or Retention(keep_last=keep_last)


def _schedule(schedule: SaveSchedule | None, save_interval: int | None) -> SaveSchedule:
    """Return the schedule of `Checkpointer(schedule=..., save_interval=...)`.

    Raises:
        DeclarationError: both are given, or one is of the wrong type.
    """
    check_kind("schedule", schedule, SaveSchedule, give="SaveSchedule(steps=100), or None", optional=True)
    if save_interval is not None:
        check_count("save_interval", save_interval, otherwise=", or None; or give schedule=SaveSchedule(...)")
        _check_given_once("save_interval", save_interval, "schedule", schedule, "steps")
    return schedule or SaveSchedule(steps=save_interval)


def _check_given_once(
    short: str, number: int, name: str, value: Retention | SaveSchedule | None, field: str
) -> None:
    """Check that an argument and the one that it is short for are not both given.

    Raises:
        DeclarationError: they are.
    """
    if value is None:
        return
    kind = type(value).__name__
    raise DeclarationError(
        f"{short}={number} and {name}={value} are both given. {short} is short for a {kind} with nothing "
        f"else: write {kind}({field}={number}, ...)."
    )


def _tiers(tiers: Sequence[Tier] | Tiers) -> Tiers:
    """Return the tiers of `Checkpointer(tiers=...)`; a list is short for `Tiers(list)`.

    Raises:
        DeclarationError: as `Tiers`.
    """
    return tiers if isinstance(tiers, Tiers) else Tiers(tiers)


def _async_options(async_save: bool | AsyncOptions) -> AsyncOptions | None:
    """Return the options of asynchronous saves; None for synchronous ones.

    Raises:
        DeclarationError: async_save is neither a bool nor `AsyncOptions`.
    """
    check_kind("async_save", async_save, (bool, AsyncOptions), give="True, False or AsyncOptions(...)")
    if isinstance(async_save, AsyncOptions):
        return async_save
    return AsyncOptions() if async_save else None


def _options(
    save_options: SaveOptions | None, load_options: LoadOptions | None, timeout_s: float | None
) -> tuple[SaveOptions, LoadOptions]:
    """Return the options of saves and loads, with the deadline timeout_s if it is given.

    Raises:
        DeclarationError: an argument is of the wrong type.
    """
    check_kind("save_options", save_options, SaveOptions, give="SaveOptions(...), or None", optional=True)
    check_kind("load_options", load_options, LoadOptions, give="LoadOptions(...), or None", optional=True)
    save_options, load_options = save_options or SaveOptions(), load_options or LoadOptions()
    if timeout_s is None:
        return save_options, load_options
    return replace(save_options, timeout_s=timeout_s), replace(load_options, timeout_s=timeout_s)
