"""The rows of all ranks on every rank, for formats whose ranks do not write from their own rows alone."""

from __future__ import annotations

from megackpt.comm import Group, broadcast_from_rank_0
from megackpt.plans.metadata import ChunkTable, column, pack_columns, unpack_columns
from megackpt.plans.planning import SavePlan


def send_whole_plan(plan: SavePlan | None, own_rows: SavePlan, group: Group) -> SavePlan:
    """Return rank 0's plan of all ranks on every rank, with the entities of its own rows. Collective."""
    packed = b""
    if plan is not None:
        columns = {"writer": plan.writer, "entity": plan.entity, "offset_bytes": plan.offset_bytes}
        packed = pack_columns({**plan.table.to_columns(), **columns})
    where = "plan of rank 0"
    received = unpack_columns(broadcast_from_rank_0(group, packed, doing="sending the plan"), where=where)
    table = ChunkTable.from_columns(received, where=where)
    writer, entity, offset = (
        column(received, name, where=where) for name in ("writer", "entity", "offset_bytes")
    )
    # Rank 0 counts entities as each rank has packed them. For its own rows, in the same order, this rank
    # knows the entities of its state.
    entity = entity.copy()
    entity[writer == group.rank] = own_rows.entity
    return SavePlan(table, writer, entity, offset)
