"""A save, as a recipe: describe, meet, take a plan or make one; then `write_out` writes and commits.

Owns what ranks compare before the first byte is written, and which plan they take. Each step that can fail on
one rank ends in a meeting of all, where a failure becomes the same error everywhere.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Protocol

import numpy as np

from megackpt.comm import Group, Numbers, run_and_compare, run_on_all_ranks
from megackpt.engine.checkpoint import manifest
from megackpt.engine.checkpoint.manifest import new_attempt
from megackpt.engine.saving.array_digests import with_array_digests
from megackpt.engine.saving.local_state import LocalState, SaveRequest, StateRowParts, prepare
from megackpt.engine.saving.parity import check_parity
from megackpt.engine.saving.plan_agreement import (
    PlanAgreement,
    ValuesToCompare,
    compare_values,
    of_own_rows,
    plan_again,
    plan_alone,
    plan_together,
)
from megackpt.engine.saving.plan_cache import CachedPlan
from megackpt.engine.saving.replica_check import compare_replicas
from megackpt.engine.saving.settings import as_number, check_settings
from megackpt.engine.saving.write import PlannedSave, write_out
from megackpt.errors import DeclarationError
from megackpt.formats.strategy import SaveStrategy
from megackpt.metadata import ChunkTable
from megackpt.options import SaveOptions
from megackpt.storage import Store

__all__ = ["SaveRequest", "plan_state", "save_state"]

OFFERED = 8
"""Ranks look for a plan that all may take among so many of those that they have used last."""


class Beside(Protocol):
    """What else is done where ranks meet to plan a save.

    Attributes:
        count: how many numbers there are.
    """

    count: int

    def numbers(self) -> tuple[int, ...]:
        """Return numbers of this rank, of which all hear the largest; an error is that of all ranks."""

    def meanwhile(self, local: LocalState, agreed: PlanAgreement) -> None:
        """Do what can be done while others answer, where all are likely to take the plan of an earlier save.

        agreed is what then would come of it.
        """

    def heard(self, largest: tuple[int, ...]) -> None:
        """Hear the largest numbers of all ranks, before anything else is made of the meeting. Collective."""


def save_state(request: SaveRequest, store: Store, group: Group, options: SaveOptions) -> None:
    """Save one state dict as one checkpoint. Collective over the group.

    Raises:
        CheckpointError: the same on every rank. The checkpoint at this place is the previous one, if any, or
            this one if only the last meeting, after the commit, failed; see `Capabilities.writes_in_place`
            for formats that may leave none.
    """
    planned, strategy = plan_state(request, store, group, options)
    write_out(planned, store, strategy, group)


def plan_state(
    request: SaveRequest,
    store: Store | None,
    group: Group,
    options: SaveOptions,
    beside: Beside | None = None,
) -> tuple[PlannedSave, SaveStrategy]:
    """Prove the ranks' declarations right and decide who writes what. Collective over the group.

    store is where it will be written; None to leave it to `write_out` to look at the place. beside is given
    on all ranks or on none.

    Raises:
        CheckpointError: the same on every rank; nothing was written.
    """
    prepared: list[LocalState] = []
    given: list[Numbers] = []  # the numbers of what is prepared
    labels: list[int] = []
    settings: list[bytes] = []
    earlier: list[manifest.LeftoverFiles | None] = [manifest.LeftoverFiles() if store is not None else None]

    def begin() -> Numbers:
        if given:
            return given[0]
        if not labels:
            labels.append(request.spread_label())  # may be collective, so no rank leaves it out
            name = request.not_imported()
            if name is not None:
                settings.append(_settings(request, name, options))
                return _before_import(settings[0], count)
        strategy = request.choose()
        check_parity(strategy, options.parity)
        if options.array_digests:
            strategy = with_array_digests(strategy)
        if strategy.capabilities.writes_in_place and not request.validate:
            raise DeclarationError(
                f"Format {strategy.backend} version {strategy.version} needs validate_access_integrity=True: "
                f"ranks have to know of each other what they write, to keep out of each other's way."
            )
        if group.rank == 0 and store is not None:
            store.create()
            earlier[0] = manifest.find_leftover_files(store, strategy)
        local = prepare(request, strategy, spread_label=labels[0], rank=group.rank, ranks=group.size)
        prepared.append(local)
        settings[:] = [_settings(request, (strategy.backend, strategy.version), options)]
        said = _numbers(local, settings[0], rank=group.rank)
        if beside is not None:
            said = replace(said, largest=said.largest + beside.numbers())
        given.append(said)
        return said

    def meanwhile() -> None:
        if not prepared:
            return
        local = prepared[0]
        if (
            beside is not None
            and local.earlier is not None
            and local.strategy.capabilities.needs_own_rows_only
        ):
            earlier_plan = local.earlier
            beside.meanwhile(
                local, of_own_rows(local, earlier_plan.plan, earlier_plan.whole, rank=group.rank)
            )

    def compare_numbers() -> Numbers:
        return run_and_compare(
            group,
            begin,
            equal=_ALIKE,
            largest=_LARGEST + count,
            doing="preparing the save",
            meanwhile=meanwhile if beside is not None else None,
        )

    count = beside.count if beside is not None else 0
    found = compare_numbers()
    if found.largest[_IS_NOT_IMPORTED]:  # on some rank, which has compared its settings only
        if not found.equal[_SETTINGS]:
            _name_settings(settings[0], group)
        found = compare_numbers()
    if beside is not None:
        beside.heard(found.largest[_LARGEST:])
    if not found.equal[_SETTINGS]:
        _name_settings(settings[0], group)
    local = prepared[0]
    attempt = f"{found.largest[0]:08x}{found.largest[1]:08x}"
    agreed = _agree(local, found, attempt, group)
    compare_replicas(local, group, options.compare_replicas, part_bytes=options.part_bytes)
    plan = agreed.plan
    planned = PlannedSave(
        attempt=attempt,
        plan=plan,
        pieces=StateRowParts(local, plan, part_bytes=options.part_bytes),
        common={"state_dict": local.common, "content_metadata": request.content_metadata},
        earlier=earlier[0],
        report=agreed.report,
        complete=agreed.complete,
        parity=options.parity,
        kept=agreed.kept,
        sizes=agreed.sizes,
    )
    return planned, local.strategy


_SETTINGS, _COMMON, _VALUES, _PLANS, _ASSUMED = range(5)
_ALIKE = 5
_IS_NOT_IMPORTED = 2 + OFFERED
_LARGEST = 3 + OFFERED


def _numbers(local: LocalState, settings: bytes, *, rank: int) -> Numbers:
    """What is compared between ranks: digests of all that must be equal, and which plans this one may take.

    Where the structure is assumed to be that of the last save, values are not compared.
    """
    request, plans = local.request, local.request.plans
    attempt = new_attempt() if rank == 0 else "0" * 16
    assumed = request.assume_constant_structure and plans is not None and bool(plans.names)
    fits = [False] * OFFERED
    if request.validate and plans is not None:
        declared = local.structure()
        names = plans.names[:1] if assumed else plans.names[:OFFERED]
        fits[: len(names)] = [plans.peek(name).declared == declared for name in names]
        if assumed and not fits[0]:
            raise _has_changed(local, plans.peek(names[0]), rank=rank)
    compared = request.validate and not assumed
    alike = (
        as_number(settings),
        as_number(local.common_leaves()) if compared else 0,
        as_number(json.dumps(local.values(), sort_keys=True).encode()) if compared else 0,
        as_number(json.dumps(plans.names if plans is not None else []).encode()),
        int(assumed),
    )
    return Numbers(alike, (int(attempt[:8], 16), int(attempt[8:], 16), *(int(not fit) for fit in fits), 0))


def _before_import(settings: bytes, count: int) -> Numbers:
    """Return numbers of a rank that is still to import its format; only its settings count.

    count is how many further numbers there are.
    """
    alike = (as_number(settings), *(0,) * (_ALIKE - 1))
    return Numbers(alike, (*(0,) * _IS_NOT_IMPORTED, 1, *(0,) * count))


def _agree(local: LocalState, found: Numbers, attempt: str, group: Group) -> PlanAgreement:
    """Take the plan of an earlier save of the same structure; where ranks have none, plan and keep it."""
    if not local.request.validate:
        return plan_alone(local, group)
    plans = local.request.plans
    all_assume = bool(found.equal[_ASSUMED]) and _is_assumed(local)
    # A rank that assumes has said nothing of its values.
    is_compared = bool(found.equal[_ASSUMED]) and not all_assume
    unequal = ValuesToCompare(
        common=not (is_compared and found.equal[_COMMON]), values=not (is_compared and found.equal[_VALUES])
    )
    missing = found.largest[2 : 2 + OFFERED]
    if plans is None or not found.equal[_PLANS] or 0 not in missing:
        agreed = plan_together(local, group, unequal)
        if plans is not None:
            if not found.equal[_PLANS]:  # from now on all ranks keep the same
                plans.clear()
            plans.keep(attempt, local.kept(agreed.kept, agreed.whole))
        return agreed
    kept = plans.find(plans.names[missing.index(0)])
    if not all_assume and (unequal.common or unequal.values):
        compare_values(local, group, unequal)
    return plan_again(local, kept.plan, kept.whole, group)


def _is_assumed(local: LocalState) -> bool:
    plans = local.request.plans
    return local.request.assume_constant_structure and plans is not None and bool(plans.names)


def _settings(request: SaveRequest, name: tuple[str, int], options: SaveOptions) -> bytes:
    """What all ranks must be given alike, as JSON; name is the format's."""
    meetings = {
        "SaveOptions.timeout_s": float(options.timeout_s),
        "SaveOptions.plain_tensors": options.plain_tensors,
        "SaveOptions.rank0_values": list(options.rank0_values),
        "SaveOptions.parity": options.parity,
        "SaveOptions.compare_replicas": options.compare_replicas.value,
        "SaveOptions.sample_replicas": options.sample_replicas.value,
        "SaveOptions.array_digests": options.array_digests,
    }
    return json.dumps(request.settings(*name) | meetings).encode()


