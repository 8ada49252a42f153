"""The first part of a save: every rank prepares its state, then all ranks compare digests.

The digests show whether ranks save with equal settings, whether common state is equal, whether a cached plan
fits on all ranks, and whether ranks have equal copies. Only small messages are exchanged; their length does
not depend on the state.
Rank 0 chooses the attempt id and looks for leftover files.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from megackpt.comm import SUMMAND_BITS, CompareStep, Group, compare_step, gather_step
from megackpt.engine.checkpoint.manifest import LeftoverFiles, find_leftover_files, new_attempt
from megackpt.engine.saving.local_state import LocalState, make_local_state
from megackpt.engine.saving.plan_cache import CachedPlan, PlanCache
from megackpt.engine.saving.save_request import SaveRequest
from megackpt.errors import DeclarationError
from megackpt.formats.registry import not_imported, save_strategy
from megackpt.formats.strategy import SaveStrategy
from megackpt.plans.metadata import ChunkTable
from megackpt.storage import Store, digest_of

Settings: TypeAlias = Mapping[str, Any]
"""Arguments that must be equal on all ranks, by the names that a user knows; JSON values."""

WriterStatus: TypeAlias = Mapping[str, int]
"""The numbers that `WRITER_STATUS` names, of one rank or the maximum of all."""

_PLANS_COMPARED = 8
"""How many of the plans that were used last are compared, to find one that fits on all ranks."""

_COMPARED = ("settings", "common state", "values", "cached plans", "assumes structure")
"""What ranks compare: digests, and whether a rank assumes that its structure is that of the last save."""

# For each cached plan, whether it does not fit on a rank.
_MISFITS = tuple(f"misfit of plan {number}" for number in range(_PLANS_COMPARED))

WRITER_STATUS = ("writer has failed", "writer is busy", "writer is apart")
"""Of a writer process: whether a save of it has failed, is pending, and whether it has to be connected."""

# The attempt id is that of rank 0; other ranks send zeros.
_ATTEMPT = ("attempt, high half", "attempt, low half")
_MAXIMISED = (*_ATTEMPT, "format is not imported", *_MISFITS, *WRITER_STATUS)

# Sums of digests, with weights that make them 0, or a multiple of 2**SUMMAND_BITS, if copies are equal.
_COPIES = ("copies of tensors", "copies of objects")


def compare_states(
    request: SaveRequest,
    store: Store | None,
    group: Group,
    *,
    writer_status: Callable[[SaveStrategy], WriterStatus] | None = None,
) -> tuple[LocalState, CompareStep, LeftoverFiles | None]:
    """Prepare this rank's state, and compare digests with other ranks. Collective.

    Args:
        request: what is saved.
        store: where it will be written: rank 0 looks for leftover files. None to look when it is written.
        group: the ranks.
        writer_status: returns the status of the writer process that is to be sent this strategy, empty for
            zeros. It is called in the step, so that all ranks raise its error.

    Returns:
        The state of this rank; what all ranks have in common, see the functions below; and the leftover files
        of earlier saves, on rank 0, or None without a store.

    Raises:
        CheckpointError: the same on every rank.
    """
    local: LocalState | None = None
    leftovers: LeftoverFiles | None = None
    spread_label: int | None = None
    settings: Settings = {}
    for may_import in (False, True):
        with compare_step(
            group, "preparing the save", equal=_COMPARED, largest=_MAXIMISED, added=_COPIES
        ) as step:
            if spread_label is None:  # it may be collective: no rank may leave it out
                spread_label = request.spread_label(rank=group.rank)
            unimported = None if may_import else not_imported(request.format)
            if unimported is not None:
                settings = request.settings(*unimported)
                _set_before_import(step, settings)
            else:
                if local is None:
                    local, leftovers = _prepare(request, store, group, spread_label)
                settings = local.settings()
                status = {} if writer_status is None else writer_status(local.strategy)
                _set_numbers(step, local, settings, status)
        # An import takes seconds, so a rank imports its format when all ranks are known to want the same one:
        # in a second round, which takes place on all ranks or on none.
        if not step.maximum["format is not imported"]:
            break
        if not step.is_equal["settings"]:
            raise_different_settings(settings, group)
    assert local is not None
    return local, step, leftovers


def agreed_attempt(compared: CompareStep) -> str:
    """Return the id of the attempt, which is rank 0's."""
    return "".join(f"{compared.maximum[half]:08x}" for half in _ATTEMPT)


