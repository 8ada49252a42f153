"""The first part of a save: every rank prepares its state, then all ranks compare digests.

The digests show whether ranks save with equal settings, whether common state is equal, and whether a cached
plan fits on all ranks. Only small messages are exchanged; their length does not depend on the state.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from megackpt.comm import CompareStep, Group, compare_step, gather_step
from megackpt.engine.checkpoint import manifest
from megackpt.engine.checkpoint.manifest import new_attempt
from megackpt.engine.saving.local_state import LocalState, make_local_state
from megackpt.engine.saving.plan_cache import CachedPlan
from megackpt.engine.saving.save_request import SaveRequest
from megackpt.errors import DeclarationError
from megackpt.options import SaveOptions
from megackpt.plans.metadata import ChunkTable
from megackpt.storage import Store, digest_of

Settings: TypeAlias = Mapping[str, Any]
"""Arguments that must be equal on all ranks, by the names that a user knows; JSON values."""

WriterStatus: TypeAlias = tuple[int, int, int]
"""The numbers of `WRITER_STATUS`, of one rank or the maximum of all."""

_PLANS_COMPARED = 8
"""How many of the plans that were used last are compared, to find one that fits on all ranks."""

_COMPARED = ("settings", "common state", "values", "cached plans", "assumes structure")
"""What ranks compare: digests, and whether a rank assumes that its structure is that of the last save."""

# For each cached plan, whether it does not fit on a rank.
_MISFITS = tuple(f"misfit of plan {number}" for number in range(_PLANS_COMPARED))
WRITER_STATUS = ("writer has failed", "writer is busy", "writer is apart")
# The attempt id is that of rank 0; other ranks send zeros.
_MAXIMISED = ("attempt, high half", "attempt, low half", "format is not imported", *_MISFITS, *WRITER_STATUS)

_DOING = "preparing the save"


@dataclass(frozen=True, slots=True)
class PreparedState:
    """The state of this rank, and what all ranks know after they have compared digests.

    Attributes:
        local: this rank's state.
        attempt: id of the attempt; equal on all ranks.
        leftovers: the leftover files of earlier saves, on rank 0; None if the store was not searched.
        settings_differ: whether ranks save with different settings, an error that planning raises.
        caches_are_equal: whether all ranks have the same cached plans.
        fitting_plan: name of a cached plan that fits on all ranks; None if there is none.
        all_assume_structure: whether all ranks use that plan without comparing anything else.
        common_is_equal: whether common state is known to be equal on all ranks.
        values_are_equal: whether replicated values and copies of chunks are known to be equal.
        writer_status: the element-wise maximum over all ranks.
        settings: the settings of this rank, as JSON.
    """

    local: LocalState
    attempt: str
    leftovers: manifest.LeftoverFiles | None
    settings_differ: bool
    caches_are_equal: bool
    fitting_plan: str | None
    all_assume_structure: bool
    common_is_equal: bool
    values_are_equal: bool
    writer_status: WriterStatus
    settings: bytes


def prepare_on_all_ranks(
    request: SaveRequest,
    store: Store | None,
    group: Group,
    options: SaveOptions,
    *,
    writer_status: Callable[[], WriterStatus] | None = None,
) -> PreparedState:
    """Prepare this rank's state, and compare digests with other ranks. Collective.

    Args:
        request: what is saved.
        store: where it will be written: rank 0 looks for leftover files. None to do so when it is written.
        group: the ranks.
        options: tunables.
        writer_status: returns the status of this rank's writer process; given on all ranks or on none. It is
            called in the step, so that all ranks raise its error.

    Raises:
        CheckpointError: the same on every rank.
    """
    local: LocalState | None = None
    leftovers: manifest.LeftoverFiles | None = None
    with compare_step(group, _DOING, equal=_COMPARED, largest=_MAXIMISED) as step:
        spread_label = request.spread_label()  # it may be collective: no rank may leave it out
        unimported = request.not_imported()
        if unimported is not None:
            settings = _settings(request, unimported, options)
            _set_before_import(step, settings)
        else:
            local, settings = _prepare(request, options, group, spread_label)
            leftovers = _leftovers(local, store, group)
            _set_numbers(step, local, settings, writer_status)
    if step.maximum["format is not imported"]:
        # Some ranks have compared their settings only. An import takes seconds, so it begins when all ranks
        # are known to want the same format.
        if not step.is_equal["settings"]:
            raise_different_settings(settings, group)
        first = step
        with compare_step(group, _DOING, equal=_COMPARED, largest=_MAXIMISED) as step:
            if local is None:
                local, settings = _prepare(request, options, group, spread_label)
                leftovers = _leftovers(local, store, group)
                _set_numbers(step, local, settings, writer_status)
            else:
                step.equal, step.largest = first.equal, first.largest
    assert local is not None
    return _prepared_state(local, leftovers, settings, step)


def _prepare(
    request: SaveRequest, options: SaveOptions, group: Group, spread_label: int
) -> tuple[LocalState, bytes]:
    """Choose the strategy and prepare this rank's state; return the state and the settings. Local."""
    strategy = request.choose()
    for hook in request.hooks:
        strategy = hook.strategy_for(strategy)
    if strategy.capabilities.shares_files and not request.validate:
        raise DeclarationError(
            f"Format {strategy.backend} version {strategy.version} needs validate_access_integrity=True: "
            f"without it ranks do not exchange what they write, and two ranks could write one file at the "
            f"same time."
        )
    local = make_local_state(request, strategy, spread_label=spread_label, rank=group.rank, ranks=group.size)
    return local, _settings(request, (strategy.backend, strategy.version), options)


