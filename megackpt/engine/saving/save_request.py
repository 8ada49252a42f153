"""What a save is asked for, and the hooks of the features that its options ask for.

The modules of features that are not used are not imported.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from megackpt.comm import AnyGroup, Group
from megackpt.engine.saving.plan_cache import PlanCache
from megackpt.engine.saving.planned_save import SaveHook
from megackpt.entities import ShardedStateDict
from megackpt.errors import DeclarationError
from megackpt.formats.registry import SaveChoice, not_imported, save_strategy
from megackpt.formats.strategy import SaveStrategy
from megackpt.options import PlainTensors, Policy, SaveOptions, Spread


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


def hooks_for(options: SaveOptions) -> tuple[SaveHook, ...]:
    """Return the hooks of the features that the options ask for."""
    hooks: list[SaveHook] = []
    if options.parity is not None:
        from megackpt.engine.saving.parity import ParityHook

        hooks.append(ParityHook(max_files=options.parity))
    if options.array_digests:
        from megackpt.engine.saving.array_digests import ArrayDigestHook

        hooks.append(ArrayDigestHook())
    if options.compare_replicas is not Policy.IGNORE:  # compares all bits, so no samples are needed
        from megackpt.engine.saving.replica_check import ReplicaCheckHook

        hooks.append(ReplicaCheckHook(options.compare_replicas, part_bytes=options.part_bytes))
    elif options.sample_replicas is not Policy.IGNORE:
        from megackpt.engine.saving.replica_samples import ReplicaSampleHook

        hooks.append(ReplicaSampleHook(options.sample_replicas))
    return tuple(hooks)


def save_request(
    sharded_state_dict: ShardedStateDict,
    sharded_strategy: SaveChoice = None,
    *,
    options: SaveOptions,
    group: Group,
    validate_access_integrity: bool = True,
    preprocess_common_before_consistancy_check: Callable[[Any], Any] | None = None,
    content_metadata: Any = None,
    plans: PlanCache | None = None,
    spread_group: AnyGroup | None = None,
    equal_arguments: Mapping[str, Any] | None = None,
) -> SaveRequest:
    """Return the request of a save with these arguments of `save`. Local.

    equal_arguments is that of `SaveRequest`.

    Raises:
        DeclarationError: preprocess_common_before_consistancy_check cannot be called.
    """
    if not callable(preprocess_common_before_consistancy_check or len):
        raise DeclarationError(
            f"preprocess_common_before_consistancy_check is {preprocess_common_before_consistancy_check!r}; "
            f"give a function that takes the common state, or None."
        )
    return SaveRequest(
        state=sharded_state_dict,
        # Functions, as they may fail on one rank: a step of the save calls them, and raises the error on all
        # ranks.
        choose=lambda: save_strategy(sharded_strategy),
        not_imported=lambda: not_imported(sharded_strategy),
        content_metadata=content_metadata,
        validate=validate_access_integrity,
        common_to_compare=preprocess_common_before_consistancy_check,
        plans=plans,
        assume_constant_structure=options.assume_constant_structure,
        spread=options.spread,
        spread_label=lambda: _label_to_spread(options, spread_group, rank=group.rank),
        plain_tensors=options.plain_tensors,
        rank0_values=options.rank0_values,
        hooks=hooks_for(options),
        equal_arguments=equal_arguments or {},
    )


def _label_to_spread(options: SaveOptions, spread_group: AnyGroup | None, *, rank: int) -> int:
    """Return a number that is equal on the ranks of one spread group; 0 without a group.

    Collective over the spread group, unless it is a group of torch.

    Raises:
        DeclarationError: the options and the group do not fit each other.
    """
    if (spread_group is not None) != (options.spread == "group"):
        presence = "given" if spread_group is not None else "not given"
        raise DeclarationError(
            f"spread_group is {presence}, and SaveOptions.spread is {options.spread!r}. Give both, a group "
            f"and spread='group', or neither."
        )
    if spread_group is None:
        return 0
    from megackpt.comm.subgroups import subgroup_label

    return subgroup_label(spread_group, rank=rank)