def fitting_plan(local: LocalState, compared: CompareStep) -> str | None:
    """Return the name of a cached plan that fits on all ranks; None if there is none."""
    misfits = [compared.maximum[name] for name in _MISFITS]
    # If caches differ, the positions stand for different plans on different ranks.
    if local.request.plans is None or not compared.is_equal["cached plans"] or 0 not in misfits:
        return None
    return local.request.plans.names[misfits.index(0)]


def differing_kinds(compared: CompareStep) -> tuple[bool, bool]:
    """Return whether copies of tensors, and of objects, may differ between ranks that use a cached plan.

    They are known to be equal otherwise. They may differ also if ranks have compared them by different plans.
    """
    tensors, objects = (bool(compared.total[kind] % 2**SUMMAND_BITS) for kind in _COPIES)
    return tensors, objects


def all_assume_structure(local: LocalState, compared: CompareStep) -> bool:
    """Return whether all ranks use the last plan without comparing anything else."""
    return local.request.assumes_structure and compared.is_equal["assumes structure"]


def values_to_compare(local: LocalState, compared: CompareStep) -> frozenset[str]:
    """Return what digests have not shown to be equal, of "common state" and "values"."""
    # A rank that assumes its structure sends no digests. What only some ranks have sent, or none, is not
    # known to be equal.
    all_sent = compared.is_equal["assumes structure"] and not local.request.assumes_structure
    names = ("common state", "values")
    return frozenset(name for name in names if not (all_sent and compared.is_equal[name]))


def _prepare(
    request: SaveRequest, store: Store | None, group: Group, spread_label: int
) -> tuple[LocalState, LeftoverFiles | None]:
    """Import the format, prepare this rank's state, and look at the store. Local."""
    strategy = save_strategy(request.format)
    for hook in request.hooks():
        strategy = hook.strategy_for(strategy)
    if strategy.capabilities.shares_files and not request.validate:
        raise DeclarationError(
            f"Format {strategy.backend} version {strategy.version} needs validate_access_integrity=True: "
            f"without it ranks do not exchange what they write, and two ranks could write one file at the "
            f"same time."
        )
    local = make_local_state(request, strategy, spread_label=spread_label, rank=group.rank, ranks=group.size)
    if store is None:
        return local, None
    leftovers = LeftoverFiles()
    if group.rank == 0:
        # All ranks wait for this step, so the directory exists before any of them writes.
        store.create()
        leftovers = find_leftover_files(store, strategy)
    return local, leftovers


def _set_numbers(
    step: CompareStep, local: LocalState, settings: Settings, writer_status: WriterStatus
) -> None:
    """Set what this rank compares: digests of what must be equal, and which cached plans do not fit."""
    request, plans = local.request, local.request.plans
    terms = (0, 0)
    attempt = new_attempt() if local.rank == 0 else "0" * 16  # rank 0's is the maximum
    assumes = request.assumes_structure
    fits = [False] * _PLANS_COMPARED
    if request.validate and plans is not None:
        digest = local.structure_digest()
        names = plans.names[:1] if assumes else plans.names[:_PLANS_COMPARED]
        fits[: len(names)] = [plans.peek(name).structure_digest == digest for name in names]
        if assumes and not fits[0]:
            raise _structure_error(local, plans.peek(names[0]))
        if True in fits:
            terms = _terms(local, plans, names[fits.index(True)])
    cached = [] if plans is None else [(name, plans.save_number(name)) for name in plans.names]
    sends_digests = request.validate and not assumes
    step.equal = {
        "settings": as_number(settings),
        "common state": as_number(local.common_digests()) if sends_digests else 0,
        "values": as_number(local.value_digests()) if sends_digests else 0,
        "cached plans": as_number(cached),
        "assumes structure": int(assumes),
    }
    # A number is below 2**62, and an attempt id has 64 bits: it takes two of them.
    step.largest = {
        **dict(zip(_ATTEMPT, (int(attempt[:8], 16), int(attempt[8:], 16)), strict=True)),
        "format is not imported": 0,
        **{name: int(not fit) for name, fit in zip(_MISFITS, fits, strict=True)},
        **{name: writer_status.get(name, 0) for name in WRITER_STATUS},
    }
    step.added = dict(zip(_COPIES, terms, strict=True))


