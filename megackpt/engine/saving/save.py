"""A save: prepare the state, agree on a plan, write, commit.

Every rank calls these functions. A step that can fail on one rank ends with a synchronisation of all ranks,
where its error is raised on all of them. Optional features (parity, replica check, array digests, samples)
are hooks; see `planned_save`.
"""

from __future__ import annotations

from megackpt.comm import Group
from megackpt.engine.saving.local_state import StateRowParts
from megackpt.engine.saving.plan_agreement import (
    ValuesToCompare,
    compare_values,
    plan_independently,
    plan_on_rank_0,
)
from megackpt.engine.saving.planned_save import PlannedSave
from megackpt.engine.saving.preparation import (
    PreparedState,
    prepare_on_all_ranks,
    raise_different_settings,
)
from megackpt.engine.saving.save_request import SaveRequest
from megackpt.engine.saving.write import write_and_commit
from megackpt.options import SaveOptions
from megackpt.plans.planning import SavePlan
from megackpt.storage import Store


def save_state(request: SaveRequest, store: Store, group: Group, options: SaveOptions) -> None:
    """Save one state dict as one checkpoint. Collective over the group.

    Raises:
        CheckpointError: the same on every rank. The checkpoint at this location is the previous one, if any,
            or this one if only the last synchronisation, after the commit, failed.
    """
    planned = plan_save(request, store, group, options)
    write_and_commit(planned, store, group)


def plan_save(request: SaveRequest, store: Store | None, group: Group, options: SaveOptions) -> PlannedSave:
    """Check the declarations of all ranks, and decide which rank writes what. Collective over the group.

    store is where it will be written; None if `write_and_commit` is to look for leftover files there.

    Raises:
        CheckpointError: the same on every rank; nothing was written.
    """
    prepared = prepare_on_all_ranks(request, store, group, options)  # flatten, declare, compare digests
    return plan_prepared(prepared, group, options)


def plan_prepared(prepared: PreparedState, group: Group, options: SaveOptions) -> PlannedSave:
    """Decide which rank writes what of a prepared state. Collective over the group.

    Raises:
        CheckpointError: the same on every rank; nothing was written.
    """
    if prepared.settings_differ:
        raise_different_settings(prepared.settings, group)
    local = prepared.local
    plan = _agree_on_plan(prepared, group)
    for hook in local.request.hooks:
        hook.after_planning(local.flattened, local.declared, group)
    return PlannedSave(
        attempt=prepared.attempt,
        plan=plan,
        parts=StateRowParts(local, plan, part_bytes=options.part_bytes),
        common={"state_dict": local.common, "content_metadata": local.request.content_metadata},
        strategy=local.strategy,
        leftovers=prepared.leftovers,
        hooks=local.request.hooks,
        exchanged=local.request.validate,
    )


def _agree_on_plan(prepared: PreparedState, group: Group) -> SavePlan:
    """Use a cached plan that fits on all ranks; if there is none, plan on rank 0 and cache the plan."""
    local, plans = prepared.local, prepared.local.request.plans
    if not local.request.validate:
        return plan_independently(local)
    to_compare = ValuesToCompare(common=not prepared.common_is_equal, values=not prepared.values_are_equal)
    if plans is not None and prepared.fitting_plan is not None:
        cached = plans.find(prepared.fitting_plan)
        # A plan that fits does not mean that values are equal. This is decided from reduced numbers, so all
        # ranks compare or none does.
        if not prepared.all_assume_structure and (to_compare.common or to_compare.values):
            compare_values(local, group, to_compare)
        return cached.plan
    plan = plan_on_rank_0(local, group, to_compare)
    if plans is not None:
        if not prepared.caches_are_equal:  # from now on all ranks have the same plans
            plans.clear()
        plans.add(prepared.attempt, local.cached_plan(plan))
    return plan
