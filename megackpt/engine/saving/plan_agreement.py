"""How ranks agree on a plan: rank 0 plans from the declarations of all ranks, and sends each rank its rows.

Declarations of replicas that are equal on several ranks are sent by the lowest of these ranks only. In a save
without validation ranks exchange no declarations: each plans by itself.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence, Set
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from megackpt.comm import (
    Group,
    broadcast_from_rank_0,
    gather_step,
    join_fields,
    rank_0_errors_on_all_ranks,
    scatter_step,
    split_fields,
)
from megackpt.engine.saving.local_state import LocalState
from megackpt.ground.notices import collected_notices, notice
from megackpt.plans.geometry import Ints
from megackpt.plans.metadata import (
    ChunkTable,
    column,
    merge_packed_declarations,
    pack_columns,
    unpack_columns,
)
from megackpt.plans.planning import (
    SavePlan,
    pack_rows,
    plan_main_replicas,
    plan_merged_save,
    unpack_rows,
)
from megackpt.plans.planning.replicas import (
    choose_lowest_rank_as_main,
    choose_main_replicas,
    replica_weights,
)
from megackpt.plans.validation import (
    check_common_equal,
    check_copies_equal,
    check_merged_coverage,
    check_replicated_equal,
)
from megackpt.plans.validation.equality import fill_absent_parts
from megackpt.storage import digest_of

_SUMMARY = np.dtype([("replica_rows", "V16"), ("label", "<i8"), ("attachment", "V16")])
"""What each rank sends to all before its declarations: digests of what other ranks may have with equal bytes,
and the label of its spread group."""

_WEIGHT = np.dtype("<i4")
"""How rank 0 sends the weight of a replica: its absolute value is less than the number of ranks."""


class _DeclarationMessage(NamedTuple):
    """What a rank sends to rank 0, so that it can plan; `join_fields` packs it.

    Attributes:
        main_rows: chunks of which the rank has the main replica.
        replica_rows: other chunks; empty if a lower rank sends equal bytes.
        values: digests of values to compare, as JSON; empty if there are none.
        attachment: of the hooks; empty if a lower rank sends equal bytes.
    """

    main_rows: bytes
    replica_rows: bytes
    values: bytes
    attachment: bytes


def plan_on_rank_0(
    local: LocalState, group: Group, to_compare: Set[str], *, number: int
) -> tuple[SavePlan, Ints]:
    """Check the declarations of all ranks on rank 0 and plan from them. Collective.

    Args:
        local: this rank's state.
        group: the ranks.
        to_compare: the values that digests have not shown to be equal, and that are compared leaf by leaf:
            "common state", and "values" (replicated values and copies of chunks). Equal on all ranks.
        number: one of the save, for its hooks. Equal on all ranks.

    Returns:
        The plan, of all ranks on rank 0 and wherever the format needs it, elsewhere of the rank's own rows.
        Then for each entity of the rank the weight of its replica; 0 if there is no other, and if the save
        has no cache. See `plans.planning.replicas.replica_weights`.

    Raises:
        CheckpointError: the same on every rank: what is wrong with which ranks' declarations or values.
    """
    packed = local.packed(local.declared)
    with gather_step(group, "comparing declarations", on_all_ranks=True) as step:
        values, flattened, declared = _encoded_values(local, to_compare), local.flattened, local.declared
        hooks = local.request.hooks()
        attachment = join_fields(
            [hook.attachment(flattened, declared, ranks=local.ranks, number=number) for hook in hooks]
        )
        label = local.spread_label.to_bytes(8, "little", signed=True)
        step.data = _digest(packed.replica_rows) + label + _digest(attachment)
    # Every rank knows now which lower ranks have equal bytes, so that only the lowest one sends them.
    summaries = np.frombuffer(b"".join(step.results), _SUMMARY)
    message = _DeclarationMessage(
        main_rows=packed.main_rows,
        replica_rows=packed.replica_rows if _is_first(summaries["replica_rows"], group.rank) else b"",
        values=values,
        attachment=attachment if _is_first(summaries["attachment"], group.rank) else b"",
    )
    # A plain gather: nothing can fail on one rank between the step above and this line.
    messages = group.gather(join_fields(message))
    plan: SavePlan | None = None
    own_rows_only = local.strategy.capabilities.needs_own_rows_only
    with scatter_step(group, "planning the save") as planning:
        if group.rank == 0:
            unpacked = [_DeclarationMessage(*split_fields(message)) for message in messages]
            plan, weights = _checked_plan(local, unpacked, summaries)
            rows = pack_rows(plan, ranks=group.size) if own_rows_only else [b""] * group.size
            planning.parts = [join_fields(fields) for fields in zip(rows, weights, strict=True)]
    own_rows, own_weights = split_fields(planning.part)
    # Rank 0 counts entities as each rank has packed them.
    replica_weights = np.zeros(len(local.declared), np.int64)
    if own_weights:
        replica_weights[packed.entities] = np.frombuffer(own_weights, _WEIGHT)
    if not own_rows_only:
        plan = _send_plan(plan, group)
    if plan is None:
        plan = unpack_rows(own_rows, local.declared, packed.entities, rank=group.rank)
        return plan, replica_weights
    # Of its own rows, a rank knows the entities of its state.
    entity, own = plan.entity.copy(), plan.writer == group.rank
    entity[own] = packed.entities[entity[own]]
    return replace(plan, entity=entity), replica_weights


def _send_plan(plan: SavePlan | None, group: Group) -> SavePlan:
    """Return rank 0's plan on every rank. Collective."""
    packed = b""
    if plan is not None:
        columns = {"writer": plan.writer, "entity": plan.entity, "offset_bytes": plan.offset_bytes}
        packed = pack_columns({**plan.table.to_columns(), **columns})
    where = "plan of rank 0"
    received = unpack_columns(broadcast_from_rank_0(group, packed, doing="sending the plan"), where=where)
    table = ChunkTable.from_columns(received, where=where)
    return SavePlan(
        table, *(column(received, name, where=where) for name in ("writer", "entity", "offset_bytes"))
    )


