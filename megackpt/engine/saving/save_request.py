"""What a save is asked for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from megackpt.engine.saving.plan_cache import PlanCache
from megackpt.engine.saving.save_hook import SaveHook
from megackpt.formats.strategy import SaveStrategy
from megackpt.mapping import ShardedStateDict
from megackpt.options import PlainTensors, Spread


@dataclass(frozen=True, slots=True)
class SaveRequest:
    """What is saved; `SaveOptions` say how.

    Attributes:
        state: this rank's sharded state dict.
        choose: returns the strategy. It may raise an error, which all ranks then raise.
        not_imported: returns backend and version of the format that choose has yet to import; None if it is
            imported. Ranks compare their settings before they spend seconds on an import.
        content_metadata: a value stored with the common state; that of rank 0 counts.
        validate: prove coverage and equality of common state before anything is written.
        common_to_compare: takes the common state and returns what of it must be equal on all ranks; None for
            all of it.
        plans: the plans of earlier saves; None to make a new plan.
        assume_constant_structure: use the last plan, if there is one, without comparing declarations.
        spread: who may write a chunk that several ranks hold; see `SaveOptions`.
        spread_label: returns a number that is equal on the ranks of one `spread_group`; 0 where there is
            none. It may be collective, and it may raise an error, as choose may.
        plain_tensors: how tensors of common state are stored; see `SaveOptions`.
        rank0_values: globs of paths of common state that may differ between ranks; see `SaveOptions`.
        hooks: the optional features of this save; see `hooks_for`.
        equal_arguments: other arguments that must be equal on all ranks, by the names that a user knows; JSON
            values.
    """

    state: ShardedStateDict
    choose: Callable[[], SaveStrategy]
    not_imported: Callable[[], tuple[str, int] | None] = lambda: None
    content_metadata: Any = None
    validate: bool = True
    common_to_compare: Any = None
    plans: PlanCache | None = None
    assume_constant_structure: bool = False
    spread: Spread = "world"
    spread_label: Callable[[], int] = int
    plain_tensors: PlainTensors = "auto"
    rank0_values: tuple[str, ...] = ()
    hooks: tuple[SaveHook, ...] = ()
    equal_arguments: Mapping[str, Any] = field(default_factory=dict)

    def settings(self, backend: str, version: int) -> dict[str, Any]:
        """Return the arguments that must be equal on all ranks, by the names that a user knows."""
        return {
            "format": [backend, version],
            "validate_access_integrity": self.validate,
            "SaveOptions.spread": self.spread,
            "plans given": self.plans is not None,
            **self.equal_arguments,
        }

    @property
    def assumes_structure(self) -> bool:
        """Whether this save uses the last plan without comparing declarations."""
        return self.assume_constant_structure and self.plans is not None and bool(self.plans.names)
