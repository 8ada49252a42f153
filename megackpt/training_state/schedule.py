"""ScheduleState: a learning-rate schedule that goes on, and what to do where it was configured otherwise.

Owns the comparison of what is stored with what is given, field by field. What the fields mean is the
schedule's own affair.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any, Literal, TypeAlias

import torch

from megackpt.errors import DeclarationError, MismatchError, truncated_list
from megackpt.mapping import ShardedStateDict
from megackpt.training_state.objects import Stateful

WhenDifferent: TypeAlias = Literal["error", "checkpoint", "given"]

PROGRESS = frozenset(
    {
        *("last_epoch", "_step_count", "_last_lr", "_get_lr_called_within_step", "_is_initial"),
        *("best", "num_bad_epochs", "cooldown_counter", "last_lrs", "T_cur", "T_i", "swa_n"),
        *("num_steps", "num_iters"),
    }
)
"""Fields that say how far a schedule has come, and are no choice of the user's.

Source: `torch.optim.lr_scheduler` of torch 2.13; `num_steps`: Megatron-Core `OptimizerParamScheduler`.
"""


class ScheduleState:
    """A schedule as common state: a torch scheduler, Megatron's, or a mapping of numbers that describe one.

    Fields of its state dict say how far it has come, or how it is configured. Progress is always that of the
    checkpoint. Where the configuration differs from the given one, `when_different` decides:

    * `error`: refuse, and name each field with both values;
    * `checkpoint`: go on as stored (Megatron's `--use-checkpoint-opt_param-scheduler`);
    * `given`: go on as given (`--override-opt_param-scheduler`). A torch scheduler that computes a rate from
      the one before (most do) goes on from the stored rate.

    Args:
        schedule: its `load_state_dict` is called; nothing is done to a mapping, see `values`.
        when_different: what to do.
        progress: names of fields that count progress.

    Attributes:
        values: the state dict: of a mapping, what holds after `resume`.
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
        self._held = dict(schedule) if isinstance(schedule, Mapping) else None
        self.when_different = when_different
        self._progress = frozenset(progress)

    @property
    def values(self) -> dict[str, Any]:
        """Return the fields as they are now."""
        if self._held is not None:
            return dict(self._held)
        assert not isinstance(self._schedule, Mapping)
        return dict(self._schedule.state_dict())

    def sharded_state_dict(self, prefix: str = "") -> ShardedStateDict:
        """Return the fields, as common state. Local."""
        return {"fields": self.values}

    def resume(self, loaded: Any, *, step: int) -> str:
        """Go on where the schedule was; returns a note where it goes on otherwise than was given. Local.

        Raises:
            MismatchError: it was configured otherwise, and `when_different` is "error".
        """
        stored, given = loaded["fields"], self.values
        differing = list(self._differing(stored, given))
        if differing and self.when_different == "error":
            raise MismatchError(
                f"The schedule of the checkpoint is not the one given:\n{truncated_list(differing)}\n"
                f'Give the values it was trained with, or choose: when_different="checkpoint" goes on as '
                f'stored, "given" as given.'
            )
        chosen = self._overridden(stored, given) if self.when_different == "given" else stored
        if self._held is not None:
            self._held = dict(chosen)
        else:
            assert not isinstance(self._schedule, Mapping)
            self._schedule.load_state_dict(chosen)
        if not differing:
            return ""
        whose = "the given" if self.when_different == "given" else "the checkpoint's"
        return f"{whose} schedule is followed ({'; '.join(differing)})"

    def _differing(self, stored: Any, given: Any, path: str = "") -> Iterator[str]:
        """Say of each configured field that differs what is stored and what is given."""
        for name, ours, theirs in _pairs(stored, given):
            if name in self._progress:
                continue
            inner = f"{path}.{name}" if path else name
            if _is_nested(ours) and _is_nested(theirs):
                yield from self._differing(ours, theirs, inner)
            elif not _are_equal(ours, theirs):
                yield f"{inner}: {ours!r} stored, {theirs!r} given"

    def _overridden(self, stored: Any, given: Any) -> Any:
        """Return what is given, with the progress that is stored."""
        if not _is_nested(stored) or not _is_nested(given):
            return given
        if isinstance(given, list):
            if not isinstance(stored, list) or len(stored) != len(given):
                return given
            return [self._overridden(a, b) for a, b in zip(stored, given, strict=True)]
        found = dict(given)
        for name in given.keys() & stored.keys():
            is_progress = name in self._progress
            found[name] = stored[name] if is_progress else self._overridden(stored[name], given[name])
        return found


class _Absent:
    def __repr__(self) -> str:
        return "nothing"


_ABSENT = _Absent()


def _is_nested(value: Any) -> bool:
    """Say whether fields are looked at one by one: in dicts, and in lists of them, as in chained ones."""
    return isinstance(value, dict) or (
        isinstance(value, list) and bool(value) and all(isinstance(item, dict) for item in value)
    )


def _pairs(stored: Any, given: Any) -> Iterator[tuple[str, Any, Any]]:
    """Return the fields that either has, by name or position, with both values."""
    ours, theirs = _named(stored), _named(given)
    for name in [*theirs, *(name for name in ours if name not in theirs)]:
        yield name, ours.get(name, _ABSENT), theirs.get(name, _ABSENT)


def _named(value: Any) -> dict[str, Any]:
    items = enumerate(value) if isinstance(value, list) else value.items()
    return {str(name): item for name, item in items}


def _are_equal(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return torch.equal(a, b)
    return bool(a == b)