def plan_independently(local: LocalState) -> SavePlan:
    """Plan from this rank's declarations only. Local.

    No rank knows which others hold a replicated value, so each of them stores it.
    """
    return plan_main_replicas(choose_lowest_rank_as_main(local.declared, set(local.flattened.replicated)))


def compare_values(local: LocalState, group: Group, to_compare: Set[str]) -> None:
    """Compare replicated values and common state leaf by leaf. Collective.

    to_compare is as for `plan_on_rank_0`.

    Raises:
        MismatchError: the same on every rank: what differs, and on which ranks.
    """
    with gather_step(group, "comparing values") as step:
        step.data = _encoded_values(local, to_compare)
    with rank_0_errors_on_all_ranks(group, "comparing values"):
        if group.rank == 0:
            values = [json.loads(encoded) for encoded in step.results]
            _check_replicas(values)
            _check_common(local, values)


def _checked_plan(
    local: LocalState, messages: Sequence[_DeclarationMessage], summaries: np.ndarray[Any, Any]
) -> tuple[SavePlan, list[bytes]]:
    """Merge the declarations of all ranks, check them, and plan. Rank 0 only.

    Returns:
        The plan, and for each rank the weights of its replicas, packed; empty if no later save uses them.
    """
    # Ranks compare the same values, so either all of them send digests or none does.
    values = [json.loads(message.values) for message in messages] if messages[0].values else []
    if values:
        # First, since tensors of common state are declared, too: this error says more than one of coverage.
        _check_common(local, values)
    # Ranks that declare replicas with equal bytes are merged as one owner group.
    senders, group_of_rank = _grouped(summaries["replica_rows"])
    # The ranks group by group, ascending in each group: the sort is stable.
    by_group = np.argsort(group_of_rank, kind="stable")
    merged, marks = merge_packed_declarations(
        [message.main_rows for message in messages],
        [messages[rank].replica_rows for rank in senders],
        np.split(by_group, np.cumsum(np.bincount(group_of_rank))[:-1]),
    )
    weights = [b""] * local.ranks
    if local.request.plans is not None and local.ranks > 1:
        of_ranks = replica_weights(merged, marks, group_of_rank)
        weights = [of_rank.astype(_WEIGHT).tobytes() for of_rank in of_ranks]
    if marks.any():  # of values and chunks whose replicas have no replica ids
        merged = choose_main_replicas(merged, marks)
    check_merged_coverage(merged)
    _check_attachments(local, messages, summaries["attachment"], merged.declared.table)
    if values:
        _check_replicas(values)
    labels = summaries["label"].astype(np.int64)
    return plan_merged_save(merged, spread=local.request.options.spread, labels=labels), weights


def _grouped(digests: np.ndarray[Any, Any]) -> tuple[list[int], Ints]:
    """Group the ranks by digest: return the lowest rank of each group, and the group of each rank.

    The lowest rank is the one of its group that has sent the bytes.
    """
    _, lowest, group_of_rank = np.unique(digests, return_index=True, return_inverse=True)
    return lowest.tolist(), group_of_rank.reshape(-1)


def _is_first(digests: np.ndarray[Any, Any], rank: int) -> bool:
    """Return whether no lower rank has the digest of this rank."""
    return not bool(np.any(digests[:rank] == digests[rank]))


def _check_attachments(
    local: LocalState,
    messages: Sequence[_DeclarationMessage],
    digests: np.ndarray[Any, Any],
    table: ChunkTable,
) -> None:
    senders, number_of_rank = _grouped(digests)
    distinct = [split_fields(messages[rank].attachment) for rank in senders]
    for number, hook in enumerate(local.request.hooks()):
        hook.check_attachments([of_hooks[number] for of_hooks in distinct], number_of_rank, table)


def _encoded_values(local: LocalState, to_compare: Set[str]) -> bytes:
    """Return digests of the values that have to be compared, as JSON; empty if there are none."""
    digests: dict[str, Any] = {}
    if "values" in to_compare:
        digests |= local.value_digests()
    if "common state" in to_compare:
        digests["common"] = local.common_digests()
    return json.dumps(digests).encode() if digests else b""


def _check_common(local: LocalState, digests_of_ranks: Sequence[dict[str, Any]]) -> None:
    if "common" not in digests_of_ranks[0]:
        return
    by_rank = fill_absent_parts([digests["common"] for digests in digests_of_ranks], local.absent_parts)
    with collected_notices() as notices:
        check_common_equal(by_rank, may_differ=local.statistics_paths())
    plans = local.request.plans
    for name, text in notices:
        if plans is None or text not in plans.known_warnings:
            notice(logging.getLogger(name), text)
        if plans is not None:
            plans.known_warnings.add(text)


def _check_replicas(digests_of_ranks: Sequence[dict[str, Any]]) -> None:
    if "replicated" in digests_of_ranks[0]:
        check_replicated_equal([digests["replicated"] for digests in digests_of_ranks])
        check_copies_equal([digests["copies"] for digests in digests_of_ranks])


def _digest(data: bytes) -> bytes:
    return bytes.fromhex(digest_of(data))
