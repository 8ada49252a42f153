"""Copying what a save will most likely write while ranks still tell each other that they take the same plan.

Owns the guess - that of an earlier save of what this rank declares - and whether it was right. Until then no
job exists: what was copied on a wrong guess is copied over.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from megackpt.engine.background.process import WriterProcess
from megackpt.engine.background.staging import StreamRange, fill
from megackpt.engine.background.staging_memory import ByteArray, lay_out_rows
from megackpt.engine.saving.local_state import LocalState, StateRowParts
from megackpt.engine.saving.plan_agreement import PlanAgreement
from megackpt.engine.saving.write import PlannedSave


@dataclass(frozen=True, slots=True)
class _Room:
    """A ring in which there is room for all of a span, and of which nobody is told."""

    stop: int

    def room_from(self, position: int) -> int:
        return self.stop

    def tell_staged(self, position: int) -> None: ...


@dataclass(frozen=True, slots=True, eq=False)
class Ahead:
    """What was copied for the next job of a writer process.

    Attributes:
        memory: of a writer process, in which it is.
        agreed: the plan that it was copied by.
        span: where it lies in the writer's stream.
    """

    memory: ByteArray
    agreed: PlanAgreement
    span: StreamRange

    def is_of(self, writer: WriterProcess, planned: PlannedSave, start: int) -> bool:
        """Say whether it is what a job writes that begins at a position of a writer's stream."""
        return (
            self.memory is writer.arena.memory  # not if it has another size since
            and self.agreed.kept is planned.kept
            and np.array_equal(self.agreed.sizes, planned.sizes)
            and self.span.start == start
        )


def stage_ahead(
    writer: WriterProcess, local: LocalState, agreed: PlanAgreement, *, part_bytes: int
) -> Ahead | None:
    """Copy what a plan lets this rank write, if there is room for all of it now; else do nothing. Local.

    Raises:
        CheckpointError: the state cannot be copied.
    """
    plan = agreed.plan
    rows = plan.rows_of(local.rank)
    layout = lay_out_rows(plan.table.nbytes[rows])
    start = writer.room_for_next(layout.stop)
    if start is None:
        return None
    span = StreamRange(start=start, layout=layout)
    pieces = StateRowParts(local, plan, part_bytes=part_bytes)
    memory = writer.arena.memory
    fill(memory, span, rows.tolist(), pieces, _Room(span.stop))
    return Ahead(memory, agreed, span)