def _name_settings(settings: bytes, group: Group) -> None:
    """Refuse ranks that are not about to do the same; every rank comes to the same result."""
    said = run_on_all_ranks(group, lambda: settings, doing="comparing settings")
    check_settings([json.loads(settings) for settings in said], what="Ranks save differently")


def _has_changed(local: LocalState, kept: CachedPlan, *, rank: int) -> DeclarationError:
    """Say that a state is not declared as the one that was planned for, naming an array if there is one."""
    planned, now = kept.plan, local.declared.table
    moved = [
        planned.table.arrays[int(planned.table.array[row])].key
        for row in planned.rows_of(rank).tolist()
        if not _is_same(planned.table, row, now, int(planned.entity[row]))
    ]
    what = f"{moved[0]!r}: the" if moved else "The"
    return DeclarationError(
        f"{what} structure of the state dict has changed since the last save, which "
        f"assume_constant_structure rules out. Save without it once, or leave it out.",
        key=moved[0] if moved else None,
        rank=rank,
    )


def _is_same(table: ChunkTable, row: int, other: ChunkTable, entity: int) -> bool:
    """Whether a row of one table is that of another, or a part of it, but for its size."""
    if entity >= len(other):
        return False
    arrays = table.arrays[int(table.array[row])], other.arrays[int(other.array[entity])]
    if arrays[0] != arrays[1]:
        return False
    dims = len(arrays[0].global_shape)
    start, shape = table.start[row, :dims], table.shape[row, :dims]
    first, extents = other.start[entity, :dims], other.shape[entity, :dims]
    if np.array_equal(start, first) and np.array_equal(shape, extents):
        low, high = other.flat_start[entity], other.flat_stop[entity]
        return bool(low <= table.flat_start[row] and table.flat_stop[row] <= high)
    return bool(((first <= start) & (start + shape <= first + extents)).all())