def _leftovers(local: LocalState, store: Store | None, group: Group) -> manifest.LeftoverFiles | None:
    if store is None:
        return None
    if group.rank != 0:
        # Not None, which would make `write_and_commit` search the store again.
        return manifest.LeftoverFiles()
    # All ranks wait for this step, so the directory exists before any of them writes.
    store.create()
    return manifest.find_leftover_files(store, local.strategy)


def _prepared_state(
    local: LocalState, leftovers: manifest.LeftoverFiles | None, settings: bytes, compared: CompareStep
) -> PreparedState:
    """Interpret the numbers that ranks have compared."""
    plans, is_equal, maximum = local.request.plans, compared.is_equal, compared.maximum
    misfits = [maximum[name] for name in _MISFITS]
    caches_are_equal = is_equal["cached plans"]
    # A plan fits if its misfit is 0 on all ranks. If caches differ, the positions stand for different plans
    # on different ranks.
    has_fitting_plan = caches_are_equal and 0 in misfits
    # A rank that assumes its structure sends no digests of common state and values. What only some ranks have
    # sent, or none, is not known to be equal.
    all_assume = is_equal["assumes structure"] and local.request.assumes_structure
    was_compared = is_equal["assumes structure"] and not all_assume
    has_failed, is_busy, is_apart = (maximum[name] for name in WRITER_STATUS)
    return PreparedState(
        local=local,
        attempt=f"{maximum['attempt, high half']:08x}{maximum['attempt, low half']:08x}",
        leftovers=leftovers,
        settings_differ=not is_equal["settings"],
        caches_are_equal=caches_are_equal,
        fitting_plan=plans.names[misfits.index(0)] if plans is not None and has_fitting_plan else None,
        all_assume_structure=all_assume,
        common_is_equal=was_compared and is_equal["common state"],
        values_are_equal=was_compared and is_equal["values"],
        writer_status=(has_failed, is_busy, is_apart),
        settings=settings,
    )


def _set_numbers(
    step: CompareStep,
    local: LocalState,
    settings: bytes,
    writer_status: Callable[[], WriterStatus] | None,
) -> None:
    """Set what this rank compares: digests of what must be equal, and which cached plans do not fit."""
    request, plans = local.request, local.request.plans
    attempt = new_attempt() if local.rank == 0 else "0" * 16  # rank 0's is the maximum
    assumes = request.assumes_structure
    fits = [False] * _PLANS_COMPARED
    if request.validate and plans is not None:
        digest = local.structure_digest()
        names = plans.names[:1] if assumes else plans.names[:_PLANS_COMPARED]
        fits[: len(names)] = [plans.peek(name).structure_digest == digest for name in names]
        if assumes and not fits[0]:
            raise _structure_error(local, plans.peek(names[0]))
    sends_digests = request.validate and not assumes
    values = json.dumps(local.value_digests(), sort_keys=True).encode() if sends_digests else b""
    step.equal = {
        "settings": as_number(settings),
        "common state": as_number(local.common_digests()) if sends_digests else 0,
        "values": as_number(values) if sends_digests else 0,
        "cached plans": as_number(json.dumps(plans.names if plans is not None else []).encode()),
        "assumes structure": int(assumes),
    }
    # In the step: this may start another writer process, which can fail on one rank only.
    status = (0, 0, 0) if writer_status is None else writer_status()
    # A number is below 2**62, and an attempt id has 64 bits: it takes two of them.
    step.largest = {
        "attempt, high half": int(attempt[:8], 16),
        "attempt, low half": int(attempt[8:], 16),
        "format is not imported": 0,
        **{name: int(not fit) for name, fit in zip(_MISFITS, fits, strict=True)},
        **dict(zip(WRITER_STATUS, status, strict=True)),
    }


def _set_before_import(step: CompareStep, settings: bytes) -> None:
    """Set the numbers of a rank that has not imported its format yet; only its settings count."""
    step.equal = dict.fromkeys(_COMPARED, 0) | {"settings": as_number(settings)}
    step.largest = dict.fromkeys(_MAXIMISED, 0) | {"format is not imported": 1}


def _settings(request: SaveRequest, format_name: tuple[str, int], options: SaveOptions) -> bytes:
    """Return the settings that must be equal on all ranks, as JSON."""
    of_options = {
        "SaveOptions.timeout_s": float(options.timeout_s),
        "SaveOptions.plain_tensors": options.plain_tensors,
        "SaveOptions.rank0_values": list(options.rank0_values),
        "SaveOptions.parity": options.parity,
        "SaveOptions.compare_replicas": options.compare_replicas.value,
        "SaveOptions.sample_replicas": options.sample_replicas.value,
        "SaveOptions.array_digests": options.array_digests,
    }
    return json.dumps(request.settings(*format_name) | of_options).encode()


def raise_different_settings(settings: bytes, group: Group) -> None:
    """Raise an error that names the setting that differs between ranks. Collective.

    Raises:
        DeclarationError: the same on every rank.
    """
    with gather_step(group, "comparing settings", on_all_ranks=True) as step:
        step.data = settings
    check_settings([json.loads(encoded) for encoded in step.results], what="Ranks save differently")


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


def as_number(data: bytes) -> int:
    """Return a digest of data as one of the numbers that ranks compare."""
    # 60 bits of the digest, since a number is below 2**62.
    return int(digest_of(data)[:15], 16)


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
        f"assume_constant_structure is set. Save once without it, or leave it out.",
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