def _terms(local: LocalState, plans: PlanCache, name: str) -> tuple[int, int]:
    """Return this rank's terms of the sums that compare copies, by the plan that fits this rank."""
    if local.ranks == 1:
        return 0, 0
    # Other ranks may take another plan, with other weights. So the plan is compared like a copy that every
    # rank has: if it is not the same, the sums are not 0.
    weight = 1 - local.ranks if local.rank == 0 else 1
    tensors = objects = weight * as_number(name)
    cached, number = plans.peek(name), plans.save_number(name)
    for hook in local.request.hooks():
        of_tensors, of_objects = hook.terms(local.flattened, cached, number=number)
        tensors, objects = tensors + of_tensors, objects + of_objects
    return tensors % 2**SUMMAND_BITS, objects % 2**SUMMAND_BITS


def _set_before_import(step: CompareStep, settings: Settings) -> None:
    """Set the numbers of a rank that has not imported its format yet; only its settings count."""
    step.equal = dict.fromkeys(_COMPARED, 0) | {"settings": as_number(settings)}
    step.largest = dict.fromkeys(_MAXIMISED, 0) | {"format is not imported": 1}
    step.added = dict.fromkeys(_COPIES, 0)


def raise_different_settings(
    settings: Settings,
    group: Group,
    *,
    what: str = "Ranks save differently",
    doing: str = "comparing settings",
) -> None:
    """Raise an error that names the setting that differs between ranks. Collective.

    Args:
        settings: of this rank; they differ from those of another rank.
        group: the ranks.
        what: start of the error's text.
        doing: name of the step, for the error's text.

    Raises:
        DeclarationError: the same on every rank.
    """
    with gather_step(group, doing, on_all_ranks=True) as step:
        step.data = json.dumps(settings).encode()  # in the order in which differences are looked for
    check_settings([json.loads(encoded) for encoded in step.results], what=what)


def check_settings(settings_of_ranks: Sequence[Settings], *, what: str) -> None:
    """Check that settings are equal, given those of all ranks. Pure.

    Raises:
        DeclarationError: names the first setting that differs, and a rank that differs from rank 0.
    """
    for name in dict.fromkeys(name for settings in settings_of_ranks for name in settings):
        values = [settings.get(name) for settings in settings_of_ranks]
        other = next((rank for rank, value in enumerate(values) if value != values[0]), None)
        if other is not None:
            raise DeclarationError(
                f"{what}: {name} is {values[0]!r} on rank 0 and {values[other]!r} on rank {other}. Give "
                f"all ranks the same arguments.",
                rank=other,
            )


def as_number(value: Any) -> int:
    """Return a digest of a value, which JSON can encode, as one of the numbers that ranks compare."""
    # 60 bits of the digest, since a number is below 2**62.
    return int(digest_of(json.dumps(value, sort_keys=True).encode())[:15], 16)


def _structure_error(local: LocalState, cached: CachedPlan) -> DeclarationError:
    """Return the error of a state that is not declared as when the plan was made, naming an array if any."""
    planned, declared = cached.plan, local.declared.table
    changed_keys = [
        planned.table.arrays[int(planned.table.array[row])].key
        for row in planned.rows_of(local.rank).tolist()
        if not _is_within(planned.table, row, declared, int(planned.entity[row]))
    ]
    subject = f"{changed_keys[0]!r}: the" if changed_keys else "The"
    return DeclarationError(
        f"{subject} structure of the state dict has changed since the last save, but "
        f"assume_constant_structure is set. Leave it out, or save once with "
        f"SaveOptions(assume_constant_structure=False).",
        key=changed_keys[0] if changed_keys else None,
        rank=local.rank,
    )


def _is_within(table: ChunkTable, row: int, declared: ChunkTable, entity: int) -> bool:
    """Return whether a planned row is the declared chunk of an entity, or a part of it."""
    # The state dict has fewer entities than at the earlier save.
    if entity >= len(declared):
        return False
    array = table.arrays[int(table.array[row])]
    if array != declared.arrays[int(declared.array[entity])]:
        return False
    dims = len(array.global_shape)
    start, shape = table.start[row, :dims], table.shape[row, :dims]
    first, extents = declared.start[entity, :dims], declared.shape[entity, :dims]
    if np.array_equal(start, first) and np.array_equal(shape, extents):
        # The same box: a row may be a part of its flat range.
        low, high = declared.flat_start[entity], declared.flat_stop[entity]
        return bool(low <= table.flat_start[row] and table.flat_stop[row] <= high)
    return bool(((first <= start) & (start + shape <= first + extents)).all())
