"""What a save is asked for: the first of the four records of a save."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from megackpt.comm import AnyGroup
from megackpt.engine.saving.plan_cache import PlanCache
from megackpt.engine.saving.planned_save import SaveHook
from megackpt.entities import ShardedStateDict
from megackpt.errors import DeclarationError
from megackpt.formats.registry import SaveChoice
from megackpt.options import Policy, SaveOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveRequest:
    """What is saved, and how: the arguments of `save`, as they were given.

    Making a request calls, imports and compares nothing. Its methods do. They can fail on one rank, so a
    step of the save calls them, which raises the error on all ranks.

    Attributes:
        state: this rank's sharded state dict.
        format: the format: a strategy, `(backend, version)` or a backend name; None for the native one.
        options: options of the save.
        content_metadata: a value stored with the common state. Only rank 0's is written.
        validate: prove coverage and equality of common state before anything is written.
        common_to_compare: the user's function that takes the common state and returns what of it must be
            equal on all ranks; None for all of it.
        plans: the plans of earlier saves; None to make a new plan.
        spread_group: the ranks that may write a chunk which several of them have; None without
            `SaveOptions(spread="group")`.
        commit_fields: further fields of metadata.json; JSON values. Only rank 0's are written.
        equal_arguments: other arguments that must be equal on all ranks, by the names that a user knows; JSON
            values.
    """

    state: ShardedStateDict
    format: SaveChoice = None
    options: SaveOptions = field(default_factory=SaveOptions)
    content_metadata: Any = None
    validate: bool = True
    common_to_compare: Callable[[Any], Any] | None = None
    plans: PlanCache | None = None
    spread_group: AnyGroup | None = None
    commit_fields: dict[str, Any] = field(default_factory=dict)
    equal_arguments: Mapping[str, Any] = field(default_factory=dict)

    def settings(self, backend: str, version: int) -> dict[str, Any]:
        """Return the arguments that must be equal on all ranks, by the names that a user knows; JSON values.

        backend and version are those of the format.
        """
        options = self.options
        return {
            "format": [backend, version],
            "validate_access_integrity": self.validate,
            "SaveOptions.spread": options.spread,
            "plans given": self.plans is not None,
            **self.equal_arguments,
            "SaveOptions.timeout_s": float(options.timeout_s),
            "SaveOptions.plain_tensors": options.plain_tensors,
            "SaveOptions.rank0_values": list(options.rank0_values),
            "SaveOptions.parity": options.parity,
            "SaveOptions.compare_replicas": options.compare_replicas.value,
            "SaveOptions.sample_replicas": options.sample_replicas.value,
            "SaveOptions.array_digests": options.array_digests,
        }

    @property
    def assumes_structure(self) -> bool:
        """Whether this save uses the last plan without comparing declarations."""
        return self.options.assume_constant_structure and self.plans is not None and bool(self.plans.names)

    def spread_label(self, *, rank: int) -> int:
        """Return a number that is equal on the ranks of one spread group; 0 without a group.

        Collective over the spread group, unless it is a group of torch.

        Raises:
            DeclarationError: the options and the group do not fit each other.
        """
        if (self.spread_group is not None) != (self.options.spread == "group"):
            presence = "given" if self.spread_group is not None else "not given"
            raise DeclarationError(
                f"spread_group is {presence}, and SaveOptions.spread is {self.options.spread!r}. Give "
                f"both, a group and spread='group', or neither."
            )
        if self.spread_group is None:
            return 0
        from megackpt.comm.process_groups import subgroup_label

        return subgroup_label(self.spread_group, rank=rank)

    def hooks(self) -> tuple[SaveHook, ...]:
        """Return the hooks of the features that the options ask for. Their modules are imported here."""
        options, hooks = self.options, list[SaveHook]()
        if options.parity is not None:
            from megackpt.engine.saving.integrity import ParityHook

            hooks.append(ParityHook(max_files=options.parity))
        if options.array_digests:
            from megackpt.engine.saving.integrity import ArrayDigestHook

            hooks.append(ArrayDigestHook())
        if options.compare_replicas is not Policy.IGNORE:  # compares all bits, so no samples are needed
            from megackpt.engine.saving.integrity import ReplicaCheckHook

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
        format=sharded_strategy,
        options=options,
        content_metadata=content_metadata,
        validate=validate_access_integrity,
        common_to_compare=preprocess_common_before_consistancy_check,
        plans=plans,
        spread_group=spread_group,
        equal_arguments=equal_arguments or {},
    )
