"""How ranks come to a plan: rank 0 plans from what all declare, and gives each rank its rows.

Owns what is sent for it. Of rows that others write, and that several ranks hold alike, one rank sends the
list; what a rank learns is its own part. Where ranks are not to know of each other, each plans alone.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import numpy as np

from megackpt.comm import Group, broadcast_from_rank_0, run_and_gather, run_on_all_ranks, scatter_from_rank_0
from megackpt.engine.saving.duplicates import with_mains_chosen
from megackpt.engine.saving.local_state import LocalState
from megackpt.engine.saving.replica_samples import check_samples, samples_of
from megackpt.errors import CoverageError
from megackpt.geometry import Ints
from megackpt.metadata import (
    ChunkTable,
    Column,
    MergedDeclarations,
    column,
    decode_declarations,
    merge_declarations,
    merge_packed_declarations,
    pack_columns,
    unpack_columns,
)
from megackpt.planning import (
    SavePlan,
    object_sizes,
    pack_rows,
    plan_main_replicas,
    plan_merged_save,
    unpack_rows,
    with_object_sizes,
)
from megackpt.storage import digest_of
from megackpt.validation import (
    check_common_equal,
    check_copies_equal,
    check_coverage,
    check_replicated_equal,
)

_INTRODUCTION = np.dtype([("digest", "V16"), ("label", "<i8"), ("samples", "V16")])
"""What a rank sends of itself before its declarations: digests of those that others may have alike."""

PlanCompletion: TypeAlias = Callable[[Sequence[bytes]], SavePlan]
"""Makes the plan of all ranks from what they report; it can be sent to another process."""


@dataclass(frozen=True, slots=True, eq=False)
class CompletionFromSizes:
    """Completes the plan of all ranks with the sizes of their objects."""

    whole: SavePlan

    def __call__(self, reports: Sequence[bytes]) -> SavePlan:
        """Return the plan; each report is the sizes of a rank's objects, int64."""
        return with_object_sizes(self.whole, _sizes(reports))


@dataclass(frozen=True, slots=True)
class CompletionFromDeclarations:
    """Makes a plan of what each rank has planned alone."""

    def __call__(self, reports: Sequence[bytes]) -> SavePlan:
        """Return the plan; each report is a rank's declarations."""
        return plan_main_replicas(merge_declarations(decode_declarations(_unpack(reports))))


@dataclass(frozen=True, slots=True)
class PlanAgreement:
    """A plan that ranks have agreed on.

    Attributes:
        kept: the rows of this rank, or of all where the format needs them, but for the sizes of objects: the
            same object in every save that takes the same plan.
        sizes: the sizes of the objects among them.
        report: what this rank tells rank 0 when it has written.
        complete: makes the plan of all ranks from the reports; on rank 0, None where `plan` is that.
    """

    kept: SavePlan
    sizes: Ints = field(default_factory=lambda: np.zeros(0, np.int64))
    report: bytes = b""
    complete: PlanCompletion | None = None

    @property
    def plan(self) -> SavePlan:
        """The rows with the sizes of this save's objects."""
        return with_object_sizes(self.kept, self.sizes)

    @property
    def whole(self) -> SavePlan | None:
        """The plan of all ranks before the reports; on rank 0, where there is one."""
        return self.complete.whole if isinstance(self.complete, CompletionFromSizes) else None


@dataclass(frozen=True, slots=True)
class ValuesToCompare:
    """What ranks could not find equal by digests, and so have to compare.

    Attributes:
        common: common state.
        values: replicated values and copies of chunks.
    """

    common: bool
    values: bool


def plan_together(local: LocalState, group: Group, unequal: ValuesToCompare) -> PlanAgreement:
    """Plan from the declarations of all ranks, after proving them right. Collective.

    Raises:
        CheckpointError: the same on every rank: what is wrong with which ranks' declarations or values.
    """
    lists, values, samples = local.lists(), b"", b""

    def introduce() -> bytes:
        nonlocal values, samples
        values, samples = _values(local, unequal), samples_of(local)
        label = local.spread_label.to_bytes(8, "little", signed=True)
        return b"".join((digest, label, bytes.fromhex(digest_of(samples))))

    digest = bytes.fromhex(digest_of(lists.replica_rows))
    said = run_on_all_ranks(group, introduce, doing="comparing declarations")
    # What several ranks have alike is sent by the first of them.
    sends = next(rank for rank, other in enumerate(said) if other[:16] == digest) == group.rank
    if any(other[24:] == said[group.rank][24:] for other in said[: group.rank]):
        samples = b""
    messages = group.gather(_joined([lists.main_rows, lists.replica_rows if sends else b"", values, samples]))
    whole: list[SavePlan] = []

    def plan() -> list[bytes]:
        whole.append(_plan(local, [_split(message) for message in messages], said))
        return pack_rows(whole[0], ranks=group.size)

    rows = scatter_from_rank_0(group, plan, doing="planning the save")
    own = unpack_rows(rows, local.declared, lists.entities, rank=group.rank)
    if local.strategy.capabilities.needs_own_rows_only:
        return of_own_rows(local, own, whole[0] if whole else None, rank=group.rank)
    packed = _pack_plan(whole[0]) if whole else b""
    everything = _unpack_plan(broadcast_from_rank_0(group, packed, doing="sharing the plan"))
    entity = everything.entity.copy()
    entity[everything.writer == group.rank] = own.entity
    return PlanAgreement(replace(everything, entity=entity))


