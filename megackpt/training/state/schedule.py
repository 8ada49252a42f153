"""A learning-rate schedule that continues after a load, also if it is configured differently now.

The stored configuration is compared with the given one, field by field.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch

from megackpt.entities import ShardedStateDict
from megackpt.errors import DeclarationError, MismatchError, truncated_list
from megackpt.training.optim.param_groups import SCHEDULE_OPTIONS, WhenDifferent
from megackpt.training.state.training_state import Stateful

PROGRESS = frozenset(
    {
        *("last_epoch", "_step_count", "_last_lr", "_get_lr_called_within_step", "_is_initial"),
        *("best", "num_bad_epochs", "cooldown_counter", "last_lrs", "T_cur", "T_i", "swa_n"),
        *("num_steps", "num_iters"),
    }
)
"""Fields that count the progress of a schedule, and are not configured by the user.

Source: `torch.optim.lr_scheduler` of torch 2.13; `num_steps`: Megatron-Core `OptimizerParamScheduler`.
"""


class ScheduleState:
    """A schedule as common state: a torch scheduler, Megatron's, or a mapping of numbers that describe one.

    Some fields of its state dict count its progress, the others are its configuration. Progress is always
    taken from the checkpoint. Where the configuration differs from the given one, `when_different` decides:

    * `error`: raise an error that names each field with both values;
    * `checkpoint`: continue as stored (Megatron's `--use-checkpoint-opt_param-scheduler`);
    * `given`: continue as given (`--override-opt_param-scheduler`). A torch scheduler that computes a rate
      from the one before (most do) continues from the stored rate.

    Schedulers keep a part of their configuration in the groups of their optimizer (`max_lr`, `initial_lr`,
    ...), where a load of the optimizer overwrites it. It is stored with the schedule. What the groups have
    when this object is made is the given configuration. So make it before the load, and call `resume` after
    the optimizer is loaded.

    Args:
        schedule: an object whose `load_state_dict` is called, or a mapping, which is not changed: see
            `values`.
        when_different: what to do.
        progress: names of fields that count progress.
    """

    def __init__(
        self,
        schedule: Stateful | Mapping[str, Any],
        *,
        when_different: WhenDifferent = "error",
        progress: Collection[str] = PROGRESS,
    ) -> None:
        if when_different not in ("error", "checkpoint", "given"):
            raise DeclarationError(
                f"when_different={when_different!r} is not known. Give 'error', 'checkpoint' or 'given'."
            )
        self._schedule = schedule
        self._values = dict(schedule) if isinstance(schedule, Mapping) else None
        self.when_different = when_different
        self._progress = frozenset(progress)
        self._given_groups = _options_of_groups(schedule)

    @property
    def values(self) -> dict[str, Any]:
        """The present fields. Of a mapping, after `resume`, those to continue with."""
        if self._values is not None:
            return dict(self._values)
        assert not isinstance(self._schedule, Mapping)
        return dict(self._schedule.state_dict())

    def sharded_state_dict(self, prefix: str = "") -> ShardedStateDict:
        """Return the fields, as common state. Local."""
        groups = _options_of_groups(self._schedule)
        return {"fields": self.values, "groups": groups} if groups else {"fields": self.values}

    def resume(self, loaded: Any, *, step: int) -> str:
        """Continue where the schedule was. Local.

        Returns:
            A sentence if stored and given configuration differ, else "".

        Raises:
            MismatchError: they differ, and `when_different` is "error".
        """
        stored, configured = loaded["fields"], self.values
        # A checkpoint of an older version lacks them, and the load of the optimizer has written them.
        stored_groups = loaded.get("groups") or _options_of_groups(self._schedule)
        differing = [*self._differing(stored, configured), *self._differing_groups(stored_groups)]
        if differing and self.when_different == "error":
            raise MismatchError(
                f"The schedule of the checkpoint is not the one given:\n{truncated_list(differing)}\n"
                f'Give the values it was trained with, or choose: when_different="checkpoint" goes on as '
                f'stored, "given" as given.'
            )
        chosen = self._overridden(stored, configured) if self.when_different == "given" else stored
        chosen_groups = self._given_groups if self.when_different == "given" else stored_groups
        for group, options in zip(_groups_of(self._schedule), chosen_groups, strict=False):
            group.update(options)
        if self._values is not None:
            self._values = dict(chosen)
        else:
            assert not isinstance(self._schedule, Mapping)
            self._schedule.load_state_dict(chosen)
        if not differing:
            return ""
        whose = "the given" if self.when_different == "given" else "the checkpoint's"
        return f"{whose} schedule is followed ({'; '.join(differing)})"

    def _differing_groups(self, stored_groups: Sequence[Mapping[str, Any]]) -> Iterator[str]:
        """Yield each option of the optimizer's groups that differs, with the stored and the given value."""
        for number, (stored, group) in enumerate(zip(stored_groups, self._given_groups, strict=False)):
            for option, value in group.items():
                stored_value = stored.get(option, _ABSENT)
                if not _are_equal(stored_value, value):
                    yield f"param_groups[{number}].{option}: {stored_value!r} stored, {value!r} given"

    def _differing(self, stored: Any, configured: Any, path: str = "") -> Iterator[str]:
        """Yield each configured field that differs, with the stored and the given value."""
        for name, stored_value, given_value in _pairs(stored, configured):
            if name in self._progress:
                continue
            inner = f"{path}.{name}" if path else name
            if _is_nested(stored_value) and _is_nested(given_value):
                yield from self._differing(stored_value, given_value, inner)
            elif not _are_equal(stored_value, given_value):
                yield f"{inner}: {stored_value!r} stored, {given_value!r} given"

    def _overridden(self, stored: Any, configured: Any) -> Any:
        """Return the given fields, with the stored progress."""
        if not _is_nested(stored) or not _is_nested(configured):
            return configured
        if isinstance(configured, list):
            if not isinstance(stored, list) or len(stored) != len(configured):
                return configured
            return [self._overridden(a, b) for a, b in zip(stored, configured, strict=True)]
        fields = dict(configured)
        for name in configured.keys() & stored.keys():
            is_progress = name in self._progress
            fields[name] = stored[name] if is_progress else self._overridden(stored[name], configured[name])
        return fields


def _groups_of(schedule: Any) -> Sequence[dict[str, Any]]:
    """Return the groups of the optimizer whose rates a schedule sets; none if it has no optimizer."""
    groups = getattr(getattr(schedule, "optimizer", None), "param_groups", ())
    return groups if isinstance(groups, Sequence) else ()


def _options_of_groups(schedule: Any) -> list[dict[str, Any]]:
    """Return what the groups have that schedules compute rates from, without groups that have nothing."""
    options = [
        {option: value for option, value in group.items() if option in SCHEDULE_OPTIONS}
        for group in _groups_of(schedule)
    ]
    return options if any(options) else []


class _Absent:
    def __repr__(self) -> str:
        return "nothing"


_ABSENT = _Absent()


def _is_nested(value: Any) -> bool:
    """Return whether fields are compared one by one: of dicts, and of lists of dicts (chained schedulers)."""
    return isinstance(value, dict) or (
        isinstance(value, list) and bool(value) and all(isinstance(item, dict) for item in value)
    )


def _pairs(stored: Any, configured: Any) -> Iterator[tuple[str, Any, Any]]:
    """Yield the fields that either has, by name or position, with both values."""
    stored_fields, given_fields = _named(stored), _named(configured)
    for name in dict.fromkeys([*given_fields, *stored_fields]):
        yield name, stored_fields.get(name, _ABSENT), given_fields.get(name, _ABSENT)


def _named(value: Any) -> dict[str, Any]:
    items = enumerate(value) if isinstance(value, list) else value.items()
    return {str(name): item for name, item in items}


def _are_equal(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return torch.equal(a, b)
    return bool(a == b)
