"""A save: prepare the state, agree on a plan, write, commit.

Every rank calls these functions. A step that can fail on one rank ends with a synchronisation of all ranks,
where its error is raised on all of them. Four records pass from step to step: what is asked (`SaveRequest`),
what this rank declares (`LocalState`), the plan (`PlannedSave`), and what was written (`WrittenChunks`).
Optional features (parity, replica check, array digests, samples) are hooks; see `planned_save`.
"""

from __future__ import annotations

from dataclasses import replace

from megackpt.comm import CompareStep, Group
from megackpt.engine.saving.local_state import LocalState, StateRowParts
from megackpt.engine.saving.plan_agreement import compare_values, plan_independently, plan_on_rank_0
from megackpt.engine.saving.planned_save import PlannedSave
from megackpt.engine.saving.preparation import (
    agreed_attempt,
    all_assume_structure,
    compare_states,
    differing_kinds,
    fitting_plan,
    raise_different_settings,
    values_to_compare,
)
from megackpt.engine.saving.save_request import SaveRequest
from megackpt.engine.saving.write import write_and_commit
from megackpt.plans.planning import SavePlan
from megackpt.storage import Store


def save_state(request: SaveRequest, store: Store, group: Group) -> None:
    """Save one state dict as one checkpoint. Collective over the group.

    Raises:
        CheckpointError: the same on every rank. The checkpoint at this location is the previous one, if any,
            or this one if only the last synchronisation, after the commit, failed.
    """
    planned = plan_save(request, store, group)
    write_and_commit(planned, store, group)


def plan_save(request: SaveRequest, store: Store | None, group: Group) -> PlannedSave:
    """Check the declarations of all ranks, and decide which rank writes what. Collective over the group.

    store is where it will be written; None if `write_and_commit` is to look for leftover files there.

    Raises:
        CheckpointError: the same on every rank; nothing was written.
    """
    local, compared, leftovers = compare_states(request, store, group)  # flatten, declare, compare digests
    return replace(plan_compared(local, compared, group), leftovers=leftovers)


def plan_compared(local: LocalState, compared: CompareStep, group: Group) -> PlannedSave:
    """Decide which rank writes what of a state, after `compare_states`. Collective over the group.

    The result has no leftover files: those belong to a store.

    Raises:
        CheckpointError: the same on every rank; nothing was written.
    """
    if not compared.is_equal["settings"]:
        raise_different_settings(local.settings(), group)
    if local.request.validate and "common state" in values_to_compare(local, compared):
        from megackpt.engine.saving.absent_parts import with_absent_parts

        local = with_absent_parts(local, group, is_assumed=all_assume_structure(local, compared))
    plan = _agree_on_plan(local, compared, group)
    request, hooks = local.request, local.request.hooks()
    for hook in hooks:
        hook.after_planning(local.flattened, local.declared, group)
    return PlannedSave(
        attempt=agreed_attempt(compared),
        plan=plan,
        parts=StateRowParts(local, plan, part_bytes=request.options.part_bytes),
        common={"state_dict": local.common, "content_metadata": request.content_metadata},
        strategy=local.strategy,
        leftovers=None,
        hooks=hooks,
        commit_fields=request.commit_fields,
        exchanged=request.validate,
        unpadded={t.key: t.unpadded_shape for t in local.flattened.tensors if t.unpadded_shape is not None},
    )


def _agree_on_plan(local: LocalState, compared: CompareStep, group: Group) -> SavePlan:
    """Use a cached plan that fits on all ranks; if there is none, plan on rank 0 and cache the plan."""
    plans, attempt = local.request.plans, agreed_attempt(compared)
    if not local.request.validate:
        return plan_independently(local)
    to_compare = values_to_compare(local, compared)
    name = fitting_plan(local, compared)
    if plans is not None and name is not None:
        number, cached = plans.save_number(name), plans.use(name)
        # A plan that fits does not mean that values are equal. Whether to compare is decided from reduced
        # numbers, so all ranks compare or none does.
        if to_compare and not all_assume_structure(local, compared):
            compare_values(local, group, to_compare)
        tensors, objects = differing_kinds(compared)
        for hook in local.request.hooks() if tensors or objects else ():
            hook.compare_copies(
                local.flattened, cached, group, number=number, tensors=tensors, objects=objects
            )
        return cached.plan
    # Without a cached plan nothing counts saves; the attempt id is another on each.
    plan, replica_weights = plan_on_rank_0(local, group, to_compare, number=int(attempt, 16))
    if plans is not None:
        if not compared.is_equal["cached plans"]:  # from now on all ranks have the same plans
            plans.clear()
        plans.add(attempt, local.cached_plan(plan, replica_weights))
    return plan