def plan_again(local: LocalState, plan: SavePlan, whole: SavePlan | None, group: Group) -> PlanAgreement:
    """Take a plan of an earlier save, for objects of this one. Collective if the format needs it whole."""
    if local.strategy.capabilities.needs_own_rows_only:
        return of_own_rows(local, plan, whole, rank=group.rank)
    if not len(object_sizes(plan)):
        return PlanAgreement(plan)
    mine = local.object_sizes(plan, rank=group.rank).tobytes()
    reports = run_on_all_ranks(group, lambda: mine, doing="comparing sizes of objects")
    return PlanAgreement(plan, _sizes(reports))


def of_own_rows(local: LocalState, plan: SavePlan, whole: SavePlan | None, *, rank: int) -> PlanAgreement:
    """Give objects the room that they need in this rank's file; rank 0 learns of it after writing."""
    sizes = local.object_sizes(plan, rank=rank)
    return PlanAgreement(
        plan, sizes, sizes.tobytes(), CompletionFromSizes(whole) if whole is not None else None
    )


def plan_alone(local: LocalState, group: Group) -> PlanAgreement:
    """Plan from this rank's declarations alone; rank 0 learns those of the others when all have written."""
    # Nobody knows who else holds a replicated value: every holder stores it.
    mine = local.alone()
    made = CompletionFromDeclarations() if group.rank == 0 else None
    return PlanAgreement(plan_main_replicas(mine), report=pack_columns(mine.to_columns()), complete=made)


def compare_values(local: LocalState, group: Group, unequal: ValuesToCompare) -> None:
    """Refuse replicated values and common state that differ between ranks. Collective.

    Raises:
        MismatchError: what differs, and on which ranks.
    """
    said = run_and_gather(group, lambda: _values(local, unequal), doing="comparing values")

    def compare() -> list[bytes]:
        _check_values([json.loads(text) for text in said])
        return [b""] * group.size

    scatter_from_rank_0(group, compare, doing="comparing values")


def _plan(local: LocalState, parts: Sequence[Sequence[bytes]], said: Sequence[bytes]) -> SavePlan:
    """Merge what all ranks declare, prove it right and plan. Rank 0."""
    digests = np.frombuffer(b"".join(said), _INTRODUCTION)
    _, first, kind = np.unique(digests["digest"], return_index=True, return_inverse=True)
    order = np.argsort(kind, kind="stable")
    owner_groups = np.split(order, np.cumsum(np.bincount(kind, minlength=len(first)))[:-1])
    values = [json.loads(part[2]) for part in parts] if parts[0][2] else []
    if values and "common" in values[0]:  # tensors of common state are declared, too: this error says more
        check_common_equal([of_rank["common"] for of_rank in values])
    alone, shared = [part[0] for part in parts], [parts[rank][1] for rank in first.tolist()]
    held, marks = merge_packed_declarations(alone, shared, owner_groups)
    held = with_mains_chosen(held, marks)
    _check_coverage(held)
    _, first, of_rank = np.unique(digests["samples"], return_index=True, return_inverse=True)
    distinct = [parts[rank][3] for rank in first.tolist()]
    check_samples(distinct, of_rank.reshape(-1), held.declared.table, local.request.sample_replicas)
    if values:
        _check_values(values)
    return plan_merged_save(held, spread=local.request.spread, labels=digests["label"].astype(np.int64))


def _check_coverage(held: MergedDeclarations) -> None:
    try:
        check_coverage(held.declared)
    except CoverageError:
        check_coverage(held.expanded())  # the same error, and names every rank
        raise


def _values(local: LocalState, unequal: ValuesToCompare) -> bytes:
    """Digests of this rank's values, as far as they have to be compared; empty if not at all."""
    said: dict[str, Any] = {}
    if unequal.values:
        said |= local.values()
    if unequal.common:
        said["common"] = json.loads(local.common_leaves())
    return json.dumps(said).encode() if said else b""


def _check_values(said: Sequence[dict[str, Any]]) -> None:
    if "replicated" in said[0]:
        check_replicated_equal([of["replicated"] for of in said])
        check_copies_equal([of["copies"] for of in said])
    if "common" in said[0]:
        check_common_equal([of["common"] for of in said])


def _joined(parts: Sequence[bytes]) -> bytes:
    return b"".join((*(len(part).to_bytes(8, "little") for part in parts), *parts))


def _split(message: bytes) -> list[bytes]:
    lengths = [int.from_bytes(message[at : at + 8], "little") for at in (0, 8, 16, 24)]
    ends = [32 + sum(lengths[: i + 1]) for i in range(4)]
    return [message[end - n : end] for n, end in zip(lengths, ends, strict=True)]


def _sizes(reports: Sequence[bytes]) -> Ints:
    return np.frombuffer(b"".join(reports), np.int64)


def _pack_plan(plan: SavePlan) -> bytes:
    columns = {"writer": plan.writer, "entity": plan.entity, "offset_bytes": plan.offset_bytes}
    return pack_columns({**plan.table.to_columns(), **columns})


def _unpack_plan(packed: bytes) -> SavePlan:
    where = "plan of rank 0"
    columns = unpack_columns(packed, where=where)
    table = ChunkTable.from_columns(columns, where=where)
    writer, entity, offset = (
        column(columns, name, where=where) for name in ("writer", "entity", "offset_bytes")
    )
    return SavePlan(table, writer, entity, offset)


def _unpack(messages: Sequence[bytes]) -> list[dict[str, Column]]:
    return [unpack_columns(m, where=f"declarations of rank {rank}") for rank, m in enumerate(messages)]
